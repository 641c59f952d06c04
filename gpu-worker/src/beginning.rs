//! The exact beginning of a prompt: KV that an earlier prompt with the same first tokens has left in this worker.
//!
//! What is kept is what full attention computes, so it is exact under every strategy whose tokens stand at their slots.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvsplice_kv::RowRanges;
use kvsplice_kv::options::{Mask, Strategy};
use kvsplice_model::Error;
use kvsplice_model::cache::{BLOCK, KvBlock, KvCache};
use kvsplice_proto::v1;

use crate::request::{Kind, Request};
use crate::tree::{Cost, Hold, Offer, Policy, Tree};

/// The beginnings that this worker keeps. Clones share them.
#[derive(Clone)]
pub(crate) struct Beginnings {
    tree: Arc<Mutex<Tree<KvBlock>>>,
    block_bytes: u64,
}

/// A beginning that a request holds; dropping it lets it go.
pub(crate) struct Beginning {
    from: Beginnings,
    hold: Option<Hold>,
    tokens: u32,
}

impl Beginnings {
    /// `token_bytes`: K and V of one token, every layer.
    pub(crate) fn new(policy: Policy, budget_bytes: u64, token_bytes: u64) -> Self {
        let tree = Arc::new(Mutex::new(Tree::new(policy, budget_bytes)));
        Self { tree, block_bytes: token_bytes * u64::from(BLOCK) }
    }

    fn lock(&self) -> MutexGuard<'_, Tree<KvBlock>> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is kept, and how useful it was.
    pub(crate) fn status(&self) -> v1::Beginnings {
        let stats = self.lock().stats();
        v1::Beginnings {
            bytes: stats.bytes,
            blocks: stats.blocks,
            held: stats.held,
            hits: stats.hits,
            misses: stats.misses,
            evicted: stats.evicted,
        }
    }

    /// What is kept of the request's beginning; nothing when its strategy does not reuse one.
    pub(crate) fn find(&self, request: &Request) -> Beginning {
        let nothing = || Beginning { from: self.clone(), hold: None, tokens: 0 };
        if !reuses(request) {
            return nothing();
        }
        let ids = ids(request);
        let hold = self.lock().find(&request.owner, &ids, limit(request));
        let tokens = hold.tokens() as u32;
        Beginning { from: self.clone(), hold: Some(hold), tokens }
    }
}

impl Beginning {
    /// Tokens, whole blocks.
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Copies the kept KV into a request's cache.
    pub(crate) fn copy_to(&self, cache: &mut KvCache) -> Result<(), Error> {
        let Some(hold) = &self.hold else { return Ok(()) };
        let tree = self.from.lock();
        tree.payloads(hold).enumerate().try_for_each(|(index, block)| cache.import(index, block))
    }

    /// Keeps the beginning of a finished prompt as far as it is exact. `rows`: slots computed in every layer.
    pub(crate) fn keep(&self, request: &Request, rows: &RowRanges, cache: &KvCache, cost: Cost) -> Result<(), Error> {
        if !reuses(request) {
            return Ok(());
        }
        let ids = ids(request);
        let tokens = exact_tokens(request, rows).min(ids.len() - request.targets.len());
        let offer = Offer {
            salt: &request.owner,
            ids: &ids,
            tokens,
            reused: self.tokens as usize,
            bytes_per_block: self.from.block_bytes,
            cost,
        };
        self.from.lock().insert(&offer, |index| cache.export(index))?;
        Ok(())
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.from.lock().release(hold);
        }
    }
}

fn reuses(request: &Request) -> bool {
    let options = &request.options;
    options.strategy != Strategy::Full && options.prefix_cache && options.mask == Mask::Right && !request.capture
}

fn ids(request: &Request) -> Vec<u32> {
    request.parts.iter().flat_map(|part| part.ids.iter().copied()).collect()
}

/// How far a kept beginning is of use: not past a token that stands elsewhere than at its slot, not past the first token
/// whose output is wanted, and not into the question's rows, which selectors look at, unless the strategy is `prefix`.
fn limit(request: &Request) -> usize {
    let first_output = request.tokens() as usize - request.targets.len() - 1;
    let mut limit = 0;
    for part in &request.parts {
        let question = part.kind == Kind::Question && request.options.strategy != Strategy::Prefix;
        if part.first_position != part.slots.start || question {
            break;
        }
        limit = part.slots.end as usize;
    }
    limit.min(first_output)
}

/// The first tokens whose KV is what full attention computes.
fn exact_tokens(request: &Request, rows: &RowRanges) -> usize {
    let options = &request.options;
    let mut end = 0;
    for part in &request.parts {
        // A reused chunk's rows may be given up on the way; question rows may attend in two parts.
        let computed = rows.count_in(part.slots.clone()) == part.slots.len()
            && (part.key.is_none() || options.early_stop.window == 0)
            && (part.kind != Kind::Question || !options.two_part());
        if part.first_position != part.slots.start || !(part.exact || computed) {
            break;
        }
        end = part.slots.end as usize;
    }
    end
}
