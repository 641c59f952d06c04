//! Records: small named objects below `records/`, replaced atomically. What they hold is the callers' business.

use bytes::Bytes;
use object_store::path::Path;

use crate::Error;
use crate::store::Store;

/// Largest record, in bytes.
const MAX_RECORD_BYTES: usize = 16 << 20;
const MAX_KEY_BYTES: usize = 800;
const MAX_SEGMENT_BYTES: usize = 200;
const ROOT: &str = "records";
/// Keys in one page of a listing.
pub(crate) const PAGE_KEYS: usize = 1000;

/// Creates or replaces a record.
pub(crate) async fn put(store: &Store, key: &str, value: Vec<u8>) -> Result<(), Error> {
    let path = path("key", key)?;
    if value.len() > MAX_RECORD_BYTES {
        let detail = format!("must be at most {MAX_RECORD_BYTES} bytes, has {}", value.len());
        return Err(Error::Request { field: "value", detail });
    }
    store.replace("put a record", &path, Bytes::from(value).into()).await
}

/// Reads a record.
pub(crate) async fn get(store: &Store, key: &str) -> Result<Bytes, Error> {
    let path = path("key", key)?;
    let value = store.get(&path, MAX_RECORD_BYTES).await?;
    value.ok_or_else(|| Error::NoRecord { key: key.to_owned() })
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
