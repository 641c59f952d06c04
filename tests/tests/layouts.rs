//! Random prompts through the running system: whatever chunks, lengths, repeats and options come, an answer keeps its
//! promises and nothing fails. Tiny seeded models with the real tokenizers; the seed of the cases is fixed.
#![allow(missing_docs)]

use kvsplice_kv::Options;
use kvsplice_kv::options::Budget;
use kvsplice_tests::{Answer, Client, Cluster, TINY, characters, inline, raw, request};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner};

const SEED: u64 = 20_251_130;
const CASES: u32 = 160;

/// One request.
#[derive(Clone, Debug)]
struct Case {
    chunks: Vec<String>,
    /// A literal prefix, or the chat template.
    prefix: Option<&'static str>,
    question: String,
    options: Options,
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

/// A specification of any strategy with any of its options.
fn options() -> impl Strategy<Value = Options> {
    let pick = |texts: &'static [&'static str]| prop::sample::select(texts);
    let ratio = || prop_oneof![1 => Just(0f32), 1 => Just(1f32), 4 => 0f32..=1f32];
    let group = pick(&["none", "8,5", "2,1", "16,4", "256,2"]);
    let layers = || pick(&["last", "0..1", "0.5..1"]);
    let scored = (ratio(), pick(&["charged", "nominal"]), group, pick(&["mean", "max"]), layers()).prop_map(
        |(ratio, budget, group, reduce, layers)| {
            (format!("{ratio}:budget={budget}:group={group}:reduce={reduce}"), layers)
        },
    );
    let clip = (scored.clone(), pick(&["chunk", "joint"]))
        .prop_map(|((text, layers), softmax)| format!("clip:{text}:softmax={softmax}:aux_layers={layers}"));
    let guided = (scored, pick(&["context", "question"]))
        .prop_map(|((text, layers), guide)| format!("guided:{text}:guide_layers={layers}:guide={guide}"));
    let blend = (ratio(), pick(&["paper", "code"]), pick(&["none", "8,5"]))
        .prop_map(|(ratio, mode, group)| format!("blend:{ratio}:blend={mode}:group={group}"));
    let lego = (0u32..40).prop_map(|first| format!("lego:first_tokens={first}"));
    let selecting = (
        prop_oneof![3 => clip, 2 => guided, 2 => blend, 1 => lego],
        pick(&["true", "true", "false"]),
        pick(&["", "", ":mask=bottom-right", ":context_temperature=0.8:context_scale=0.9", ":early_stop=1,0,0"]),
    )
        .prop_map(|(text, shared, more)| format!("{text}:shared_prefix={shared}{more}"));
    let direct = (any::<bool>(), any::<bool>())
        .prop_map(|(shared, renumber)| format!("direct:shared_prefix={shared}:renumber={renumber}"));
    let ape =
        pick(&["ape", "ape:context_form=code", "ape:context_temperature=1:context_scale=1"]).prop_map(str::to_owned);
    let craft = pick(&["craft", "craft:alpha=0.3", "craft:capture=true", "craft:alpha=1:early_stop=none"])
        .prop_map(str::to_owned);
    let reusing = prop_oneof![6 => selecting, 1 => direct, 1 => ape, 2 => craft, 1 => Just("prefix".to_owned())];
    let reusing = (reusing, any::<bool>()).prop_map(|(text, kept)| format!("{text}:prefix_cache={kept}"));
    prop_oneof![10 => reusing, 1 => Just("full".to_owned())]
        .prop_map(|text| text.parse().unwrap_or_else(|error| panic!("{text}: {error}")))
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
            .generate(request(prompt, case.options.into(), case.max_tokens))
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
    let options = &case.options;
    let selects = ["clip", "guided", "blend", "lego", "craft"].contains(&receipt.effective.as_str());
    let counted = ["clip", "guided"].contains(&receipt.effective.as_str());
    let charged = options.budget == Budget::Charged;
    holds!(starts.len() == case.chunks.len() + 1, "{} chunk starts", starts.len());
    holds!(receipt.chunks.len() == case.chunks.len(), "{} chunks in the receipt", receipt.chunks.len());

    // What an earlier prompt has left is neither computed nor selected.
    let kept = options.prefix_cache && receipt.effective != "full";
    let (mut selectable, mut picked, mut all_rows) = (0, 0, 0);
    for (place, chunk) in receipt.chunks.iter().enumerate() {
        let slots = starts[place]..starts[place + 1];
        let rows = dump.rows.iter().filter(|row| slots.contains(row)).count() as u32;
        holds!(chunk.tokens == slots.end - slots.start, "chunk {place} has {} tokens, not {slots:?}", chunk.tokens);
        holds!(chunk.rows == rows, "chunk {place} has {} rows, the dump {rows}", chunk.rows);
        all_rows += rows;
        if chunk.source == "fresh" {
            holds!(
                (kept || rows == chunk.tokens) && !chunk.reason.is_empty(),
                "chunk {place} is fresh with {rows} rows"
            );
            continue;
        }
        if chunk.source == "device" {
            holds!(kept && rows == 0, "chunk {place} is held, but has {rows} rows");
            continue;
        }
        let exact = place == 0 && (charged || case.chunks.len() == 1);
        if selects && !exact {
            selectable += chunk.tokens;
            picked += rows;
        } else {
            holds!(rows == 0, "chunk {place} is not selectable, but has {rows} rows");
        }
    }
    holds!(all_rows as usize == dump.rows.len(), "{} rows, {all_rows} of them in chunks", dump.rows.len());
    holds!(dump.rows.windows(2).all(|pair| pair[0] < pair[1]), "rows are not ascending");
    let budget = (f64::from(options.ratio) * f64::from(selectable)).round() as u32;
    if counted && !kept && options.ratio >= 1.0 {
        holds!(picked == selectable, "ratio 1 picked {picked} of {selectable}");
    } else if counted && !kept && charged {
        holds!(picked <= budget, "picked {picked} of {selectable} tokens, the budget is {budget}");
    }
    if counted && !kept && selectable > 0 && options.early_stop.window == 0 {
        let share = f64::from(picked) / f64::from(selectable);
        holds!((receipt.ratio_charged - share).abs() < 1e-9, "charged {}, not {share}", receipt.ratio_charged);
    }
    holds!((0.0..=1.0).contains(&receipt.ratio_charged), "charged {}", receipt.ratio_charged);

    let prompt = tokens.prefix + tokens.chunk + tokens.question;
    let accounted = tokens.reused_exact + tokens.reused_approximate + tokens.recomputed;
    holds!(prompt == accounted, "{prompt} tokens, {accounted} accounted for: {tokens:?}");
    holds!(prompt == answer.planned.prompt_tokens && prompt as usize == dump.token_ids.len(), "prompt: {tokens:?}");
    holds!(tokens.chunk == receipt.chunks.iter().map(|chunk| chunk.tokens).sum::<u32>(), "chunks: {tokens:?}");
    let at_least = all_rows + tokens.question;
    let recomputed = [at_least, at_least + tokens.prefix].contains(&tokens.recomputed);
    holds!(
        recomputed || (kept && tokens.recomputed < at_least + tokens.prefix),
        "{all_rows} rows and the question: {tokens:?}"
    );
    holds!(tokens.output == case.max_tokens && answer.token_ids.len() as u32 == case.max_tokens, "{tokens:?}");

    let all_fresh = answer.sources().iter().all(|source| *source == "fresh");
    let exact = ["full", "prefix"].contains(&receipt.effective.as_str());
    holds!(!all_fresh || exact, "effective {} of {:?}", receipt.effective, answer.sources());
    holds!(!exact || tokens.reused_approximate == 0, "exact, with {tokens:?}");
    let asked = options.strategy.name();
    let captured = options.capture && receipt.effective == "full";
    holds!(!case.store || receipt.effective == asked || captured, "stored, yet {}", receipt.effective_reason);
    holds!(!dump.logits.is_empty() && dump.logits.iter().all(|logit| logit.is_finite()), "logits are not numbers");
    Ok(())
}
