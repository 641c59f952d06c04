use serde_json::json;

use super::super::score::Metric;
use super::super::tasks::Sample;
use super::*;
use crate::failure::{exit_code, one_line};

fn header() -> Header {
    let model =
        |role: &str| Model { role: role.into(), name: "m".into(), digest: "00ff".repeat(16), dtype: "f32".into() };
    Header {
        format: FORMAT,
        command: "agreement".into(),
        settings: json!({"tokens": 1300, "kinds": ["hop"]}),
        seed: 42,
        models: vec![model("primary"), model("auxiliary")],
        version: "1".into(),
        words: vec!["eval".into()],
        set_flag: String::new(),
    }
}

fn item(id: &str, question: &str) -> Item {
    let sample = Sample {
        id: id.into(),
        task: "hop".into(),
        system: None,
        intro: None,
        chunks: vec!["a".into()],
        question: question.into(),
        answer_prefix: String::new(),
        answers: vec!["b".into()],
        gold: "b".into(),
        max_tokens: 4,
        metric: Metric::Contains,
        stop_at_newline: true,
    };
    Item::new("", sample).unwrap()
}

fn record(item: &Item, strategy: &str) -> Record {
    Record {
        sample: item.sample.id.clone(),
        digest: item.digest.clone(),
        strategy: strategy.into(),
        answer: Some(Answered { text: "two\nlines".into(), score: 0.5, ..Answered::default() }),
        ..Record::default()
    }
}

#[test]
fn finished_pairs_are_found_again_and_a_torn_line_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (item("hop-0", "?"), item("hop-1", "?"));
    let mut store = Store::open(folder.path(), header()).unwrap();
    store.add(record(&first, "full")).unwrap();
    store.add(record(&first, "clip:0.2")).unwrap();
    drop(store);
    let path = folder.path().join(FILE);
    let whole = std::fs::read(&path).unwrap();
    let line = serde_json::to_string(&record(&second, "full")).unwrap();
    // Torn anywhere, even within a character or right before the line's end.
    for length in [1, line.len() / 2, line.len()] {
        std::fs::write(&path, [&whole[..], &line.as_bytes()[..length]].concat()).unwrap();
        let (_, records) = load(folder.path()).unwrap();
        assert_eq!(records.len(), 2);
        let mut store = Store::open(folder.path(), header()).unwrap();
        assert_eq!(store.records().len(), 2);
        assert_eq!(store.find(&first, "clip:0.2").unwrap(), Some(&record(&first, "clip:0.2")));
        assert!(store.find(&second, "full").unwrap().is_none());
        store.add(record(&second, "full")).unwrap();
        drop(store);
        assert_eq!(load(folder.path()).unwrap().1.len(), 3);
    }
}

#[test]
fn a_torn_header_starts_anew_and_a_damaged_line_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    std::fs::write(&path, "{\"format\":1,").unwrap();
    assert_eq!(exit_code(&load(folder.path()).unwrap_err()), 65);
    let mut store = Store::open(folder.path(), header()).unwrap();
    assert!(store.records().is_empty());
    store.add(record(&item("hop-0", "?"), "full")).unwrap();
    drop(store);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("\"sample\"", "\"simple\"", 1)).unwrap();
    let error = Store::open(folder.path(), header()).unwrap_err();
    assert_eq!(exit_code(&error), 65);
    assert!(one_line(&error).contains("line 2"), "{error}");
}

#[test]
fn other_results_are_not_added_to() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), header()).unwrap();
    store.add(record(&item("hop-0", "?"), "full")).unwrap();
    // While a command has the folder, no other gets it.
    let error = Store::open(folder.path(), header()).unwrap_err();
    assert!(one_line(&error).contains("in use"), "{error}");
    assert_eq!(exit_code(&error), 64);
    let error = store.find(&item("hop-0", "another?"), "full").unwrap_err();
    assert!(one_line(&error).contains("hop-0"), "{error}");
    drop(store);

    let mut seed = header();
    seed.seed = 7;
    let mut command = header();
    command.command = "ruler".into();
    let mut setting = header();
    setting.settings = json!({"tokens": 2600, "kinds": ["hop"]});
    let mut model = header();
    model.models[1].digest = "11".repeat(32);
    for (other, said) in
        [(seed, "seed 42, not 7"), (command, "ruler"), (setting, "tokens 1300, not 2600"), (model, "11111")]
    {
        let error = Store::open(folder.path(), other).unwrap_err();
        assert_eq!(exit_code(&error), 64);
        assert!(one_line(&error).contains(said), "{error}");
    }
    // A model that lies elsewhere is the same model, and more words of the command line do not matter.
    let mut same = header();
    same.models[0].name = "elsewhere".into();
    same.words.push("--samples".into());
    assert_eq!(Store::open(folder.path(), same).unwrap().records().len(), 1);
}
