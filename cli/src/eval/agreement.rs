//! `kvsplice eval agreement`: along the gold answers of generated prompts, how far each strategy is from full attention.

use clap::Args;
use serde_json::json;

use super::client::Client;
use super::count::counting;
use super::flags::{self, CommonFlags};
use super::plan::{Item, Measures, Plan};
use super::run::carry_out;
use super::tasks;
use super::tasks::agreement::{Kind, Setup, generate};

pub(super) const EXAMPLES: &str = "Examples:\n  kvsplice eval agreement --samples 12 --strategies full,direct,clip,guided\n  \
    kvsplice eval agreement --kinds hop,needle --strategies direct,clip:0.1,clip:0.2:group=none --no-text";

/// Flags of `eval agreement`.
#[derive(Args, Clone, Debug)]
pub(crate) struct AgreementFlags {
    /// Strategies, each NAME, NAME:RATIO or NAME:OPTION=VALUE; full is always among them. For craft, each prompt's chunks
    /// are first captured in another order
    #[arg(long, value_name = "LIST", default_value = "full,direct,clip,guided")]
    strategies: String,
    /// Prompts in all, the kinds in turn
    #[arg(long, value_name = "N", default_value_t = 48)]
    samples: usize,
    /// Tokens of the whole prompt, at most
    #[arg(long, value_name = "N", default_value_t = 1300)]
    tokens: usize,
    #[command(flatten)]
    prompts: PromptFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

/// Which prompts are generated.
#[derive(Args, Clone, Debug)]
pub(super) struct PromptFlags {
    /// hop, hop2, needle, multikey, multivalue, ordering, or all
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "all")]
    kinds: Vec<String>,
    /// Tokens a chunk, at most
    #[arg(long, value_name = "N", default_value_t = 200)]
    chunk_tokens: usize,
    /// Measure no answers: quicker, without score and time
    #[arg(long)]
    no_text: bool,
}

impl PromptFlags {
    /// Usage failures come before anything starts.
    pub(super) fn kinds(&self) -> anyhow::Result<Vec<Kind>> {
        Kind::read(&self.kinds)
    }

    /// Settings that decide a result, but for the length.
    pub(super) fn settings(&self, kinds: &[Kind]) -> serde_json::Map<String, serde_json::Value> {
        let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        let mut settings = serde_json::Map::new();
        settings.insert("kinds".to_owned(), json!(names));
        settings.insert("chunk_tokens".to_owned(), json!(self.chunk_tokens));
        settings.insert("text".to_owned(), json!(!self.no_text));
        settings
    }

    /// Words of the command line that generates the same prompts, but for the length.
    pub(super) fn words(&self, kinds: &[Kind], samples: usize) -> Vec<String> {
        let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        let words =
            ["eval", "agreement", "--kinds", &names.join(","), "--samples", &samples.to_string(), "--chunk-tokens"];
        let mut words: Vec<String> = words.map(str::to_owned).to_vec();
        words.push(self.chunk_tokens.to_string());
        if self.no_text {
            words.push("--no-text".to_owned());
        }
        words
    }

    pub(super) fn measures(&self) -> Measures {
        Measures { agreement: true, text: !self.no_text }
    }

    /// The prompts of one length.
    pub(super) async fn generate(
        &self,
        client: &Client,
        kinds: &[Kind],
        (samples, seed, tokens): (usize, u64, usize),
    ) -> anyhow::Result<Vec<tasks::Sample>> {
        let (kinds, chunk_tokens) = (kinds.to_vec(), self.chunk_tokens);
        let overhead = client.overhead(false).await?;
        counting(client, move |count| {
            generate(&Setup { kinds: &kinds, samples, seed, tokens, chunk_tokens, overhead }, count)
        })
        .await
    }
}

/// Measures, and reports.
pub(crate) async fn run(flags: AgreementFlags) -> anyhow::Result<()> {
    let strategies = flags::strategies(&flags.strategies)?;
    let kinds = flags.prompts.kinds()?;
    let (common, prompts, samples) = (&flags.common, &flags.prompts, flags.samples);
    if samples == 0 {
        return Err(crate::failure::usage("zero samples: nothing to measure; ask for at least one with --samples"));
    }
    carry_out(common, "agreement", async |client| {
        let generated = prompts.generate(client, &kinds, (samples, common.seed, flags.tokens)).await?;
        let mut settings = prompts.settings(&kinds);
        settings.insert("tokens".to_owned(), json!(flags.tokens));
        settings.insert("prefix_cache".to_owned(), json!(common.prefix_cache));
        let mut words = prompts.words(&kinds, samples);
        words.extend(["--tokens".to_owned(), flags.tokens.to_string()]);
        words.extend(common.words());
        Ok(Plan {
            command: "agreement",
            settings: settings.into(),
            seed: common.seed,
            items: generated.into_iter().map(|sample| Item::new("", sample)).collect::<anyhow::Result<_>>()?,
            strategies,
            measures: prompts.measures(),
            prefix_cache: common.prefix_cache,
            words,
            set_flag: "",
        })
    })
    .await
}
