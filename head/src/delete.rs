//! Removes documents, and the KV that no other document of the owner uses.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvsplice_kv::ChunkId;
use kvsplice_kv::record::Document;

use crate::corpus::ids_of;
use crate::head::Head;
use crate::{Error, craft, record};

/// Chunks removed in one call.
const BATCH: usize = 1024;

/// Removes documents of a corpus; all are looked up before the first is removed. Returns the removed objects' paths.
pub(crate) async fn delete_documents(head: &Head, corpus: &str, ids: &[String]) -> Result<Vec<String>, Error> {
    let index = head.corpora.get_now(corpus).await?;
    let mut documents: Vec<Arc<Document>> = Vec::with_capacity(ids.len());
    for id in ids {
        let Some(document) = index.document(id) else {
            let hint = format!("corpus {corpus:?} has no such document; nothing was removed");
            return Err(Error::NotFound { what: "document", name: id.clone(), hint });
        };
        documents.push(Arc::clone(document));
    }
    let mut records = Vec::new();
    for document in &documents {
        let key = record::document_key(&head.config.owner, corpus, &document.id);
        records.extend(record::pages(&key, document)?.into_iter().map(|(key, _)| key));
    }
    // Page 0 comes last where it is written, so first here: a document that is half removed is not visible.
    records.reverse();
    let mut removed = head.corpora.remove(&records).await?;
    head.corpora.touch(corpus).await?;
    let ids = documents.iter().flat_map(|document| document.chunks.iter().flat_map(ids_of)).collect();
    removed.extend(unused_chunks(head, ids).await?);
    Ok(removed)
}

/// Removes those of `ids` that no document uses any more. Returns the removed objects' paths.
pub(crate) async fn unused_chunks(head: &Head, ids: Vec<ChunkId>) -> Result<Vec<String>, Error> {
    let used = head.corpora.ids_in_use().await?;
    let unused: BTreeSet<ChunkId> = ids.into_iter().filter(|id| !used.contains(id)).collect();
    let unused: Vec<ChunkId> = unused.into_iter().collect();
    let mut removed = Vec::new();
    for batch in unused.chunks(BATCH) {
        removed.extend(head.cache.delete(batch, &[]).await.map_err(Error::cache("remove chunks"))?);
    }
    if !unused.is_empty() {
        removed.extend(craft::forget(&head.cache, &unused).await?);
    }
    Ok(removed)
}
