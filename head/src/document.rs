//! A document's text → its record: cut, tokenized for both models, every chunk named. No KV yet.

use std::collections::BTreeMap;

use kvsplice_kv::ChunkKey;
use kvsplice_kv::record::{Chunk, Corpus, Document, Tokens};
use kvsplice_proto::v1;

use crate::Error;
use crate::cut::cut;
use crate::text::TextModel;

/// The longest text that a document may have.
pub(crate) const MAX_TEXT_BYTES: usize = 50_000_000;
const MAX_ID_BYTES: usize = 1024;

/// What stands before every chunk of a corpus, by the prefix's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedPrefix {
    pub(crate) name: String,
    pub(crate) primary: Vec<u32>,
    pub(crate) auxiliary: Vec<u32>,
}

/// Cuts the documents of one corpus.
#[derive(Clone)]
pub(crate) struct Cutter {
    pub(crate) primary: TextModel,
    pub(crate) auxiliary: TextModel,
    pub(crate) manifest: Corpus,
    pub(crate) prefixes: Vec<NamedPrefix>,
}

/// Digest of a document's text: the same text is not ingested twice. A text that is one chunk differs from one that is
/// cut.
pub(crate) fn digest(document: &v1::DocumentText) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(document.text.as_bytes());
    if document.chunk {
        hasher.update(b"\0chunk");
    }
    hasher.finalize().to_hex().to_string()
}

/// Refuses a document that cannot be ingested, by its id.
pub(crate) fn check(document: &v1::DocumentText) -> Result<(), Error> {
    if document.id.is_empty() || document.id.len() > MAX_ID_BYTES {
        let detail = format!("must be 1 to {MAX_ID_BYTES} bytes, got {}", document.id.len());
        return Err(Error::invalid("document id", detail));
    }
    if document.text.trim().is_empty() {
        return Err(refused(&document.id, "has no text; leave it out"));
    }
    if document.text.len() > MAX_TEXT_BYTES {
        let detail = format!("has {} bytes, at most {MAX_TEXT_BYTES} are taken; split it", document.text.len());
        return Err(refused(&document.id, &detail));
    }
    Ok(())
}

fn refused(document: &str, detail: &str) -> Error {
    Error::invalid(format!("document {document:?}"), detail)
}

impl Cutter {
    /// Cuts and tokenizes. Takes a while for long texts: not for an async task.
    pub(crate) fn cut(&self, document: &v1::DocumentText) -> Result<Document, Error> {
        let (max_tokens, overlap) = (self.manifest.chunk_tokens as usize, self.manifest.overlap as usize);
        let chunks = if document.chunk {
            vec![self.chunk(document, 0, &document.text, self.primary.chunk(&document.text)?)?]
        } else {
            let pieces = cut(&document.text, max_tokens, overlap, |text| self.primary.chunk(text))?;
            let mut chunks = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let text = document.text.get(piece.start..piece.end).unwrap_or_default();
                chunks.push(self.chunk(document, piece.start, text, piece.tokens)?);
            }
            chunks
        };
        Ok(Document { id: document.id.clone(), digest: digest(document), chunks })
    }

    fn chunk(&self, document: &v1::DocumentText, offset: usize, text: &str, primary: Tokens) -> Result<Chunk, Error> {
        let auxiliary = self.auxiliary.chunk(text)?;
        if primary.ids.is_empty() || auxiliary.ids.is_empty() {
            return Err(refused(&document.id, "has a chunk without a token; leave it out"));
        }
        let document_offset = offset as u64;
        let (ids, auxiliary_ids) = (BTreeMap::new(), BTreeMap::new());
        let mut chunk = Chunk { ids, auxiliary_ids, text: text.to_owned(), document_offset, primary, auxiliary };
        self.name(&document.id, &mut chunk)?;
        Ok(chunk)
    }

    /// Names a chunk's KV behind every prefix. Fails on a chunk that does not fit a model with one of them.
    pub(crate) fn name(&self, document: &str, chunk: &mut Chunk) -> Result<(), Error> {
        self.fits(document, chunk)?;
        let owner = &self.manifest.owner;
        let id = |model: &TextModel, before: &[u32], tokens: &Tokens| {
            ChunkKey::new(model.digest, before, &tokens.ids, owner).id()
        };
        for prefix in &self.prefixes {
            chunk.ids.insert(prefix.name.clone(), id(&self.primary, &prefix.primary, &chunk.primary));
            let auxiliary = id(&self.auxiliary, &prefix.auxiliary, &chunk.auxiliary);
            chunk.auxiliary_ids.insert(prefix.name.clone(), auxiliary);
        }
        Ok(())
    }

    /// Refuses a chunk that does not fit a model with every prefix.
    pub(crate) fn fits(&self, document: &str, chunk: &Chunk) -> Result<(), Error> {
        for prefix in &self.prefixes {
            for (model, before, tokens) in [
                (&self.primary, &prefix.primary, &chunk.primary),
                (&self.auxiliary, &prefix.auxiliary, &chunk.auxiliary),
            ] {
                let (needed, context) = (before.len() + tokens.ids.len(), model.config.context as usize);
                if needed >= context {
                    let detail = format!(
                        "has a chunk that takes {needed} tokens with its prefix {:?}, the {} model takes {context} with \
                         the question; cut it smaller or shorten the system prompt",
                        prefix.name, model.role
                    );
                    return Err(refused(document, &detail));
                }
            }
        }
        Ok(())
    }

    /// Whether every chunk of a document is named behind every prefix.
    pub(crate) fn named(&self, document: &Document) -> bool {
        let named = |chunk: &Chunk| self.prefixes.iter().all(|prefix| chunk.ids.contains_key(&prefix.name));
        document.chunks.iter().all(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(id: &str, text: &str) -> v1::DocumentText {
        v1::DocumentText { id: id.into(), text: text.into(), chunk: false }
    }

    #[test]
    fn a_refused_document_is_named() {
        for bad in [document("a", " \n"), document("a", &"x".repeat(MAX_TEXT_BYTES + 1))] {
            assert!(check(&bad).unwrap_err().to_string().contains("document \"a\""));
        }
        assert!(check(&document("", "x")).is_err());
        assert!(check(&document("a", "x")).is_ok());
    }

    #[test]
    fn one_chunk_and_cut_text_have_different_digests() {
        let text = document("a", "x");
        assert_ne!(digest(&text), digest(&v1::DocumentText { chunk: true, ..text.clone() }));
        assert_eq!(digest(&text), digest(&document("b", "x")));
    }
}
