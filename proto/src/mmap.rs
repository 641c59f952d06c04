//! Maps chunk objects that the cache service names as files of this host.
//!
//! A file counts only if it is the very one that the service has verified, and a layer only if its checksum is right. The
//! one place of this crate with unsafe code. Invariant: nobody writes to a file after it was named; it is unlinked at most.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use bytes::Bytes;
use memmap2::{Advice, Mmap};

use crate::v1;

/// Why a mapped layer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened or mapped: on another host, in another container, or not readable by this user.
    #[error("map {path}: {source}")]
    Open {
        /// The file.
        path: String,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// There is another file of that name.
    #[error("{path} is not the file that the cache service named")]
    OtherFile {
        /// The file.
        path: String,
    },
    /// The layer does not lie in the file.
    #[error("{path} has {size} bytes, a layer ends at {end}")]
    Outside {
        /// The file.
        path: String,
        /// Its bytes.
        size: u64,
        /// Where the layer should end.
        end: usize,
    },
    /// The bytes are not those that the service has verified.
    #[error("damaged: bytes {}..{} of {path} do not match their checksum", .range.start, .range.end)]
    Damaged {
        /// The file.
        path: String,
        /// The layer's place.
        range: Range<usize>,
    },
}

/// What tells a file from another one of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The device that it is on.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// The last change, in nanoseconds since the Unix epoch.
    pub modified_ns: i64,
}

impl Identity {
    /// Of an open file.
    pub fn of(meta: &Metadata) -> Self {
        let modified_ns = meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec());
        Self { device: meta.dev(), inode: meta.ino(), size: meta.len(), modified_ns }
    }
}

/// A mapped file.
#[derive(Clone, Debug)]
pub struct Mapped {
    path: String,
    map: Arc<Mmap>,
    bytes: Bytes,
}

/// What [`Bytes`] hold on to.
struct Owner(Arc<Mmap>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Mapped {
    /// Maps the whole file that `mapping` names, without reading it.
    ///
    /// # Errors
    /// [`Error::Open`] when it cannot be had here, [`Error::OtherFile`] when it is not the one that was meant.
    pub fn open(mapping: &v1::Mapping) -> Result<Self, Error> {
        let path = || mapping.path.clone();
        let opened = File::open(&mapping.path).and_then(|file| file.metadata().map(|meta| (file, meta)));
        let (file, meta) = opened.map_err(|source| Error::Open { path: path(), source })?;
        let v1::Mapping { device, inode, size, modified_ns, .. } = *mapping;
        if !meta.is_file() || Identity::of(&meta) != (Identity { device, inode, size, modified_ns }) {
            return Err(Error::OtherFile { path: path() });
        }
        let map = Arc::new(map_file(&file).map_err(|source| Error::Open { path: path(), source })?);
        Ok(Self { path: path(), bytes: Bytes::from_owner(Owner(map.clone())), map })
    }

    /// The whole file, unchecked.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Lets the system read a part of the file ahead. Does not wait.
    pub fn read_ahead(&self, range: &Range<usize>) {
        if range.start < range.end && range.end <= self.bytes.len() {
            // Only a hint: a system that does not take it reads when the bytes are looked at.
            let _hint = self.map.advise_range(Advice::WillNeed, range.start, range.len());
        }
    }

    /// The bytes at `range`, once they match their CRC-32C. Reads them, hence may block.
    ///
    /// # Errors
    /// [`Error::Outside`] or [`Error::Damaged`].
    pub fn layer(&self, range: Range<usize>, crc32c: u32) -> Result<Bytes, Error> {
        if range.start > range.end || range.end > self.bytes.len() {
            let size = self.bytes.len() as u64;
            return Err(Error::Outside { path: self.path.clone(), size, end: range.end });
        }
        // Only a hint: one call for all pages takes less than a fault for every few of them.
        #[cfg(target_os = "linux")]
        let _hint = self.map.advise_range(Advice::PopulateRead, range.start, range.len());
        let bytes = self.bytes.slice(range.clone());
        if crc32c::crc32c(&bytes) != crc32c {
            return Err(Error::Damaged { path: self.path.clone(), range });
        }
        Ok(bytes)
    }
}

#[allow(unsafe_code)]
fn map_file(file: &File) -> io::Result<Mmap> {
    // SAFETY: a mapping is sound while nobody changes or truncates the file. The cache service writes a file under another
    // name, syncs it, renames it, and from then on only unlinks it, which leaves mappings as they are; the file's identity
    // says that it is one of those. Bytes that change all the same are caught by their checksum, or are a caller's doing
    // that has write access to the service's own folder.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(path: &std::path::Path) -> v1::Mapping {
        let Identity { device, inode, size, modified_ns } = Identity::of(&std::fs::metadata(path).unwrap());
        v1::Mapping {
            path: path.display().to_string(),
            device,
            inode,
            size,
            modified_ns,
            header_bytes: 0,
            layer_crc32c: Vec::new(),
        }
    }

    #[test]
    fn what_is_mapped_outlives_its_name_and_is_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("object");
        let data: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &data).unwrap();
        let mapping = named(&path);
        let file = Mapped::open(&mapping).unwrap();
        file.read_ahead(&(10..5000));
        file.read_ahead(&(10..200_000));
        std::fs::remove_file(&path).unwrap();
        let crc = crc32c::crc32c(&data[10..5000]);
        assert_eq!(file.layer(10..5000, crc).unwrap(), data[10..5000]);
        assert!(matches!(file.layer(10..5000, crc ^ 1), Err(Error::Damaged { .. })));
        assert!(matches!(file.layer(10..100_001, crc), Err(Error::Outside { .. })));
        assert!(matches!(Mapped::open(&mapping), Err(Error::Open { .. })));
    }

    #[test]
    fn another_file_of_the_same_name_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("object");
        std::fs::write(&path, b"one").unwrap();
        let mapping = named(&path);
        // Both exist at the same time, so that the inode is another one.
        std::fs::write(folder.path().join("other"), b"two").unwrap();
        std::fs::rename(folder.path().join("other"), &path).unwrap();
        assert!(matches!(Mapped::open(&mapping), Err(Error::OtherFile { .. })));
        for wrong in [v1::Mapping { size: 4, ..named(&path) }, v1::Mapping { modified_ns: 0, ..named(&path) }] {
            assert!(matches!(Mapped::open(&wrong), Err(Error::OtherFile { .. })));
        }
        let of_folder = named(folder.path());
        assert!(matches!(Mapped::open(&of_folder), Err(Error::OtherFile { .. })));
    }
}
