//! Radix tree of exact prefixes: nodes of 64 token ids with a payload (their KV), shared by all requests of a worker.
//!
//! RadixAttention (SGLang, arXiv 2312.07104, §3) in whole blocks, with LRU or PGDSF eviction (see `worth`). It neither
//! computes nor copies KV. Invariants: payloads never exceed the budget; whoever holds a node holds its ancestors, and
//! only leaves that nobody holds are evicted, so that every node can be reached from its owner.

mod nodes;
#[cfg(test)]
mod tests;
mod worth;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use kvsplice_model::cache;

use nodes::{Node, Nodes, Parent, Slot};
pub(crate) use worth::Cost;
pub use worth::Policy;
use worth::{History, Worth};

/// Tokens of a node.
const BLOCK: usize = cache::BLOCK as usize;

/// Evicted blocks whose statistics are kept: about 4 MiB.
const HISTORY: usize = 1 << 16;

/// The prefixes of one worker's model, each block with a payload `B`.
#[derive(Debug)]
pub(crate) struct Tree<B> {
    policy: Policy,
    budget_bytes: u64,
    nodes: Nodes<B>,
    /// Leaves that nobody holds, the next victim first. A node's rank does not change while it is in here.
    evictable: BTreeSet<Rank>,
    history: History,
    hasher: RandomState,
    /// Highest priority evicted so far, so that what was used long ago ages against what is used now.
    clock: f64,
    /// Number of the latest find or insert.
    tick: u64,
    stats: Stats,
}

/// Order of eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// Bits of a priority that is not negative, which sort as the number does.
    priority: u64,
    tick: u64,
    slot: Slot,
}

/// Blocks that stay in the tree until they are released with [`Tree::release`].
#[derive(Debug)]
#[must_use = "blocks stay in the tree until the hold is released"]
pub(crate) struct Hold {
    path: Vec<Slot>,
}

impl Hold {
    /// Tokens whose payloads are held, from the first on; whole blocks.
    pub(crate) fn tokens(&self) -> usize {
        self.path.len() * BLOCK
    }
}

/// A computed prefix that is offered to the tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer<'a> {
    /// Owner; prefixes of different owners never match.
    pub(crate) salt: &'a str,
    /// The request's token ids.
    pub(crate) ids: &'a [u32],
    /// How many of them, from the first on, have exact payloads; rounded down to whole blocks.
    pub(crate) tokens: usize,
    /// How many of them [`Tree::find`] gave to the request.
    pub(crate) reused: usize,
    /// Bytes of one payload.
    pub(crate) bytes_per_block: u64,
    /// What it took to compute the others.
    pub(crate) cost: Cost,
}

/// What became of an [`Offer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inserted {
    /// Blocks that are new in the tree.
    pub(crate) blocks: usize,
    /// Tokens of the offer that the tree has now, from the first on.
    pub(crate) tokens: usize,
}

/// Figures of a tree; `hits`, `misses` and `evicted` count from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    /// Bytes of all payloads.
    pub(crate) bytes: u64,
    /// Blocks in the tree.
    pub(crate) blocks: u64,
    /// Blocks that were looked for and found.
    pub(crate) hits: u64,
    /// Whole blocks that were looked for and not found.
    pub(crate) misses: u64,
    /// Blocks that had to go.
    pub(crate) evicted: u64,
    /// Blocks that somebody holds.
    pub(crate) held: u64,
    /// Bytes of the payloads of these.
    pub(crate) held_bytes: u64,
}

impl<B> Tree<B> {
    /// An empty tree whose payloads take at most `budget_bytes`.
    pub(crate) fn new(policy: Policy, budget_bytes: u64) -> Self {
        let history = match policy {
            Policy::Lru => 0,
            Policy::Pgdsf => HISTORY,
        };
        Self {
            policy,
            budget_bytes,
            nodes: Nodes::new(),
            evictable: BTreeSet::new(),
            history: History::new(history),
            hasher: RandomState::new(),
            clock: 0.0,
            tick: 0,
            stats: Stats::default(),
        }
    }

    /// Holds the longest known prefix of `ids` in whole blocks, of at most `limit` tokens. A caller that needs logits
    /// leaves the last token out of the limit.
    pub(crate) fn find(&mut self, salt: &str, ids: &[u32], limit: usize) -> Hold {
        self.tick += 1;
        let ids = &ids[..limit.min(ids.len())];
        let path = self.walk(salt, ids);
        self.stats.hits += path.len() as u64;
        self.stats.misses += (ids.len() / BLOCK - path.len()) as u64;
        self.pin(&path);
        for &slot in &path {
            self.nodes[slot].worth.used();
        }
        self.touch(&path);
        Hold { path }
    }

    /// Payloads of the held blocks, in prompt order.
    pub(crate) fn payloads<'a>(&'a self, hold: &'a Hold) -> impl Iterator<Item = &'a B> {
        hold.path.iter().map(|&slot| &self.nodes[slot].payload)
    }

    /// Gives up what [`Tree::find`] held.
    pub(crate) fn release(&mut self, hold: Hold) {
        self.unpin(&hold.path);
    }

    /// Adds the blocks of `offer` that are missing, from the first on, until the next one does not fit beside what is
    /// held. `make` is called for each of them with its index in the prompt; when it fails, those before stay.
    pub(crate) fn insert<E>(
        &mut self,
        offer: &Offer<'_>,
        make: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Inserted, E> {
        self.tick += 1;
        let mut path = self.walk(offer.salt, &offer.ids[..offer.tokens.min(offer.ids.len())]);
        let known = path.len();
        // Held, the path is safe from the evictions that make room for its own end.
        self.pin(&path);
        // What came into the tree since this request looked: it was computed here too.
        for &slot in path.iter().skip(offer.reused / BLOCK) {
            self.nodes[slot].worth.computed(offer.cost);
        }
        let grown = self.grow(offer, &mut path, make);
        self.touch(&path);
        self.unpin(&path);
        grown?;
        Ok(Inserted { blocks: path.len() - known, tokens: path.len() * BLOCK })
    }

    /// Figures of this moment.
    pub(crate) fn stats(&self) -> Stats {
        self.stats
    }

    /// Nodes of the longest known prefix of `ids`.
    fn walk(&self, salt: &str, ids: &[u32]) -> Vec<Slot> {
        let mut path = Vec::new();
        let mut children = self.nodes.first_blocks(salt);
        for block in ids.chunks_exact(BLOCK) {
            let Some(&slot) = children.and_then(|children| children.get(block)) else { break };
            path.push(slot);
            children = Some(&self.nodes[slot].children);
        }
        path
    }

    /// Adds missing blocks to the end of the held `path`; they are held too.
    fn grow<E>(
        &mut self,
        offer: &Offer<'_>,
        path: &mut Vec<Slot>,
        mut make: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<(), E> {
        let ids = &offer.ids[..offer.tokens.min(offer.ids.len())];
        // A payload of no bytes would let the tree grow without end.
        let bytes = offer.bytes_per_block.max(1);
        let mut key = match path.last() {
            Some(&slot) => self.nodes[slot].key,
            None => self.hasher.hash_one(offer.salt),
        };
        let mut fits = true;
        for (index, block) in ids.chunks_exact(BLOCK).enumerate().skip(path.len()) {
            key = self.hasher.hash_one((key, block));
            let mut worth = self.history.take(key).unwrap_or_default();
            // A block that was found, then evicted, then offered again was not computed, and its use is counted.
            if index >= offer.reused / BLOCK || worth == Worth::default() {
                worth.computed(offer.cost);
            }
            fits = fits && self.make_room(bytes);
            if !fits {
                self.history.put(key, worth);
                continue;
            }
            let payload = make(index).inspect_err(|_| self.history.put(key, worth))?;
            let parent = match path.last() {
                Some(&slot) => Parent::Node(slot),
                None => Parent::Owner(Arc::from(offer.salt)),
            };
            path.push(self.nodes.add(Node {
                block: Arc::from(block),
                payload,
                bytes,
                parent,
                children: nodes::Children::new(),
                holders: 1,
                worth,
                priority: 0.0,
                tick: self.tick,
                key,
            }));
            self.stats.blocks += 1;
            self.stats.bytes += bytes;
            self.stats.held += 1;
            self.stats.held_bytes += bytes;
        }
        Ok(())
    }

    /// Evicts until `bytes` fit; false, with nothing evicted, when held blocks leave too little.
    fn make_room(&mut self, bytes: u64) -> bool {
        if bytes > self.budget_bytes - self.stats.held_bytes {
            return false;
        }
        while bytes > self.budget_bytes - self.stats.bytes {
            let Some(victim) = self.evictable.pop_first() else { return false };
            self.evict(victim.slot);
        }
        true
    }

    /// Removes a leaf that nobody holds and that is no longer in `evictable`.
    fn evict(&mut self, slot: Slot) {
        let node = self.nodes.remove(slot);
        self.clock = self.clock.max(node.priority);
        self.history.put(node.key, node.worth);
        self.stats.blocks -= 1;
        self.stats.bytes -= node.bytes;
        self.stats.evicted += 1;
        if let Parent::Node(parent) = node.parent {
            self.offer_for_eviction(parent);
        }
    }

    /// Ranks the nodes of a held path anew. A priority never falls while its block is in the tree, and a parent's is
    /// never below a child's: the parent cannot go first, and its own mean may be lower.
    fn touch(&mut self, path: &[Slot]) {
        let mut child = 0.0f64;
        for &slot in path.iter().rev() {
            let node = &mut self.nodes[slot];
            let own = match self.policy {
                // All equal: the tick decides.
                Policy::Lru => 0.0,
                Policy::Pgdsf => self.clock + node.worth.value(),
            };
            node.priority = node.priority.max(own).max(child);
            node.tick = self.tick;
            child = node.priority;
        }
    }

    fn pin(&mut self, path: &[Slot]) {
        for &slot in path {
            let node = &mut self.nodes[slot];
            if node.holders == 0 {
                self.stats.held += 1;
                self.stats.held_bytes += node.bytes;
                self.evictable.remove(&rank(slot, node));
            }
            node.holders += 1;
        }
    }

    fn unpin(&mut self, path: &[Slot]) {
        for &slot in path {
            let node = &mut self.nodes[slot];
            node.holders -= 1;
            if node.holders == 0 {
                self.stats.held -= 1;
                self.stats.held_bytes -= node.bytes;
                self.offer_for_eviction(slot);
            }
        }
    }

    fn offer_for_eviction(&mut self, slot: Slot) {
        let node = &self.nodes[slot];
        if node.holders == 0 && node.children.is_empty() {
            self.evictable.insert(rank(slot, node));
        }
    }
}

fn rank<B>(slot: Slot, node: &Node<B>) -> Rank {
    Rank { priority: node.priority.to_bits(), tick: node.tick, slot }
}
