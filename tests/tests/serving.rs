//! Several requests, callers that leave, signals, and peers that are down or strangers.
#![allow(missing_docs)]

use std::net::TcpListener;
use std::process::Output;
use std::time::{Duration, Instant};

use kvsplice_proto::v1;
use kvsplice_tests::{
    Answer, Client, Cluster, Process, TINY, article, greedy, inline, options, request, run, run_ok, wait_serving,
    wait_until, words, worker_status,
};
use serde_json::Value;

const QUESTION: &str = "Who is the captain of the Marguerite?";

fn chunks(first_word: usize, count: usize, length: usize) -> Vec<String> {
    (0..count).map(|place| words(first_word + place * length, length)).collect()
}

/// One line on stderr and exit code 69.
#[track_caller]
fn refused(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(69), "{stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    stderr
}

fn ingest(server: &str, name: &str) {
    let common = ["ingest", "--server", server, "--corpus", "harbor", "--chunk-tokens", "96", "--overlap", "8"];
    run_ok(&[&common[..], &[&article(name)]].concat()).unwrap();
}

fn ask(server: &str) -> Vec<&str> {
    vec!["ask", "--server", server, "--corpus", "harbor", "--top-k", "4", "--max-tokens", "16", "--json", QUESTION]
}

fn done(server: &str) -> Value {
    let output = run_ok(&ask(server)).unwrap();
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

/// Waits until the worker has nothing in hand.
fn wait_idle(worker: &Process, deadline: Duration) {
    wait_until("an idle worker", deadline, || {
        let status = worker_status(worker.address())?;
        Ok((status.running == 0 && status.queued == 0 && status.kv_bytes == 0).then_some(()))
    })
    .unwrap();
}

/// The texts of eight requests at once, and of the same requests in turn.
fn eight(client: &Client, words_each: usize, tokens: u32) -> [Vec<Answer>; 2] {
    let strategies = ["clip", "full", "clip", "direct"];
    let requests: Vec<_> = (0..8)
        .map(|place| {
            let chunks = chunks(100 * place, 3, words_each + place);
            request(inline(&chunks, QUESTION, true), options(strategies[place % 4], 0.2), tokens + place as u32)
        })
        .collect();
    // The first time stores the chunks; from then on both ways read the same KV.
    let alone: Vec<Answer> = requests.iter().map(|request| client.generate(request.clone()).unwrap()).collect();
    [client.generate_together(requests).unwrap(), alone]
}

#[test]
fn the_real_models_serve_several_at_once() {
    let cluster = Cluster::start(&["--dtype", "f32"]).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    let [together, alone] = eight(&client, 25, 10);
    for (together, alone) in together.iter().zip(&alone) {
        assert_eq!(together.text, alone.text);
    }

    // A running request while another's 4K prompt is computed.
    let short = || {
        let mut request = request(inline(&chunks(0, 2, 40), QUESTION, false), options("full", 0.2), 400);
        request.dump = false;
        request
    };
    let sample = 20;
    let mut idle = client.open(short()).unwrap();
    idle.read_tokens(sample).unwrap();
    let alone = idle.answer.median_gap();
    drop(idle);
    wait_idle(&cluster.worker, Duration::from_secs(10));

    let mut running = client.open(short()).unwrap();
    running.read_tokens(2).unwrap();
    let long = chunks(0, 16, 190);
    let mut prefill = client.open(request(inline(&long, QUESTION, false), options("full", 0.2), 1)).unwrap();
    wait_until("two running requests", Duration::from_secs(60), || {
        Ok((worker_status(cluster.worker.address())?.running == 2).then_some(()))
    })
    .unwrap();
    running.read_ready().unwrap();
    let before = running.answer.token_ids.len();
    running.answer.times.clear();
    running.read_tokens(before + sample).unwrap();
    prefill.read_ready().unwrap();
    assert!(prefill.answer.planned.prompt_tokens > 3800, "{:?}", prefill.answer.planned);
    assert!(prefill.answer.token_ids.is_empty(), "the prefill ended before the sample");
    let busy = running.answer.median_gap();
    println!("median time between tokens: {alone:?} alone, {busy:?} during another's prefill");
    assert!(busy <= 3 * alone, "{busy:?} during another's prefill, {alone:?} alone");

    drop((running, prefill));
    wait_idle(&cluster.worker, Duration::from_secs(10));
}

#[test]
fn tiny_models_serve_eight_at_once_with_the_same_texts() {
    let cluster = Cluster::start(&TINY).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    let [together, alone] = eight(&client, 60, 40);
    for (together, alone) in together.iter().zip(&alone) {
        assert_eq!(together.text, alone.text);
        assert_eq!(together.token_ids, alone.token_ids);
    }
}

#[test]
fn a_caller_that_leaves_frees_its_work() {
    let cluster = Cluster::start(&TINY).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    let endless = || request(inline(&chunks(0, 2, 50), QUESTION, true), options("clip", 0.2), 7000);
    let opened: Vec<_> = (0..4)
        .map(|_| {
            let mut opened = client.open(endless()).unwrap();
            opened.read_tokens(2).unwrap();
            opened
        })
        .collect();
    let status = worker_status(cluster.worker.address()).unwrap();
    assert_eq!(status.running, 4, "{status:?}");
    assert!(status.kv_bytes > 0);
    drop(opened);
    wait_idle(&cluster.worker, Duration::from_secs(5));
    // One that leaves before its first token.
    let long = request(inline(&chunks(0, 12, 380), QUESTION, false), options("full", 0.2), 7);
    drop(client.open(long).unwrap());
    wait_idle(&cluster.worker, Duration::from_secs(5));
    assert_eq!(
        client.generate(request(inline(&["x"], "y?", false), options("full", 0.2), 3)).unwrap().token_ids.len(),
        3
    );
}

#[test]
fn more_requests_than_fit_are_refused_at_once() {
    let settings = [&TINY[..], &["--set", "worker.queue_limit=2"]].concat();
    let cluster = Cluster::start(&settings).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    let endless = || request(inline(&["a passage"], QUESTION, false), options("full", 0.2), 7000);
    let _running: Vec<_> = (0..2).map(|_| client.open(endless()).unwrap()).collect();
    let start = Instant::now();
    let status = client.open(endless()).err().or_else(|| client.generate(endless()).err()).unwrap();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn fifty_streams_are_finished_after_a_signal() {
    let mut cluster = Cluster::start(&TINY).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    let tokens = 120;
    let mut opened: Vec<_> = (0..50)
        .map(|place| {
            let chunks = chunks(place * 7, 2, 20 + place % 5);
            let mut request = request(inline(&chunks, QUESTION, false), options("full", 0.2), tokens);
            request.dump = false;
            client.open(request).unwrap()
        })
        .collect();
    for stream in &mut opened {
        stream.read_tokens(1).unwrap();
    }
    for process in [&cluster.head, &cluster.worker, &cluster.cache] {
        process.signal("TERM").unwrap();
    }
    for stream in opened {
        let answer = stream.finish().unwrap();
        assert_eq!(answer.token_ids.len(), tokens as usize);
        assert_eq!(answer.receipt.tokens.unwrap().output, tokens);
    }
    for process in [&mut cluster.head, &mut cluster.worker, &mut cluster.cache] {
        assert!(process.wait(Duration::from_secs(40)).unwrap().success(), "{}", process.role());
    }
}

#[test]
fn a_second_signal_ends_a_role_at_once() {
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let mut cluster = Cluster::start(&TINY).unwrap();
        let client = Client::connect(cluster.server()).unwrap();
        let endless = request(inline(&["a passage"], QUESTION, false), options("full", 0.2), 7000);
        let mut running = client.open(endless).unwrap();
        running.read_tokens(1).unwrap();
        let process = if name == "INT" { &mut cluster.worker } else { &mut cluster.head };
        process.signal(name).unwrap();
        wait_until("an orderly end", Duration::from_secs(10), || {
            Ok(process.log_text()?.contains("shutting down").then_some(()))
        })
        .unwrap();
        assert!(process.is_running().unwrap(), "{} ended before its stream", process.role());
        process.signal(name).unwrap();
        let start = Instant::now();
        assert_eq!(process.wait(Duration::from_secs(5)).unwrap().code(), Some(code), "{}", process.role());
        assert!(start.elapsed() < Duration::from_secs(2));
    }
}

#[test]
fn a_worker_with_another_model_is_refused_with_both_digests() {
    let mut cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), "marguerite.md");
    let expected = worker_status(cluster.worker.address()).unwrap().model.unwrap().digest;
    let address = cluster.worker.address().to_owned();
    cluster.worker.kill().unwrap();
    let to_cache = format!("worker.cache={}", cluster.cache.address());
    let settings = [&TINY[..], &["--set", "worker.primary.seed=7", "--set", &to_cache]].concat();
    cluster.worker = Process::start_at("worker", &address, &settings, cluster.folder()).unwrap();
    wait_serving(&cluster.worker).unwrap();
    let found = worker_status(cluster.worker.address()).unwrap().model.unwrap().digest;
    assert_ne!(found, expected);
    // The head may find out by its own question or from the worker's refusal.
    for _ in 0..2 {
        let line = refused(&run(&ask(cluster.server())).unwrap());
        assert!(line.contains(&expected) && line.contains(&found), "{line}");
    }
    let ingest = run(&["ingest", "--server", cluster.server(), "--corpus", "harbor", &article("eel-pie.md")]).unwrap();
    let line = refused(&ingest);
    assert!(line.contains(&expected) && line.contains(&found), "{line}");
}

#[test]
fn a_worker_that_is_down_or_silent_is_reported_within_the_deadline() {
    let mut cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), "marguerite.md");
    let address = cluster.worker.address().to_owned();
    cluster.worker.kill().unwrap();
    let start = Instant::now();
    let line = refused(&run(&ask(cluster.server())).unwrap());
    assert!(line.contains(&address), "{line}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());

    // It takes connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let (to_worker, to_cache) = (format!("head.worker={address}"), format!("head.cache={}", cluster.cache.address()));
    let settings = ["--set", &to_worker, "--set", &to_cache, "--set", "head.call_deadline_s=1"];
    let head = Process::start("head", &[&settings[..], &TINY].concat(), cluster.folder()).unwrap();
    wait_serving(&head).unwrap();
    let start = Instant::now();
    let line = refused(&run(&ask(head.address())).unwrap());
    assert!(line.contains(&address), "{line}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let line = refused(&run(&[&ask(head.address())[..], &["--timeout", "1"]].concat()).unwrap());
    assert!(line.contains("--timeout"), "{line}");
}

#[test]
fn answers_go_on_fresh_without_the_cache_service_and_are_cached_again_with_it() {
    let mut cluster = Cluster::start(&TINY).unwrap();
    ingest(cluster.server(), "marguerite.md");
    let cached = done(cluster.server());
    let sources = |done: &Value| -> Vec<String> {
        let chunks = done["receipt"]["chunks"].as_array().unwrap();
        chunks.iter().map(|chunk| chunk["source"].as_str().unwrap().to_owned()).collect()
    };
    assert!(sources(&cached).iter().all(|source| source == "memory" || source == "object"));

    // Killed while answers come, some of them after that.
    let client = Client::connect(cluster.server()).unwrap();
    let corpus = v1::CorpusSource { corpus: "harbor".into(), top_k: 4, ..v1::CorpusSource::default() };
    let prompt = v1::Prompt {
        source: Some(v1::prompt::Source::Corpus(corpus)),
        question: QUESTION.into(),
        ..Default::default()
    };
    let request = v1::GenerateRequest {
        prompt: Some(prompt),
        options: Some(options("clip", 0.2)),
        sampling: Some(greedy(60)),
        dump: false,
    };
    let mut opened = client.open(request.clone()).unwrap();
    opened.read_tokens(1).unwrap();
    let address = cluster.cache.address().to_owned();
    cluster.cache.kill().unwrap();
    assert_eq!(opened.finish().unwrap().token_ids.len(), 60);
    for answer in client.generate_together(vec![request; 3]).unwrap() {
        assert_eq!(answer.receipt.effective, "full");
        assert!(answer.receipt.effective_reason.contains("cache service"), "{}", answer.receipt.effective_reason);
        assert!(answer.sources().iter().all(|source| *source == "fresh"));
        assert!(answer.receipt.chunks.iter().all(|chunk| !chunk.reason.is_empty()));
    }

    let store = format!("file://{}", cluster.store().display());
    let settings = [&["--object-store", store.as_str()], &TINY[..]].concat();
    cluster.cache = Process::start_at("cache", &address, &settings, cluster.folder()).unwrap();
    wait_serving(&cluster.cache).unwrap();
    let again = done(cluster.server());
    assert_eq!(again["text"], cached["text"]);
    assert!(sources(&again).iter().all(|source| source == "object"), "{:?}", sources(&again));
}
