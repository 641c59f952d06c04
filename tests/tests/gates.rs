//! The gates that every splice must pass before a figure of quality or speed means anything, through the running system:
//! tiny seeded models with the real tokenizers, chunk KV stored as f32 so that equal means equal.
#![allow(missing_docs)]

use std::sync::{Arc, Mutex, Weak};

use kvsplice_proto::v1;
use kvsplice_proto::v1::part::Kind;
use kvsplice_proto::v1::worker_client::WorkerClient;
use kvsplice_tests::{Answer, Client, Cluster, EXACT, Shared, inline, options, raw, request, shared, words};

/// Single precision, other summation orders.
const EXACT_TOLERANCE: f32 = 1e-3;
const BATCH_TOLERANCE: f32 = 1e-4;
const QUESTION: &str = "Who keeps the beehives of the harbor?";

static CLUSTER: Shared = Mutex::new(Weak::new());

fn start() -> (Arc<Cluster>, Client) {
    let cluster = shared(&CLUSTER, &EXACT).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    (cluster, client)
}

/// Chunks of several lengths, none of which another test has.
fn chunks(first_word: usize, lengths: &[usize]) -> Vec<String> {
    let mut first = first_word;
    let mut chunks = Vec::new();
    for &length in lengths {
        chunks.push(words(first, length));
        first += length;
    }
    chunks
}

#[track_caller]
fn assert_near(what: &str, one: &Answer, other: &Answer, tolerance: f32) {
    let difference = one.logit_difference(other);
    assert!(difference <= tolerance, "{what}: logits differ by {difference}");
    assert_eq!(one.token_ids, other.token_ids, "{what}");
    assert_eq!(one.text, other.text, "{what}");
}

#[test]
fn ratio_one_equals_full() {
    let (_cluster, client) = start();
    for (first, lengths) in [(0, &[60, 3, 120, 1, 40][..]), (300, &[1, 1]), (400, &[150, 150, 150])] {
        let chunks = chunks(first, lengths);
        let ask = |options| client.generate(request(inline(&chunks, QUESTION, true), options, 12)).unwrap();
        let full = ask(options("full", 0.2));
        let all = ask(options("clip", 1.0));
        assert_near(&format!("{lengths:?}"), &all, &full, EXACT_TOLERANCE);
        assert_eq!(all.receipt.effective, "clip");
        let tokens = all.receipt.tokens.unwrap();
        assert_eq!(tokens.reused_approximate, 0);
        assert!(tokens.reused_exact > 0, "the first chunk is not computed again");
        let first = all.dump.chunk_starts[1];
        let rows: Vec<u32> = (first..all.dump.chunk_starts[lengths.len()]).collect();
        assert_eq!(all.dump.rows, rows, "every token of every other chunk");
    }
}

#[test]
fn ratio_zero_equals_direct() {
    let (_cluster, client) = start();
    let chunks = chunks(900, &[50, 80, 20, 110]);
    let ask = |options| client.generate(request(inline(&chunks, QUESTION, true), options, 12)).unwrap();
    let direct = ask(options("direct", 0.2));
    let none = ask(options("clip", 0.0));
    assert_near("ratio 0", &none, &direct, 0.0);
    assert!(none.dump.rows.is_empty() && direct.dump.rows.is_empty());
    assert!(none.receipt.tokens.unwrap().reused_approximate > 0);
    let full = ask(options("full", 0.2));
    assert!(direct.logit_difference(&full) > EXACT_TOLERANCE, "these prompts cannot tell direct from full");
}

#[test]
fn a_single_chunk_equals_full_and_computes_the_question_only() {
    let (_cluster, client) = start();
    let chunk = chunks(1200, &[130]);
    let ask = |options| client.generate(request(inline(&chunk, QUESTION, true), options, 12)).unwrap();
    let full = ask(options("full", 0.2));
    let nominal = v1::Options { budget: Some("nominal".into()), ..options("clip", 0.4) };
    for options in [options("direct", 0.2), options("clip", 0.2), options("clip", 1.0), nominal] {
        let answer = ask(options.clone());
        assert_near(&format!("{options:?}"), &answer, &full, EXACT_TOLERANCE);
        let tokens = answer.receipt.tokens.unwrap();
        assert_eq!(tokens.recomputed, tokens.question, "{options:?}");
        assert_eq!(tokens.reused_approximate, 0, "{options:?}");
        assert!(answer.dump.rows.is_empty(), "{options:?}");
    }
}

#[test]
fn requests_that_share_chunks_do_not_see_each_others_rows() {
    let (_cluster, client) = start();
    let chunks = chunks(1400, &[70, 90, 60, 80]);
    let questions = ["Who built the ferry?", "When was the flood?", "What does the organ sound like?", "Why eels?"];
    let options = v1::Options { group: Some("none".into()), ..options("clip", 0.3) };
    let requests: Vec<_> =
        questions.iter().map(|question| request(inline(&chunks, question, true), options.clone(), 24)).collect();
    let alone: Vec<Answer> = requests.iter().map(|request| client.generate(request.clone()).unwrap()).collect();
    assert!(alone.windows(2).all(|pair| pair[0].dump.rows != pair[1].dump.rows), "the questions pick the same rows");
    // Twice each, so that equal and different rows meet.
    let twice = [requests.clone(), requests].concat();
    for (place, together) in client.generate_together(twice).unwrap().iter().enumerate() {
        let alone = &alone[place % questions.len()];
        assert_eq!(together.dump.rows, alone.dump.rows);
        assert_near(questions[place % questions.len()], together, alone, BATCH_TOLERANCE);
    }
}

#[test]
fn eight_requests_at_once_equal_eight_in_turn() {
    let (_cluster, client) = start();
    let strategies = [options("full", 0.2), options("direct", 0.2), options("clip", 0.2), options("clip", 0.7)];
    let prompt = |place: usize| inline(&chunks(1800 + 70 * place, &[30 + 9 * place, 40, 50 + place]), QUESTION, true);
    let requests: Vec<_> =
        (0..8).map(|place| request(prompt(place), strategies[place % 4].clone(), 20 + 3 * place as u32)).collect();
    let alone: Vec<Answer> = requests.iter().map(|request| client.generate(request.clone()).unwrap()).collect();
    let together = client.generate_together(requests).unwrap();
    for (place, (together, alone)) in together.iter().zip(&alone).enumerate() {
        assert_near(&format!("request {place}"), together, alone, BATCH_TOLERANCE);
    }

    let scored: Vec<_> = (0..8)
        .map(|place| v1::ScoreAnswerRequest {
            prompt: Some(prompt(place)),
            options: Some(strategies[place % 4].clone()),
            answer: words(10 * place, 12),
            ..Default::default()
        })
        .collect();
    let alone: Vec<_> = scored.iter().map(|request| client.score(request.clone()).unwrap()).collect();
    for (together, alone) in client.score_together(scored).unwrap().iter().zip(&alone) {
        assert_eq!(together.token_ids, alone.token_ids);
        assert_eq!(together.argmax_ids, alone.argmax_ids);
        assert_eq!(together.logprobs.len(), alone.token_ids.len());
        for (together, alone) in together.logprobs.iter().zip(&alone.logprobs) {
            assert!((together - alone).abs() <= BATCH_TOLERANCE, "{together} at once, {alone} alone");
        }
    }
}

#[test]
fn without_a_cached_chunk_every_strategy_is_full_to_the_bit() {
    let (_cluster, client) = start();
    let chunks = chunks(3000, &[45, 70, 33]);
    let ask = |options| client.generate(request(inline(&chunks, QUESTION, false), options, 16)).unwrap();
    let full = ask(options("full", 0.2));
    for strategy in ["direct", "clip"] {
        let answer = ask(options(strategy, 0.2));
        assert_eq!(answer.dump.logits, full.dump.logits, "{strategy}");
        assert_eq!(answer.text, full.text);
        assert_eq!(answer.receipt.effective, "full");
        assert!(answer.receipt.effective_reason.contains("not cached"), "{}", answer.receipt.effective_reason);
        assert_eq!(answer.sources(), ["fresh"; 3]);
        assert!(answer.receipt.chunks.iter().all(|chunk| !chunk.reason.is_empty()));
    }
}

#[test]
fn a_miss_in_the_middle_is_fresh_and_the_others_are_reused() {
    let (_cluster, client) = start();
    let all = chunks(3300, &[55, 65, 75]);
    let kept = [&all[0], &all[2]];
    client.generate(request(inline(&kept, QUESTION, true), options("clip", 0.2), 1)).unwrap();
    for strategy in ["clip", "direct"] {
        let answer = client.generate(request(inline(&all, QUESTION, false), options(strategy, 0.2), 4)).unwrap();
        assert_eq!(answer.receipt.effective, strategy);
        let sources = answer.sources();
        assert_eq!(sources[1], "fresh");
        assert!(!answer.receipt.chunks[1].reason.is_empty());
        assert!(sources[0] != "fresh" && sources[2] != "fresh", "{sources:?}");
        let starts = &answer.dump.chunk_starts;
        let fresh = (starts[1]..starts[2]).filter(|slot| answer.dump.rows.contains(slot)).count();
        assert_eq!(fresh as u32, answer.receipt.chunks[1].tokens, "{strategy}: every row of the fresh chunk");
        assert_eq!(answer.receipt.chunks[1].rows, answer.receipt.chunks[1].tokens);
        assert_eq!(answer.receipt.chunks[0].rows, 0);
    }
}

#[test]
fn a_chunk_may_stand_in_a_prompt_several_times() {
    let (_cluster, client) = start();
    let two = chunks(3600, &[60, 50]);
    let repeated = [&two[0], &two[1], &two[0], &two[0], &two[1]];
    let ask = |options| client.generate(request(inline(&repeated, QUESTION, true), options, 12)).unwrap();
    let full = ask(options("full", 0.2));
    assert_near("ratio 1", &ask(options("clip", 1.0)), &full, EXACT_TOLERANCE);
    let clip = ask(options("clip", 0.3));
    let ids = &clip.planned.chunks;
    assert!(ids[0] == ids[2] && ids[2] == ids[3] && ids[1] == ids[4] && ids[0] != ids[1]);
    assert_eq!(clip.receipt.chunks[0].rows, 0, "the first placement is exact");
    assert!(clip.receipt.chunks[2].rows + clip.receipt.chunks[3].rows > 0, "the others are not");
    assert!(clip.sources().iter().all(|source| *source != "fresh"));
    // Stored once: without --store it is found as well.
    let again = client.generate(request(inline(&repeated, QUESTION, false), options("clip", 0.3), 12)).unwrap();
    assert_near("again", &again, &clip, BATCH_TOLERANCE);
}

#[test]
fn an_order_of_chunks_does_not_change_what_another_order_gives() {
    let (_cluster, client) = start();
    let [a, b, c] = <[String; 3]>::try_from(chunks(3900, &[40, 50, 60])).unwrap();
    let ask = |chunks: [&String; 3]| {
        client.generate(request(inline(&chunks, QUESTION, true), options("clip", 0.3), 12)).unwrap()
    };
    let first = ask([&a, &b, &c]);
    ask([&c, &a, &b]);
    ask([&b, &c, &a]);
    assert_near("the first order again", &ask([&a, &b, &c]), &first, 0.0);
}

#[test]
fn decoding_a_token_at_a_time_equals_computing_all_at_once() {
    let (cluster, client) = start();
    let chunks = chunks(4200, &[35, 45]);
    let answer = client.generate(request(inline(&chunks, QUESTION, false), options("full", 0.2), 24)).unwrap();
    let scored = score(&cluster, &client, &answer.dump, &answer.token_ids);
    assert_eq!(scored.argmax_ids, answer.token_ids, "the greedy text of both");

    // The last target is no input of any row, and the one before it only of the last row.
    let mut changed = answer.token_ids.clone();
    changed[22] = 17;
    changed[23] = 19;
    let other = score(&cluster, &client, &answer.dump, &changed);
    assert_eq!(other.logprobs[..22], scored.logprobs[..22], "a later key changes no bit of an earlier row");
    assert_eq!(other.argmax_ids[..23], scored.argmax_ids[..23]);
}

/// Scores tokens after a dumped prompt, every chunk fresh, as a head would ask the worker.
fn score(cluster: &Cluster, client: &Client, dump: &v1::Dump, targets: &[u32]) -> v1::ScoreResponse {
    let starts = &dump.chunk_starts;
    let part = |kind: Kind, first: u32, end: usize| v1::Part {
        kind: kind.into(),
        token_ids: dump.token_ids[first as usize..end].to_vec(),
        first_slot: first,
        first_position: first,
        ..v1::Part::default()
    };
    let mut parts = vec![part(Kind::Prefix, 0, starts[0] as usize)];
    parts.extend(starts.windows(2).map(|pair| part(Kind::Chunk, pair[0], pair[1] as usize)));
    parts.push(part(Kind::Question, *starts.last().unwrap(), dump.token_ids.len()));
    client.run(async {
        let channel = kvsplice_proto::client::channel(cluster.worker.address()).unwrap();
        let mut worker = WorkerClient::new(channel);
        let model = worker.status(v1::WorkerStatusRequest {}).await.unwrap().into_inner().model.unwrap().digest;
        let start = v1::PrefillStart {
            model,
            owner: "default".into(),
            parts,
            variant: "f32-clean-1".into(),
            ..v1::PrefillStart::default()
        };
        let rows = v1::Rows { ranges: Vec::new(), complete_below: dump.token_ids.len() as u32 };
        let request = v1::ScoreRequest {
            start: Some(start),
            rows: Some(rows),
            target_ids: targets.to_vec(),
            ..Default::default()
        };
        worker.score(request).await.unwrap().into_inner()
    })
}

#[test]
fn a_raw_prompt_of_one_question_token_is_answered() {
    let (_cluster, client) = start();
    let chunks = chunks(4500, &[2, 30]);
    for prefix in ["", "Read this.\n"] {
        let ask = |strategy: &str, ratio| {
            client.generate(request(raw(prefix, &chunks, "?", true), options(strategy, ratio), 6)).unwrap()
        };
        let full = ask("full", 0.2);
        assert_eq!(full.receipt.tokens.unwrap().question, 1);
        assert_near("ratio 1", &ask("clip", 1.0), &full, EXACT_TOLERANCE);
        assert_near("ratio 0", &ask("clip", 0.0), &ask("direct", 0.2), 0.0);
    }
}
