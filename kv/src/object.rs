//! The chunk object: a safetensors file whose byte ranges follow from [`KvLayout`].
//!
//! Writing is deterministic. The parser renders the header that its metadata calls for and compares every byte, so it
//! accepts exactly what [`write()`] makes: no other offset, name, dtype or shape gets through. It never touches tensor data;
//! [`Header::verify_layer`] does, one layer at a time.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;

use serde::Deserialize;

use crate::{ChunkId, ChunkKey, Encoding, KvLayout, Part, Variant};

/// Raised when the header changes; another version is foreign.
pub const FORMAT_VERSION: u32 = 1;
/// What a reader fetches first, in bytes: the whole header of a model of up to 64 layers (32 with scales).
pub const FIRST_READ_BYTES: usize = 32 << 10;
/// What comes before the metadata in every header, after its length.
const METADATA: &[u8] = b"{\"__metadata__\":";
/// Longest header that is read, in bytes.
pub const MAX_HEADER_BYTES: usize = FIRST_READ_BYTES * 32;

const FORMAT: &str = "kvsplice chunk";
const MAX_LAYERS: u32 = 999;
const MAX_HEADS: u32 = 1024;
const MAX_HEAD_DIM: u32 = 1024;
const MAX_ROW_BYTES: usize = 1 << 20;
const MAX_TOKENS: u32 = 1 << 24;
const MAX_OWNER_BYTES: usize = 256;
const MAX_NAME_BYTES: usize = 64;

/// Why a chunk object was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes end too early.
    #[error("truncated: {got} bytes, need {need}")]
    Truncated {
        /// Bytes there.
        got: usize,
        /// Bytes needed.
        need: usize,
    },
    /// Not a chunk object of this format, or one of another chunk.
    #[error("foreign: {what} is {found}, expected {expected}")]
    Foreign {
        /// What differs.
        what: &'static str,
        /// What this reader accepts.
        expected: String,
        /// What the object says, cut at 80 characters.
        found: String,
    },
    /// The header is not what its writer wrote.
    #[error("damaged: the header does not match its digest")]
    DamagedHeader,
    /// A layer is not what its writer wrote.
    #[error("damaged: layer {layer} does not match its digest")]
    DamagedLayer {
        /// The layer.
        layer: u32,
    },
    /// A value that no object can have.
    #[error("{what} must be {expected}, got {got}")]
    OutOfRange {
        /// Which value.
        what: &'static str,
        /// The valid values in words.
        expected: &'static str,
        /// The value as given.
        got: String,
    },
}

/// What the header of a chunk object says. One that came from [`Header::parse`] is consistent in itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the chunk id is made of.
    pub key: ChunkKey,
    /// Shape of the KV.
    pub layout: KvLayout,
    /// Encoding, provenance and meaning of the data.
    pub variant: Variant,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Version of the program that wrote the object.
    pub build: String,
    /// What the KV was computed in, such as `f32`.
    pub compute_dtype: String,
    /// BLAKE3 of each layer's bytes.
    pub layer_digests: Vec<[u8; 32]>,
}

/// Makes a chunk object. `layers` gives, for each layer in order, the bytes of its parts: K
/// `[tokens, kv_heads, head_dim]`, row-major in the layout's encoding and before RoPE, its scales if it has any, and V alike. Errors: [`Error::OutOfRange`] when a value or a layer's length
/// does not fit the layout.
pub fn write(
    key: &ChunkKey,
    layout: &KvLayout,
    variant: Variant,
    tokens: u32,
    compute_dtype: &str,
    layers: impl IntoIterator<Item = impl AsRef<[u8]>>,
) -> Result<Vec<u8>, Error> {
    let mut header = Header {
        key: key.clone(),
        layout: *layout,
        variant,
        tokens,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        compute_dtype: compute_dtype.to_owned(),
        layer_digests: Vec::new(),
    };
    header.check_ranges()?;
    let layer_bytes = layout.layer_bytes(tokens);
    let mut object = Vec::with_capacity(layout.object_bytes(tokens));
    object.resize(layout.header_bytes(), b' ');
    for layer in layers {
        let layer = layer.as_ref();
        if layer.len() != layer_bytes {
            return Err(Error::OutOfRange {
                what: "layer",
                expected: "as long as the layout says",
                got: format!("{} bytes, layout {layout} with {tokens} tokens needs {layer_bytes}", layer.len()),
            });
        }
        header.layer_digests.push(*blake3::hash(layer).as_bytes());
        object.extend_from_slice(layer);
    }
    if header.layer_digests.len() != layout.layers as usize {
        return Err(Error::OutOfRange {
            what: "layers",
            expected: "as many as the layout has",
            got: format!("{}, layout {layout}", header.layer_digests.len()),
        });
    }
    let rendered = header.render()?;
    object[..rendered.len()].copy_from_slice(&rendered);
    Ok(object)
}

impl Header {
    /// Reads the header from the first bytes of an object. [`Error::Truncated`] says how many bytes it takes; a reader that
    /// has the start of an object reads that many and tries again.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
            return Err(Error::Truncated { got: bytes.len(), need: FIRST_READ_BYTES });
        };
        let length = u64::from_le_bytes(*length);
        let header_bytes = usize::try_from(length).ok().and_then(|length| length.checked_add(8)).unwrap_or(usize::MAX);
        if header_bytes == 8 || header_bytes > MAX_HEADER_BYTES || !header_bytes.is_multiple_of(FIRST_READ_BYTES) {
            return Err(foreign("header length", "a multiple of 32 KiB, less 8, up to 1 MiB", &length.to_string()));
        }
        let Some(json) = rest.get(..header_bytes - 8) else {
            return Err(Error::Truncated { got: bytes.len(), need: header_bytes });
        };
        let file: File = serde_json::from_slice(json)
            .map_err(|error| foreign("header", "JSON with __metadata__", &error.to_string()))?;
        let header = Self::from_metadata(&file.metadata)?;
        if header.layout.header_bytes() != header_bytes {
            return Err(Error::DamagedHeader);
        }
        let rendered = header.render()?;
        if rendered.get(8..) != Some(json) {
            return Err(Error::DamagedHeader);
        }
        Ok(header)
    }

    /// Reads the header from its metadata alone, which come first and are sealed: of a model of 48 layers some 5 of 32 KiB. What
    /// else is there must be as its writer wrote it; what is not there follows from it. Also says how many bytes that took.
    /// None where the metadata are not all there, or not as they should be: [`Header::parse`] of the whole header says why.
    pub fn parse_start(bytes: &[u8]) -> Option<(Self, usize)> {
        let metadata = bytes.get(8..)?.strip_prefix(METADATA)?;
        let mut values = serde_json::Deserializer::from_slice(metadata).into_iter::<BTreeMap<String, String>>();
        let header = Self::from_metadata(&values.next()?.ok()?).ok()?;
        let rendered = header.render().ok()?;
        let there = bytes.get(..rendered.len()).unwrap_or(bytes);
        (rendered.get(..there.len()) == Some(there)).then(|| (header, 8 + METADATA.len() + values.byte_offset()))
    }

    /// Checks that the object belongs to the chunk `id`.
    pub fn check_id(&self, id: ChunkId) -> Result<(), Error> {
        let found = self.key.id();
        if found != id {
            return Err(foreign("chunk id", &id.to_string(), &found.to_string()));
        }
        Ok(())
    }

    /// Checks that the object is of this variant.
    pub fn check_variant(&self, variant: Variant) -> Result<(), Error> {
        if self.variant != variant {
            return Err(foreign("variant", &variant.to_string(), &self.variant.to_string()));
        }
        Ok(())
    }

    /// Checks the bytes of one layer against the header.
    pub fn verify_layer(&self, layer: u32, bytes: &[u8]) -> Result<(), Error> {
        let digest = self.layer_digests.get(layer as usize).ok_or_else(|| Error::OutOfRange {
            what: "layer",
            expected: "less than the number of layers",
            got: format!("{layer} of {}", self.layout.layers),
        })?;
        let need = self.layer_bytes();
        if bytes.len() < need {
            return Err(Error::Truncated { got: bytes.len(), need });
        }
        if bytes.len() > need || blake3::hash(bytes).as_bytes() != digest {
            return Err(Error::DamagedLayer { layer });
        }
        Ok(())
    }

    /// Bytes of one layer.
    pub const fn layer_bytes(&self) -> usize {
        self.layout.layer_bytes(self.tokens)
    }

    /// Bytes of the whole object.
    pub const fn object_bytes(&self) -> usize {
        self.layout.object_bytes(self.tokens)
    }

    /// Where a layer lies in the object.
    pub const fn layer_range(&self, layer: u32) -> Range<usize> {
        self.layout.layer_range(layer, self.tokens)
    }

    /// Every size is bounded, so that no product of them overflows.
    fn check_ranges(&self) -> Result<(), Error> {
        let layout = &self.layout;
        check_range("layers", layout.layers, MAX_LAYERS, "in 1..=999")?;
        check_range("kv_heads", layout.kv_heads, MAX_HEADS, "in 1..=1024")?;
        check_range("head_dim", layout.head_dim, MAX_HEAD_DIM, "in 1..=1024")?;
        check_range("tokens", self.tokens, MAX_TOKENS, "in 1..=16777216")?;
        let row_bytes = layout.parts().iter().map(|&part| layout.row_bytes(part)).max().unwrap_or(0);
        if row_bytes > MAX_ROW_BYTES {
            return Err(out_of_range("row", "at most 1 MiB", format!("{row_bytes} bytes")));
        }
        if layout.encoding.quantized() && !layout.head_dim.is_multiple_of(8) {
            return Err(out_of_range("head_dim", "a multiple of 8 where KV is quantized", layout.head_dim.to_string()));
        }
        if layout.encoding != self.variant.encoding {
            let got = format!("{} in {}", layout.encoding, self.variant);
            return Err(out_of_range("encoding", "the variant's", got));
        }
        check_text("owner", &self.key.owner, MAX_OWNER_BYTES, "1 to 256 bytes")?;
        check_text("build", &self.build, MAX_NAME_BYTES, "1 to 64 bytes")?;
        check_text("compute_dtype", &self.compute_dtype, MAX_NAME_BYTES, "1 to 64 bytes")
    }

    fn from_metadata(metadata: &BTreeMap<String, String>) -> Result<Self, Error> {
        let text = |what: &'static str| {
            metadata.get(what).map(String::as_str).ok_or_else(|| foreign(what, "in the metadata", "missing"))
        };
        let number = |what: &'static str| {
            let found = text(what)?;
            found.parse::<u32>().map_err(|_| foreign(what, "a number", found))
        };
        for (what, expected) in [("format", FORMAT.to_owned()), ("format_version", FORMAT_VERSION.to_string())] {
            let found = text(what)?;
            if found != expected {
                return Err(foreign(what, &expected, found));
            }
        }
        let digest = |what: &'static str| {
            let found = text(what)?;
            blake3::Hash::from_hex(found).map_err(|_| foreign(what, "64 hexadecimal digits", found))
        };
        let variant: Variant = text("variant")?
            .parse()
            .map_err(|error: crate::Error| foreign("variant", "a known variant", &error.to_string()))?;
        let mut header = Self {
            key: ChunkKey {
                model: crate::ModelDigest::from_bytes(*digest("model")?.as_bytes()),
                prefix: crate::id::TokensDigest::from_bytes(*digest("prefix")?.as_bytes()),
                tokens: crate::id::TokensDigest::from_bytes(*digest("token_ids")?.as_bytes()),
                owner: text("owner")?.to_owned(),
            },
            layout: KvLayout {
                layers: number("layers")?,
                kv_heads: number("kv_heads")?,
                head_dim: number("head_dim")?,
                encoding: variant.encoding,
            },
            variant,
            tokens: number("tokens")?,
            build: text("build")?.to_owned(),
            compute_dtype: text("compute_dtype")?.to_owned(),
            layer_digests: Vec::new(),
        };
        header.check_ranges()?;
        for layer in 0..header.layout.layers {
            let name = format!("blake3.{layer:03}");
            let found = metadata.get(&name).ok_or(Error::DamagedHeader)?;
            let hash = blake3::Hash::from_hex(found).map_err(|_| Error::DamagedHeader)?;
            header.layer_digests.push(*hash.as_bytes());
        }
        Ok(header)
    }

    /// The header with its length field, padded to `layout.header_bytes()`: the bytes that it was parsed from. Errors:
    /// [`Error::OutOfRange`] when it does not fit. Needs one digest a layer.
    pub fn render(&self) -> Result<Vec<u8>, Error> {
        let mut json = String::with_capacity(self.layout.header_bytes());
        let mut entry = |name: &str, value: &str| {
            let first = if json.is_empty() { "{\"__metadata__\":{" } else { "," };
            // Owner, build and dtype are free text: serde_json escapes them.
            let value = serde_json::Value::from(value);
            write!(json, "{first}\"{name}\":{value}").map_err(|_| Error::DamagedHeader)
        };
        entry("format", FORMAT)?;
        entry("format_version", &FORMAT_VERSION.to_string())?;
        entry("chunk_id", &self.key.id().to_string())?;
        entry("model", &self.key.model.to_string())?;
        entry("prefix", &self.key.prefix.to_string())?;
        entry("token_ids", &self.key.tokens.to_string())?;
        entry("owner", &self.key.owner)?;
        entry("variant", &self.variant.to_string())?;
        entry("layers", &self.layout.layers.to_string())?;
        entry("kv_heads", &self.layout.kv_heads.to_string())?;
        entry("head_dim", &self.layout.head_dim.to_string())?;
        entry("tokens", &self.tokens.to_string())?;
        entry("build", &self.build)?;
        entry("compute_dtype", &self.compute_dtype)?;
        for (layer, digest) in self.layer_digests.iter().enumerate() {
            entry(&format!("blake3.{layer:03}"), blake3::Hash::from_bytes(*digest).to_hex().as_str())?;
        }
        let seal = blake3::hash(json.as_bytes());
        write!(json, ",\"blake3.header\":\"{}\"}}", seal.to_hex()).map_err(|_| Error::DamagedHeader)?;
        self.render_tensors(&mut json).map_err(|_| Error::DamagedHeader)?;

        let room = self.layout.header_bytes() - 8;
        if json.len() > room {
            return Err(out_of_range("header", "within its fixed size", format!("{} of {room} bytes", json.len())));
        }
        let mut bytes = Vec::with_capacity(self.layout.header_bytes());
        bytes.extend_from_slice(&(room as u64).to_le_bytes());
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(self.layout.header_bytes(), b' ');
        Ok(bytes)
    }

    fn render_tensors(&self, json: &mut String) -> std::fmt::Result {
        let mut start = 0;
        for layer in 0..self.layout.layers {
            for &part in self.layout.parts() {
                let end = start + self.layout.part_bytes(part, self.tokens);
                let (dtype, shape) = self.tensor(part);
                write!(json, ",\"layers.{layer:03}.{}\":{{\"dtype\":\"{dtype}\",", part.name())?;
                write!(json, "\"shape\":[{shape}],\"data_offsets\":[{start},{end}]}}")?;
                start = end;
            }
        }
        json.push('}');
        Ok(())
    }

    /// The dtype and shape of a part's tensors.
    fn tensor(&self, part: Part) -> (&'static str, String) {
        let KvLayout { kv_heads, head_dim, encoding, .. } = self.layout;
        let rows = part.rows(self.tokens);
        match part {
            // Two codes a byte.
            Part::Keys | Part::Values if encoding == Encoding::Int4 => {
                (encoding.dtype(), format!("{rows},{kv_heads},{}", head_dim / 2))
            }
            Part::Keys | Part::Values => (encoding.dtype(), format!("{rows},{kv_heads},{head_dim}")),
            Part::KeyScales => ("F32", format!("{rows},{kv_heads},{head_dim}")),
            Part::ValueScales => ("F32", format!("{rows},{kv_heads}")),
        }
    }
}

/// The part of the file's header that is read; the rest is compared.
#[derive(Deserialize)]
struct File {
    #[serde(rename = "__metadata__")]
    metadata: BTreeMap<String, String>,
}

fn foreign(what: &'static str, expected: &str, found: &str) -> Error {
    Error::Foreign { what, expected: expected.to_owned(), found: found.chars().take(80).collect() }
}

fn out_of_range(what: &'static str, expected: &'static str, got: String) -> Error {
    Error::OutOfRange { what, expected, got }
}

fn check_range(what: &'static str, value: u32, most: u32, expected: &'static str) -> Result<(), Error> {
    if (1..=most).contains(&value) { Ok(()) } else { Err(out_of_range(what, expected, value.to_string())) }
}

fn check_text(what: &'static str, text: &str, most: usize, expected: &'static str) -> Result<(), Error> {
    if (1..=most).contains(&text.len()) {
        Ok(())
    } else {
        Err(out_of_range(what, expected, format!("{} bytes", text.len())))
    }
}

#[cfg(test)]
mod tests;
