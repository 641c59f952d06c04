//! Reads documents from files: .txt, .md and .jsonl (`{"id","text"[,"chunk":true]}`). Holds one document at a time.
//!
//! Everything wrong with a file is one line that names the file, and the line in a .jsonl.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::failure::data;

/// The longest text of one document, in bytes.
pub(crate) const MAX_TEXT_BYTES: usize = 50_000_000;
/// The longest line of a .jsonl; JSON escapes make a text longer.
const MAX_LINE_BYTES: usize = 2 * MAX_TEXT_BYTES;

/// One document.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Document {
    /// Unique in its corpus: the id of a .jsonl line, or the file's path below the folder that was named.
    pub(crate) id: String,
    /// The whole text.
    pub(crate) text: String,
    /// It stays one chunk.
    pub(crate) chunk: bool,
}

/// A file to read and the name of the document in it.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    name: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Text,
    Lines,
}

fn format(path: &Path) -> Option<Format> {
    match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "txt" | "md" => Some(Format::Text),
        "jsonl" => Some(Format::Lines),
        _ => None,
    }
}

/// The files behind `paths`, in order. Folders are walked, sorted by name; other files in them are left out.
pub(crate) fn sources(paths: &[PathBuf]) -> anyhow::Result<Vec<Source>> {
    let mut sources = Vec::new();
    for path in paths {
        let about = path.metadata().map_err(|error| data(format!("read {}: {error}", path.display())))?;
        if about.is_dir() {
            let before = sources.len();
            walk(path, path, &mut sources)?;
            if sources.len() == before {
                return Err(data(format!("{}: no .txt, .md or .jsonl file in this folder", path.display())));
            }
            continue;
        }
        if format(path).is_none() {
            return Err(data(format!("{}: only .txt, .md and .jsonl files can be read", path.display())));
        }
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        sources.push(Source { path: path.clone(), name });
    }
    Ok(sources)
}

fn walk(root: &Path, folder: &Path, sources: &mut Vec<Source>) -> anyhow::Result<()> {
    let fail = |error: std::io::Error| data(format!("read {}: {error}", folder.display()));
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        entries.push(entry.map_err(fail)?);
    }
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        // Links are not followed into folders: a loop would never end.
        if entry.file_type().map_err(fail)?.is_dir() {
            walk(root, &path, sources)?;
        } else if format(&path).is_some() {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            sources.push(Source { path, name });
        }
    }
    Ok(())
}

/// Calls `visit` with every document. Stops at the first that is bad, or that `visit` refuses.
pub(crate) fn each(sources: &[Source], mut visit: impl FnMut(Document) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut seen: HashMap<String, String> = HashMap::new();
    let mut visit_once = |place: String, document: Document| {
        if let Some(first) = seen.get(&document.id) {
            return Err(data(format!("{place}: id {:?} was used before, in {first}", document.id)));
        }
        seen.insert(document.id.clone(), place);
        visit(document)
    };
    for source in sources {
        let place = source.path.display().to_string();
        if format(&source.path) == Some(Format::Lines) {
            lines(&source.path, |number, line| {
                let place = format!("{place}:{number}");
                let id = line.id.ok_or_else(|| data(format!("{place}: \"id\" is missing")))?;
                if id.is_empty() {
                    return Err(data(format!("{place}: \"id\" is empty")));
                }
                visit_once(place, Document { id, text: line.text, chunk: line.chunk })
            })?;
        } else {
            let text = read_text(&source.path)?;
            visit_once(place, Document { id: source.name.clone(), text, chunk: false })?;
        }
    }
    Ok(())
}

/// The texts of a .jsonl file, one chunk a line, in order. Ids are optional here.
pub(crate) fn chunks(path: &Path) -> anyhow::Result<Vec<String>> {
    let mut chunks = Vec::new();
    lines(path, |_, line| {
        chunks.push(line.text);
        Ok(())
    })?;
    if chunks.is_empty() {
        return Err(data(format!("{}: no document in this file", path.display())));
    }
    Ok(chunks)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: Option<String>,
    text: String,
    #[serde(default)]
    chunk: bool,
}

fn lines(path: &Path, mut visit: impl FnMut(usize, Line) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let file = File::open(path).map_err(|error| data(format!("read {}: {error}", path.display())))?;
    let mut reader = BufReader::new(file);
    let mut bytes = Vec::new();
    for number in 1.. {
        let place = format_args!("{}:{number}", path.display()).to_string();
        bytes.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        let read = (&mut reader).take(limit).read_until(b'\n', &mut bytes);
        if read.map_err(|error| data(format!("read {place}: {error}")))? == 0 {
            break;
        }
        if bytes.len() > MAX_LINE_BYTES {
            return Err(data(format!("{place}: the line is longer than {MAX_LINE_BYTES} bytes; split the document")));
        }
        let text = std::str::from_utf8(&bytes).map_err(|error| data(not_utf8(&place, &error)))?;
        if text.trim().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_str(text)
            .map_err(|error| data(format!("{place}: {error}; a line must be {{\"id\":…,\"text\":…}}")))?;
        check(&place, &line.text)?;
        visit(number, line)?;
    }
    Ok(())
}

fn read_text(path: &Path) -> anyhow::Result<String> {
    let place = path.display().to_string();
    let file = File::open(path).map_err(|error| data(format!("read {place}: {error}")))?;
    let mut bytes = Vec::new();
    let read = file.take(MAX_TEXT_BYTES as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| data(format!("read {place}: {error}")))?;
    if bytes.len() > MAX_TEXT_BYTES {
        return Err(too_long(&place));
    }
    let text = String::from_utf8(bytes).map_err(|error| data(not_utf8(&place, &error.utf8_error())))?;
    check(&place, &text)?;
    Ok(text)
}

fn check(place: &str, text: &str) -> anyhow::Result<()> {
    if text.trim().is_empty() {
        return Err(data(format!("{place}: the document is empty")));
    }
    if text.len() > MAX_TEXT_BYTES {
        return Err(too_long(place));
    }
    Ok(())
}

fn too_long(place: &str) -> anyhow::Error {
    data(format!("{place}: a document may have at most {MAX_TEXT_BYTES} bytes; split it"))
}

fn not_utf8(place: &str, error: &std::str::Utf8Error) -> String {
    format!("{place}: not UTF-8 at byte {}; convert the file first", error.valid_up_to())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(paths: &[PathBuf]) -> anyhow::Result<Vec<Document>> {
        let mut documents = Vec::new();
        each(&sources(paths)?, |document| {
            documents.push(document);
            Ok(())
        })?;
        Ok(documents)
    }

    fn error(paths: &[PathBuf]) -> String {
        let error = all(paths).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 65);
        error.to_string()
    }

    #[test]
    fn a_folder_is_read_in_order_and_a_line_can_stay_one_chunk() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("b")).unwrap();
        std::fs::write(folder.path().join("b/z.MD"), "# Z").unwrap();
        std::fs::write(folder.path().join("a.txt"), "A").unwrap();
        std::fs::write(folder.path().join("image.png"), [0xff]).unwrap();
        std::fs::write(folder.path().join("c.jsonl"), "{\"id\":\"1\",\"text\":\"x\",\"chunk\":true}\n\n").unwrap();
        let document = |id: &str, text: &str, chunk| Document { id: id.into(), text: text.into(), chunk };
        assert_eq!(
            all(&[folder.path().into()]).unwrap(),
            [document("a.txt", "A", false), document("b/z.MD", "# Z", false), document("1", "x", true)]
        );
        let lines = folder.path().join("c.jsonl");
        assert_eq!(chunks(&lines).unwrap(), ["x"]);
    }

    #[test]
    fn what_is_wrong_is_named_with_file_and_line() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        assert!(error(&[folder.path().into()]).contains("no .txt"));
        assert!(error(&[folder.path().join("none.txt")]).contains("none.txt"));
        assert!(error(&[write("x.pdf", b"x")]).contains("only .txt"));
        assert!(error(&[write("empty.txt", b" \n")]).contains("empty.txt: the document is empty"));
        assert!(error(&[write("latin.txt", b"caf\xe9")]).contains("latin.txt: not UTF-8 at byte 3"));
        let bad = |text: &str| error(&[write("bad.jsonl", text.as_bytes())]);
        assert!(bad("{\"id\":\"1\",\"text\":\"x\"}\nnot json").contains("bad.jsonl:2: "));
        assert!(bad("{\"text\":\"x\"}").contains("bad.jsonl:1: \"id\" is missing"));
        assert!(bad("{\"id\":\"\",\"text\":\"x\"}").contains("\"id\" is empty"));
        assert!(bad("{\"id\":\"1\",\"text\":\"x\",\"chunks\":true}").contains("chunks"));
        assert!(bad("{\"id\":\"1\",\"text\":\"\"}").contains("bad.jsonl:1: the document is empty"));
        let twice = "{\"id\":\"1\",\"text\":\"x\"}\n{\"id\":\"1\",\"text\":\"y\"}";
        assert!(bad(twice).contains("bad.jsonl:2: id \"1\" was used before"));
    }

    #[test]
    fn a_document_that_is_too_long_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.txt");
        File::create(&path).unwrap().set_len(MAX_TEXT_BYTES as u64 + 1).unwrap();
        assert!(error(&[path]).contains("at most 50000000 bytes"));
    }
}
