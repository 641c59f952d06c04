//! The program from outside: parsing, exit codes, and the one line that says what failed and what to do.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn kvsplice(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsplice"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KVSPLICE_") {
            command.env_remove(name);
        }
    }
    command.args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Asserts the code and gives the one line on stderr.
fn fails(arguments: &[&str], code: i32) -> String {
    let output = kvsplice(arguments);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{arguments:?}: {stderr}");
    assert!(stderr.starts_with("kvsplice: "), "{stderr}");
    stderr
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path: PathBuf = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// An address where nobody listens: bound once, and closed again.
fn dead_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// A chunk id.
const ID: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

#[test]
fn help_and_version_are_no_failure() {
    for arguments in [&["--help"][..], &["--version"], &["ask", "--help"], &["help", "doctor"]] {
        let output = kvsplice(arguments);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains("kvsplice"));
    }
    assert!(stdout(&kvsplice(&["ask", "--help"])).contains("Examples:"));
    assert_eq!(kvsplice(&[]).status.code(), Some(64));
}

#[test]
fn a_device_that_is_not_there_is_code_64_and_says_what_to_do() {
    // No machine has device 4095; one without a driver says that first.
    for arguments in [
        &["worker", "--log", "error", "--listen", "127.0.0.1:0", "--device", "cuda:4095"][..],
        &["bench", "gpu", "--device", "cuda:4095", "--json"],
    ] {
        let line = fails(arguments, 64);
        assert!(line.contains("CUDA") && line.contains("--device cpu"), "{line}");
    }
    assert!(fails(&["worker", "--log", "error", "--device", "gpu"], 64).contains("known: cpu, cuda, cuda:N"));
    assert!(fails(&["bench", "gpu", "--device", "cpu"], 64).contains("needs --device cuda"));
    let doctor = kvsplice(&["doctor", "--json", "--device", "cuda:4095"]);
    let checks = stdout(&doctor);
    let device = checks.lines().find(|line| line.contains("device cuda:4095")).unwrap();
    assert!(device.contains("\"verdict\":\"bad\"") && device.contains("--device cpu"), "{device}");
}

#[test]
fn wrong_usage_is_code_64_and_names_the_value() {
    let cases: [(&[&str], &str); 15] = [
        (&["aks"], "aks"),
        (&["ask", "--corpus", "c", "q", "--strategy", "magic"], "unknown strategy"),
        (&["ask", "--corpus", "c", "q", "--ratio", "1.5"], "ratio must be in 0..=1"),
        (&["ask", "--corpus", "c", "q", "--ratio", "NaN"], "ratio must be in 0..=1"),
        (&["ask", "--corpus", "c", "q", "--group", "2,9"], "group"),
        (&["ask", "--corpus", "c", "q", "--renumber", "false"], "goes with direct"),
        (&["ask", "--corpus", "c", "q", "--temperature", "NaN"], "temperature"),
        (&["ask", "q"], "--corpus, --documents or --raw"),
        (&["ingest", "x.txt"], "--corpus"),
        (&["ask", "--corpus", "c", "q", "--server", "localhost"], "HOST:PORT"),
        (&["cache", "verify"], "--all"),
        (&["cache", "verify", "--all", ID], "cannot be used with"),
        (&["cache", "gc", "--older-than", "soon"], "--older-than"),
        (&["cache", "pin"], "ID"),
        (&["cache", "pin", "12xy"], "12xy"),
    ];
    for (arguments, part) in cases {
        let line = fails(arguments, 64);
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn bad_configuration_is_code_64() {
    let folder = tempfile::tempdir().unwrap();
    let server = dead_address();
    let ask =
        |more: &[&str]| fails(&[&["ask", "--corpus", "c", "q", "--server", server.as_str()][..], more].concat(), 64);
    let unknown = write(folder.path(), "unknown.toml", "[listen]\nhaed = \"127.0.0.1:1\"\n");
    assert!(ask(&["--config", &unknown]).contains("haed"));
    let broken = write(folder.path(), "broken.toml", "[listen\n");
    assert!(ask(&["--config", &broken]).contains("broken.toml"));
    assert!(ask(&["--config", "/nonexistent/kvsplice.toml"]).contains("/nonexistent/kvsplice.toml"));
    assert!(ask(&["--set", "listen.head"]).contains("KEY=VALUE"));
    assert!(ask(&["--log", "a=b=c"]).contains("log filter"));
}

#[test]
fn the_effective_configuration_can_be_printed_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let output = kvsplice(&["doctor", "--print-config", "--set", "listen.head=127.0.0.1:9"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let printed = stdout(&output);
    assert!(printed.contains("head = \"127.0.0.1:9\""), "{printed}");
    let file = write(folder.path(), "printed.toml", &printed);
    assert_eq!(stdout(&kvsplice(&["doctor", "--print-config", "--config", &file])), printed);
}

#[test]
fn bad_input_is_code_65_and_is_found_before_anything_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let server = dead_address();
    let bad = write(folder.path(), "bad.jsonl", "{\"id\":\"1\",\"text\":\"x\"}\n{\"id\":2}\n");
    let line = fails(&["ingest", "--corpus", "c", &bad, "--server", &server], 65);
    assert!(line.contains("bad.jsonl:2: "), "{line}");
    let line = fails(&["ask", "--documents", &bad, "q", "--server", &server], 65);
    assert!(line.contains("bad.jsonl:2: "), "{line}");
    let line = fails(&["ask", "--corpus", "c", " ", "--server", &server], 65);
    assert!(line.contains("the question is empty"), "{line}");
    let raw = write(folder.path(), "raw.json", "{\"prefix\":\"\",\"chunks\":[]}");
    let line = fails(&["ask", "--raw", &raw, "--server", &server], 65);
    assert!(line.contains("missing field `question`"), "{line}");
}

#[test]
fn a_server_that_is_down_is_code_69_and_named() {
    let server = dead_address();
    for command in [
        &["ask", "--corpus", "c", "q"][..],
        &["compare", "--corpus", "c", "q"],
        &["cache", "stats"],
        &["cache", "ls"],
        &["cache", "verify", "--all"],
        &["cache", "gc", "--dry-run"],
        &["cache", "pin", ID],
        &["cache", "unpin", ID],
    ] {
        let line = fails(&[command, &["--server", &server]].concat(), 69);
        assert!(line.contains(&server), "{line}");
    }
    let folder = tempfile::tempdir().unwrap();
    let text = write(folder.path(), "a.txt", "text");
    let line = fails(&["ingest", "--corpus", "c", &text, "--server", &server], 69);
    assert!(line.contains(&server), "{line}");
}
