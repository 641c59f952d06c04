//! Identities: which model computed a KV cache, and which chunk it belongs to.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// Raised when the meaning of a [`ChunkId`] changes; part of its hash.
pub const ID_VERSION: u32 = 1;

macro_rules! digest {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name([u8; 32]);

        impl $name {
            /// Wraps 32 raw bytes.
            pub const fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }

            /// The 32 raw bytes.
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }

            /// The first 12 hexadecimal digits, for people.
            pub fn short(&self) -> String {
                self.to_string()[..12].to_owned()
            }
        }

        impl TryFrom<&[u8]> for $name {
            type Error = Error;

            fn try_from(bytes: &[u8]) -> Result<Self, Error> {
                let bytes = bytes.try_into().map_err(|_| Error::Digest {
                    what: $what,
                    got: format!("{} raw bytes", bytes.len()),
                })?;
                Ok(Self(bytes))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                let hash = blake3::Hash::from_hex(text).map_err(|_| Error::Digest {
                    what: $what,
                    got: text.chars().take(80).collect(),
                })?;
                Ok(Self(*hash.as_bytes()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;

            fn try_from(text: String) -> Result<Self, Error> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(digest: $name) -> String {
                digest.to_string()
            }
        }
    };
}

digest! {
    /// BLAKE3 over a model's weights, tokenizer and configuration.
    ModelDigest, "model digest"
}

digest! {
    /// Names one chunk's KV: see [`ChunkKey`] for what it hashes.
    ChunkId, "chunk id"
}

digest! {
    /// BLAKE3 over a list of token ids, each as a little-endian u32.
    TokensDigest, "token digest"
}

impl TokensDigest {
    /// Hashes token ids; no ids at all is the empty prefix.
    pub fn of(ids: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for id in ids {
            hasher.update(&id.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }
}

/// Everything a [`ChunkId`] is made of. It stands in the header of each object, so that a store can check the id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkKey {
    /// The model that computes the KV.
    pub model: ModelDigest,
    /// The prefix that stands before the chunk while its KV is computed.
    pub prefix: TokensDigest,
    /// The chunk's own tokens.
    pub tokens: TokensDigest,
    /// The namespace that owns the corpus, never the caller.
    pub owner: String,
}

impl ChunkKey {
    /// The key of the chunk `ids` behind `prefix_ids`.
    pub fn new(model: ModelDigest, prefix_ids: &[u32], ids: &[u32], owner: &str) -> Self {
        Self { model, prefix: TokensDigest::of(prefix_ids), tokens: TokensDigest::of(ids), owner: owner.to_owned() }
    }

    /// The id: BLAKE3 over the version, the three digests and the owner.
    pub fn id(&self) -> ChunkId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"kvsplice chunk");
        hasher.update(&ID_VERSION.to_le_bytes());
        hasher.update(self.model.as_bytes());
        hasher.update(self.prefix.as_bytes());
        hasher.update(self.tokens.as_bytes());
        hasher.update(self.owner.as_bytes());
        ChunkId(*hasher.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_changes_with_each_part_of_its_key() {
        let key = |model: u8, prefix: &[u32], ids: &[u32], owner: &str| {
            ChunkKey::new(ModelDigest::from_bytes([model; 32]), prefix, ids, owner).id()
        };
        let base = key(1, &[1, 2], &[3, 4], "a");
        assert_eq!(base, key(1, &[1, 2], &[3, 4], "a"));
        for other in [
            key(2, &[1, 2], &[3, 4], "a"),
            key(1, &[1], &[2, 3, 4], "a"),
            key(1, &[], &[3, 4], "a"),
            key(1, &[1, 2], &[4, 3], "a"),
            key(1, &[1, 2], &[3, 4], "b"),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_digest_survives_text_and_refuses_anything_else() {
        let id = ChunkId::from_bytes([7; 32]);
        assert_eq!(id.to_string().parse::<ChunkId>().unwrap(), id);
        assert!("xyz".parse::<ChunkId>().is_err());
        assert!(ChunkId::try_from([0u8; 31].as_slice()).is_err());
    }
}
