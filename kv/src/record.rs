//! What is kept beside the KV: a corpus's settings and one record a document, as JSON objects in the store.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ChunkId, Encoding, ModelDigest};

/// The settings under which a corpus was ingested. Path: `records/{owner}/{corpus}/manifest`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Corpus {
    /// The corpus's name.
    pub name: String,
    /// The namespace that owns it.
    pub owner: String,
    /// The model whose KV is stored.
    pub primary: ModelDigest,
    /// The model whose scores pick rows.
    pub auxiliary: ModelDigest,
    /// Primary tokens a chunk, at most.
    pub chunk_tokens: u32,
    /// Primary tokens that neighboring chunks of a document share.
    pub overlap: u32,
    /// How KV is stored.
    pub encoding: Encoding,
    /// Named prefixes: name → system prompt. Every chunk is encoded behind each of them.
    pub prefixes: BTreeMap<String, String>,
}

/// The name of the prefix that a corpus has from the start.
pub const DEFAULT_PREFIX: &str = "default";

/// One document and its chunks. Path: `records/{owner}/{corpus}/documents/{BLAKE3 of the document id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// The document's id, unique in its corpus.
    pub id: String,
    /// BLAKE3 of the text; the same text is not ingested twice.
    pub digest: String,
    /// Its chunks in order.
    pub chunks: Vec<Chunk>,
}

/// A span of a document whose KV is cached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// The id of the primary KV behind each named prefix.
    pub ids: BTreeMap<String, ChunkId>,
    /// The id of the auxiliary KV behind each named prefix.
    pub auxiliary_ids: BTreeMap<String, ChunkId>,
    /// The chunk's text.
    pub text: String,
    /// First byte of the chunk in its document.
    pub document_offset: u64,
    /// Token ids of the primary model.
    pub primary: Tokens,
    /// Token ids of the auxiliary model.
    pub auxiliary: Tokens,
}

/// Token ids with their places in the text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Byte range of each token in the text; tokens that share one character share its range.
    pub spans: Vec<(u32, u32)>,
}
