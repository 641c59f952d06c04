//! Random prompts through the running system: whatever chunks, lengths, repeats and options come, an answer keeps its
//! promises and nothing fails. Tiny seeded models with the real tokenizers; the seed of the cases is fixed.
#![allow(missing_docs)]

use kvsplice_proto::v1;
use kvsplice_tests::{Answer, Client, Cluster, characters, inline, raw, request};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner};

const TINY: [&str; 5] = ["--shape", "tiny", "--random-weights", "--dtype", "f32"];
const SEED: u64 = 20_251_130;
const CASES: u32 = 80;

/// One request.
#[derive(Clone, Debug)]
struct Case {
    chunks: Vec<String>,
    /// A literal prefix, or the chat template.
    prefix: Option<&'static str>,
    question: String,
    options: v1::Options,
    max_tokens: u32,
    store: bool,
}

/// A piece of the corpus, cut anywhere: 1 to about 300 tokens.
fn text() -> impl Strategy<Value = String> {
    let length = prop_oneof![2 => 1usize..1100, 1 => 1usize..12];
    (0usize..30_000, length).prop_map(|(first, count)| characters(first, count))
}

/// Some texts in some order, with repeats.
fn chunks() -> impl Strategy<Value = Vec<String>> {
    let picks = prop::collection::vec(any::<prop::sample::Index>(), 1..=12);
    (prop::collection::vec(text(), 1..=8), picks)
        .prop_map(|(pool, picks)| picks.iter().map(|pick| pick.get(&pool).clone()).collect())
}

fn options() -> impl Strategy<Value = v1::Options> {
    let name = |names: &'static [&'static str]| prop::sample::select(names).prop_map(|name| Some(name.to_owned()));
    let strategy = prop_oneof![4 => Just("clip"), 1 => Just("direct"), 1 => Just("full")];
    let ratio = prop_oneof![1 => Just(0f32), 1 => Just(1f32), 4 => 0f32..=1f32];
    let group = name(&["none", "8,5", "2,1", "16,4", "256,2"]);
    let layers = name(&["last", "0..1", "0.5..1"]);
    let clip = (ratio, name(&["charged", "nominal"]), group, name(&["chunk", "joint"]), layers);
    (strategy, clip, any::<(bool, bool)>()).prop_map(|(strategy, clip, (shared_prefix, renumber))| {
        let (ratio, budget, group, softmax, aux_layers) = clip;
        let direct = strategy == "direct";
        v1::Options {
            strategy: Some(strategy.to_owned()),
            ratio: Some(ratio),
            budget,
            group,
            softmax,
            aux_layers,
            shared_prefix: direct.then_some(shared_prefix),
            renumber: direct.then_some(renumber),
        }
    })
}

fn case() -> impl Strategy<Value = Case> {
    let prefix = prop::sample::select(&[None, Some(""), Some("Read the passages.\n")][..]);
    let question = prop_oneof![1 => Just("?".to_owned()), 2 => text().prop_map(|text| format!("{text}?"))];
    (chunks(), prefix, question, options(), 0u32..4, any::<bool>()).prop_map(
        |(chunks, prefix, question, options, max_tokens, store)| Case {
            chunks,
            prefix,
            question,
            options,
            max_tokens,
            store,
        },
    )
}

macro_rules! holds {
    ($condition:expr, $($message:tt)+) => {
        let kept: bool = $condition;
        if !kept {
            return Err(TestCaseError::fail(format!($($message)+)));
        }
    };
}

#[test]
fn a_random_prompt_keeps_every_promise() {
    let cluster = Cluster::start(&TINY).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    println!("{CASES} cases from seed {SEED}");
    let config = Config {
        cases: CASES,
        rng_seed: RngSeed::Fixed(SEED),
        failure_persistence: None,
        max_shrink_iters: 100,
        ..Config::default()
    };
    let result = TestRunner::new(config).run(&case(), |case| {
        let prompt = match case.prefix {
            Some(prefix) => raw(prefix, &case.chunks, &case.question, case.store),
            None => inline(&case.chunks, &case.question, case.store),
        };
        let answer = client
            .generate(request(prompt, case.options.clone(), case.max_tokens))
            .map_err(|status| TestCaseError::fail(format!("{status:?}")))?;
        check(&case, &answer)
    });
    if let Err(error) = result {
        panic!("{error}\n{}", cluster.worker.log_text().unwrap());
    }
}

fn check(case: &Case, answer: &Answer) -> Result<(), TestCaseError> {
    let (dump, receipt) = (&answer.dump, &answer.receipt);
    let starts = &dump.chunk_starts;
    let tokens = receipt.tokens.unwrap_or_default();
    let clip = receipt.effective == "clip";
    let charged = case.options.budget.as_deref() == Some("charged");
    let ratio = case.options.ratio.unwrap_or_default();
    holds!(starts.len() == case.chunks.len() + 1, "{} chunk starts", starts.len());
    holds!(receipt.chunks.len() == case.chunks.len(), "{} chunks in the receipt", receipt.chunks.len());

    let (mut selectable, mut picked, mut all_rows) = (0, 0, 0);
    for (place, chunk) in receipt.chunks.iter().enumerate() {
        let slots = starts[place]..starts[place + 1];
        let rows = dump.rows.iter().filter(|row| slots.contains(row)).count() as u32;
        holds!(chunk.tokens == slots.end - slots.start, "chunk {place} has {} tokens, not {slots:?}", chunk.tokens);
        holds!(chunk.rows == rows, "chunk {place} has {} rows, the dump {rows}", chunk.rows);
        all_rows += rows;
        if chunk.source == "fresh" {
            holds!(rows == chunk.tokens && !chunk.reason.is_empty(), "chunk {place} is fresh with {rows} rows");
            continue;
        }
        let exact = place == 0 && (charged || case.chunks.len() == 1);
        if clip && !exact {
            selectable += chunk.tokens;
            picked += rows;
        } else {
            holds!(rows == 0, "chunk {place} is not selectable, but has {rows} rows");
        }
    }
    holds!(all_rows as usize == dump.rows.len(), "{} rows, {all_rows} of them in chunks", dump.rows.len());
    holds!(dump.rows.windows(2).all(|pair| pair[0] < pair[1]), "rows are not ascending");
    let budget = (f64::from(ratio) * f64::from(selectable)).round() as u32;
    if clip && ratio >= 1.0 {
        holds!(picked == selectable, "ratio 1 picked {picked} of {selectable}");
    } else if clip && charged {
        holds!(picked <= budget, "picked {picked} of {selectable} tokens, the budget is {budget}");
    }
    if clip && selectable > 0 {
        let share = f64::from(picked) / f64::from(selectable);
        holds!((receipt.ratio_charged - share).abs() < 1e-9, "charged {}, not {share}", receipt.ratio_charged);
    }

    let prompt = tokens.prefix + tokens.chunk + tokens.question;
    let accounted = tokens.reused_exact + tokens.reused_approximate + tokens.recomputed;
    holds!(prompt == accounted, "{prompt} tokens, {accounted} accounted for: {tokens:?}");
    holds!(prompt == answer.planned.prompt_tokens && prompt as usize == dump.token_ids.len(), "prompt: {tokens:?}");
    holds!(tokens.chunk == receipt.chunks.iter().map(|chunk| chunk.tokens).sum::<u32>(), "chunks: {tokens:?}");
    let at_least = all_rows + tokens.question;
    let recomputed = [at_least, at_least + tokens.prefix].contains(&tokens.recomputed);
    holds!(recomputed, "{all_rows} rows and the question: {tokens:?}");
    holds!(tokens.output == case.max_tokens && answer.token_ids.len() as u32 == case.max_tokens, "{tokens:?}");

    let all_fresh = answer.sources().iter().all(|source| *source == "fresh");
    holds!(all_fresh == (receipt.effective == "full"), "effective {} of {:?}", receipt.effective, answer.sources());
    holds!(!case.store || receipt.effective == case.options.strategy(), "stored, yet {}", receipt.effective_reason);
    holds!(!dump.logits.is_empty() && dump.logits.iter().all(|logit| logit.is_finite()), "logits are not numbers");
    Ok(())
}
