//! Where a corpus's records lie in the store, and their form as JSON.
//!
//! A document whose record would be large is kept in pages: page 0 at the document's key, page n at `key.n`. Page 0 is
//! written last, so a document is visible only when it is whole; pages of an older text have another digest.

use kvsplice_kv::record::{Chunk, Document};
use serde::de::DeserializeOwned;

use crate::Error;

/// A page's chunks are cut where their JSON would exceed this; the store takes records of up to 16 MiB.
const PAGE_BYTES: usize = 6 << 20;

/// Whether `text` can be one segment of a record's key.
pub(crate) fn is_segment(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    (1..=128).contains(&text.len()) && text.bytes().all(plain) && text != "." && !text.contains("..")
}

/// Checks the name of a corpus.
pub(crate) fn check_corpus(name: &str) -> Result<(), Error> {
    if is_segment(name) {
        return Ok(());
    }
    Err(Error::invalid("corpus", format!("must be 1 to 128 letters, digits or -_.@ without \"..\", got {name:?}")))
}

/// Checks the name of a prefix.
pub(crate) fn check_prefix(name: &str) -> Result<(), Error> {
    if is_segment(name) {
        return Ok(());
    }
    Err(Error::invalid("prefix name", format!("must be 1 to 128 letters, digits or -_.@ without \"..\", got {name:?}")))
}

/// Key of a corpus's settings.
pub(crate) fn manifest_key(owner: &str, corpus: &str) -> String {
    format!("{owner}/{corpus}/manifest")
}

/// Key of a corpus's version: a text that changes with every change of its documents.
pub(crate) fn version_key(owner: &str, corpus: &str) -> String {
    format!("{owner}/{corpus}/version")
}

/// The prefix that all documents of a corpus have.
pub(crate) fn documents_prefix(owner: &str, corpus: &str) -> String {
    format!("{owner}/{corpus}/documents")
}

/// Key of a document's page 0.
pub(crate) fn document_key(owner: &str, corpus: &str, document: &str) -> String {
    format!("{}/{}", documents_prefix(owner, corpus), blake3::hash(document.as_bytes()).to_hex())
}

/// The document's key and page number of a listed key.
pub(crate) fn page_of(key: &str) -> (&str, usize) {
    let numbered = key.rsplit_once('.').and_then(|(document, page)| Some((document, page.parse().ok()?)));
    numbered.unwrap_or((key, 0))
}

/// The records of a document in the order in which they must be written.
pub(crate) fn pages(key: &str, document: &Document) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let mut groups: Vec<Vec<Chunk>> = vec![Vec::new()];
    let mut bytes = 0;
    for chunk in &document.chunks {
        // Quoting makes at most six bytes of one; an id with its span takes up to 36 digits and marks.
        let estimate = 1024 + 6 * chunk.text.len() + 36 * (chunk.primary.ids.len() + chunk.auxiliary.ids.len());
        if bytes + estimate > PAGE_BYTES && bytes > 0 {
            groups.push(Vec::new());
            bytes = 0;
        }
        bytes += estimate;
        if let Some(group) = groups.last_mut() {
            group.push(chunk.clone());
        }
    }
    let mut pages = Vec::with_capacity(groups.len());
    for (number, chunks) in groups.into_iter().enumerate().rev() {
        let name = if number == 0 { key.to_owned() } else { format!("{key}.{number}") };
        let page = Document { id: document.id.clone(), digest: document.digest.clone(), chunks };
        let json = serde_json::to_vec(&page).map_err(|source| Error::Record { key: name.clone(), source })?;
        pages.push((name, json));
    }
    Ok(pages)
}

/// Joins pages in ascending order into one document; pages of another digest than page 0 are left out.
pub(crate) fn join(pages: Vec<Document>) -> Option<Document> {
    let mut pages = pages.into_iter();
    let mut document = pages.next()?;
    for page in pages.filter(|page| page.id == document.id && page.digest == document.digest).collect::<Vec<_>>() {
        document.chunks.extend(page.chunks);
    }
    Some(document)
}

/// Reads a record's JSON.
pub(crate) fn parse<T: DeserializeOwned>(key: &str, json: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(json).map_err(|source| Error::Record { key: key.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(chunks: usize, text: &str) -> Document {
        let chunk = Chunk {
            ids: Default::default(),
            auxiliary_ids: Default::default(),
            text: text.to_owned(),
            document_offset: 0,
            primary: Default::default(),
            auxiliary: Default::default(),
        };
        Document { id: "d".into(), digest: "x".into(), chunks: vec![chunk; chunks] }
    }

    #[test]
    fn a_large_document_is_kept_in_pages_and_page_zero_comes_last() {
        let document = document(40, &"\u{1}".repeat(300_000));
        let pages = pages("o/c/documents/k", &document).unwrap();
        assert!(pages.len() > 3);
        assert_eq!(pages.last().unwrap().0, "o/c/documents/k");
        assert!(pages.iter().all(|(_, json)| json.len() < 16 << 20));
        let read = pages.iter().rev().map(|(key, json)| parse(key, json).unwrap()).collect();
        assert_eq!(join(read).unwrap(), document);
    }

    #[test]
    fn pages_of_an_older_text_are_left_out() {
        let old = Document { digest: "old".into(), ..document(2, "a") };
        assert_eq!(join(vec![document(1, "b"), old]).unwrap().chunks.len(), 1);
        assert_eq!(page_of("o/c/documents/abc.12"), ("o/c/documents/abc", 12));
        assert_eq!(page_of("o/c.v2/documents/abc"), ("o/c.v2/documents/abc", 0));
    }

    #[test]
    fn names_that_would_leave_their_folder_are_refused() {
        for bad in ["", "..", "a/b", "a b", "ü", "a..b", "."] {
            assert!(check_corpus(bad).is_err(), "{bad}");
            assert!(check_prefix(bad).unwrap_err().to_string().contains("prefix name"), "{bad}");
        }
        assert!(check_corpus("wiki-2024.v2@eu").is_ok());
    }
}
