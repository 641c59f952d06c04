//! The auxiliary model's work, one layer a job: decode steps of other requests go in between, and a caller that goes
//! away frees the compute thread within one layer.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvsplice_kv::Encoding;
use kvsplice_model::attention::last_attention;
use kvsplice_model::auxiliary::{ChunkKv, ScoreRequest, Scoring};
use kvsplice_model::encode::{Encoder, Prefix};
use kvsplice_model::{Compute, Decoder};

use crate::Error;

/// The auxiliary model on the compute thread.
#[derive(Clone)]
pub(crate) struct Engine {
    pub(crate) compute: Compute,
    pub(crate) decoder: Arc<Mutex<Decoder>>,
}

impl Engine {
    /// One score an auxiliary token of each chunk, in order.
    pub(crate) async fn score(&self, request: ScoreRequest) -> Result<Vec<Vec<f32>>, Error> {
        let expected: Vec<usize> = request.chunk_kv.iter().map(|chunk| chunk.tokens as usize).collect();
        let mut scoring = self.job(move |decoder| Ok(Scoring::new(decoder, request)?)).await?;
        loop {
            let (advanced, last) = self
                .job(move |decoder| {
                    let last = scoring.advance(decoder)?;
                    Ok((scoring, last))
                })
                .await?;
            scoring = advanced;
            if last {
                break;
            }
        }
        let scores = self.job(move |_| Ok(scoring.finish()?)).await?;
        let got: Vec<usize> = scores.iter().map(Vec::len).collect();
        if got != expected {
            return Err(Error::Task { task: "score", detail: format!("scored {got:?} tokens of {expected:?}") });
        }
        Ok(scores)
    }

    /// What the last of `ids` attends to in each of `layers`: one weight a token.
    pub(crate) async fn attention(&self, ids: Vec<u32>, layers: Vec<u32>) -> Result<Vec<Vec<f32>>, Error> {
        Ok(last_attention(&self.compute, &self.decoder, ids, layers).await?)
    }

    /// KV of `chunks`, each behind `prefix` alone, in order, and the time that computing took; waiting for others' jobs does
    /// not count.
    pub(crate) async fn encode(
        &self,
        prefix: &[u32],
        chunks: Vec<Vec<u32>>,
        encoding: Encoding,
    ) -> Result<(Vec<ChunkKv>, Duration), Error> {
        let ids = prefix.to_vec();
        // The chunks' own time: a prefix is computed once for many.
        let mut spent = Duration::ZERO;
        let mut prefix = self.job(move |decoder| Ok(Prefix::new(decoder, &ids)?)).await?;
        let mut encoded = Vec::with_capacity(chunks.len());
        let mut rest = chunks;
        while !rest.is_empty() {
            let batch: Vec<_> = rest.drain(..Encoder::batch(rest.iter().map(Vec::len))).collect();
            // Tensors are not shared between threads: they go to the job and come back.
            let (mut encoder, unchanged) = self
                .job(move |decoder| {
                    let batch: Vec<&[u32]> = batch.iter().map(Vec::as_slice).collect();
                    Ok((Encoder::new(decoder, &prefix, &batch, encoding)?, prefix))
                })
                .await?;
            prefix = unchanged;
            loop {
                let (advanced, last, took) = self
                    .job(move |decoder| {
                        let started = Instant::now();
                        let last = encoder.advance(decoder)?;
                        Ok((encoder, last, started.elapsed()))
                    })
                    .await?;
                encoder = advanced;
                spent += took;
                if last {
                    break;
                }
            }
            encoded.extend(encoder.finish());
        }
        Ok((encoded, spent))
    }

    async fn job<R: Send + 'static>(
        &self,
        job: impl FnOnce(&Decoder) -> Result<R, Error> + Send + 'static,
    ) -> Result<R, Error> {
        let decoder = Arc::clone(&self.decoder);
        self.compute.run(move || job(&*lock(&decoder)?)).await?
    }
}

/// The decoder; a panic in an earlier job may have left it in the middle of one.
fn lock(decoder: &Mutex<Decoder>) -> Result<MutexGuard<'_, Decoder>, Error> {
    decoder
        .lock()
        .map_err(|_poisoned| Error::Task { task: "auxiliary model", detail: "an earlier job panicked".into() })
}
