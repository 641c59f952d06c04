//! `kvsplice eval tune craft|ape|clip`: measures one strategy with several settings on generated validation prompts and names
//! the setting to take: the least recomputed whose score holds (craft, clip), or the one nearest to full attention (ape).

pub(super) mod capture;
mod choose;
mod flags;
mod outcome;
mod settings;

use kvsplice_kv::{Options, Strategy};
use serde_json::json;

use self::choose::{Rule, choose};
pub(crate) use self::flags::TuneFlags;
use self::flags::{By, Common, TargetFlags};
use self::outcome::{Means, Tuned};
use super::client::Client;
use super::flags::with_full;
use super::plan::{Item, Plan};
use super::run::{Runner, open};
use super::store::{Header, Store};
use crate::failure::usage;
use crate::output;

pub(super) const EXAMPLES: &str = "Examples:\n  kvsplice eval tune craft --alphas 0.5,1,2 --target 0.95\n  \
    kvsplice eval tune ape --temperatures 0.8,0.9,1 --scales 0.8,0.9,1\n  \
    kvsplice eval tune clip --ratios 0.1,0.2,0.3 --aux-layers last,0.5..0.8 --by match";

/// A strategy's settings and what makes one the best.
struct Task<'a> {
    command: &'static str,
    candidates: Vec<Options>,
    /// None takes the least KL.
    target: Option<&'a TargetFlags>,
    tune: &'a Common,
}

/// Measures every setting, and names the best.
pub(super) async fn run(flags: TuneFlags) -> anyhow::Result<()> {
    let task = flags.task()?;
    task.check()?;
    let common = &task.tune.common;
    let Some(opened) = open(common, &common.folder(task.command)).await? else { return Ok(()) };
    let result = task.measure(&opened.client).await;
    let closed = opened.close().await;
    result.and(closed)
}

impl Task<'_> {
    fn check(&self) -> anyhow::Result<()> {
        if self.tune.samples == 0 {
            return Err(usage("zero samples: nothing to measure; ask for at least one with --samples"));
        }
        let by = self.target.map(|target| target.by);
        if !self.tune.prompts.measures().text && by.is_some_and(|by| by != By::Argmax) {
            return Err(usage("--no-text measures no answers; judge the settings with --by argmax"));
        }
        self.tune.prompts.kinds().map(drop)
    }

    async fn measure(&self, client: &Client) -> anyhow::Result<()> {
        let plan = self.plan(client).await?;
        plan.check()?;
        let folder = self.tune.common.folder(self.command);
        let mut store = Store::open(&folder, Header::new(&plan, client.models().await?))?;
        let json = self.tune.common.json;
        let measured = async {
            if self.candidates.iter().any(|options| options.strategy == Strategy::Craft) {
                capture::all(client, &plan, &store, json).await?;
            }
            Runner { client, plan: &plan, json }.measure(&mut store).await
        };
        if let Err(error) = measured.await {
            let (done, all, folder) = (store.records().len(), plan.pairs(), folder.display());
            return Err(
                error.context(format!("{done} of {all} pairs are kept in {folder}; the same command goes on there"))
            );
        }
        let settings = outcome::all(&plan, &store, |tuned| self.score(tuned))?;
        let Some((full, settings)) = settings.split_first() else { return Ok(()) };
        self.report(full, settings, &plan)
    }

    async fn plan(&self, client: &Client) -> anyhow::Result<Plan> {
        let Common { samples, tokens, prompts, common } = self.tune;
        let kinds = prompts.kinds()?;
        let generated = prompts.generate(client, &kinds, (*samples, common.seed, *tokens)).await?;
        let mut settings = prompts.settings(&kinds);
        settings.insert("tokens".to_owned(), json!(tokens));
        settings.insert("prefix_cache".to_owned(), json!(common.prefix_cache));
        let mut words = prompts.words(&kinds, *samples);
        words.extend(["--tokens".to_owned(), tokens.to_string()]);
        words.extend(common.words());
        Ok(Plan {
            command: self.command,
            settings: settings.into(),
            seed: common.seed,
            items: generated.into_iter().map(|sample| Item::new("", sample)).collect::<anyhow::Result<_>>()?,
            strategies: with_full(self.candidates.clone()),
            measures: prompts.measures(),
            prefix_cache: common.prefix_cache,
            words,
            set_flag: "",
        })
    }

    /// What a setting is judged by.
    fn score(&self, tuned: &Means) -> f64 {
        match self.target.map_or(By::Argmax, |target| target.by) {
            By::Answer => tuned.answer.unwrap_or(0.0),
            By::Match => tuned.same_text.unwrap_or(0.0),
            By::Argmax => tuned.argmax,
        }
    }

    fn report(&self, full: &Tuned, settings: &[Tuned], plan: &Plan) -> anyhow::Result<()> {
        let rule = match self.target {
            Some(target) => Rule::LeastComputed { wanted: target.target * full.outcome.score },
            None => Rule::LeastKl,
        };
        let outcomes: Vec<_> = settings.iter().map(|tuned| tuned.outcome).collect();
        // When full attention itself has no score, every setting keeps it and none is known to be good.
        let tells = self.target.is_none() || full.outcome.score > 0.0;
        let chosen = choose(&outcomes, rule).filter(|_| tells).and_then(|place| settings.get(place));
        let verdict = self.verdict(full, settings, chosen);
        let common = &self.tune.common;
        let report = json!({
            "tuned": self.command,
            "by": self.target.map_or("kl", |target| target.by.name()),
            "target": self.target.map(|target| target.target),
            "samples": plan.items.len(),
            "seed": plan.seed,
            "full": full.to_json(full),
            "settings": settings.iter().map(|tuned| tuned.to_json(full)).collect::<Vec<_>>(),
            "chosen": chosen.map(|tuned| tuned.options.to_string()),
            "flags": chosen.map(|tuned| settings::flags(&tuned.options)),
            "verdict": verdict,
        });
        let path = common.folder(self.command).join("tune.json");
        let written = std::fs::write(&path, format!("{report:#}\n"));
        written.map_err(|error| usage(format!("write {}: {error}", path.display())))?;
        if common.json {
            return output::json(&json!({"event": "done", "report": report}));
        }
        output::line(outcome::table(full, settings, chosen))?;
        output::line(verdict)
    }

    /// The setting to take and how, or why none can be named.
    fn verdict(&self, full: &Tuned, settings: &[Tuned], chosen: Option<&Tuned>) -> String {
        if let Some(tuned) = chosen {
            let flags = settings::flags(&tuned.options);
            return format!("take {}: kvsplice ask {flags} ...", tuned.options);
        }
        let best = settings.iter().map(|tuned| tuned.outcome.score).fold(0.0, f64::max);
        match self.target {
            Some(target) if full.outcome.score > 0.0 => format!(
                "no setting keeps {} of the score of full attention, {:.3}: the best has {best:.3}; lower --target or try others",
                target.target, full.outcome.score
            ),
            Some(_) => {
                "full attention has no score on these prompts, so none tells the settings apart; judge with --by match"
                    .to_owned()
            }
            None => "no setting has a finite KL divergence".to_owned(),
        }
    }
}
