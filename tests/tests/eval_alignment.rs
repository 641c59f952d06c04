//! `eval alignment` and `eval tune` against a running system of tiny, seeded models: the figures mean nothing, so the tests
//! look at what must hold for any models.
#![allow(missing_docs)]

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use kvsplice_tests::{Cluster, Shared, run, run_ok, shared};
use serde_json::Value;

const TINY: [&str; 5] = ["--shape", "tiny", "--random-weights", "--dtype", "f32"];
const USAGE: i32 = 64;
const DATA: i32 = 65;

static CLUSTER: Shared = Mutex::new(Weak::new());

fn start() -> Arc<Cluster> {
    shared(&CLUSTER, &TINY).unwrap()
}

/// `kvsplice eval WHAT` at the cluster, with its results in `folder`.
fn arguments<'a>(what: &[&'a str], server: &'a str, folder: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let folder = folder.to_str().unwrap();
    [&["eval"], what, &["--server", server, "--out", folder, "--json"], more].concat()
}

/// The lines of a command that must succeed.
fn events(arguments: &[&str]) -> Vec<Value> {
    let output = run_ok(arguments).unwrap();
    output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn results(events: &[Value]) -> usize {
    events.iter().filter(|event| event["event"] == "result").count()
}

/// The report of a command's last line.
fn report(events: &[Value]) -> &Value {
    let last = events.last().unwrap();
    assert_eq!(last["event"], "done", "{last}");
    &last["report"]
}

/// Asserts the exit code, and that stderr is one line that holds every part.
#[track_caller]
fn fails(arguments: &[&str], code: i32, parts: &[&str]) {
    let output = run(arguments).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{part:?} is not in {stderr:?}");
    }
}

/// Asserts that two reports say the same; reading a number from JSON may change its last bit.
#[track_caller]
fn same(left: &Value, right: &Value) {
    match (left, right) {
        (Value::Object(left), Value::Object(right)) => {
            assert!(left.keys().eq(right.keys()));
            left.values().zip(right.values()).for_each(|(left, right)| same(left, right));
        }
        (Value::Array(left), Value::Array(right)) => {
            assert_eq!(left.len(), right.len());
            left.iter().zip(right).for_each(|(left, right)| same(left, right));
        }
        (Value::Number(left), Value::Number(right)) => {
            let (left, right) = (left.as_f64().unwrap(), right.as_f64().unwrap());
            assert!((left - right).abs() <= 1e-12 * left.abs().max(1.0), "{left} is not {right}");
        }
        _ => assert_eq!(left, right),
    }
}

const PROMPTS: [&str; 6] = ["--lengths", "400,600", "--samples", "2", "--chunk-tokens", "100"];

fn share(value: &Value) -> f64 {
    let share = value.as_f64().unwrap();
    assert!((0.0..=1.0).contains(&share), "{share}");
    share
}

#[test]
fn a_layer_is_aligned_with_itself_and_every_figure_is_in_its_range() {
    let cluster = start();
    let folder = cluster.folder().join("alignment");
    // Layer 0 is the first one, by another name.
    let more = [&PROMPTS[..], &["--layers", "first,last,0"]].concat();
    let events = events(&arguments(&["alignment"], cluster.server(), &folder, &more));
    assert_eq!(results(&events), 4);
    let report = report(&events);
    let lengths = report["lengths"].as_array().unwrap();
    assert_eq!(lengths.iter().map(|length| length["length"].as_u64().unwrap()).collect::<Vec<_>>(), [400, 600]);
    for length in lengths {
        assert_eq!(length["samples"], 2);
        let tokens = length["primary_tokens"].as_f64().unwrap();
        assert!(tokens > 0.5 * length["length"].as_f64().unwrap() && tokens < length["length"].as_f64().unwrap());
        let chance = share(&length["chance"]["mean"]);
        assert!((chance - 1.0 / 9.0).abs() < 0.03, "{chance}");
        let rows = length["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 3 * 3 + 3 * 2);
        let mut twins = 0;
        for row in rows {
            assert_eq!(row["reference"]["role"], "primary");
            let (jaccard, kl) = (share(&row["jaccard"]["mean"]), row["kl"]["mean"].as_f64().unwrap());
            assert!(kl >= 0.0, "{row}");
            let same = row["guess"]["role"] == "primary" && row["guess"]["index"] == row["reference"]["index"];
            if same {
                assert_eq!((jaccard, kl), (1.0, 0.0), "{row}");
                twins += 1;
            } else {
                assert!(jaccard < 1.0 && kl > 0.0, "{row}");
            }
        }
        assert_eq!(twins, 2);
    }
    let written: Value = serde_json::from_slice(&fs::read(folder.join("report.json")).unwrap()).unwrap();
    assert_eq!(&written, report);
}

#[test]
fn what_is_measured_is_not_measured_again() {
    let cluster = start();
    let folder = cluster.folder().join("resumed");
    let words = arguments(&["alignment"], cluster.server(), &folder, &PROMPTS);
    let first = events(&words);
    assert_eq!(results(&first), 4);
    // As if the last prompt was interrupted while it was written.
    let path = folder.join("prompts.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let whole = text.trim_end().rfind('\n').unwrap();
    fs::write(&path, &text[..whole + 40]).unwrap();
    let second = events(&words);
    assert_eq!(results(&second), 1);
    same(report(&first), report(&second));

    let other = [&PROMPTS[..], &["--layers", "last"]].concat();
    fails(&arguments(&["alignment"], cluster.server(), &folder, &other), USAGE, &["layers", "--out"]);
    let table = run_ok(&words.iter().copied().filter(|word| *word != "--json").collect::<Vec<_>>()).unwrap();
    assert!(table.contains("auxiliary last") && table.contains("expected 0.111"), "{table}");
}

#[test]
fn own_documents_are_measured_or_refused_in_one_line() {
    let cluster = start();
    let (server, folder) = (cluster.server(), cluster.folder().join("own"));
    let path = cluster.folder().join("notes.jsonl");
    let mut lines = String::new();
    for boat in 0..30 {
        lines.push_str(&format!(
            "{{\"text\": \"Boat number {boat} — «Étoile» — has {} oars and a blue sail.\"}}\n",
            boat * 7
        ));
    }
    fs::write(&path, lines).unwrap();
    let file = ["--documents", path.to_str().unwrap()];
    let question = ["--question", "Which boat has 70 oars?"];
    let own = |more: &[&'static str]| {
        let mut words = arguments(&["alignment"], server, &folder, &[]);
        words.extend(file);
        words.extend(more);
        words.iter().map(|word| (*word).to_owned()).collect::<Vec<String>>()
    };
    let words = own(&[&question[..], &["--lengths", "200", "--samples", "2"]].concat());
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let measured = events(&words);
    assert_eq!(results(&measured), 2);
    assert_eq!(report(&measured)["lengths"][0]["length"], 200);

    let refused = |more: &[&'static str], code, parts: &[&str]| {
        let words = own(more);
        fails(&words.iter().map(String::as_str).collect::<Vec<_>>(), code, parts);
    };
    refused(&["--lengths", "200"], USAGE, &["--question"]);
    refused(&[&question[..], &["--lengths", "100000"]].concat(), DATA, &["the documents have"]);
    refused(&[&question[..], &["--samples", "0"]].concat(), USAGE, &["zero samples"]);
    refused(&[&question[..], &["--layers", "middle"]].concat(), USAGE, &["middle", "first, last"]);
    refused(&[&question[..], &["--layers", "last", "--lengths", "200"]].concat(), USAGE, &["layers", "--out"]);
    let more = [&file[..], &question, &["--layers", "77", "--lengths", "200"]].concat();
    fails(&arguments(&["alignment"], server, &cluster.folder().join("own-77"), &more), DATA, &["77"]);
}

const VALIDATION: [&str; 8] = ["--samples", "2", "--kinds", "hop,needle", "--tokens", "500", "--chunk-tokens", "100"];

#[test]
fn the_cheapest_setting_that_keeps_the_answers_is_chosen() {
    let cluster = start();
    let folder = cluster.folder().join("tune-clip");
    // Everything recomputed is full attention, so at least that keeps the text.
    let more = ["--ratios", "0,1", "--aux-layers", "last", "--by", "match", "--target", "1"];
    let words = arguments(&["tune", "clip"], cluster.server(), &folder, &[&VALIDATION[..], &more].concat());
    let events = events(&words);
    assert_eq!(results(&events), 6);
    let report = report(&events);
    assert_eq!((&report["full"]["score"], &report["full"]["kl"]), (&1.0.into(), &0.0.into()));
    let settings = report["settings"].as_array().unwrap();
    assert_eq!(settings.len(), 2);
    assert_eq!(settings[1]["score"], 1.0, "{settings:?}");
    assert_eq!((&settings[0]["ratio_charged"], &settings[1]["ratio_charged"]), (&0.0.into(), &1.0.into()));
    let best = if settings[0]["score"] == 1.0 { &settings[0] } else { &settings[1] };
    assert_eq!(report["chosen"], best["strategy"]);
    assert!(report["flags"].as_str().unwrap().starts_with("--strategy clip --ratio "), "{report}");
    let written: Value = serde_json::from_slice(&fs::read(folder.join("tune.json")).unwrap()).unwrap();
    assert_eq!(&written, report);
}

#[test]
fn chunks_are_captured_in_another_order_before_craft_is_tuned() {
    let cluster = start();
    let folder = cluster.folder().join("tune-craft");
    let more = ["--alphas", "0,1000", "--by", "argmax", "--no-text"];
    let words = arguments(&["tune", "craft"], cluster.server(), &folder, &[&VALIDATION[..], &more].concat());
    let events = events(&words);
    assert_eq!(results(&events), 6);
    let report = report(&events);
    let settings = report["settings"].as_array().unwrap();
    // With α = 0 nothing is repaired; with a great one, chunks whose context changed are computed whole.
    let computed: Vec<f64> = settings.iter().map(|setting| share(&setting["computed"])).collect();
    assert!(computed[0] == 0.0 && computed[1] > 0.0, "{computed:?}");
    settings.iter().for_each(|setting| assert!(setting["kl"].as_f64().unwrap() >= 0.0, "{setting}"));
    if let Some(chosen) = report["chosen"].as_str() {
        let chosen = settings.iter().find(|setting| setting["strategy"] == chosen).unwrap();
        assert!(chosen["retained"].as_f64().unwrap() >= 0.95, "{chosen}");
    }
    assert!(!report["verdict"].as_str().unwrap().is_empty());
}

#[test]
fn the_temperature_and_scale_with_the_least_kl_are_chosen() {
    let cluster = start();
    let folder = cluster.folder().join("tune-ape");
    let more = ["--temperatures", "0.5,1", "--scales", "0.9", "--no-text"];
    let words = arguments(&["tune", "ape"], cluster.server(), &folder, &[&VALIDATION[..], &more].concat());
    let events = events(&words);
    let report = report(&events);
    let settings = report["settings"].as_array().unwrap();
    let least = settings.iter().min_by(|left, right| left["kl"].as_f64().partial_cmp(&right["kl"].as_f64()).unwrap());
    assert_eq!(report["chosen"], least.unwrap()["strategy"]);

    let tune = |what: &'static str, more: &[&'static str]| arguments(&["tune", what], cluster.server(), &folder, more);
    fails(&tune("ape", &["--scales", "0"]), USAGE, &["context_scale"]);
    fails(&tune("craft", &["--samples", "0"]), USAGE, &["zero samples"]);
    fails(&tune("craft", &["--target", "1.5"]), USAGE, &["target"]);
    fails(&tune("clip", &["--no-text"]), USAGE, &["--by argmax"]);
    fails(&tune("clip", &["--kinds", "riddle"]), USAGE, &["riddle", "needle"]);
}
