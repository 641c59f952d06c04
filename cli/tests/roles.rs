//! Roles inside and behind the program, on tiny seeded models with the demo models' tokenizers: `up`, `ask`, `compare`,
//! signals, and what a role that cannot start says. Needs the demo models (`kvsplice models pull all`).
#![cfg(all(feature = "head", feature = "worker", feature = "cache", feature = "client"))]

use std::io::{BufRead, BufReader, Lines, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

const TINY: [&str; 6] = ["--shape", "tiny", "--random-weights", "--object-store", "memory://", "--dtype=f32"];

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsplice"));
    command
        .args(arguments)
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn one_line(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    stderr
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

fn documents(folder: &Path) -> String {
    let path = folder.join("chunks.jsonl");
    let lines = ["The ferry Alder was built by Tomas Reed.", "Tomas Reed was born in Skell.", "Skell has two wells."];
    let text: Vec<String> = lines.iter().map(|text| serde_json::json!({"text": text}).to_string()).collect();
    std::fs::write(&path, text.join("\n")).unwrap();
    path.to_str().unwrap().to_owned()
}

fn last_json(output: &Output) -> serde_json::Value {
    let stdout = String::from_utf8(output.stdout.clone()).unwrap();
    let last =
        stdout.lines().last().unwrap_or_else(|| panic!("no output; {:?}", String::from_utf8_lossy(&output.stderr)));
    serde_json::from_str(last).unwrap()
}

/// A running `up`, ended when dropped.
struct Up {
    child: Child,
    head: String,
    _lines: Lines<BufReader<ChildStdout>>,
}

impl Up {
    fn start() -> Self {
        let free =
            ["--listen", "127.0.0.1:0", "--set", "listen.worker=127.0.0.1:0", "--set", "listen.cache=127.0.0.1:0"];
        let mut child = command(&[&["up", "--log", "off"][..], &TINY, &free].concat()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut head = String::new();
        for role in ["head", "worker", "cache"] {
            let line = lines.next().unwrap().unwrap();
            let address = line.strip_prefix(&format!("listening role={role} address=127.0.0.1:")).unwrap();
            assert_ne!(address.parse::<u16>().unwrap(), 0);
            if role == "head" {
                head = format!("127.0.0.1:{address}");
            }
        }
        Self { child, head, _lines: lines }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

#[test]
fn a_running_server_and_embedded_roles_give_the_same_answer() {
    let folder = tempfile::tempdir().unwrap();
    let documents = documents(folder.path());
    let ask = ["ask", "--documents", &documents, "Where was he born?", "--store", "--max-tokens", "8", "--json"];
    let mut up = Up::start();
    let served = output(&[&ask[..], &["--server", &up.head]].concat());
    assert_eq!(served.status.code(), Some(0), "{served:?}");
    let embedded = output(&[&ask[..], &TINY].concat());
    assert_eq!(embedded.status.code(), Some(0), "{embedded:?}");
    let (served, embedded) = (last_json(&served), last_json(&embedded));
    assert_eq!(served["event"], "done");
    assert_eq!(served["text"], embedded["text"]);
    assert_eq!(served["receipt"]["requested"]["ratio"], 0.2);
    assert_eq!(served["receipt"]["chunks"].as_array().unwrap().len(), 3);
    signal(&up.child, "-TERM");
    assert_eq!(up.child.wait().unwrap().code(), Some(0));
}

#[test]
fn strategies_are_compared_side_by_side() {
    let folder = tempfile::tempdir().unwrap();
    let documents = documents(folder.path());
    let compare = ["compare", "--documents", &documents, "Where?", "--store", "--max-tokens", "2", "--rounds", "2"];
    let json = output(&[&compare[..], &TINY, &["--json", "--strategies", "full,direct,clip:0.5"]].concat());
    assert_eq!(json.status.code(), Some(0), "{json:?}");
    let done = last_json(&json);
    let rows = done["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["strategy"].as_str().unwrap()).collect();
    assert_eq!(names, ["full", "direct", "clip"]);
    assert_eq!(rows[0]["speed_up"], 1.0);
    assert_eq!(rows[0]["reused_approximate"], 0);
    let table = output(&[&compare[..], &TINY].concat());
    let stdout = String::from_utf8(table.stdout).unwrap();
    assert!(stdout.contains("| full "), "{stdout}");
}

#[test]
fn an_interrupted_answer_ends_with_code_130() {
    let folder = tempfile::tempdir().unwrap();
    let documents = documents(folder.path());
    let ask = ["ask", "--documents", &documents, "Go on.", "--max-tokens", "7000", "--ignore-eos", "--json"];
    let mut child = command(&[&ask[..], &TINY].concat()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while !lines.next().unwrap().unwrap().contains("\"delta\"") {}
    signal(&child, "-INT");
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!rest.iter().any(|line| line.contains("\"done\"")));
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(stderr.contains("kvsplice: interrupted"), "{stderr}");
}

#[test]
fn a_role_that_cannot_start_says_why_in_one_line() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap().to_string();
    let busy = output(&["cache", "--object-store", "memory://", "--log", "off", "--listen", &address]);
    assert_eq!(busy.status.code(), Some(69), "{busy:?}");
    assert!(one_line(&busy).contains("in use"));
    let nowhere = output(&["worker", "--primary", "no-such-model", "--log", "off", "--listen", "127.0.0.1:0"]);
    assert_eq!(nowhere.status.code(), Some(64), "{nowhere:?}");
    assert!(one_line(&nowhere).contains("kvsplice models pull"));
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("broken.gguf");
    std::fs::write(&model, "GGUF and nothing more").unwrap();
    let broken = output(&["worker", "--primary", model.to_str().unwrap(), "--log", "off", "--listen", "127.0.0.1:0"]);
    assert_eq!(broken.status.code(), Some(65), "{broken:?}");
    assert!(one_line(&broken).contains("broken.gguf") && one_line(&broken).len() < 300);
    let documents = documents(folder.path());
    let ask = output(&["ask", "--documents", &documents, "Where?", "--primary", "no-such-model"]);
    assert_eq!(ask.status.code(), Some(64), "{ask:?}");
    assert!(one_line(&ask).contains("no-such-model"));
}

#[test]
fn doctor_names_what_is_bad() {
    let checked = output(&["doctor", "--json", "--auxiliary", "no-such-model", "--object-store", "memory://"]);
    assert_eq!(checked.status.code(), Some(69), "{checked:?}");
    assert!(last_json(&checked)["bad"].as_u64().unwrap() >= 1);
    let stdout = String::from_utf8(checked.stdout).unwrap();
    let bad = stdout.lines().find(|line| line.contains("auxiliary model")).unwrap();
    assert!(bad.contains("\"bad\"") && bad.contains("no-such-model"), "{bad}");
    assert!(stdout.contains("libtorch") && stdout.contains("2.11.0"), "{stdout}");
}
