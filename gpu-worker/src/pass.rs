//! Prefixes kept between encodings, and the clean-room encoding of one batch of chunks for ingest or repair.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use kvsplice_kv::Encoding;
use kvsplice_kv::id::TokensDigest;
use kvsplice_model::encode::{ChunkKv, Encoder, Prefix};
use kvsplice_model::{Decoder, Error};

/// Prefixes that are kept; corpora in use at the same time are few.
const KEPT_PREFIXES: usize = 8;

/// The KV of prefixes used last. Locked on the compute thread only.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prefixes {
    kept: Arc<Mutex<VecDeque<(TokensDigest, Prefix)>>>,
}

impl Prefixes {
    /// Starts encoding `chunks` behind `prefix_ids`, whose KV is computed unless it is kept.
    pub(crate) fn encoder(
        &self,
        decoder: &Decoder,
        prefix_ids: &[u32],
        chunks: &[&[u32]],
        encoding: Encoding,
    ) -> Result<Encoder, Error> {
        let digest = TokensDigest::of(prefix_ids);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.iter().position(|(known, _)| *known == digest);
        let entry = match found.and_then(|index| kept.remove(index)) {
            Some(entry) => entry,
            None => (digest, Prefix::new(decoder, prefix_ids)?),
        };
        let encoder = Encoder::new(decoder, &entry.1, chunks, encoding);
        kept.push_front(entry);
        kept.truncate(KEPT_PREFIXES);
        encoder
    }
}

/// Chunks behind one prefix, to be encoded in one pass.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) prefix_ids: Vec<u32>,
    pub(crate) chunks: Vec<Vec<u32>>,
    pub(crate) encoding: Encoding,
}

/// A batch on its way through the layers.
pub(crate) enum Pass {
    Waiting(Batch),
    Running(Box<Encoder>),
}

/// What a step led to.
pub(crate) enum Encoded {
    More(Pass),
    Done(Vec<ChunkKv>),
}

impl Pass {
    /// Computes one layer.
    pub(crate) fn advance(self, decoder: &Decoder, prefixes: &Prefixes) -> Result<Encoded, Error> {
        let mut encoder = match self {
            Pass::Running(encoder) => encoder,
            Pass::Waiting(batch) => {
                let chunks: Vec<&[u32]> = batch.chunks.iter().map(Vec::as_slice).collect();
                Box::new(prefixes.encoder(decoder, &batch.prefix_ids, &chunks, batch.encoding)?)
            }
        };
        if encoder.advance(decoder)? {
            return Ok(Encoded::Done(encoder.finish()));
        }
        Ok(Encoded::More(Pass::Running(encoder)))
    }
}
