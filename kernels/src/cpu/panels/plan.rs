//! How a product is cut into tasks, from its sizes and the number of threads alone.

use std::ops::Range;

use super::{Call, PANEL};
use crate::parallel;

/// Strips of a task at most: so often a panel is used once it has come from memory.
const STRIPS: usize = 8;
/// Steps at most that a strip is packed for at once: of those, all strips of a task stay in the second-level cache.
const DEPTH: usize = 1536;
/// Panels of a task at most, where a block has several strips.
const GROUP: usize = 32;
/// A task has at most one part in so many of what a thread has left on average: tasks shrink, and threads end together.
const SHARES: usize = 4;
/// Panels of a task at least, for each part of the inner size, where a block has several strips: packing those must pay.
const LEAST: usize = 4;

/// How a call is cut into tasks.
pub(super) struct Plan {
    /// One a task; the last comes first.
    pub(super) parts: Vec<Part>,
    /// Rows a strip.
    pub(super) height: usize,
    /// Strips a block.
    pub(super) strips: usize,
    /// Steps of a part of the inner size, and how many parts.
    pub(super) depth: usize,
    pub(super) depths: usize,
}

/// A block of strips times some panels.
pub(super) struct Part {
    pub(super) block: usize,
    pub(super) panels: Range<usize>,
}

impl Plan {
    pub(super) fn new<T>(call: &Call<'_, T>, height: usize) -> Self {
        let strips = call.count.div_ceil(height);
        let blocks = strips.div_ceil(STRIPS);
        // A single strip is packed once, whatever its length.
        let depths = if strips == 1 { 1 } else { call.inner.div_ceil(DEPTH) };
        let bounds = if strips == 1 { (1, usize::MAX) } else { ((LEAST * depths).min(GROUP), GROUP) };
        Self {
            parts: parts(blocks, call.panels.len() / (call.inner * PANEL), bounds),
            height,
            strips: strips.div_ceil(blocks),
            depth: call.inner.div_ceil(depths),
            depths,
        }
    }
}

fn parts(blocks: usize, panels: usize, (least, most): (usize, usize)) -> Vec<Part> {
    let shares = SHARES * parallel::threads();
    let mut parts = Vec::new();
    for block in (0..blocks).rev() {
        let mut end = panels;
        while end > 0 {
            let left = block * panels + end;
            let size = (left / shares).max(least).min(most);
            // Nor is a rest left that is smaller than the least.
            let start = if end < size + least { 0 } else { end - size };
            parts.push(Part { block, panels: start..end });
            end = start;
        }
    }
    parts.reverse();
    parts
}
