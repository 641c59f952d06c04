//! What an answer must be: that of a system which nothing disturbs, with the chunks fresh that the receipt calls fresh.
//!
//! The reference has its own store, cache service, worker and head. Stored KV and computation are f32, so that a text can
//! be compared with another that was computed in another way.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use kvsplice_kv::{ChunkId, Encoding, Variant};
use kvsplice_proto::v1::part::Kind;
use kvsplice_proto::v1::prefill_event::Event;
use kvsplice_proto::v1::prefill_request::Message;
use kvsplice_proto::v1::worker_client::WorkerClient;
use kvsplice_proto::{client, v1};

use crate::{Answer, CacheService, Client, FaultyStore, Pair, greedy, inline, request, strategy, worker_status};

/// Tiny models in single precision, whose chunks are loaded if they are there: how fast this machine is decides nothing.
pub const TINY: [&str; 7] =
    ["--shape", "tiny", "--random-weights", "--dtype", "f32", "--set", "worker.plan_loads=false"];
/// Tiny models whose KV is stored as it was computed, and loaded if it is there: how fast this machine is decides nothing.
pub const EXACT: [&str; 11] = [
    "--shape",
    "tiny",
    "--random-weights",
    "--dtype",
    "f32",
    "--set",
    "head.encoding=f32",
    "--set",
    "head.auxiliary_encoding=f32",
    "--set",
    "worker.plan_loads=false",
];
/// Single precision, other summation orders.
const TOLERANCE: f32 = 1e-3;
const VARIANT: &str = "f32-clean-1";
/// Where a chunk's KV comes from when it is not computed.
const STORED: [&str; 4] = ["device", "memory", "disk", "object"];

/// How a right answer came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As undisturbed, from stored chunks alone.
    Stored,
    /// As undisturbed, with chunks that were encoded anew.
    Repaired,
    /// With chunks that were computed in context, as the receipt says.
    Fresh,
}

/// The undisturbed system.
#[derive(Debug)]
pub struct Reference {
    client: Client,
    pair: Pair,
    _cache: CacheService,
    store: Arc<FaultyStore>,
    model: String,
    known: HashMap<Case, Answer>,
}

/// Chunks, question, specification, output tokens, and the chunks that are fresh.
type Case = (Vec<String>, String, String, u32, BTreeSet<String>);

impl Reference {
    /// Starts it.
    pub fn start() -> Result<Self> {
        let store = Arc::new(FaultyStore::default());
        let cache = CacheService::start(store.clone(), 0, "127.0.0.1:0")?;
        let pair = Pair::start(cache.address(), &EXACT)?;
        let model = worker_status(pair.worker.address())?.model.context("the worker has a model")?.digest;
        let client = Client::connect(pair.head.address())?;
        Ok(Self { client, pair, _cache: cache, store, model, known: HashMap::new() })
    }

    /// Checks the answer to `question` over `chunks` under the strategy `spec`: its text, tokens and first logits, and that
    /// it gives a reason for whatever was not as asked. Fails with what differs.
    pub fn check(&mut self, chunks: &[String], question: &str, spec: &str, answer: &Answer) -> Result<Verdict> {
        let sources = answer.sources();
        let receipt = &answer.receipt;
        ensure!(sources.len() == chunks.len(), "{} chunks in the receipt", sources.len());
        for chunk in &receipt.chunks {
            let as_asked = STORED.contains(&chunk.source.as_str());
            ensure!(as_asked || !chunk.reason.is_empty(), "no reason for {chunk:?}");
        }
        let asked = spec.split(':').next().unwrap_or_default();
        ensure!(
            receipt.effective == asked || !receipt.effective_reason.is_empty(),
            "no reason for {}",
            receipt.effective
        );

        let spec = if receipt.effective == "full" { "full" } else { spec };
        let is_fresh = |(_, source): &(&String, &&str)| spec != "full" && **source == "fresh";
        let fresh: BTreeSet<String> =
            answer.planned.chunks.iter().zip(&sources).filter(is_fresh).map(|(id, _)| id.clone()).collect();
        let tokens = answer.token_ids.len() as u32;
        let stored = |id: &String| if fresh.contains(id) { None } else { Some(VARIANT.to_owned()) };
        let variants: Vec<_> = answer.planned.chunks.iter().map(stored).collect();
        // A head trusts for a while what it knows of stored variants, so that hiding chunks from it says nothing: the rows are
        // taken as they are.
        let by_variants = spec.starts_with("craft");
        let case = if by_variants { ("direct", BTreeSet::new()) } else { (spec, fresh.clone()) };
        let expected = self.answer(chunks, question, case.0, tokens, &case.1)?;
        if by_variants {
            let same = self.replays(answer, spec, &variants)?;
            ensure!(same, "the tokens or logits differ from a run with just these rows and fresh chunks");
        } else if expected.dump.rows == answer.dump.rows {
            let difference = expected.logit_difference(answer);
            ensure!(difference <= TOLERANCE, "the first logits differ by {difference}");
            ensure!(expected.text == answer.text, "{:?} instead of {:?}", answer.text, expected.text);
            ensure!(expected.token_ids == answer.token_ids, "the tokens differ");
        } else {
            // The rows were chosen before these chunks became fresh.
            ensure!(spec.starts_with("clip") && !fresh.is_empty(), "{spec}: the rows differ");
            let same = self.replays(answer, spec, &variants)?;
            ensure!(same, "the tokens or logits differ from a run with just these rows and fresh chunks");
        }
        Ok(match (spec == "full" && asked != "full" || !fresh.is_empty(), sources.contains(&"repaired")) {
            (true, _) => Verdict::Fresh,
            (false, true) => Verdict::Repaired,
            (false, false) => Verdict::Stored,
        })
    }

    /// The answer when just the chunks `fresh` are not stored.
    pub fn answer(
        &mut self,
        chunks: &[String],
        question: &str,
        spec: &str,
        tokens: u32,
        fresh: &BTreeSet<String>,
    ) -> Result<Answer> {
        let case = (chunks.to_vec(), question.to_owned(), spec.to_owned(), tokens, fresh.clone());
        if let Some(known) = self.known.get(&case) {
            return Ok(known.clone());
        }
        if !fresh.is_empty() {
            // Stores the others.
            self.answer(chunks, question, spec, tokens, &BTreeSet::new())?;
        }
        let chosen = strategy(spec);
        let store = fresh.is_empty() && spec != "full";
        self.store.hide(fresh.iter().cloned());
        let answer = self.client.generate(request(inline(chunks, question, store), chosen, tokens));
        self.store.hide([]);
        let answer = answer.with_context(|| format!("ask the reference, {spec}"))?;
        for (id, source) in answer.planned.chunks.iter().zip(answer.sources()) {
            let as_meant = spec == "full" || (source == "fresh") == fresh.contains(id);
            ensure!(as_meant && source != "repaired", "the reference is disturbed: {id} is {source}");
        }
        self.known.insert(case, answer.clone());
        Ok(answer)
    }

    /// Keeps the chunks' KV as it is in the context of this prompt, beside that of each chunk alone.
    pub fn capture(&mut self, chunks: &[String], question: &str) -> Result<()> {
        for spec in ["direct", "craft:capture=true"] {
            self.client.generate(request(inline(chunks, question, true), strategy(spec), 1))?;
        }
        Ok(())
    }

    /// As [`Reference::check`], for `craft` over a prompt whose chunks were captured in its own context and in no other. Each
    /// chunk that the receipt calls stored may come of the capture, or alone where the capture was not to be had.
    pub fn check_captured(&mut self, chunks: &[String], question: &str, answer: &Answer) -> Result<Verdict> {
        let sources = answer.sources();
        for chunk in &answer.receipt.chunks {
            let as_asked = STORED.contains(&chunk.source.as_str());
            ensure!(as_asked || !chunk.reason.is_empty(), "no reason for {chunk:?}");
        }
        if answer.receipt.effective != "craft" || !sources.contains(&"repaired") && answer.dump.rows.is_empty() {
            // What was captured behind the same chunks is what full attention computes.
            let tokens = answer.token_ids.len() as u32;
            let full = self.answer(chunks, question, "full", tokens, &BTreeSet::new())?;
            let difference = full.logit_difference(answer);
            ensure!(difference <= TOLERANCE, "the first logits differ by {difference}");
            ensure!(full.token_ids == answer.token_ids, "the tokens differ from those of full");
            let fresh = answer.receipt.effective != "craft";
            return Ok(if fresh { Verdict::Fresh } else { Verdict::Stored });
        }
        let ids: Vec<ChunkId> = answer.planned.chunks.iter().map(|id| Ok(id.parse()?)).collect::<Result<_>>()?;
        for alone in 0..1u32 << ids.len() {
            let variant = |(index, source): (usize, &&str)| match *source {
                "fresh" => None,
                "repaired" => Some(VARIANT.to_owned()),
                _ if alone >> index & 1 == 1 => Some(VARIANT.to_owned()),
                _ => Some(Variant::context(Encoding::F32, &ids[..index]).to_string()),
            };
            let variants: Vec<_> = sources.iter().enumerate().map(variant).collect();
            if self.replays(answer, "craft", &variants)? {
                let repaired = sources.contains(&"repaired");
                return Ok(if repaired { Verdict::Repaired } else { Verdict::Fresh });
            }
        }
        bail!("no run with just these rows, fresh and repaired chunks gives these tokens and logits")
    }

    /// Whether the worker gives the same tokens and first logits for just the rows of `answer`, with each chunk loaded in a
    /// variant or fresh.
    fn replays(&self, answer: &Answer, spec: &str, variants: &[Option<String>]) -> Result<bool> {
        let (ids, starts) = (&answer.dump.token_ids, &answer.dump.chunk_starts);
        let part = |kind: Kind, first: u32, end: usize| v1::Part {
            kind: kind.into(),
            token_ids: ids[first as usize..end].to_vec(),
            first_slot: first,
            first_position: first,
            ..v1::Part::default()
        };
        let mut parts = vec![part(Kind::Prefix, 0, starts[0] as usize)];
        for ((pair, id), variant) in starts.windows(2).zip(&answer.planned.chunks).zip(variants) {
            let chunk = if variant.is_some() { id.clone() } else { String::new() };
            let variant = variant.clone().unwrap_or_default();
            let part = part(Kind::Chunk, pair[0], pair[1] as usize);
            parts.push(v1::Part { chunk, variant, behind_prefix: true, ..part });
        }
        let question = *starts.last().context("the question has a first slot")?;
        parts.push(part(Kind::Question, question, ids.len()));
        let start = v1::PrefillStart {
            model: self.model.clone(),
            owner: "default".to_owned(),
            parts,
            sampling: Some(greedy(answer.token_ids.len() as u32)),
            variant: VARIANT.to_owned(),
            options: Some(strategy(spec)),
            want_logits: true,
            ..v1::PrefillStart::default()
        };
        let ranges = answer.dump.rows.iter().map(|&row| v1::Range { first: row, end: row + 1 }).collect();
        let rows = v1::Rows { ranges, complete_below: ids.len() as u32 };
        let messages =
            [Message::Start(start), Message::Rows(rows)].map(|message| v1::PrefillRequest { message: Some(message) });
        let (tokens, logits) = self.client.run(async {
            let mut worker = WorkerClient::new(client::channel(self.pair.worker.address())?);
            let mut events = worker.prefill(tokio_stream::iter(messages)).await?.into_inner();
            let (mut tokens, mut logits) = (Vec::new(), Vec::new());
            while let Some(event) = events.message().await? {
                match event.event {
                    Some(Event::Token(token)) => tokens.push(token.id),
                    Some(Event::Logits(bytes)) => logits = floats(&bytes),
                    Some(Event::Done(_)) => break,
                    _ => {}
                }
            }
            Ok::<_, anyhow::Error>((tokens, logits))
        })?;
        let far = |(one, other): (&f32, &f32)| (one - other).abs() > TOLERANCE;
        let same = logits.len() == answer.dump.logits.len() && !logits.iter().zip(&answer.dump.logits).any(far);
        Ok(same && tokens == answer.token_ids)
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
