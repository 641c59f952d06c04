//! Cache-Craft (arXiv 2502.15734, Eq. 6 to 14): what was measured when a chunk's KV was captured in a prompt, how much of
//! it must be computed anew behind other chunks, and which tokens.
//!
//! Source: the paper's formulas; where it is silent, as said at each method. A chunk that stands several times before this
//! one counts once, at its first place: the paper speaks of sets. The prompt's own prefix is no chunk: it is part of each
//! [`ChunkId`]. Invariant: a capture that came from [`Capture::from_json`] holds finite, non-negative numbers of matching
//! lengths.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::layout::Provenance;
use crate::{ChunkId, Error, Variant};

/// Raised when a capture's record changes; another format is refused.
pub const FORMAT: u32 = 1;
/// Where the records of all captures lie.
pub const RECORDS: &str = "craft";

const MAX_TOKENS: u32 = 1 << 24;
const MAX_PREFIX: usize = 4096;

/// What was measured while a chunk's KV was captured behind other chunks. Masses are attention weights averaged over
/// heads and layers, so a row's masses sum to at most 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Capture {
    /// [`FORMAT`] at the time of writing.
    pub format: u32,
    /// The chunk.
    pub chunk: ChunkId,
    /// The stored form of its KV.
    pub variant: Variant,
    /// Its tokens, |C_i|.
    pub tokens: u32,
    /// The chunks that stood before it, in order (S_old); none for a clean-room chunk.
    pub prefix: Vec<ChunkId>,
    /// For each chunk of `prefix`: attention mass of all this chunk's rows on it (Eq. 3).
    pub inter: Vec<f32>,
    /// For each chunk of `prefix`: its tokens, |C_j|.
    pub prefix_tokens: Vec<u32>,
    /// Attention mass of all this chunk's rows on the chunk itself (Eq. 4).
    pub intra: f32,
    /// For each token of this chunk: its row's attention mass on all earlier chunks (Eq. 14). Empty when none was
    /// measured, which only a capture without `prefix` may lack.
    pub external: Vec<f32>,
    /// How often it was used, each use weighted by the inverse of its cost (f_r).
    pub uses: f64,
    /// When it was captured, in milliseconds since the Unix epoch.
    pub created_ms: u64,
}

impl Capture {
    /// A clean-room chunk: nothing stood before it, and nothing was measured.
    pub fn clean(chunk: ChunkId, variant: Variant, tokens: u32) -> Self {
        Self {
            format: FORMAT,
            chunk,
            variant,
            tokens,
            prefix: Vec::new(),
            inter: Vec::new(),
            prefix_tokens: Vec::new(),
            intra: 0.0,
            external: Vec::new(),
            uses: 0.0,
            created_ms: 0,
        }
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`Error::Capture`] naming the field that is missing, of another type, or outside its range.
    pub fn from_json(json: &[u8]) -> Result<Self, Error> {
        let mut reader = serde_json::Deserializer::from_slice(json);
        let capture: Self = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
            let path = error.path().to_string();
            // A missing field has no path of its own; the message names it.
            let field = if path == "." { "record" } else { &path };
            bad(field, format!("cannot be read: {}", error.inner()))
        })?;
        reader.end().map_err(|error| bad("record", format!("cannot be read: {error}")))?;
        capture.validate()?;
        Ok(capture)
    }

    /// The record.
    ///
    /// # Errors
    /// [`Error::Capture`] as [`Capture::from_json`].
    pub fn to_json(&self) -> Result<Vec<u8>, Error> {
        self.validate()?;
        serde_json::to_vec(self).map_err(|error| bad("record", format!("cannot be written: {error}")))
    }

    /// The key of the record, below `records/`.
    pub fn key(&self) -> String {
        format!("{}/{}", Self::folder(self.chunk), self.variant)
    }

    /// What the keys of all captures of a chunk begin with.
    pub fn folder(chunk: ChunkId) -> String {
        format!("{RECORDS}/{chunk}")
    }

    fn validate(&self) -> Result<(), Error> {
        if self.format != FORMAT {
            return Err(bad("format", format!("must be {FORMAT}, got {}", self.format)));
        }
        if !(1..=MAX_TOKENS).contains(&self.tokens) {
            return Err(bad("tokens", format!("must be in 1..={MAX_TOKENS}, got {}", self.tokens)));
        }
        let places = self.prefix.len();
        if places > MAX_PREFIX {
            return Err(bad("prefix", format!("must be at most {MAX_PREFIX} chunks, got {places}")));
        }
        let expected = Provenance::context(&self.prefix);
        if self.variant.provenance != expected {
            return Err(bad("variant", format!("must be of {expected} for this prefix, got {}", self.variant)));
        }
        if self.inter.len() != places {
            return Err(bad(
                "inter",
                format!("must have one mass a prefix chunk ({places}), got {}", self.inter.len()),
            ));
        }
        if self.prefix_tokens.len() != places {
            let got = self.prefix_tokens.len();
            return Err(bad("prefix_tokens", format!("must have one length a prefix chunk ({places}), got {got}")));
        }
        let measured = self.external.len();
        if measured != self.tokens as usize && !(measured == 0 && places == 0) {
            return Err(bad("external", format!("must have one mass a token ({}), got {measured}", self.tokens)));
        }
        for (place, &tokens) in self.prefix_tokens.iter().enumerate() {
            if !(1..=MAX_TOKENS).contains(&tokens) {
                return Err(bad(
                    &format!("prefix_tokens[{place}]"),
                    format!("must be in 1..={MAX_TOKENS}, got {tokens}"),
                ));
            }
        }
        masses("inter", &self.inter)?;
        masses("external", &self.external)?;
        number("intra", self.intra.into())?;
        number("uses", self.uses)
    }

    /// Cache context impact, in 0.5..1: how much the chunks before it weigh against the chunk itself (Eq. 9 to 11).
    /// 0.5 when no mass lay on them.
    pub fn cci(&self) -> f64 {
        let tokens = f64::from(self.tokens);
        let pairs = self.inter.iter().zip(&self.prefix_tokens);
        let a: f64 = pairs.map(|(&mass, &before)| f64::from(mass) / (tokens * f64::from(before))).sum();
        let b = f64::from(self.intra) / (tokens * tokens);
        if a == 0.0 {
            return 0.5;
        }
        // No mass on itself at all is the limit 1, which rounding reaches early: it stays open.
        (1.0 / (1.0 + (-a / b).exp())).min(1.0f64.next_down())
    }

    /// Share of the mass on earlier chunks that lay on chunks which stand in `new_prefix` too, in 0..=1 (Eq. 6). Chunks
    /// that are only in `new_prefix` do not matter, as in the paper.
    ///
    /// Behind nothing, Eq. 6 is 0/0. Then this is 1 only if `new_prefix` is empty as well: an isolated chunk must not pass
    /// for one that was captured in place. Where no mass lay on a prefix, it is 1 only if every chunk of it is still there.
    pub fn beta(&self, new_prefix: &[ChunkId]) -> f64 {
        self.overlap(&first_places(new_prefix)).0
    }

    /// Share of pairs of common chunks whose order changed, in 0..=1 (normalized Kendall tau distance, Eq. 7); 0 for fewer
    /// than two common chunks.
    pub fn gamma(&self, new_prefix: &[ChunkId]) -> f64 {
        self.overlap(&first_places(new_prefix)).1
    }

    /// Cache fix overhead, in 0..=1: the share of the chunk to compute anew behind `new_prefix` (Eq. 8 and 12). `alpha` is
    /// finite and not negative. 1 means that the capture is worth nothing here.
    pub fn cfo(&self, alpha: f64, new_prefix: &[ChunkId]) -> f64 {
        self.cfo_at(alpha, &first_places(new_prefix))
    }

    fn cfo_at(&self, alpha: f64, new: &HashMap<ChunkId, usize>) -> f64 {
        let (beta, gamma) = self.overlap(new);
        let overhead = alpha * self.cci() * (1.0 - beta * (1.0 - gamma));
        if overhead.is_nan() { 1.0 } else { overhead.clamp(0.0, 1.0) }
    }

    /// Beta and gamma against the first places of the new prefix.
    fn overlap(&self, new: &HashMap<ChunkId, usize>) -> (f64, f64) {
        if self.prefix.is_empty() {
            return (if new.is_empty() { 1.0 } else { 0.0 }, 0.0);
        }
        let old = first_places(&self.prefix);
        let (mut all, mut kept) = (0.0, 0.0);
        // Places in the new prefix of the common chunks, in old order.
        let mut places = Vec::with_capacity(old.len());
        for (place, (id, &mass)) in self.prefix.iter().zip(&self.inter).enumerate() {
            if old.get(id) != Some(&place) {
                continue;
            }
            all += f64::from(mass);
            if let Some(&place) = new.get(id) {
                kept += f64::from(mass);
                places.push(place);
            }
        }
        let beta = match all > 0.0 {
            true => kept / all,
            false if places.len() == old.len() => 1.0,
            false => 0.0,
        };
        let pairs = places.len() * places.len().saturating_sub(1) / 2;
        let gamma = if pairs == 0 { 0.0 } else { inversions(&mut places) as f64 / pairs as f64 };
        (beta, gamma)
    }

    /// The tokens to compute anew, ascending: the ceil(cfo × tokens) with the greatest mass on earlier chunks; the smaller
    /// index wins a tie. Where no mass was measured the first tokens come first: the rows that a chunk encoded alone uses
    /// as attention sinks (LegoLink, arXiv 2410.15332).
    pub fn rows(&self, cfo: f64) -> Vec<u32> {
        let count = (cfo * f64::from(self.tokens)).ceil().clamp(0.0, self.tokens.into()) as usize;
        // Minus zero is zero here.
        let mass = |token: u32| self.external.get(token as usize).map_or(0.0, |&mass| mass + 0.0);
        let mut rows: Vec<u32> = (0..self.tokens).collect();
        if count < rows.len() {
            rows.sort_by(|&one, &other| mass(other).total_cmp(&mass(one)).then(one.cmp(&other)));
            rows.truncate(count);
            rows.sort_unstable();
        }
        rows
    }
}

/// The variant that costs least behind `new_prefix` with its CFO; the first one wins a tie. None when there is no variant.
/// At a CFO of 1 the whole chunk is to be computed.
pub fn choose(variants: &[Capture], alpha: f64, new_prefix: &[ChunkId]) -> Option<(usize, f64)> {
    let new = first_places(new_prefix);
    let costs = variants.iter().map(|variant| variant.cfo_at(alpha, &new)).enumerate();
    costs.min_by(|(_, one), (_, other)| one.total_cmp(other))
}

/// Where each distinct chunk stands first.
fn first_places(chunks: &[ChunkId]) -> HashMap<ChunkId, usize> {
    let mut places = HashMap::with_capacity(chunks.len());
    for (place, &id) in chunks.iter().enumerate() {
        places.entry(id).or_insert(place);
    }
    places
}

/// Pairs that stand in descending order, counted while merging runs; sorts `values`.
fn inversions(values: &mut [usize]) -> usize {
    let mut count = 0;
    let mut merged = Vec::with_capacity(values.len());
    let mut width = 1;
    while width < values.len() {
        for run in values.chunks_mut(2 * width) {
            let (left, right) = run.split_at(width.min(run.len()));
            let (mut i, mut j) = (0, 0);
            merged.clear();
            while i < left.len() && j < right.len() {
                if left[i] <= right[j] {
                    merged.push(left[i]);
                    i += 1;
                } else {
                    // All that is left of the left run stands before a smaller value.
                    count += left.len() - i;
                    merged.push(right[j]);
                    j += 1;
                }
            }
            merged.extend_from_slice(&left[i..]);
            merged.extend_from_slice(&right[j..]);
            run.copy_from_slice(&merged);
        }
        width *= 2;
    }
    count
}

fn bad(field: &str, detail: String) -> Error {
    Error::Capture { field: field.to_owned(), detail }
}

fn masses(field: &str, masses: &[f32]) -> Result<(), Error> {
    masses.iter().enumerate().try_for_each(|(place, &mass)| number(&format!("{field}[{place}]"), mass.into()))
}

fn number(field: &str, value: f64) -> Result<(), Error> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(bad(field, format!("must be finite and not negative, got {value}")))
}

#[cfg(test)]
mod tests;
