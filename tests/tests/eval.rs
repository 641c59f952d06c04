//! `eval agreement`, `ruler`, `longbench`, `ablation` and `report` against a running system of tiny, seeded models. What the
//! models say means nothing; what is counted, kept and refused does.
#![allow(missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use kvsplice_tests::{Process, program, project, run, run_ok, wait_serving, wait_until};
use serde_json::Value;
use tempfile::TempDir;

/// Chunks are sent each time, so that bytes are counted, and loaded however slow that is.
const TINY: [&str; 11] = [
    "--shape",
    "tiny",
    "--random-weights",
    "--dtype",
    "f32",
    "--set",
    "worker.map_files=false",
    "--set",
    "worker.pool_bytes=0",
    "--set",
    "worker.plan_loads=false",
];
const EVERY: &str = "full,prefix,direct,ape,lego,blend,craft,clip,guided";
/// Small prompts of two kinds.
const PROMPTS: [&str; 6] = ["--kinds", "hop,needle", "--tokens", "600", "--chunk-tokens", "120"];
const DEADLINE: Duration = Duration::from_secs(120);

/// `kvsplice up` with a store in `folder`.
fn up(folder: &Path) -> Process {
    let store = format!("file://{}", folder.join("store").display());
    fs::create_dir_all(folder.join("store")).unwrap();
    let settings =
        ["--object-store", &store, "--set", "listen.worker=127.0.0.1:0", "--set", "listen.cache=127.0.0.1:0"];
    let process = Process::start("up", &[&settings[..], &TINY].concat(), folder).unwrap();
    wait_serving(&process).unwrap();
    process
}

struct Case {
    server: Process,
    folder: TempDir,
}

impl Case {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { server: up(folder.path()), folder }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// `kvsplice eval WHAT MORE` at the server, with its results in the folder.
    fn arguments(&self, what: &str, more: &[&str]) -> Vec<String> {
        let out = self.out().display().to_string();
        let common = ["eval", what, "--server", self.server.address(), "--out", &out, "--json"];
        [&common[..], more].concat().iter().map(|&word| word.to_owned()).collect()
    }

    /// The lines of a command that must succeed: finished pairs, and the report.
    fn measure(&self, what: &str, more: &[&str]) -> (Vec<Value>, Value) {
        let output = run_ok(&self.arguments(what, more)).unwrap();
        let mut lines: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let last = lines.pop().unwrap();
        assert_eq!(last["event"], "done", "{last}");
        assert!(lines.iter().all(|line| line["event"] == "result"), "{lines:?}");
        (lines, last["report"].clone())
    }

    /// A command under way.
    fn spawn(&self, what: &str, more: &[&str]) -> Child {
        let mut command = Command::new(program().unwrap());
        command.args(self.arguments(what, more)).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Whole lines of the results, the header among them.
    fn lines(&self) -> Vec<String> {
        let text = fs::read_to_string(self.out().join("results.jsonl")).unwrap_or_default();
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        text[..whole].lines().map(str::to_owned).collect()
    }

    fn wait_for_lines(&self, count: usize) {
        wait_until("finished pairs", DEADLINE, || Ok((self.lines().len() >= count).then_some(()))).unwrap();
    }
}

/// Asserts the exit code, and that stderr is one line that holds every part.
#[track_caller]
fn failed(output: &Output, code: i32, parts: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{part:?} is not in {stderr:?}");
    }
}

fn row<'a>(report: &'a Value, strategy: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["strategy"] == strategy).unwrap_or_else(|| panic!("no {strategy} in {report}"))
}

fn number(value: &Value) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!(number.is_finite());
    number
}

#[test]
fn agreement_measures_every_strategy_and_the_report_comes_again() {
    let case = Case::start();
    let more = [&PROMPTS[..], &["--samples", "2", "--strategies", EVERY]].concat();
    let (lines, report) = case.measure("agreement", &more);
    assert_eq!(lines.len(), 18);
    assert_eq!(case.lines().len(), 19, "a header and the pairs");
    assert_eq!(report["rows"].as_array().unwrap().len(), 9);
    for row in report["rows"].as_array().unwrap() {
        let strategy = row["strategy"].as_str().unwrap();
        assert_eq!(row["samples"], 2);
        assert!(number(&row["kl"]["mean"]) >= 0.0 && number(&row["gold_logprob"]) < 0.0, "{row}");
        assert!((0.0..=1.0).contains(&number(&row["ratio_charged"])) && number(&row["ttft_ms"]) > 0.0, "{row}");
        assert_eq!(row["cold"], 0, "{strategy} was timed with its chunks cached");
        let command = row["command"].as_str().unwrap();
        assert!(command.starts_with("kvsplice eval agreement ") && command.contains(strategy), "{command}");
    }
    // Exact strategies agree with themselves; every other one comes from the cache and differs.
    assert_eq!(number(&row(&report, "full")["kl"]["mean"]), 0.0);
    assert!(number(&row(&report, "prefix")["kl"]["mean"]) < 1e-6);
    assert_eq!(number(&row(&report, "prefix")["same_text"]), 1.0);
    let direct = row(&report, "direct");
    assert!(number(&direct["kl"]["mean"]) > 1e-3 && number(&direct["mb_loaded"]) > 0.0, "{direct}");
    assert_eq!(number(&direct["kl_of_direct"]), 1.0);
    let charged = number(&row(&report, "clip:0.2")["ratio_charged"]);
    assert!(charged > 0.0 && charged <= 0.2 + 1e-9, "{charged}");

    let saved = fs::read_to_string(case.out().join("report.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&saved).unwrap(), report);
    let page = fs::read_to_string(case.out().join("report.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("guided:0.2") && !page.contains("<script"));

    // Nothing is measured twice, more strategies and samples are welcome, and the report needs no server.
    let (lines, again) = case.measure("agreement", &more);
    assert!(lines.is_empty());
    assert_eq!(again, report);
    let grown = [&PROMPTS[..], &["--samples", "3", "--strategies", "direct,clip:0.5"]].concat();
    let (lines, grown) = case.measure("agreement", &grown);
    assert_eq!(lines.len(), 5, "three pairs of hop-1, and clip:0.5 on the two others");
    assert_eq!(row(&grown, "clip:0.5")["samples"], 3);
    fs::remove_file(case.out().join("report.html")).unwrap();
    let out = case.out().display().to_string();
    let shown: Value = serde_json::from_str(&run_ok(&["eval", "report", &out, "--json"]).unwrap()).unwrap();
    assert_eq!(shown["report"], grown);
    assert!(case.out().join("report.html").exists());
    let text = run_ok(&["eval", "report", &out]).unwrap();
    assert!(text.contains("| strategy") && text.contains("one row again: kvsplice eval agreement"), "{text}");

    // The folder is taken.
    let other = [&PROMPTS[..], &["--samples", "2", "--seed", "7"]].concat();
    failed(
        &run(&case.arguments("agreement", &other)).unwrap(),
        64,
        &["holds other results", "seed 42, not 7", "--out"],
    );
    let ruler = ["--length", "600", "--samples", "1", "--tasks", "single_1", "--chunk-tokens", "200"];
    failed(&run(&case.arguments("ruler", &ruler)).unwrap(), 64, &["holds other results", "agreement"]);
}

#[test]
fn a_run_goes_on_where_its_server_died_or_its_user_stopped_it() {
    let mut case = Case::start();
    let more = [&PROMPTS[..], &["--samples", "8", "--strategies", "full,direct,clip"]].concat();

    // Two commands do not write to one folder.
    let child = case.spawn("agreement", &more);
    case.wait_for_lines(3);
    failed(&run(&case.arguments("agreement", &more)).unwrap(), 64, &["in use", "--out"]);
    // The server dies.
    case.server.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    let kept = case.lines();
    assert!(kept.len() >= 3 && kept.len() < 25, "{} lines", kept.len());
    failed(&output, 69, &["pairs are kept in", "the same command goes on"]);
    // Each line that was printed is there.
    let printed = String::from_utf8_lossy(&output.stdout).lines().count();
    assert!(printed < kept.len(), "{printed} printed, {} kept", kept.len());

    // The user stops it.
    case.server = up(case.folder.path());
    let child = case.spawn("agreement", &more);
    case.wait_for_lines(kept.len() + 2);
    let stopped = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(stopped.success());
    let output = child.wait_with_output().unwrap();
    let later = case.lines();
    assert!(later.len() >= kept.len() + 2 && later[..kept.len()] == kept);
    if output.status.code() != Some(0) {
        failed(&output, 130, &["pairs are kept in", "interrupted"]);
    }

    // A line that a crash tore is measured again, and nothing else.
    let path = case.out().join("results.jsonl");
    let torn = format!("{}\n{}", later[..later.len() - 1].join("\n"), &later[later.len() - 1][..40]);
    fs::write(&path, torn).unwrap();
    let (lines, report) = case.measure("agreement", &more);
    assert_eq!(lines.len(), 24 - (later.len() - 2));
    let whole = case.lines();
    assert_eq!(whole.len(), 25);
    assert!(whole[..later.len() - 1] == later[..later.len() - 1]);
    for strategy in ["full", "direct", "clip:0.2"] {
        assert_eq!(row(&report, strategy)["samples"], 8);
    }
    assert!(fs::read_dir(case.out()).unwrap().count() == 3, "results and two reports");
}

#[test]
fn ruler_and_longbench_are_scored_by_task() {
    let case = Case::start();
    let ruler = ["--tasks", "all", "--length", "1000", "--samples", "1", "--chunk-tokens", "250", "--overlap", "20"];
    let (lines, report) = case.measure("ruler", &[&ruler[..], &["--strategies", "direct,guided"]].concat());
    assert_eq!((lines.len(), report["tasks"].as_array().unwrap().len()), (8 * 3, 8));
    for line in &lines {
        assert!((0.0..=1.0).contains(&number(&line["answer"]["score"])), "{line}");
        assert!(number(&line["answer"]["output_tokens"]) <= 128.0 && line["agreement"].is_null(), "{line}");
    }
    assert!(row(&report, "direct")["kl"].is_null());
    assert_eq!(row(&report, "direct")["cold"], 0, "chunks are encoded before a time counts");

    let folder = project().join("tests/data/longbench");
    fs::remove_dir_all(case.out()).unwrap();
    let folder = folder.to_str().unwrap();
    let longbench = ["--folder", folder, "--limit", "1", "--chunk-tokens", "120", "--overlap", "10"];
    let (lines, report) = case.measure("longbench", &[&longbench[..], &["--strategies", "direct"]].concat());
    assert_eq!(lines.len(), 2 * 2);
    assert_eq!(report["tasks"], serde_json::json!(["hotpotqa", "multifieldqa_zh"]));
}

#[test]
fn an_ablation_is_a_list_of_strategies_by_length() {
    let case = Case::start();
    let more = ["--kinds", "needle", "--samples", "1", "--chunk-tokens", "120", "--lengths", "500,700", "--no-text"];
    let sweep = ["--no-factors", "--windows", "4,8", "--thresholds", "0.5,1"];
    let (lines, report) = case.measure("ablation", &[&more[..], &sweep].concat());
    assert_eq!(lines.len(), 2 * (3 + 4), "full, direct twice and four groupings, at two lengths");
    let heats = report["heats"].as_array().unwrap();
    assert_eq!(heats.len(), 2);
    assert_eq!((&heats[0]["set"], &heats[0]["shares"]), (&"500".into(), &serde_json::json!([0.5, 1.0])));
    let command = row(&report, "clip:0.2:group=4,2")["command"].as_str().unwrap();
    assert!(command.contains("eval agreement") && command.contains("--tokens 500"), "{command}");
    assert!(fs::read_to_string(case.out().join("report.html")).unwrap().contains("Windows and thresholds"));
}

#[test]
fn bad_input_is_one_line_that_names_it() {
    let case = Case::start();
    let fails = |what: &str, more: &[&str], code: i32, parts: &[&str]| {
        failed(&run(&case.arguments(what, more)).unwrap(), code, parts);
    };
    fails("agreement", &["--samples", "0"], 64, &["zero samples"]);
    fails("ruler", &["--samples", "0"], 64, &["zero samples"]);
    fails("agreement", &["--kinds", "hops"], 64, &["\"hops\"", "hop2", "ordering"]);
    fails("ruler", &["--tasks", "single_9"], 64, &["single_9", "multiquery"]);
    fails("agreement", &["--strategies", "magic"], 64, &["magic", "guided"]);
    fails("agreement", &["--strategies", "direct:ratio=0.2"], 64, &["ratio", "direct"]);
    fails("agreement", &["--strategies", "craft:capture=true"], 64, &["capture"]);
    fails("agreement", &["--tokens", "100"], 64, &["too few"]);
    fails("ruler", &["--length", "150", "--tasks", "single_2"], 64, &["150", "too short"]);

    let write = |name: &str, text: &str| {
        let path = case.folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let essay = write("essay.txt", "Too short.");
    fails("ruler", &["--essay", &essay], 65, &["essay.txt"]);
    let folder = case.folder.path().display().to_string();
    fails("longbench", &["--folder", &folder], 65, &["no dataset", "hotpotqa"]);
    let good = fs::read_to_string(project().join("tests/data/longbench/hotpotqa.jsonl")).unwrap();
    write("bad/hotpotqa.jsonl", &format!("{}\n{{\"input\": \"?\"}}\n", good.lines().next().unwrap()));
    let bad = case.folder.path().join("bad").display().to_string();
    fails("longbench", &["--folder", &bad], 65, &["hotpotqa.jsonl", "2"]);
    fails("longbench", &["--folder", &bad, "--datasets", "squad"], 64, &["squad", "hotpotqa"]);
    fails("longbench", &["--folder", &bad, "--limit", "1", "--budget", "9000000"], 64, &["9000000", "context"]);
    failed(&run(&["eval", "report", &folder]).unwrap(), 65, &["results.jsonl"]);
}
