//! Reads a dataset's lines. `length` and `all_classes` are not needed and may be missing; unknown fields are passed over.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::{Map, Value};

use crate::failure::data;

/// The longest line, in bytes; the benchmark's longest is below a million.
const MAX_LINE_BYTES: u64 = 50_000_000;

/// One line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// From 1; names the sample.
    pub(super) line: usize,
    /// File and line, for messages.
    pub(super) place: String,
    pub(super) input: String,
    pub(super) context: String,
    /// At least one.
    pub(super) answers: Vec<String>,
}

/// The first `limit` records of `file`; blank lines are passed over.
///
/// # Errors
/// A data failure that names file and line, or the file if it has no record.
pub(super) fn records(file: &Path, limit: Option<usize>) -> anyhow::Result<Vec<Record>> {
    let name = file.display().to_string();
    let opened = File::open(file).map_err(|error| data(format!("read {name}: {error}")))?;
    let mut reader = BufReader::new(opened);
    let mut records = Vec::new();
    let mut bytes = Vec::new();
    for line in 1.. {
        if limit.is_some_and(|limit| records.len() >= limit) {
            break;
        }
        let place = format!("{name}:{line}");
        bytes.clear();
        let read = (&mut reader).take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut bytes);
        if read.map_err(|error| data(format!("read {place}: {error}")))? == 0 {
            break;
        }
        if bytes.len() as u64 > MAX_LINE_BYTES {
            return Err(data(format!("{place}: the line is longer than {MAX_LINE_BYTES} bytes")));
        }
        if !bytes.trim_ascii().is_empty() {
            records.push(record(line, place, &bytes)?);
        }
    }
    if records.is_empty() {
        return Err(data(format!("{name}: no sample in this file")));
    }
    Ok(records)
}

fn record(line: usize, place: String, bytes: &[u8]) -> anyhow::Result<Record> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| data(format!("{place}: not JSON: {error}")))?;
    let Value::Object(mut fields) = value else {
        return Err(data(format!("{place}: not a JSON object with \"input\", \"context\" and \"answers\"")));
    };
    let input = text(&mut fields, "input", &place)?;
    let context = text(&mut fields, "context", &place)?;
    let answers = answers(&mut fields, &place)?;
    Ok(Record { line, place, input, context, answers })
}

fn take(fields: &mut Map<String, Value>, name: &str, place: &str) -> anyhow::Result<Value> {
    let lacks = || data(format!("{place}: lacks {name:?}; a line needs \"input\", \"context\" and \"answers\""));
    fields.remove(name).ok_or_else(lacks)
}

fn text(fields: &mut Map<String, Value>, name: &str, place: &str) -> anyhow::Result<String> {
    match take(fields, name, place)? {
        Value::String(text) if text.trim().is_empty() => Err(data(format!("{place}: {name:?} is empty"))),
        Value::String(text) => Ok(text),
        _ => Err(data(format!("{place}: {name:?} must be a text"))),
    }
}

fn answers(fields: &mut Map<String, Value>, place: &str) -> anyhow::Result<Vec<String>> {
    let wrong = || data(format!("{place}: \"answers\" must be a list of one text or more"));
    let Value::Array(list) = take(fields, "answers", place)? else { return Err(wrong()) };
    let mut answers = Vec::with_capacity(list.len());
    for value in list {
        let Value::String(answer) = value else { return Err(wrong()) };
        answers.push(answer);
    }
    if answers.is_empty() { Err(wrong()) } else { Ok(answers) }
}
