//! The files of the disk tier: their names, and what is read from and written to them.
//!
//! `{first two digits}/{chunk id}-{variant}.safetensors` is a whole chunk object, which other programs may open or map at any
//! time: it is written below `partial/`, synced, renamed, and never changed. A file that is removed stays readable for those
//! who have it open. Files with other names are none of ours and are left alone.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytes::Bytes;
use kvsplice_kv::object::{self, FIRST_READ_BYTES, Header};
use kvsplice_proto::mmap::Identity;
use rustix::buffer::spare_capacity;
use rustix::io::{pread, retry_on_intr};

use crate::tier::ObjectKey;

const PARTIAL: &str = "partial";
const LOCK: &str = "lock";
const SUFFIX: &str = ".safetensors";
/// Files take whole blocks.
const BLOCK_BYTES: u64 = 4096;

/// One folder.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

/// A whole object as it was found.
pub(crate) struct Found {
    pub(super) key: ObjectKey,
    pub(crate) header: Header,
    pub(super) written: SystemTime,
}

/// Why a file is not a whole object of this name.
#[derive(Debug)]
pub(crate) enum Fault {
    Io(io::Error),
    Object(object::Error),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Fault::Io(error)
    }
}

impl From<object::Error> for Fault {
    fn from(error: object::Error) -> Self {
        Fault::Object(error)
    }
}

/// Bytes that an object takes on the disk.
pub(super) const fn file_bytes(header: &Header) -> u64 {
    (header.object_bytes() as u64).next_multiple_of(BLOCK_BYTES)
}

impl Folder {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self(folder)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Takes the folder for this process, until the file is dropped. None while another process has it.
    pub(super) fn lock(&self) -> io::Result<Option<File>> {
        std::fs::create_dir_all(self.0.join(PARTIAL))?;
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(self.0.join(LOCK))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    pub(super) fn whole(&self, key: &ObjectKey) -> PathBuf {
        let chunk = key.chunk.to_string();
        let fan_out = chunk.get(..2).unwrap_or("00").to_owned();
        self.0.join(fan_out).join(file_name(key))
    }

    fn partial(&self, key: &ObjectKey) -> PathBuf {
        self.0.join(PARTIAL).join(file_name(key))
    }

    /// Removes what was being written when the last process ended. Returns how many files.
    pub(super) fn remove_partial(&self) -> u64 {
        let Ok(entries) = std::fs::read_dir(self.0.join(PARTIAL)) else { return 0 };
        let mut removed = 0;
        for entry in entries.flatten() {
            let ours = entry.file_name().to_str().is_some_and(|name| parse_name(name).is_some());
            removed += u64::from(ours && std::fs::remove_file(entry.path()).is_ok());
        }
        removed
    }

    /// The names of all whole objects. What cannot be listed is left out, with the first error.
    pub(super) fn keys(&self) -> (Vec<ObjectKey>, Option<io::Error>) {
        let mut keys = Vec::new();
        let mut failure = None;
        let mut list = |folder: &Path| -> Vec<std::fs::DirEntry> {
            let entries = std::fs::read_dir(folder).and_then(Iterator::collect);
            entries.unwrap_or_else(|error| {
                let nothing = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
                if !nothing && failure.is_none() {
                    failure = Some(error);
                }
                Vec::new()
            })
        };
        for fan_out in list(&self.0) {
            let name = fan_out.file_name();
            let is_ours = name.to_str().is_some_and(|name| {
                name.len() == 2 && name.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
            });
            if !is_ours {
                continue;
            }
            for file in list(&fan_out.path()) {
                let key = file.file_name().to_str().and_then(parse_name);
                keys.extend(key.filter(|key| self.whole(key) == file.path()));
            }
        }
        (keys, failure)
    }

    /// Reads the header of a whole object and checks it against its name and size. The layers are not read.
    pub(super) fn check(&self, key: &ObjectKey) -> Result<Found, Fault> {
        check_file(File::open(self.whole(key))?, key)
    }

    /// Reads ranges of an object, whole or not, each into memory of its own. Which file it is comes with those of a whole one.
    pub(super) fn read(
        &self,
        key: &ObjectKey,
        whole: bool,
        ranges: impl Iterator<Item = Range<usize>>,
    ) -> io::Result<(Option<Identity>, Vec<Bytes>)> {
        let file = match File::open(if whole { self.whole(key) } else { self.partial(key) }) {
            // Finished since it was looked up.
            Err(error) if error.kind() == ErrorKind::NotFound && !whole => File::open(self.whole(key))?,
            other => other?,
        };
        let identity = if whole { Some(Identity::of(&file.metadata()?)) } else { None };
        let bytes = ranges.map(|range| read(&file, range)).collect::<io::Result<_>>()?;
        Ok((identity, bytes))
    }

    /// Begins an object.
    pub(super) fn begin(&self, key: &ObjectKey, header: &Header) -> io::Result<()> {
        let bytes = header.render().map_err(io::Error::other)?;
        File::create(self.partial(key))?.write_all(&bytes)
    }

    /// Writes layers of an object that was begun.
    pub(super) fn write(&self, key: &ObjectKey, header: &Header, layers: &[(u32, Bytes)]) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(self.partial(key))?;
        for (layer, bytes) in layers {
            file.write_all_at(bytes, header.layer_range(*layer).start as u64)?;
        }
        Ok(())
    }

    /// Makes an object whole: after this a power failure loses nothing.
    pub(super) fn finish(&self, key: &ObjectKey) -> io::Result<()> {
        let (partial, whole) = (self.partial(key), self.whole(key));
        OpenOptions::new().write(true).open(&partial)?.sync_all()?;
        let Some(fan_out) = whole.parent() else { return Err(ErrorKind::InvalidFilename.into()) };
        std::fs::create_dir_all(fan_out)?;
        std::fs::rename(&partial, &whole)?;
        File::open(fan_out)?.sync_all()
    }

    /// Removes an object, whole or not. What is not there is not an error.
    pub(super) fn remove(&self, key: &ObjectKey) -> io::Result<()> {
        for path in [self.partial(key), self.whole(key)] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Reads a range of a file into memory that is not cleared before.
fn read(file: &File, range: Range<usize>) -> io::Result<Bytes> {
    let mut bytes = Vec::with_capacity(range.len());
    while bytes.len() < range.len() {
        let at = (range.start + bytes.len()) as u64;
        match retry_on_intr(|| pread(file, spare_capacity(&mut bytes), at))? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            _read => {}
        }
    }
    // The allocator may have given more.
    bytes.truncate(range.len());
    Ok(bytes.into())
}

/// Reads the header of a whole object and checks it against its key and size. The layers are not read.
pub(crate) fn check_file(mut file: File, key: &ObjectKey) -> Result<Found, Fault> {
    let meta = file.metadata()?;
    let mut start = Vec::new();
    Read::by_ref(&mut file).take(FIRST_READ_BYTES as u64).read_to_end(&mut start)?;
    let header = match Header::parse(&start) {
        Err(object::Error::Truncated { need, .. }) if need > start.len() => {
            file.take((need - start.len()) as u64).read_to_end(&mut start)?;
            Header::parse(&start)?
        }
        other => other?,
    };
    header.check_id(key.chunk)?;
    header.check_variant(key.variant)?;
    let need = header.object_bytes();
    if meta.len() != need as u64 {
        return Err(object::Error::Truncated { got: usize::try_from(meta.len()).unwrap_or(usize::MAX), need }.into());
    }
    Ok(Found { key: *key, header, written: meta.modified()? })
}

fn file_name(key: &ObjectKey) -> String {
    format!("{}-{}{SUFFIX}", key.chunk, key.variant)
}

fn parse_name(name: &str) -> Option<ObjectKey> {
    let (chunk, variant) = name.strip_suffix(SUFFIX)?.split_once('-')?;
    let key = ObjectKey { chunk: chunk.parse().ok()?, variant: variant.parse().ok()? };
    (file_name(&key) == name).then_some(key)
}

#[cfg(test)]
mod tests {
    use kvsplice_kv::{ChunkId, Encoding, Variant};

    use super::*;

    #[test]
    fn only_our_names_are_taken_for_ours() {
        let key = ObjectKey { chunk: ChunkId::from_bytes([0xAB; 32]), variant: Variant::clean(Encoding::Bf16) };
        assert_eq!(parse_name(&file_name(&key)), Some(key));
        let upper = file_name(&key).to_uppercase();
        for name in ["", "lock", "x-bf16-clean-1.safetensors", &file_name(&key)[1..], &upper, "a.safetensors"] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }
}
