//! Clean-room encoding: the KV of chunks, each behind a prefix and nothing else.
//!
//! Several chunks share one forward pass, but none sees another. Work goes layer by layer, so that a caller can put
//! other work between two layers.

use bytes::Bytes;
use kvsplice_kernels::rope::Rotation;
use kvsplice_kv::{Encoding, KvLayout};
use tch::Tensor;

use crate::cache::KvCache;
use crate::decoder::{Keep, SLICE_ROWS, Segment, joined, slice_of};
use crate::stored::StoredLayer;
use crate::{Decoder, Error};

/// The KV of one chunk as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkKv {
    /// Shape and encoding.
    pub layout: KvLayout,
    /// Tokens.
    pub tokens: u32,
    /// One a layer, as [`StoredLayer::bytes`].
    pub layers: Vec<Bytes>,
}

impl ChunkKv {
    /// One layer; none beyond the last.
    pub fn layer(&self, layer: u32) -> Option<StoredLayer> {
        let bytes = self.layers.get(layer as usize)?.clone();
        Some(StoredLayer { layout: self.layout, tokens: self.tokens, bytes })
    }
}

/// The layout of a model's chunks.
pub fn layout(config: &crate::Config, encoding: Encoding) -> KvLayout {
    KvLayout { layers: config.layers, kv_heads: config.kv_heads, head_dim: config.head_dim, encoding }
}

/// A prefix whose KV is computed once for many chunks.
#[derive(Debug)]
pub struct Prefix {
    cache: KvCache,
    tokens: u32,
}

impl Prefix {
    /// Computes the KV of `ids`; none is fine.
    pub fn new(decoder: &Decoder, ids: &[u32]) -> Result<Self, Error> {
        let tokens = ids.len() as u32;
        let mut cache = decoder.cache(tokens.max(1))?;
        let slots: Vec<u32> = (0..tokens).collect();
        let slice = slice_of(slots.len(), SLICE_ROWS).max(1);
        for (slots, ids) in slots.chunks(slice).zip(ids.chunks(slice)) {
            let rotation = decoder.rotation(slots)?;
            let mut hidden = decoder.embed(ids)?;
            let last = decoder.config().layers - 1;
            for layer in 0..=last {
                let keep = if layer == last { Keep::Rows(&[]) } else { Keep::All };
                hidden = decoder.layer(
                    layer,
                    &hidden,
                    &rotation,
                    &mut [Segment { cache: &mut cache, slots, two_part: None }],
                    keep,
                    None,
                )?;
            }
        }
        Ok(Self { cache, tokens })
    }
}

struct Chunk {
    cache: KvCache,
    slots: Vec<u32>,
    layers: Vec<Bytes>,
}

/// Chunks on their way through the layers.
pub struct Encoder {
    chunks: Vec<Chunk>,
    /// `[all rows, hidden]`
    hidden: Tensor,
    rotation: Rotation,
    layer: u32,
    layout: KvLayout,
}

impl Encoder {
    /// Starts on `chunks` behind `prefix`. Fails on an empty chunk and on one that is longer than the context.
    pub fn new(decoder: &Decoder, prefix: &Prefix, chunks: &[&[u32]], encoding: Encoding) -> Result<Self, Error> {
        let mut started = Vec::with_capacity(chunks.len());
        for ids in chunks {
            if ids.is_empty() {
                return Err(Error::Argument("an empty chunk has no KV".to_owned()));
            }
            let end = prefix.tokens + ids.len() as u32;
            let mut cache = decoder.cache(end)?;
            cache.copy_start(&prefix.cache, prefix.tokens)?;
            started.push(Chunk { cache, slots: (prefix.tokens..end).collect(), layers: Vec::new() });
        }
        let positions: Vec<u32> = started.iter().flat_map(|chunk| chunk.slots.iter().copied()).collect();
        Ok(Self {
            hidden: decoder.embed(&chunks.concat())?,
            rotation: decoder.rotation(&positions)?,
            layer: 0,
            layout: layout(decoder.config(), encoding),
            chunks: started,
        })
    }

    /// How many of `lengths` (tokens a chunk) go into one forward pass: as many as fit a slice, at least one.
    pub fn batch(lengths: impl IntoIterator<Item = usize>) -> usize {
        let mut rows = 0;
        let fitting = lengths.into_iter().take_while(|length| {
            rows += length;
            rows <= SLICE_ROWS
        });
        fitting.count().max(1)
    }

    /// Computes one layer. Returns whether it was the last.
    pub fn advance(&mut self, decoder: &Decoder) -> Result<bool, Error> {
        let last = self.layer + 1 == self.layout.layers;
        let keep = if last { Keep::Rows(&[]) } else { Keep::All };
        let rows = self.hidden.size()[0] as usize;
        let mut captured = Vec::new();
        if rows <= SLICE_ROWS {
            let mut segments: Vec<Segment<'_>> = self
                .chunks
                .iter_mut()
                .map(|chunk| Segment { cache: &mut chunk.cache, slots: &chunk.slots, two_part: None })
                .collect();
            self.hidden =
                decoder.layer(self.layer, &self.hidden, &self.rotation, &mut segments, keep, Some(&mut captured))?;
        } else {
            // One chunk that is longer than a slice.
            let [chunk] = &mut self.chunks[..] else {
                return Err(Error::Argument(format!("{rows} rows of several chunks do not fit one pass")));
            };
            let mut outputs = Vec::new();
            let slice = slice_of(rows, SLICE_ROWS);
            for (index, slots) in chunk.slots.chunks(slice).enumerate() {
                let first = index * slice;
                let hidden = self.hidden.f_narrow(0, first as i64, slots.len() as i64)?;
                let rotation = self.rotation.narrow(first, slots.len())?;
                let mut segments = [Segment { cache: &mut chunk.cache, slots, two_part: None }];
                outputs.push(decoder.layer(
                    self.layer,
                    &hidden,
                    &rotation,
                    &mut segments,
                    keep,
                    Some(&mut captured),
                )?);
            }
            self.hidden = joined(outputs)?;
        }
        self.store(&captured)?;
        self.layer += 1;
        Ok(last)
    }

    /// Turns the captured rows of a layer into bytes, chunk by chunk.
    fn store(&mut self, captured: &[(Tensor, Tensor)]) -> Result<(), Error> {
        let (keys, values) = joined_pairs(captured)?;
        let mut first = 0;
        for chunk in &mut self.chunks {
            let tokens = chunk.slots.len() as i64;
            let (keys, values) = (keys.f_narrow(0, first, tokens)?, values.f_narrow(0, first, tokens)?);
            chunk.layers.push(StoredLayer::encode(self.layout, &keys, &values)?.bytes);
            first += tokens;
        }
        Ok(())
    }

    /// The chunks' KV, in the order given. Call it when [`Encoder::advance`] has said that it is done.
    pub fn finish(self) -> Vec<ChunkKv> {
        let layout = self.layout;
        let chunks = self.chunks.into_iter();
        chunks.map(|chunk| ChunkKv { layout, tokens: chunk.slots.len() as u32, layers: chunk.layers }).collect()
    }
}

/// Rows `first..first + tokens` of slices of all rows, K before rotation and V by layer, as one chunk's KV.
pub fn pack(
    config: &crate::Config,
    encoding: Encoding,
    layers: &[Vec<(Tensor, Tensor)>],
    first: i64,
    tokens: i64,
) -> Result<ChunkKv, Error> {
    let layout = layout(config, encoding);
    let mut packed = Vec::with_capacity(layers.len());
    for slices in layers {
        let (keys, values) = joined_pairs(slices)?;
        let (keys, values) = (keys.f_narrow(0, first, tokens)?, values.f_narrow(0, first, tokens)?);
        packed.push(StoredLayer::encode(layout, &keys, &values)?.bytes);
    }
    Ok(ChunkKv { layout, tokens: tokens as u32, layers: packed })
}

/// Slices of keys and of values one after another.
fn joined_pairs(slices: &[(Tensor, Tensor)]) -> Result<(Tensor, Tensor), Error> {
    let all = |pick: fn(&(Tensor, Tensor)) -> &Tensor| Tensor::f_cat(&slices.iter().map(pick).collect::<Vec<_>>(), 0);
    Ok((all(|slice| &slice.0)?, all(|slice| &slice.1)?))
}

/// Encodes `chunks` behind `prefix_ids` at one go. With `chunks` = the prefix itself and no prefix ids, this is the
/// prefix's own KV.
pub fn encode(
    decoder: &Decoder,
    prefix_ids: &[u32],
    chunks: &[&[u32]],
    encoding: Encoding,
) -> Result<Vec<ChunkKv>, Error> {
    let prefix = Prefix::new(decoder, prefix_ids)?;
    let mut encoded = Vec::with_capacity(chunks.len());
    let mut rest = chunks;
    while !rest.is_empty() {
        let (batch, later) = rest.split_at(Encoder::batch(rest.iter().map(|ids| ids.len())));
        let mut encoder = Encoder::new(decoder, &prefix, batch, encoding)?;
        while !encoder.advance(decoder)? {}
        encoded.extend(encoder.finish());
        rest = later;
    }
    Ok(encoded)
}
