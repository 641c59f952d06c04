use serde_json::json;

use super::super::store::{Agreement, Answered};
use super::*;

fn header() -> Header {
    Header {
        format: 1,
        command: "ablation".into(),
        settings: json!({}),
        seed: 42,
        models: Vec::new(),
        version: "1".into(),
        words: ["eval", "agreement", "--set", "a b=it's"].map(str::to_owned).to_vec(),
        set_flag: "--tokens".into(),
    }
}

/// A pair with its KL, score and time; a negative time is that of a cold answer.
fn pair(sample: &str, strategy: &str, kl: f64, score: f64, ttft_ms: f64) -> Record {
    let task = sample.split('-').next().unwrap();
    Record {
        set: "1300".into(),
        sample: sample.into(),
        task: task.into(),
        strategy: strategy.into(),
        effective: strategy.into(),
        ratio_charged: 0.25,
        bytes: 2_000_000,
        agreement: Some(Agreement { kl, argmax: 1.0 - kl, right: score > 0.5, gold_logprob: -kl, gold_tokens: 4 }),
        answer: Some(Answered {
            score,
            same_text: strategy == "full",
            ttft_ms: ttft_ms.abs(),
            cold: ttft_ms < 0.0,
            ..Answered::default()
        }),
        ..Record::default()
    }
}

fn near(left: Option<f64>, right: f64) {
    let left = left.unwrap();
    assert!((left - right).abs() < 1e-9, "{left} is not {right}");
}

#[test]
fn rows_compare_over_the_samples_that_both_have() {
    let records = [
        pair("hop-0", "full", 0.0, 1.0, 400.0),
        pair("hop-0", "direct", 0.8, 0.0, 100.0),
        pair("hop-0", "clip:0.2", 0.1, 1.0, -900.0),
        pair("hop-1", "full", 0.0, 1.0, 600.0),
        pair("hop-1", "direct", 0.4, 0.0, 100.0),
        pair("hop-1", "clip:0.2", 0.3, 0.5, 250.0),
        pair("needle-0", "full", 0.0, 0.5, 5000.0),
        pair("needle-0", "direct", 0.6, 0.5, 100.0),
        // Interrupted here: clip has no needle-0.
    ];
    let report = Report::of(&header(), &records);
    assert_eq!(report.tasks, ["hop", "needle"]);
    let row = |name: &str| report.rows.iter().find(|row| row.strategy == name).unwrap();
    let (full, direct, clip) = (row("full"), row("direct"), row("clip:0.2"));
    assert_eq!((full.samples, direct.samples, clip.samples), (3, 3, 2));
    // Tasks count alike: (1 + 0.5) / 2.
    near(full.score.map(|score| score.mean), 0.75);
    near(full.retained, 1.0);
    near(direct.retained, 0.25 / 0.75);
    near(clip.retained, 0.75);
    near(direct.kl.map(|kl| kl.mean), 0.6);
    near(clip.kl_of_direct, 0.2 / 0.6);
    near(direct.kl_of_direct, 1.0);
    near(full.same_text, 1.0);
    near(clip.right, 0.5);
    // The cold time does not count while there is a warm one; full: the median of the two samples that clip has.
    near(clip.ttft_ms, 250.0);
    near(clip.speed_up, 2.0);
    assert_eq!(clip.cold, 1);
    near(Some(clip.mb_loaded), 2.0);
    assert_eq!(clip.tasks.len(), 1);
    near(direct.tasks[1].kl, 0.6);
    assert_eq!(clip.command, "kvsplice eval agreement --set 'a b=it'\\''s' --tokens 1300 --strategies full,clip:0.2");
    assert!(full.command.ends_with("--strategies full"));
    assert!(table::overview(&report).to_string().contains("33.3 %"));
    assert!(table::by_task(&report).unwrap().to_string().contains("needle"));
    let page = page::render(&report).unwrap();
    assert_eq!(page.matches("<svg").count(), 4, "quality against time and by task, for KL and score");
    // Nothing is fetched, texts are escaped, and plots take the page's color.
    assert!(page.contains("&#x27;a b=it") && page.contains("currentColor"), "{page}");
    assert!(!page.contains("#000000") && !page.contains("<script") && !page.contains("src="));
    let outside = page.replace("http://www.w3.org/2000/svg", "");
    assert!(!outside.contains("http:") && !outside.contains("https:"));
}

#[test]
fn a_run_without_text_or_without_full_has_no_such_numbers() {
    let mut only = pair("hop-0", "direct", 0.8, 0.0, 100.0);
    only.answer = None;
    only.effective = "full".into();
    only.effective_reason = "every chunk is fresh".into();
    let report = Report::of(&header(), &[only]);
    let row = &report.rows[0];
    assert!(row.score.is_none() && row.retained.is_none() && row.ttft_ms.is_none() && row.speed_up.is_none());
    assert_eq!(row.replaced, [("full: every chunk is fresh".to_owned(), 1)]);
    let text = table::overview(&report).to_string();
    assert!(!text.contains("TTFT") && text.contains("0.8000"), "{text}");
    assert!(table::by_task(&report).is_none());
    assert!(Report::of(&header(), &[]).rows.is_empty());
}
