//! Reads chunks whole from the object store, past every tier, and says which cannot be used. Changes nothing: what is damaged
//! is removed, and repaired, when it is next asked for.

use futures::{StreamExt, TryStreamExt, stream};
use kvsplice_kv::ChunkId;
use kvsplice_kv::object::Header;
use kvsplice_proto::v1::{ObjectFault, VerifyResponse};
use object_store::path::Path;

use crate::Error;
use crate::fetch::{self, Fetcher, Miss, Verified};
use crate::store::{chunk_path, object_key, object_path};
use crate::tier::{ObjectKey, Origin};

/// Objects read at once.
const PARALLEL: usize = 8;
/// Bytes of one read, unless a layer is larger.
const READ_BYTES: usize = 8 << 20;

/// Checks every variant of `chunks`.
pub(crate) async fn verify(fetcher: &Fetcher, chunks: &[ChunkId]) -> Result<VerifyResponse, Error> {
    let mut paths: Vec<Path> = Vec::new();
    let mut response = VerifyResponse::default();
    for chunk in chunks {
        let variants = fetcher.store.list(&chunk_path(chunk)).await?;
        if variants.is_empty() {
            response.faults.push(fault(&chunk_path(chunk), &Miss::Missing));
        }
        paths.extend(variants);
    }
    let check = |path: Path| async move {
        let checked = match object_key(&path) {
            Some(key) => check(fetcher, &key).await,
            None => Err(Miss::Foreign("its name is not that of a variant".into())),
        };
        Ok::<_, Error>((path, checked))
    };
    let checks: Vec<_> = paths.into_iter().map(check).collect();
    let checked: Vec<(Path, Result<u64, Miss>)> = stream::iter(checks).buffered(PARALLEL).try_collect().await?;
    for (path, checked) in checked {
        response.objects += 1;
        match checked {
            Ok(bytes) => response.bytes += bytes,
            Err(miss) => response.faults.push(fault(&path, &miss)),
        }
    }
    Ok(response)
}

fn fault(path: &Path, miss: &Miss) -> ObjectFault {
    ObjectFault { path: path.to_string(), fault: miss.to_string() }
}

/// Bytes of a sound object.
async fn check(fetcher: &Fetcher, key: &ObjectKey) -> Result<u64, Miss> {
    let object = fetcher.read_object(key).await?;
    let header = &object.header;
    let e_tag = match &object.origin {
        Origin::Store(e_tag) => e_tag.as_deref(),
        Origin::Disk => None,
    };
    // To look it up only its start was read.
    let bytes = fetcher.store.range(&object_path(key), e_tag, 0..header.layout.header_bytes()).await?;
    if let Err(error) = Header::parse(&bytes) {
        fetcher.store.count_fault(&error);
        return Err(error.into());
    }
    let step = (READ_BYTES / header.layer_bytes().max(1)).max(1);
    for first in (0..header.layout.layers).step_by(step) {
        let last = (first + (step as u32 - 1)).min(header.layout.layers - 1);
        let range = header.layer_range(first).start..header.layer_range(last).end;
        let bytes = fetcher.store.range(&object_path(key), e_tag, range).await?;
        let Verified { failure, .. } = fetch::verify(object.clone(), first, bytes, Vec::new()).await?;
        if let Some(error) = failure {
            fetcher.store.count_fault(&error);
            return Err(error.into());
        }
    }
    Ok(header.object_bytes() as u64)
}
