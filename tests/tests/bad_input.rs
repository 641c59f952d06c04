//! Bad input gets one clear line and its exit code, and loses nothing: what worked before works after.
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, Weak};

use kvsplice_kv::{Encoding, Variant};
use kvsplice_proto::v1;
use kvsplice_tests::{
    CacheService, Client, Cluster, FaultyStore, Pair, Shared, article, home, inline, options, program, request, run,
    run_ok, shared, words,
};
use serde_json::{Value, json};
use tonic::Code;

const TINY: [&str; 5] = ["--shape", "tiny", "--random-weights", "--dtype", "f32"];
const QUESTION: &str = "How many beehives does the captain of the Marguerite keep?";
const USAGE: i32 = 64;
const DATA: i32 = 65;
const UNAVAILABLE: i32 = 69;

static CLUSTER: Shared = Mutex::new(Weak::new());

/// A cluster with the corpus `harbor`.
fn start() -> Arc<Cluster> {
    let cluster = shared(&CLUSTER, &TINY).unwrap();
    ingest_ok(cluster.server(), &article("marguerite.md"));
    cluster
}

fn ingest_ok(server: &str, path: &str) {
    run_ok(&ingest(server, path)).unwrap();
}

fn ingest<'a>(server: &'a str, path: &'a str) -> Vec<&'a str> {
    vec!["ingest", "--server", server, "--corpus", "harbor", "--chunk-tokens", "96", "--overlap", "8", path]
}

fn ask<'a>(server: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["ask", "--server", server, "--max-tokens", "16", "--ignore-eos", "--json"], more].concat()
}

fn done(server: &str) -> Value {
    let output = run_ok(&ask(server, &["--corpus", "harbor", "--top-k", "4", QUESTION])).unwrap();
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

/// Asserts the exit code, and that stderr is one line that holds every part. Returns the line.
#[track_caller]
fn fails<S: AsRef<std::ffi::OsStr> + std::fmt::Debug>(arguments: &[S], code: i32, parts: &[&str]) -> String {
    let output = run(arguments).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    // `ingest` has said what it is about to do when the server refuses.
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.starts_with("1 documents, ")).collect();
    let [line] = lines[..] else { panic!("{arguments:?}: {stderr}") };
    assert!(line.starts_with("kvsplice: ") && !line.contains("panicked"), "{stderr}");
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
    line.to_owned()
}

fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> String {
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn what_a_question_names_must_exist() {
    let cluster = start();
    let server = cluster.server();
    let before = done(server);
    let harbor = ["--corpus", "harbor"];
    let with = |more: &[&'static str]| ask(server, &[&harbor[..], more].concat());
    fails(&ask(server, &["--corpus", "nowhere", QUESTION]), DATA, &["corpus", "\"nowhere\"", "ingest"]);
    fails(&with(&["--chunks", "0123456789abcdef", QUESTION]), DATA, &["chunk", "0123456789abcdef"]);
    fails(&with(&["--chunks", "marguerite.md#99", QUESTION]), DATA, &["chunk", "marguerite.md#99"]);
    fails(&with(&["--prefix", "formal", QUESTION]), DATA, &["prefix", "\"formal\"", "default"]);
    fails(&with(&["--strategy", "magic", QUESTION]), USAGE, &["strategy", "\"magic\"", "clip"]);
    fails(&with(&[""]), DATA, &["question is empty"]);
    fails(&with(&[" \n\t "]), DATA, &["question is empty"]);
    for ratio in ["1.01", "-0.1", "NaN", "inf", "-inf", "half"] {
        let flag = format!("--ratio={ratio}");
        fails(&ask(server, &["--corpus", "harbor", &flag, QUESTION]), USAGE, &["ratio"]);
    }
    let unknown = ["ask", "--corpus", "harbor", "--primary", "no-such-model", "--object-store", "memory://", QUESTION];
    fails(&unknown, USAGE, &["no-such-model", "kvsplice models pull"]);
    assert_eq!(done(server)["text"], before["text"]);
}

#[test]
fn the_same_over_the_wire_has_its_status() {
    let cluster = start();
    let client = Client::connect(cluster.server()).unwrap();
    let refused = |request: v1::GenerateRequest, code: Code, part: &str| {
        let status = client.generate(request).unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(part), "{part:?} is not in {:?}", status.message());
    };
    let good = || request(inline(&["A passage."], QUESTION, false), options("clip", 0.2), 2);
    let with = |change: &dyn Fn(&mut v1::Options)| {
        let mut request = good();
        change(request.options.as_mut().unwrap());
        request
    };
    for ratio in [f32::NAN, f32::INFINITY, -0.01, 1.01] {
        refused(with(&|options| options.ratio = Some(ratio)), Code::InvalidArgument, "ratio");
    }
    refused(with(&|options| options.strategy = Some("magic".into())), Code::InvalidArgument, "magic");
    refused(with(&|options| options.budget = Some("free".into())), Code::InvalidArgument, "free");
    refused(with(&|options| options.group = Some("2,9".into())), Code::InvalidArgument, "group");
    refused(with(&|options| options.aux_layers = Some("0.8..0.5".into())), Code::InvalidArgument, "aux_layers");
    let prompt = |prompt: v1::Prompt| v1::GenerateRequest { prompt: Some(prompt), ..good() };
    refused(prompt(inline(&["A passage."], " ", false)), Code::InvalidArgument, "question");
    refused(prompt(inline(&["A passage.", ""], QUESTION, false)), Code::InvalidArgument, "chunk 1");
    refused(prompt(inline::<&str>(&[], QUESTION, false)), Code::InvalidArgument, "chunks");
    refused(prompt(v1::Prompt::default()), Code::InvalidArgument, "source");
    let sampling = |sampling: v1::Sampling| v1::GenerateRequest { sampling: Some(sampling), ..good() };
    for temperature in [f32::NAN, -1.0, f32::INFINITY] {
        let bad = v1::Sampling { temperature: Some(temperature), ..v1::Sampling::default() };
        refused(sampling(bad), Code::InvalidArgument, "temperature");
    }
    let top_p = v1::Sampling { top_p: Some(0.0), ..v1::Sampling::default() };
    refused(sampling(top_p), Code::InvalidArgument, "top_p");
    let long = v1::Sampling { max_tokens: Some(u32::MAX), ..v1::Sampling::default() };
    let status = client.generate(sampling(long)).unwrap_err();
    assert!([Code::OutOfRange, Code::InvalidArgument].contains(&status.code()), "{status:?}");
    refused(prompt(inline(&[words(0, 9000)], QUESTION, false)), Code::OutOfRange, "8192");
    client.generate(good()).unwrap();
}

#[test]
fn a_document_that_cannot_be_read_is_named_and_nothing_is_sent() {
    let cluster = start();
    let server = cluster.server();
    let folder = tempfile::tempdir().unwrap();
    let before = done(server);
    let good = write(folder.path(), "good.md", "A document that is fine.");
    let empty = write(folder.path(), "empty.txt", "");
    let blank = write(folder.path(), "blank.md", " \n\n\t");
    let latin = write(folder.path(), "latin.txt", b"The caf\xe9 is closed.");
    let line = write(folder.path(), "line.jsonl", "{\"id\":\"1\",\"text\":\"x\"}\n{\"id\":\"2\",\"text\":\"\"}\n");
    let bytes = write(folder.path(), "bytes.jsonl", b"{\"id\":\"1\",\"text\":\"caf\xe9\"}\n");
    let long = folder.path().join("long.txt").to_str().unwrap().to_owned();
    File::create(&long).unwrap().set_len(50_000_001).unwrap();
    let missing = folder.path().join("missing.txt").to_str().unwrap().to_owned();
    let cases = [
        (&empty, "empty.txt", "empty"),
        (&blank, "blank.md", "empty"),
        (&latin, "latin.txt", "not UTF-8 at byte 7"),
        (&line, "line.jsonl:2", "empty"),
        (&bytes, "bytes.jsonl:1", "UTF-8"),
        (&long, "long.txt", "50000000 bytes"),
        (&missing, "missing.txt", "No such file"),
    ];
    for (path, name, reason) in cases {
        // The good one stands first, and must not be sent.
        fails(&[&ingest(server, &good)[..], &[path.as_str()]].concat(), DATA, &[name, reason]);
    }
    let client = Client::connect(server).unwrap();
    assert!(client.list_chunks("harbor").unwrap().iter().all(|chunk| chunk.document != "good.md"));
    let text = "é".repeat(10);
    let half = write(folder.path(), "half.json", json!({"prefix": text, "chunks": ["a"]}).to_string());
    fails(&ask(server, &["--raw", &half]), DATA, &["half.json", "question"]);
    let cut = write(folder.path(), "cut.json", "{\"prefix\":");
    fails(&ask(server, &["--raw", &cut]), DATA, &["cut.json"]);
    assert_eq!(done(server)["text"], before["text"]);
}

#[test]
fn one_endless_line_is_ingested() {
    let cluster = start();
    let server = cluster.server();
    let folder = tempfile::tempdir().unwrap();
    let line = words(0, 85_000);
    assert!(!line.contains('\n'));
    let path = write(folder.path(), "line.txt", &line);
    run_ok(&["ingest", "--server", server, "--corpus", "line", &path]).unwrap();
    let client = Client::connect(server).unwrap();
    let chunks = client.list_chunks("line").unwrap();
    let tokens: u32 = chunks.iter().map(|chunk| chunk.tokens).sum();
    assert!(tokens >= 100_000, "{tokens} tokens in {} chunks", chunks.len());
    assert!(chunks.iter().all(|chunk| (1..=1000).contains(&chunk.tokens)));
    let mut rest = line.as_str();
    for chunk in &chunks {
        let start = line.find(&chunk.text).unwrap();
        assert!(line.len() - start >= rest.len(), "a gap before chunk {}", chunk.index);
        rest = &line[start.max(line.len() - rest.len())..];
        rest = rest.get(chunk.text.len().min(rest.len())..).unwrap_or_default();
    }
    // Without spaces there is no word to cut at.
    let path = write(folder.path(), "solid.txt", "abcdefghij".repeat(20_000));
    run_ok(&["ingest", "--server", server, "--corpus", "solid", &path]).unwrap();
    // As one chunk it does not fit the model.
    let one = json!({"id": "1", "text": line, "chunk": true}).to_string();
    let path = write(folder.path(), "one.jsonl", one);
    fails(&["ingest", "--server", server, "--corpus", "one", &path], DATA, &["8192"]);
}

#[test]
fn a_prompt_longer_than_the_context_is_refused() {
    let cluster = start();
    let server = cluster.server();
    let folder = tempfile::tempdir().unwrap();
    let long = write(folder.path(), "long.jsonl", json!({"text": words(0, 8000)}).to_string());
    for strategy in ["full", "clip"] {
        let parts = ["8192", "fewer or shorter chunks"];
        fails(&ask(server, &["--documents", &long, "--strategy", strategy, "Why?"]), DATA, &parts);
    }
    let short = write(folder.path(), "short.jsonl", json!({"text": "A passage."}).to_string());
    let output = ["ask", "--server", server, "--documents", &short, "--max-tokens", "8192", "Why?"];
    fails(&output, DATA, &["8192", "max_tokens"]);
}

/// The place of a tensor's type in a GGUF file: behind its name, dimensions and their sizes.
fn type_offset(header: &[u8], tensor: &str) -> usize {
    let name = header.windows(tensor.len()).position(|window| window == tensor.as_bytes()).unwrap();
    let dimensions = name + tensor.len();
    let count = u32::from_le_bytes(header[dimensions..dimensions + 4].try_into().unwrap()) as usize;
    assert!((1..=4).contains(&count));
    dimensions + 4 + 8 * count
}

#[test]
fn a_model_file_that_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let good = home().unwrap().join("models/smollm2-135m-instruct.gguf");
    let mut header = vec![0; 8 << 20];
    File::open(&good).unwrap().read_exact(&mut header).unwrap();
    let worker = |model: &str| {
        ["worker", "--log", "off", "--listen", "127.0.0.1:0", "--primary", model].map(str::to_owned).to_vec()
    };
    let head = |model: &str| {
        let mut arguments = worker("qwen2.5-coder-0.5b-instruct");
        arguments[0] = "head".into();
        [arguments, vec!["--auxiliary".into(), model.into()]].concat()
    };

    let missing = folder.path().join("missing.gguf").to_str().unwrap().to_owned();
    fails(&worker(&missing), USAGE, &["missing.gguf", "kvsplice models pull"]);
    fails(&head(&missing), USAGE, &["missing.gguf", "kvsplice models pull"]);
    let nothing = write(folder.path(), "nothing.gguf", "");
    fails(&worker(&nothing), DATA, &["nothing.gguf", "GGUF"]);
    let other = write(folder.path(), "other.gguf", vec![7; 4096]);
    fails(&worker(&other), DATA, &["other.gguf", "GGUF"]);
    let absurd = [&b"GGUF"[..], &3u32.to_le_bytes(), &u64::MAX.to_le_bytes(), &u64::MAX.to_le_bytes()].concat();
    let absurd = write(folder.path(), "absurd.gguf", absurd);
    fails(&worker(&absurd), DATA, &["absurd.gguf"]);
    let head_only = write(folder.path(), "head.gguf", &header[..100_000]);
    fails(&worker(&head_only), DATA, &["head.gguf", "GGUF"]);
    let truncated = write(folder.path(), "truncated.gguf", &header);
    fails(&worker(&truncated), DATA, &["truncated.gguf"]);
    fails(&head(&truncated), DATA, &["truncated.gguf"]);

    // A file of the right size with a type that nobody reads (IQ2_XXS is 16), and with none at all.
    let patched = folder.path().join("patched.gguf");
    fs::copy(&good, &patched).unwrap();
    let offset = type_offset(&header, "blk.0.attn_q.weight") as u64;
    for number in [16u32, 9999] {
        let mut file = OpenOptions::new().write(true).open(&patched).unwrap();
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.write_all(&number.to_le_bytes()).unwrap();
        drop(file);
        let line = fails(&worker(patched.to_str().unwrap()), DATA, &["patched.gguf", &number.to_string()]);
        assert!(line.contains("Q4_K"), "it does not say which types are supported: {line}");
    }
}

#[test]
fn a_demo_model_that_is_not_the_pinned_file_is_listed_as_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path().join("models");
    fs::create_dir(&models).unwrap();
    let list = || {
        let mut command = Command::new(program().unwrap());
        let output = command.args(["models", "list"]).env("KVSPLICE_HOME", folder.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let listed = String::from_utf8(output.stdout).unwrap();
        listed.lines().find(|line| line.starts_with("smollm2-135m-instruct ")).unwrap().to_owned()
    };
    assert!(list().contains("not pulled"));
    let pinned = home().unwrap().join("models/smollm2-135m-instruct.gguf");
    let copy = models.join("smollm2-135m-instruct.gguf");
    fs::copy(&pinned, &copy).unwrap();
    assert!(list().contains("ready"));
    // One bit, at the same size.
    let mut file = OpenOptions::new().read(true).write(true).open(&copy).unwrap();
    file.seek(SeekFrom::Start(50 << 20)).unwrap();
    let mut byte = [0];
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(50 << 20)).unwrap();
    file.write_all(&[byte[0] ^ 1]).unwrap();
    drop(file);
    assert!(list().contains("damaged (pull it again)"), "{}", list());
    OpenOptions::new().write(true).open(&copy).unwrap().set_len(1000).unwrap();
    assert!(list().contains("damaged (pull it again)"));
}

/// Every chunk object of a store, by its path.
fn objects(store: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for chunk in fs::read_dir(store.join("kv")).unwrap() {
        for object in fs::read_dir(chunk.unwrap().path()).unwrap() {
            let path = object.unwrap().path();
            found.insert(path.clone(), fs::read(path).unwrap());
        }
    }
    found
}

#[test]
fn damaged_objects_are_repaired_and_the_answer_stays() {
    let settings = [&TINY[..], &["--set", "cache.memory_bytes=0", "--set", "head.auxiliary_kv_bytes=0"]].concat();
    let cluster = Cluster::start(&settings).unwrap();
    let server = cluster.server();
    ingest_ok(server, &article("marguerite.md"));
    let undisturbed = done(server);
    let intact = objects(&cluster.store());
    let chunk = undisturbed["receipt"]["chunks"][2]["id"].as_str().unwrap();
    let primary = intact.keys().find(|path| path.to_string_lossy().contains(chunk)).unwrap();
    type Damage<'a> = (&'a str, &'a dyn Fn(&mut Vec<u8>));
    let damage: [Damage<'_>; 6] = [
        ("a bit in the last layer", &|bytes| *bytes.last_mut().unwrap() ^= 1),
        ("a bit in the first layer", &|bytes| bytes[(32 << 10) + 5] ^= 0x40),
        ("a bit in the header", &|bytes| bytes[20] ^= 4),
        ("half written", &|bytes| bytes.truncate(bytes.len() / 2)),
        ("half a header", &|bytes| bytes.truncate(1000)),
        ("empty", &Vec::clear),
    ];
    for (what, damage) in damage {
        let mut bytes = intact[primary].clone();
        damage(&mut bytes);
        fs::write(primary, bytes).unwrap();
        let repaired = done(server);
        assert_eq!(repaired["text"], undisturbed["text"], "{what}");
        let chunk = &repaired["receipt"]["chunks"][2];
        assert_eq!(chunk["source"], "repaired", "{what}: {chunk}");
        assert_ne!(chunk["reason"], "", "{what}");
        let others = [0, 1, 3].map(|place| repaired["receipt"]["chunks"][place]["source"] == "object");
        assert_eq!(others, [true; 3], "{what}: {}", repaired["receipt"]["chunks"]);
        // Kept again, with the very bytes that were there.
        kvsplice_tests::wait_until("the repaired object", std::time::Duration::from_secs(10), || {
            Ok((fs::read(primary).ok().as_ref() == Some(&intact[primary])).then_some(()))
        })
        .unwrap();
        assert_eq!(done(server)["receipt"]["chunks"][2]["source"], "object", "{what}");
    }

    // KV of the auxiliary model, every object of it.
    let variant = Variant::clean(Encoding::Bf16).to_string();
    assert!(intact.keys().all(|path| path.ends_with(&variant)));
    let chunks: Vec<&str> = ["0", "1", "2", "3"]
        .iter()
        .map(|place| undisturbed["receipt"]["chunks"][place.parse::<usize>().unwrap()]["id"].as_str().unwrap())
        .collect();
    for (path, bytes) in &intact {
        let shown = path.to_string_lossy();
        if !chunks.iter().any(|chunk| shown.contains(chunk)) {
            let mut bytes = bytes.clone();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        }
    }
    let answer = done(server);
    assert_eq!(answer["text"], undisturbed["text"]);
    assert_eq!(answer["receipt"]["auxiliary_source"], "computed");
}

#[test]
fn a_port_in_use_is_named() {
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap().to_string();
    let common = [&["--log", "off", "--object-store", "memory://"], &TINY[..]].concat();
    for role in ["head", "worker", "cache", "up"] {
        fails(&[&[role, "--listen", &address], &common[..]].concat(), UNAVAILABLE, &[&address, "in use", "--listen"]);
    }
    let inner = format!("listen.cache={address}");
    let free = ["--listen", "127.0.0.1:0", "--set", "listen.worker=127.0.0.1:0", "--set", &inner];
    fails(&[&["up"], &free[..], &common].concat(), UNAVAILABLE, &["cache", &address, "in use"]);
}

#[test]
fn a_store_that_cannot_be_written_is_named_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "file", "no folder");
    let store = format!("file://{file}/store");
    fails(&["cache", "--log", "off", "--listen", "127.0.0.1:0", "--object-store", &store], UNAVAILABLE, &[&file]);
    let ask = ["ask", "--documents", &write(folder.path(), "a.jsonl", "{\"text\":\"x\"}"), "Why?"].map(str::to_owned);
    let mut ask = ask.to_vec();
    ask.extend(["--object-store".to_owned(), store]);
    ask.extend(TINY.map(str::to_owned));
    fails(&ask, UNAVAILABLE, &[&file]);
    for url in ["nowhere", "gopher://store", "file://host/path"] {
        let output = run(&["cache", "--log", "off", "--listen", "127.0.0.1:0", "--object-store", url]).unwrap();
        assert!([Some(USAGE), Some(UNAVAILABLE)].contains(&output.status.code()), "{url}: {output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr).trim_end().lines().count(), 1, "{url}");
    }
}

#[test]
fn a_store_that_is_full_or_read_only_refuses_new_documents_and_keeps_the_old() {
    let store = Arc::new(FaultyStore::default());
    let cache = CacheService::start(store.clone(), 1 << 30, "127.0.0.1:0").unwrap();
    let pair = Pair::start(cache.address(), &TINY).unwrap();
    let server = pair.head.address();
    ingest_ok(server, &article("marguerite.md"));
    let before = done(server);
    let documents = write(pair.folder(), "inline.jsonl", json!({"text": "A passage of its own."}).to_string());
    for (error, reason) in [(ErrorKind::StorageFull, "no storage space"), (ErrorKind::ReadOnlyFilesystem, "read-only")]
    {
        store.fail_writes(Some(error));
        let line = fails(&ingest(server, &article("eel-pie.md")), UNAVAILABLE, &[]);
        assert!(line.to_lowercase().contains(reason), "{line}");
        fails(&ask(server, &["--documents", &documents, "--store", "Why?"]), UNAVAILABLE, &[]);
        run_ok(&ask(server, &["--documents", &documents, "Why?"])).unwrap();
        assert_eq!(done(server)["text"], before["text"]);
    }
    store.fail_writes(None);
    ingest_ok(server, &article("eel-pie.md"));
    let client = Client::connect(server).unwrap();
    assert!(client.list_chunks("harbor").unwrap().iter().any(|chunk| chunk.document == "eel-pie.md"));
}
