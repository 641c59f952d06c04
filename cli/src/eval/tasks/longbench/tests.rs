use std::path::PathBuf;

use super::super::testing::Words;
use super::*;
use crate::eval::score::{Metric, score};

fn data_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/longbench")
}

fn setup<'a>(folder: &'a Path, datasets: &'a [String]) -> Setup<'a> {
    Setup { folder, datasets, templates: None, budget: 4000, overhead: 40, chunk_tokens: 60, overlap: 5, limit: None }
}

fn joined(sample: &Sample, overlap: usize) -> String {
    let mut text = sample.chunks[0].clone();
    for chunk in &sample.chunks[1..] {
        let shared = Words.cut(chunk, overlap, 0).swap_remove(0);
        text.push_str(&chunk[shared.len()..]);
    }
    text
}

/// Characters count here, as Chinese has no spaces.
struct Characters;

impl Count for Characters {
    fn tokens(&self, text: &str) -> usize {
        text.chars().count()
    }

    fn cut(&self, text: &str, chunk: usize, overlap: usize) -> Vec<String> {
        assert_eq!(overlap, 0);
        text.chars().collect::<Vec<_>>().chunks(chunk).map(|chars| chars.iter().collect()).collect()
    }
}

#[test]
fn the_files_of_a_folder_are_read_in_order() {
    let folder = data_folder();
    let setup = setup(&folder, &[]);
    let loaded = load(&setup, &Words).unwrap();
    assert_eq!((loaded.samples.len(), loaded.truncated), (14, 0));
    let first = &loaded.samples[0];
    assert_eq!((first.id.as_str(), first.task.as_str()), ("hotpotqa-1", "hotpotqa"));
    assert_eq!((first.metric, first.max_tokens), (Metric::QaF1, 32));
    assert!(joined(first, 5).starts_with("Passage 1:\nHollin Lighthouse\n"));
    assert!(first.chunks.len() > 2 && first.chunks.iter().all(|chunk| Words.tokens(chunk) <= 60));
    assert!(first.intro.as_deref().unwrap().ends_with("These are the passages.\n"));
    let asked = "\n\nQuestion: In which town was the designer of the Hollin Lighthouse born?\nAnswer:";
    assert!(first.question.ends_with(asked), "{}", first.question);
    assert_eq!((first.answer_prefix.as_str(), first.gold.as_str()), ("", "Osterlund"));
    let last = &loaded.samples[13];
    assert_eq!((last.id.as_str(), last.metric, last.max_tokens), ("multifieldqa_zh-7", Metric::QaF1Zh, 64));
    assert!(last.question.ends_with("\n\n问题：村里的第一台缝纫机是从哪里买来的？\n回答："));
    for sample in &loaded.samples {
        assert!((score(sample.metric, &sample.gold, &sample.answers) - 1.0).abs() < 1e-12);
        assert!(!sample.stop_at_newline);
        let all_of_it = joined(sample, 5);
        assert!(sample.answers[0] == "yes" || all_of_it.contains(&sample.answers[0]), "{}", sample.id);
    }
}

#[test]
fn a_limit_and_names_choose_samples() {
    let folder = data_folder();
    let names = ["multifieldqa_zh".to_owned(), "multifieldqa_zh".to_owned()];
    let loaded = load(&Setup { limit: Some(2), ..setup(&folder, &names) }, &Words).unwrap();
    let ids: Vec<&str> = loaded.samples.iter().map(|sample| sample.id.as_str()).collect();
    assert_eq!(ids, ["multifieldqa_zh-1", "multifieldqa_zh-2"]);
}

#[test]
fn a_long_context_keeps_its_head_and_its_tail() {
    let folder = tempfile::tempdir().unwrap();
    let words: Vec<String> = (0..1000).map(|number| format!("w{number}")).collect();
    let line = serde_json::json!({"input": "Which?", "context": words.join(" "), "answers": ["w0"], "length": 1000});
    std::fs::write(folder.path().join("musique.jsonl"), format!("{line}\n")).unwrap();
    for (budget, overlap) in [(300, 0), (301, 0), (300, 10), (1000, 0), (1100, 10)] {
        let setup = Setup { budget, overlap, ..setup(folder.path(), &[]) };
        let loaded = load(&setup, &Words).unwrap();
        assert_eq!(loaded.truncated, 1, "budget {budget}");
        let sample = &loaded.samples[0];
        let (before, after) = (Words.tokens(sample.intro.as_deref().unwrap()), Words.tokens(&sample.question));
        let chunks: usize = sample.chunks.iter().map(|chunk| Words.tokens(chunk)).sum();
        let total = 40 + before + chunks + after;
        assert!(total <= budget && total + 12 > budget, "{total} of {budget}");
        let text = if overlap == 0 { sample.chunks.concat() } else { joined(sample, overlap) };
        assert!(text.starts_with("w0 w1 ") && text.ends_with(" w998 w999"));
        let gaps = text.split_whitespace().zip(text.split_whitespace().skip(1)).filter(|(left, right)| {
            let number = |word: &str| word[1..].parse::<usize>().unwrap();
            number(right) != number(left) + 1
        });
        assert_eq!(gaps.count(), 1, "{text}");
        if overlap == 0 {
            // Half of the budget ends in the head.
            let head = text.split_whitespace().take_while(|word| word[1..].parse::<usize>().unwrap() < 500).count();
            assert_eq!(before + head, (budget - 40) / 2);
        }
    }
    let enough = Setup { budget: 1200, overlap: 0, ..setup(folder.path(), &[]) };
    let whole = load(&enough, &Words).unwrap();
    assert_eq!((whole.truncated, whole.samples[0].chunks.concat()), (0, words.join(" ")));
}

#[test]
fn truncation_never_cuts_a_character() {
    let folder = data_folder();
    let names = ["multifieldqa_zh".to_owned()];
    let setup = Setup { budget: 260, overlap: 0, ..setup(&folder, &names) };
    let loaded = load(&setup, &Characters).unwrap();
    assert!(loaded.truncated > 0);
    for sample in &loaded.samples {
        let parts = [sample.intro.as_deref().unwrap(), &sample.question, &sample.chunks.concat()].concat();
        assert!(Characters.tokens(&parts) + 40 <= 260, "{}", sample.id);
    }
}

#[test]
fn prompts_of_a_file_take_the_place_of_ours() {
    let folder = data_folder();
    let own = tempfile::tempdir().unwrap();
    let file = own.path().join("dataset2prompt.json");
    let names = ["hotpotqa".to_owned()];
    let with = |text: &str| {
        std::fs::write(&file, text).unwrap();
        load(&Setup { templates: Some(&file), ..setup(&folder, &names) }, &Words)
    };
    let sample =
        with(r#"{"hotpotqa": "Q {input}\n{context}\n{input} A:", "gov_report": "free"}"#).unwrap().samples.remove(0);
    let asked = "In which town was the designer of the Hollin Lighthouse born?";
    assert_eq!(sample.intro.unwrap(), format!("Q {asked}\n"));
    assert_eq!(sample.question, format!("\n{asked} A:"));
    for (text, told) in [
        ("[]", "dataset2prompt.json: invalid type"),
        ("{", "dataset2prompt.json: EOF"),
        (r#"{"hotpotqa": "{input}"}"#, "the prompt of \"hotpotqa\" must hold {context} once"),
        (r#"{"hotpotqa": "{context}"}"#, "must hold {context} once, and {input}"),
        (r#"{"hotpotqa": "{context}{context}{input}"}"#, "once"),
    ] {
        let error = with(text).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 65);
        assert!(error.to_string().contains(told), "{error}");
    }
}

#[test]
fn what_is_wrong_is_named_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let told = |text: &str| {
        std::fs::write(folder.path().join("qasper.jsonl"), text).unwrap();
        let error = load(&setup(folder.path(), &[]), &Words).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 65);
        error.to_string()
    };
    let good = r#"{"input": "q", "context": "c", "answers": ["a"], "length": 1, "all_classes": null, "more": 1}"#;
    assert!(told(&format!("{good}\n\n{{oops")).contains("qasper.jsonl:3: not JSON: "));
    assert!(told("7").contains("qasper.jsonl:1: not a JSON object"));
    assert!(told(r#"{"input": "q", "answers": ["a"]}"#).contains("qasper.jsonl:1: lacks \"context\"; a line needs"));
    assert!(told(r#"{"input": "q", "context": "c"}"#).contains("lacks \"answers\""));
    assert!(told(r#"{"input": 3, "context": "c", "answers": ["a"]}"#).contains("\"input\" must be a text"));
    assert!(told(r#"{"input": "q", "context": " ", "answers": ["a"]}"#).contains("\"context\" is empty"));
    for answers in ["[]", "\"a\"", "[1]"] {
        let line = format!(r#"{{"input": "q", "context": "c", "answers": {answers}}}"#);
        assert!(told(&line).contains("\"answers\" must be a list"), "{answers}");
    }
    assert!(told("\n \n").contains("qasper.jsonl: no sample in this file"));
    std::fs::write(folder.path().join("qasper.jsonl"), b"\xff\n").unwrap();
    assert!(load(&setup(folder.path(), &[]), &Words).unwrap_err().to_string().contains("qasper.jsonl:1: not JSON"));
}

#[test]
fn wrong_options_are_refused_with_what_to_do() {
    let folder = data_folder();
    let told = |setup: Setup<'_>, code| {
        let error = load(&setup, &Words).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), code);
        error.to_string()
    };
    let unknown = ["hotpotqa".to_owned(), "triviaqa".to_owned()];
    let message = told(setup(&folder, &unknown), 64);
    assert!(message.contains("\"triviaqa\"") && message.contains("qasper, narrativeqa and all"), "{message}");
    let absent = ["qasper".to_owned()];
    assert!(told(setup(&folder, &absent), 65).contains("qasper.jsonl"));
    let own = tempfile::tempdir().unwrap();
    assert!(told(setup(own.path(), &[]), 65).contains("holds no dataset; expected NAME.jsonl"));
    assert!(told(setup(&own.path().join("none"), &[]), 65).contains("no such folder"));
    assert!(told(Setup { limit: Some(0), ..setup(&folder, &[]) }, 64).contains("zero samples"));
    assert!(told(Setup { overlap: 60, ..setup(&folder, &[]) }, 64).contains("no less than the chunk of 60"));
    assert!(
        told(Setup { budget: 60, ..setup(&folder, &[]) }, 65).contains("hotpotqa.jsonl:1: the question alone needs")
    );
}
