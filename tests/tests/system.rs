//! The system as its users run it: real processes, real files, the public command line. The models are tiny and random,
//! with the real tokenizers; what the answers say does not matter, that they are the same does.
#![allow(missing_docs)]
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use kvsplice_tests::{Cluster, Process, program, project, python, run, run_ok, wait_serving};
use serde_json::Value;

const TINY: [&str; 3] = ["--shape", "tiny", "--random-weights"];
const QUESTION: &str = "How many beehives does the captain of the Marguerite keep?";

fn article(name: &str) -> String {
    project().join("demo/corpus").join(name).display().to_string()
}

fn ingest(server: &str, articles: &[&str]) {
    let mut arguments: Vec<String> =
        ["ingest", "--server", server, "--corpus", "harbor", "--chunk-tokens", "96", "--overlap", "8"]
            .map(String::from)
            .into();
    arguments.extend(articles.iter().map(|name| article(name)));
    run_ok(&arguments).unwrap();
}

fn ask_arguments<'a>(server: &'a str, strategy: &'a str, max_tokens: &'a str) -> Vec<&'a str> {
    let common = ["ask", "--server", server, "--corpus", "harbor", "--top-k", "6", "--max-tokens", max_tokens];
    [&common[..], &["--ignore-eos", "--json", "--strategy", strategy, QUESTION]].concat()
}

/// The last event of an answer.
fn ask(server: &str, strategy: &str) -> Value {
    done(&run_ok(&ask_arguments(server, strategy, "24")).unwrap())
}

fn done(output: &str) -> Value {
    let last: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "done", "{output}");
    last
}

fn sources(done: &Value) -> Vec<&str> {
    let chunks = done["receipt"]["chunks"].as_array().unwrap();
    chunks.iter().map(|chunk| chunk["source"].as_str().unwrap()).collect()
}

/// Every chunk object of a store, by its path.
fn objects(store: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![store.join("kv")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(store).unwrap().to_owned(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

#[test]
fn three_processes_a_restarted_store_and_one_process_give_the_same_text() {
    let mut cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), &["marguerite.md", "ansel-drury.md"]);
    let strategies = ["full", "direct", "clip"];
    let first = strategies.map(|strategy| ask(cluster.server(), strategy)["text"].clone());

    let address = cluster.cache.address().to_owned();
    cluster.cache.signal("TERM").unwrap();
    assert!(cluster.cache.wait(Duration::from_secs(40)).unwrap().success());
    let store = format!("file://{}", cluster.store().display());
    let settings = [&["--object-store", store.as_str()], &TINY[..]].concat();
    cluster.cache = Process::start_at("cache", &address, &settings, cluster.folder()).unwrap();
    wait_serving(&cluster.cache).unwrap();
    for (strategy, text) in strategies.iter().zip(&first) {
        let done = ask(cluster.server(), strategy);
        assert_eq!(&done["text"], text, "{strategy} after the restart of the cache service");
        let reused = sources(&done).iter().all(|source| ["device", "memory", "disk", "object"].contains(source));
        assert!(reused || *strategy == "full", "{strategy}: {:?}", sources(&done));
    }

    let free = ["--set", "listen.worker=127.0.0.1:0", "--set", "listen.cache=127.0.0.1:0"];
    let up = Process::start("up", &[&settings[..], &free].concat(), cluster.folder()).unwrap();
    wait_serving(&up).unwrap();
    for (strategy, text) in strategies.iter().zip(&first) {
        assert_eq!(&ask(up.address(), strategy)["text"], text, "{strategy} in one process");
    }
}

#[test]
fn an_object_does_not_depend_on_what_was_served_before() {
    let quiet = Cluster::start(&TINY).unwrap();
    ingest(quiet.server(), &["marguerite.md", "ansel-drury.md"]);
    let expected = objects(&quiet.store());
    assert!(!expected.is_empty());
    drop(quiet);

    let busy = Cluster::start(&TINY).unwrap();
    ingest(busy.server(), &["pell-island.md", "ansel-drury.md"]);
    ask(busy.server(), "clip");
    ingest(busy.server(), &["marguerite.md", "ansel-drury.md"]);
    let found = objects(&busy.store());
    for (path, bytes) in &expected {
        assert!(found.get(path) == Some(bytes), "{} is missing or differs", path.display());
    }
}

#[test]
fn ingesting_again_changes_nothing() {
    let cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), &["marguerite.md"]);
    let before = objects(&cluster.store());
    ingest(cluster.server(), &["marguerite.md"]);
    assert!(objects(&cluster.store()) == before);
}

#[test]
fn a_registered_prefix_reuses_cached_chunks() {
    let cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), &["marguerite.md", "ansel-drury.md"]);
    let before = objects(&cluster.store()).len();
    let register = |system: &str| {
        let common = ["ingest", "--server", cluster.server(), "--corpus", "harbor", "--register-prefix", "brief"];
        run(&[&common[..], &["--json", "--system-prompt", system]].concat()).unwrap()
    };
    let output = register("Answer in one sentence.");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(done(&String::from_utf8_lossy(&output.stdout))["chunks_created"].as_u64().unwrap() > 0);
    assert!(objects(&cluster.store()).len() > before);
    assert_eq!(register("Answer at length.").status.code(), Some(69), "the name is taken");

    let prefixed = |strategy| [&ask_arguments(cluster.server(), strategy, "24")[..], &["--prefix", "brief"]].concat();
    let answer = done(&run_ok(&prefixed("clip")).unwrap());
    assert_eq!(answer["receipt"]["effective"], "clip");
    let reused = ["device", "memory", "disk", "object"];
    assert!(sources(&answer).iter().all(|source| reused.contains(source)), "{:?}", sources(&answer));
}

#[test]
fn python_reads_a_chunk_object() {
    let settings = [&TINY[..], &["--set", "head.encoding=f32", "--set", "head.auxiliary_encoding=f32"]].concat();
    let cluster = Cluster::start(&settings).unwrap();
    ingest(cluster.server(), &["marguerite.md"]);
    let code = "
import sys, numpy
from safetensors import safe_open
for path in sys.argv[1:]:
    with safe_open(path, framework='np') as f:
        names = sorted(f.keys())
        assert names[0] == 'layers.000.k' and names[1] == 'layers.000.v', names
        shapes = {f.get_tensor(name).shape for name in names}
        assert len(shapes) == 1 and len(shapes.pop()) == 3, shapes
        assert all(numpy.isfinite(f.get_tensor(name)).all() for name in names)
        assert f.metadata(), 'no metadata'
print('read', len(sys.argv) - 1)
";
    let paths: Vec<PathBuf> = objects(&cluster.store()).into_keys().map(|path| cluster.store().join(path)).collect();
    assert_eq!(python(code, &paths).unwrap().trim(), format!("read {}", paths.len()));
}

#[test]
fn a_damaged_object_is_repaired_and_the_text_stays() {
    let settings = [&TINY[..], &["--set", "cache.memory_bytes=0"]].concat();
    let cluster = Cluster::start(&settings).unwrap();
    ingest(cluster.server(), &["marguerite.md", "ansel-drury.md"]);
    let undisturbed = ask(cluster.server(), "clip");
    let chunk = undisturbed["receipt"]["chunks"][1]["id"].as_str().unwrap();

    let damaged = objects(&cluster.store()).into_iter().filter(|(path, _)| path.to_string_lossy().contains(chunk));
    let mut count = 0;
    for (path, mut bytes) in damaged {
        let last = bytes.last_mut().unwrap();
        *last ^= 1;
        fs::write(cluster.store().join(path), bytes).unwrap();
        count += 1;
    }
    assert!(count > 0, "no object of chunk {chunk}");
    let done = ask(cluster.server(), "clip");
    assert_eq!(done["text"], undisturbed["text"]);
    assert_eq!(done["receipt"]["chunks"][1]["source"], "repaired");
    assert_ne!(done["receipt"]["chunks"][1]["reason"], "");
}

#[test]
fn without_the_cache_service_an_answer_is_fresh_and_says_why() {
    let mut cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), &["marguerite.md", "ansel-drury.md"]);
    let full = ask(cluster.server(), "full");
    cluster.cache.kill().unwrap();
    let done = ask(cluster.server(), "clip");
    assert_eq!(done["text"], full["text"]);
    assert_eq!(done["receipt"]["effective"], "full");
    assert_ne!(done["receipt"]["effective_reason"], "");
    let output =
        run(&["ingest", "--server", cluster.server(), "--corpus", "harbor", &article("pell-island.md")]).unwrap();
    assert_eq!(output.status.code(), Some(69), "ingest without a cache service");
}

#[test]
fn without_the_worker_a_request_is_refused_and_does_not_hang() {
    let mut cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), &["marguerite.md"]);
    cluster.worker.kill().unwrap();
    let output = run(&ask_arguments(cluster.server(), "clip", "24")).unwrap();
    assert_eq!(output.status.code(), Some(69), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr).trim().lines().count(), 1);
}

#[test]
fn a_stream_is_finished_before_a_role_stops() {
    let mut cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), &["marguerite.md", "ansel-drury.md"]);
    let mut client = Command::new(program().unwrap())
        .args(ask_arguments(cluster.server(), "clip", "200"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    let first = lines.find(|line| line.as_ref().unwrap().contains("\"delta\"")).unwrap().unwrap();
    for process in [&cluster.head, &cluster.worker, &cluster.cache] {
        process.signal("TERM").unwrap();
    }
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(client.wait().unwrap().success(), "{first}\n{rest:?}");
    assert_eq!(done(&rest.join("\n"))["receipt"]["tokens"]["output"], 200);
    for process in [&mut cluster.head, &mut cluster.worker, &mut cluster.cache] {
        assert!(process.wait(Duration::from_secs(60)).unwrap().success(), "{}", process.role());
    }
}

/// The last line that `kvsplice cache` prints with these arguments, which must succeed.
fn cache(address: &str, arguments: &[&str]) -> Value {
    done(&run_ok(&[&["cache"], arguments, &["--server", address, "--json"]].concat()).unwrap())
}

#[test]
fn orphans_are_removed_and_what_documents_name_or_is_pinned_stays() {
    let cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), &["marguerite.md", "ansel-drury.md"]);
    let address = cluster.cache.address();
    let before = objects(&cluster.store());
    assert_eq!(cache(address, &["gc", "--older-than", "0s"])["orphans"], 0);
    assert!(objects(&cluster.store()) == before, "nothing was an orphan");

    // Without its record a document's chunks are orphans.
    let records = run_ok(&["cache", "ls", "default/harbor/documents", "--server", address]).unwrap();
    let record = records.lines().last().unwrap();
    let named: Value = serde_json::from_str(&run_ok(&["cache", "get", record, "--server", address]).unwrap()).unwrap();
    let pinned = named["chunks"][0]["ids"].as_object().unwrap().values().next().unwrap().as_str().unwrap();
    fs::remove_file(cluster.store().join("records").join(record)).unwrap();
    assert_eq!(cache(address, &["pin", pinned])["pins"], 1);
    assert_eq!(cache(address, &["gc"])["orphans"], 0, "all are too young");
    let dry = cache(address, &["gc", "--older-than", "0s", "--dry-run"]);
    assert!(dry["orphans"].as_u64().unwrap() > 0, "{dry}");
    assert_eq!(dry["protected"], 1);
    assert!(objects(&cluster.store()) == before, "a dry run removes nothing");

    let removed = cache(address, &["gc", "--older-than", "0s"]);
    assert_eq!((&removed["orphans"], &removed["bytes"]), (&dry["orphans"], &dry["bytes"]));
    let after = objects(&cluster.store());
    assert_eq!(after.len() as u64 + removed["orphans"].as_u64().unwrap(), before.len() as u64);
    assert!(after.iter().all(|(path, bytes)| before.get(path) == Some(bytes)));
    assert_eq!(cache(address, &["unpin", pinned])["pins"], 0);
    assert_eq!(cache(address, &["gc", "--older-than", "0s"])["orphans"], 1, "the chunk that was pinned");
    assert_eq!(cache(address, &["verify", "--all"])["bad"], 0);
}

#[test]
fn verify_names_what_is_damaged_and_what_is_missing() {
    let cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), &["marguerite.md"]);
    let address = cluster.cache.address();
    let whole = cache(address, &["verify", "--all"]);
    let objects = objects(&cluster.store());
    // The named chunks may have bases that no document names, such as the prefix.
    assert!(whole["objects"].as_u64().unwrap() > 1 && whole["objects"].as_u64().unwrap() <= objects.len() as u64);
    assert_eq!(cache(address, &["verify", "--prefix", "default/nothing"])["chunks"], 0);

    let all = |arguments: &[&str]| run(&[&["cache", "verify", "--server", address], arguments].concat()).unwrap();
    let records = run_ok(&["cache", "ls", "default/harbor/documents", "--server", address]).unwrap();
    let record = run_ok(&["cache", "get", records.lines().next().unwrap(), "--server", address]).unwrap();
    let named = |path: &&PathBuf| path.iter().nth(1).is_some_and(|id| record.contains(id.to_str().unwrap()));
    let paths: Vec<&PathBuf> = objects.keys().filter(named).take(2).collect();
    let mut bytes = objects[paths[0]].clone();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(cluster.store().join(paths[0]), bytes).unwrap();
    fs::remove_file(cluster.store().join(paths[1])).unwrap();
    let output = all(&["--all"]);
    assert_eq!(output.status.code(), Some(65));
    let lines = String::from_utf8(output.stdout).unwrap();
    let fault = |path: &Path, word: &str| {
        let id = path.iter().nth(1).unwrap().to_str().unwrap();
        lines.lines().any(|line| line.contains(id) && line.contains(word))
    };
    assert!(fault(paths[0], "damaged: ") && fault(paths[1], "missing"), "{lines}");
    let sound = objects.keys().find(|path| !paths.contains(path)).unwrap().iter().nth(1).unwrap();
    assert_eq!(all(&[sound.to_str().unwrap()]).status.code(), Some(0));
}
