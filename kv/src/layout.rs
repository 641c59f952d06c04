//! How the KV of a chunk is laid out: which bytes each layer has, and what they mean.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{ChunkId, Error};

/// Raised by hand when stored bytes change meaning (K before RoPE and after bias, V as projected: 1).
pub const KV_SEMANTICS: u32 = 1;

/// How numbers of a chunk's KV are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// IEEE single precision; for tests of exactness.
    F32,
    /// bfloat16; the default.
    Bf16,
    /// 8 bits, symmetric: a number is its code times a scale.
    Int8,
    /// 8-bit floating point, 4 bits of exponent and 3 of mantissa, times a scale.
    Fp8,
    /// 4 bits, symmetric, two codes a byte (the lower half first), times a scale.
    Int4,
}

impl Encoding {
    /// Every encoding.
    pub const ALL: [Self; 5] = [Self::F32, Self::Bf16, Self::Int8, Self::Fp8, Self::Int4];

    /// Bits of one number, scales aside.
    pub const fn bits(self) -> usize {
        match self {
            Encoding::F32 => 32,
            Encoding::Bf16 => 16,
            Encoding::Int8 | Encoding::Fp8 => 8,
            Encoding::Int4 => 4,
        }
    }

    /// Whether numbers are codes with scales: what is read back is close to what was computed, not equal to it.
    pub const fn quantized(self) -> bool {
        matches!(self, Encoding::Int8 | Encoding::Fp8 | Encoding::Int4)
    }

    /// The dtype name in a safetensors header.
    pub const fn dtype(self) -> &'static str {
        match self {
            Encoding::F32 => "F32",
            Encoding::Bf16 => "BF16",
            Encoding::Int8 => "I8",
            Encoding::Fp8 => "F8_E4M3",
            // Two codes a byte.
            Encoding::Int4 => "U8",
        }
    }

    /// Its name on the command line, in settings and in paths.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "f32",
            Encoding::Bf16 => "bf16",
            Encoding::Int8 => "int8",
            Encoding::Fp8 => "fp8",
            Encoding::Int4 => "int4",
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Encoding {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|encoding| encoding.name() == name).ok_or_else(|| Error::UnknownName {
            what: "encoding",
            got: name.to_owned(),
            known: "f32, bf16, int8, fp8, int4",
        })
    }
}

/// Tokens that share the scales of quantized keys. Channels of keys differ in size far more than tokens do, hence a scale
/// a channel (KIVI, arXiv 2402.02750, section 3); values have a scale a token and KV head.
pub const SCALE_GROUP: u32 = 64;

/// A part of one stored layer. In this order they make the layer's bytes; scales stand behind what they scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Keys, one row a token: `[tokens, kv_heads, head_dim]`.
    Keys,
    /// Scales of quantized keys, f32, one row for [`SCALE_GROUP`] tokens: `[groups, kv_heads, head_dim]`.
    KeyScales,
    /// Values, as keys.
    Values,
    /// Scales of quantized values, f32, one row a token: `[tokens, kv_heads]`.
    ValueScales,
}

impl Part {
    /// Every part.
    pub const ALL: [Self; 4] = [Self::Keys, Self::KeyScales, Self::Values, Self::ValueScales];

    /// Its place in [`Part::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The end of its tensor's name.
    pub const fn name(self) -> &'static str {
        match self {
            Part::Keys => "k",
            Part::KeyScales => "k.scales",
            Part::Values => "v",
            Part::ValueScales => "v.scales",
        }
    }

    /// Whether a row is a token's.
    pub const fn by_token(self) -> bool {
        !matches!(self, Part::KeyScales)
    }

    /// Rows for `tokens` tokens.
    pub const fn rows(self, tokens: u32) -> u32 {
        if self.by_token() { tokens } else { tokens.div_ceil(SCALE_GROUP) }
    }
}

/// In which context a chunk's KV was computed. Its text is `clean` or `ctx` with 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Provenance {
    /// From prefix and chunk alone, whatever traffic came before.
    Clean,
    /// Behind other chunks of one prompt (Cache-Craft, arXiv 2502.15734): the first 8 bytes, big-endian, of BLAKE3 over
    /// the ids of the chunks before it, in order.
    Context(u64),
}

impl Provenance {
    /// The context of a chunk that stands behind the prompt's prefix and the chunks `before`; behind none it is clean.
    pub fn context(before: &[ChunkId]) -> Self {
        if before.is_empty() {
            return Provenance::Clean;
        }
        let mut hasher = blake3::Hasher::new();
        for id in before {
            hasher.update(id.as_bytes());
        }
        let mut digest = [0; 8];
        hasher.finalize_xof().fill(&mut digest);
        Provenance::Context(u64::from_be_bytes(digest))
    }
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Provenance::Clean => f.write_str("clean"),
            Provenance::Context(digest) => write!(f, "ctx{digest:016x}"),
        }
    }
}

impl FromStr for Provenance {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        if name == "clean" {
            return Ok(Provenance::Clean);
        }
        // One text for each value: a variant is a path.
        let canonical = |digits: &&str| {
            digits.len() == 16 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
        };
        let digits = name.strip_prefix("ctx").filter(canonical);
        match digits.map(|digits| u64::from_str_radix(digits, 16)) {
            Some(Ok(digest)) => Ok(Provenance::Context(digest)),
            _ => Err(Error::UnknownName {
                what: "provenance",
                got: name.to_owned(),
                known: "clean, ctx with 16 hexadecimal digits",
            }),
        }
    }
}

/// One stored form of a chunk's KV. Its text, `bf16-clean-1` or `bf16-ctx0123456789abcdef-1`, is the last part of the
/// object's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// How numbers are stored.
    pub encoding: Encoding,
    /// In which context they were computed.
    pub provenance: Provenance,
    /// What they mean: [`KV_SEMANTICS`] at the time of writing.
    pub kv_semantics: u32,
}

impl Variant {
    /// The clean-room variant of today's semantics.
    pub const fn clean(encoding: Encoding) -> Self {
        Self { encoding, provenance: Provenance::Clean, kv_semantics: KV_SEMANTICS }
    }

    /// The variant, in today's semantics, that was computed behind the chunks `before`; behind none it is the clean one.
    pub fn context(encoding: Encoding, before: &[ChunkId]) -> Self {
        Self { encoding, provenance: Provenance::context(before), kv_semantics: KV_SEMANTICS }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.encoding, self.provenance, self.kv_semantics)
    }
}

impl FromStr for Variant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || Error::UnknownName {
            what: "variant",
            got: text.to_owned(),
            known: "like bf16-clean-1 or bf16-ctx0123456789abcdef-1",
        };
        let mut parts = text.splitn(3, '-');
        let (Some(encoding), Some(provenance), Some(semantics)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(unknown());
        };
        Ok(Self {
            encoding: encoding.parse()?,
            provenance: provenance.parse()?,
            kv_semantics: semantics.parse().map_err(|_| unknown())?,
        })
    }
}

impl Serialize for Variant {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Variant {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The shape of one chunk's KV. Everything about byte ranges follows from it.
///
/// Bytes of an object: header, then for each layer its [`Part`]s, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    /// Decoder layers.
    pub layers: u32,
    /// KV heads a layer.
    pub kv_heads: u32,
    /// Numbers a head.
    pub head_dim: u32,
    /// How numbers are stored.
    pub encoding: Encoding,
}

impl KvLayout {
    /// The parts of a stored layer, in order.
    pub const fn parts(&self) -> &'static [Part] {
        if self.encoding.quantized() { &Part::ALL } else { &[Part::Keys, Part::Values] }
    }

    /// Bytes of one row of a part.
    pub const fn row_bytes(&self, part: Part) -> usize {
        let (heads, dim) = (self.kv_heads as usize, self.head_dim as usize);
        match part {
            Part::Keys | Part::Values => heads * dim * self.encoding.bits() / 8,
            Part::KeyScales => heads * dim * 4,
            Part::ValueScales => heads * 4,
        }
    }

    /// Bytes of one part of a layer of a chunk of `tokens` tokens.
    pub const fn part_bytes(&self, part: Part, tokens: u32) -> usize {
        part.rows(tokens) as usize * self.row_bytes(part)
    }

    /// Where a part lies in the bytes of its layer; empty for a part that the encoding does not have.
    pub fn part_range(&self, part: Part, tokens: u32) -> std::ops::Range<usize> {
        let before = self.parts().iter().take_while(|&&other| other != part);
        let start = before.map(|&other| self.part_bytes(other, tokens)).sum();
        let bytes = if self.parts().contains(&part) { self.part_bytes(part, tokens) } else { 0 };
        start..start + bytes
    }

    /// Bytes of one layer of a chunk of `tokens` tokens.
    pub const fn layer_bytes(&self, tokens: u32) -> usize {
        let numbers = self.part_bytes(Part::Keys, tokens) + self.part_bytes(Part::Values, tokens);
        if !self.encoding.quantized() {
            return numbers;
        }
        numbers + self.part_bytes(Part::KeyScales, tokens) + self.part_bytes(Part::ValueScales, tokens)
    }

    /// Bytes of one token over all layers, rounded up: scales are shared.
    pub const fn token_bytes(&self) -> usize {
        (self.layers as usize * self.layer_bytes(SCALE_GROUP)).div_ceil(SCALE_GROUP as usize)
    }

    /// Bytes of the header with its length field: 32 KiB for each 64 layers begun, or 32 where they have scales.
    pub const fn header_bytes(&self) -> usize {
        let layers = if self.encoding.quantized() { 32 } else { 64 };
        (32 << 10) * (self.layers as usize).div_ceil(layers)
    }

    /// Bytes of a whole object of `tokens` tokens.
    pub const fn object_bytes(&self, tokens: u32) -> usize {
        self.header_bytes() + self.layers as usize * self.layer_bytes(tokens)
    }

    /// Where layer `layer` (K, then V) lies in an object of `tokens` tokens.
    pub const fn layer_range(&self, layer: u32, tokens: u32) -> std::ops::Range<usize> {
        let start = self.header_bytes() + layer as usize * self.layer_bytes(tokens);
        start..start + self.layer_bytes(tokens)
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} layers × {} KV heads × {} {}", self.layers, self.kv_heads, self.head_dim, self.encoding)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_variant_survives_its_text(
            digest in any::<u64>(),
            encoding in prop::sample::select(Encoding::ALL.to_vec()),
            kv_semantics in any::<u32>(),
        ) {
            for provenance in [Provenance::Clean, Provenance::Context(digest)] {
                let variant = Variant { encoding, provenance, kv_semantics };
                prop_assert_eq!(variant.to_string().parse(), Ok(variant));
                let json = serde_json::to_string(&variant).unwrap();
                prop_assert_eq!(serde_json::from_str::<Variant>(&json).unwrap(), variant);
            }
        }
    }

    #[test]
    fn the_parts_of_a_layer_lie_one_after_another() {
        for encoding in Encoding::ALL {
            let layout = KvLayout { layers: 3, kv_heads: 2, head_dim: 16, encoding };
            for tokens in [1, 63, 64, 65, 1000] {
                let mut end = 0;
                for &part in layout.parts() {
                    let range = layout.part_range(part, tokens);
                    assert_eq!(range, end..end + layout.part_bytes(part, tokens), "{encoding} {part:?}");
                    end = range.end;
                }
                assert_eq!(end, layout.layer_bytes(tokens), "{encoding}, {tokens} tokens");
            }
        }
        let bytes = |encoding| KvLayout { layers: 1, kv_heads: 8, head_dim: 128, encoding }.token_bytes();
        assert_eq!(Encoding::ALL.map(bytes), [8192, 4096, 2144, 2144, 1120]);
    }

    #[test]
    fn a_context_depends_on_each_chunk_and_on_their_order() {
        let id = |byte| ChunkId::from_bytes([byte; 32]);
        let context =
            |before: &[u8]| Variant::context(Encoding::Bf16, &before.iter().copied().map(id).collect::<Vec<_>>());
        assert_eq!(context(&[]), Variant::clean(Encoding::Bf16));
        let all = [context(&[]), context(&[1]), context(&[1, 2]), context(&[2, 1]), context(&[1, 1, 2])];
        for (index, one) in all.iter().enumerate() {
            assert!(!all[..index].contains(one), "{one}");
        }
        let hash = blake3::hash(&[[1; 32], [2; 32]].concat()).to_hex();
        assert_eq!(context(&[1, 2]).to_string(), format!("bf16-ctx{}-1", &hash[..16]));
    }

    #[test]
    fn a_text_that_is_not_canonical_is_no_variant() {
        let bad = [
            "bf16",
            "bf16-clean",
            "bf16-ctx-1",
            "bf16-ctx0123456789abcde-1",
            "bf16-ctx0123456789abcdef0-1",
            "bf16-ctx0123456789ABCDEF-1",
            "bf16-ctx+123456789abcdef-1",
            "bf16-ctx0123456789abcdef",
            "bf16-context-1",
            "bf16-ctx\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}-1",
        ];
        for text in bad {
            assert!(text.parse::<Variant>().is_err(), "{text}");
        }
        assert!("bf16-ctx0123456789abcdef-1".parse::<Variant>().is_ok());
    }
}
