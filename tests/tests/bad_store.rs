//! A store that cannot be used, seen from the command line: the exit code, and one line that says what to do. No secret is
//! in it.
#![allow(missing_docs)]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};

use kvsplice_tests::{SmallDisk, article, on_a_small_disk, program};

const USAGE: i32 = 64;
const UNAVAILABLE: i32 = 69;
const SECRET: &str = "not-very-secret";

/// An S3 server that answers every request with one error, as a bucket's does.
fn s3(status: &'static str, code: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // It ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || refuse(stream, status, code));
        }
    });
    address
}

/// Reads requests, and answers each, until the caller is gone.
fn refuse(stream: TcpStream, status: &str, code: &str) -> Option<()> {
    let (mut reader, mut writer) = (BufReader::new(stream.try_clone().ok()?), stream);
    loop {
        let (mut line, mut body) = (String::new(), 0);
        loop {
            line.clear();
            if reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(length) = line.to_lowercase().strip_prefix("content-length:") {
                body = length.trim().parse().ok()?;
            }
            if line.trim().is_empty() {
                break;
            }
        }
        std::io::copy(&mut std::io::Read::take(&mut reader, body), &mut std::io::sink()).ok()?;
        let answer = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>no</Message></Error>");
        write!(writer, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{answer}", answer.len()).ok()?;
    }
}

/// Runs the program with an S3 server and credentials in its environment.
fn run(arguments: &[&str], endpoint: &str) -> Output {
    Command::new(program().unwrap())
        .args(arguments)
        .env("AWS_ENDPOINT_URL", format!("http://{endpoint}"))
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_REGION", "us-east-1")
        .env("AWS_ACCESS_KEY_ID", "somebody")
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

#[track_caller]
fn assert_fails(output: &Output, code: i32, parts: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let [line] = lines[..] else { panic!("not one line: {text}") };
    assert!(line.starts_with("kvsplice: ") && !line.contains("panicked") && !line.contains(SECRET), "{line}");
    for part in parts {
        assert!(line.to_lowercase().contains(part), "{part:?} is not in {line:?}");
    }
}

/// Every command that opens a store, on `store`.
fn assert_all_fail(store: &str, endpoint: &str, code: i32, parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let documents = folder.path().join("a.jsonl");
    std::fs::write(&documents, "{\"text\":\"A passage.\"}\n").unwrap();
    let document = article("eel-pie.md");
    let tiny = ["--shape", "tiny", "--random-weights", "--object-store", store, "--set", "cache.store_timeout_s=5"];
    let listen = ["--listen", "127.0.0.1:0", "--log", "off"];
    let commands: [&[&str]; 4] = [
        &[&["cache"], &listen[..], &["--object-store", store, "--set", "cache.store_timeout_s=5"]].concat(),
        &[&["up"], &listen[..], &["--set", "listen.worker=127.0.0.1:0", "--set", "listen.cache=127.0.0.1:0"], &tiny]
            .concat(),
        &[&["ask", "--documents", documents.to_str().unwrap(), "Why?"], &tiny[..]].concat(),
        &[&["ingest", "--corpus", "harbor", &document], &tiny[..]].concat(),
    ];
    for command in commands {
        println!("{}", command.join(" "));
        assert_fails(&run(command, endpoint), code, parts);
    }
}

#[test]
fn wrong_credentials_are_named() {
    let endpoint = s3("403 Forbidden", "SignatureDoesNotMatch");
    assert_all_fail("s3://chunks/a", &endpoint, UNAVAILABLE, &["s3://chunks/a", "credentials in the environment"]);
}

#[test]
fn a_bucket_that_is_not_there_is_named() {
    let endpoint = s3("404 Not Found", "NoSuchBucket");
    assert_all_fail("s3://nowhere/a", &endpoint, UNAVAILABLE, &["s3://nowhere/a", "create the bucket"]);
}

#[test]
fn a_server_that_is_not_there_is_named_in_time() {
    // Bound, so that nobody else has it, and never answered.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = silent.local_addr().unwrap().to_string();
    let start = std::time::Instant::now();
    let command = ["cache", "--listen", "127.0.0.1:0", "--log", "off", "--object-store", "s3://chunks", "--set"];
    let output = run(&[&command[..], &["cache.store_timeout_s=2"]].concat(), &endpoint);
    assert_fails(&output, UNAVAILABLE, &["s3://chunks", "reachable"]);
    assert!(start.elapsed() < std::time::Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn a_bad_url_is_named() {
    let unused = "127.0.0.1:9";
    for (store, code, parts) in [
        ("nowhere", USAGE, &["url", "nowhere"][..]),
        ("", USAGE, &["url"]),
        ("gopher://store", UNAVAILABLE, &["gopher", "s3"]),
        ("file://host/path", UNAVAILABLE, &["absolute path", "file:///folder"]),
        ("s3:///a", UNAVAILABLE, &["bucket"]),
        ("s3://somebody:not-very-secret@chunks", UNAVAILABLE, &["credentials in the url", "environment"]),
    ] {
        assert_all_fail(store, unused, code, parts);
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let name = "a_folder_that_cannot_be_written_is_named";
    let folder = match on_a_small_disk(name, 1024).unwrap() {
        SmallDisk::Here(folder) => folder,
        SmallDisk::Passed => return,
        SmallDisk::NotTried => {
            println!("not tried: this system lets nobody mount a small disk (unshare --user --mount)");
            // Nobody makes folders there.
            return assert_all_fail("file:///proc/kvsplice", "127.0.0.1:9", UNAVAILABLE, &["/proc/kvsplice"]);
        }
    };
    let inside = folder.join("store");
    std::fs::create_dir(&inside).unwrap();
    let status = Command::new("mount").args(["-o", "remount,ro"]).arg(&folder).status().unwrap();
    assert!(status.success());
    let parts = ["read-only", inside.to_str().unwrap()];
    let store = format!("file://{}", inside.display());
    assert_all_fail(&store, "127.0.0.1:9", UNAVAILABLE, &parts.map(str::to_lowercase).each_ref().map(String::as_str));
    let store = format!("file://{}/new", folder.display());
    assert_all_fail(&store, "127.0.0.1:9", UNAVAILABLE, &["read-only", "name a folder"]);
}
