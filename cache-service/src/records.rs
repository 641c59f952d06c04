//! Records: small named objects below `records/`, replaced atomically. What they hold is the callers' business.
//!
//! The first line of the object, `{"blake3":"…"}`, is the digest of what follows it, so that a record that is not as it was
//! written is never given out. Records without that line, of an earlier version, are read as they are.

use bytes::Bytes;
use kvsplice_kv::object;
use object_store::path::Path;

use crate::Error;
use crate::store::Store;

/// Largest record, in bytes.
const MAX_RECORD_BYTES: usize = 16 << 20;
const MAX_KEY_BYTES: usize = 800;
const MAX_SEGMENT_BYTES: usize = 200;
pub(crate) const ROOT: &str = "records";
/// Keys in one page of a listing.
pub(crate) const PAGE_KEYS: usize = 1000;

/// Creates or replaces a record.
pub(crate) async fn put(store: &Store, key: &str, value: Vec<u8>) -> Result<(), Error> {
    let path = path("key", key)?;
    if value.len() > MAX_RECORD_BYTES {
        let detail = format!("must be at most {MAX_RECORD_BYTES} bytes, has {}", value.len());
        return Err(Error::Request { field: "value", detail });
    }
    let line = Bytes::from(seal(&value));
    store.replace("put a record", &path, [line, value.into()].into_iter().collect()).await
}

/// Reads a record.
pub(crate) async fn get(store: &Store, key: &str) -> Result<Bytes, Error> {
    let path = path("key", key)?;
    let stored = store.get(&path, MAX_RECORD_BYTES + LINE_BYTES).await?;
    let stored = stored.ok_or_else(|| Error::NoRecord { key: key.to_owned() })?;
    open(stored).ok_or_else(|| {
        store.count_fault(&object::Error::DamagedHeader);
        Error::DamagedRecord { key: key.to_owned() }
    })
}

/// Around the hexadecimal digest.
const MARK: (&str, &str) = ("{\"blake3\":\"", "\"}\n");
const LINE_BYTES: usize = MARK.0.len() + 64 + MARK.1.len();

/// The first line of a record.
fn seal(value: &[u8]) -> String {
    format!("{}{}{}", MARK.0, blake3::hash(value).to_hex(), MARK.1)
}

/// The value of a stored record; none if it is not as it was written.
fn open(mut stored: Bytes) -> Option<Bytes> {
    let compared = stored.len().min(MARK.0.len());
    let alike = stored.iter().zip(MARK.0.as_bytes()).filter(|(found, expected)| found == expected).count();
    // One that was cut short or of which some bits are wrong must not pass for one of an earlier version.
    if compared > 0 && 2 * alike <= compared {
        return Some(stored);
    }
    if stored.len() < LINE_BYTES {
        return None;
    }
    let line = stored.split_to(LINE_BYTES);
    (line == seal(&stored).as_bytes()).then_some(stored)
}

/// The keys below a prefix of whole segments, ascending.
pub(crate) async fn list(store: &Store, prefix: &str) -> Result<Vec<String>, Error> {
    let prefix = if prefix.is_empty() { Path::from(ROOT) } else { path("prefix", prefix)? };
    let paths = store.list(&prefix).await?;
    let key = |path: &Path| path.as_ref().strip_prefix(ROOT)?.strip_prefix('/').map(str::to_owned);
    Ok(paths.iter().filter_map(key).collect())
}

/// The path of a record. Keys are checked here and nowhere else.
pub(crate) fn path(field: &'static str, key: &str) -> Result<Path, Error> {
    let good = |segment: &str| {
        let symbols = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        (1..=MAX_SEGMENT_BYTES).contains(&segment.len())
            && segment != "."
            && segment != ".."
            && segment.chars().all(symbols)
    };
    if key.len() > MAX_KEY_BYTES || !key.split('/').all(good) {
        let shown: String = key.chars().take(80).collect();
        let detail =
            format!("must be segments of letters, digits and -_.@ joined by /, at most 800 bytes, got {shown:?}");
        return Err(Error::Request { field, detail });
    }
    Ok(Path::from_iter(std::iter::once(ROOT).chain(key.split('/'))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_as_it_was_written_or_none() {
        for value in [&b""[..], b"{}", b"a longer value"] {
            let stored = [seal(value).as_bytes(), value].concat();
            assert_eq!(open(stored.clone().into()).unwrap(), value);
            for length in 0..stored.len() {
                assert_eq!(open(stored[..length].to_vec().into()), None, "cut at {length}");
            }
            for bit in 0..8 * stored.len() {
                let mut flipped = stored.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(open(flipped.into()), None, "bit {bit}");
            }
        }
        for old in [r#"{"name":"wiki","owner":"default"}"#, r#"{"id":"blake3","digest":""}"#, "4f2a", "x", "[1]"] {
            assert_eq!(open(old.into()).unwrap(), old);
        }
    }

    #[test]
    fn a_key_stays_below_records() {
        assert_eq!(path("key", "default/wiki/manifest").unwrap().as_ref(), "records/default/wiki/manifest");
        assert_eq!(path("key", "a@b-c_d.e").unwrap().as_ref(), "records/a@b-c_d.e");
        let long = "a/".repeat(500) + "a";
        for bad in ["", "/", "a/", "/a", "a//b", "..", "a/../b", ".", "a/./b", "a b", "a\\b", "ä", "a\0", "a#1", &long]
        {
            assert!(path("key", bad).is_err(), "{bad:?}");
        }
    }
}
