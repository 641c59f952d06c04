//! Products with a matrix whose numbers were brought into the order of reading once, where the library does that in each
//! call.
//!
//! A panel is 32 outputs, `[inner][32]`. Rows are packed into strips, `[depth][16]`, and a strip times a panel is a tile
//! whose sums stay in registers. A sum is one chain of multiply-adds along the inner size, whatever the rows, tasks and
//! threads: a row's bits do not depend on the rows beside it. One body, three instruction sets, as in [`super::tile`].

use std::cell::Cell;

use super::activation::silu;
use super::isa::Isa;
use super::number::Target;
use crate::parallel;

/// Outputs a panel.
pub(crate) const PANEL: usize = 32;
/// Gates, and as many ups, of a panel of pairs.
pub(crate) const PAIRS: usize = PANEL / 2;
/// Numbers from one step of a strip to the next: rows, and padding up to a line of memory.
const STRIP: usize = 16;
/// Steps at most that a strip is packed for at once: of those, all strips of a task stay in the second-level cache.
const DEPTH: usize = 1024;
/// Strips of a task at most: so often a panel is used once it has come from memory.
const STRIPS: usize = 8;
/// Steps that are packed at once.
const STEPS: usize = 64;
/// Panels of a task at most.
const GROUP: usize = 32;
/// Tasks a thread where rows are few and only panels can be shared out.
const TASKS: usize = 8;
/// Steps between two requests for memory ahead.
const STRIDE: usize = 4;
/// Lines that so many steps of a panel have.
const LINES: usize = STRIDE * PANEL / LINE;
/// Numbers of a line of memory.
const LINE: usize = 16;
/// Numbers ahead that a task of a single strip asks for: the hardware's own requests come late.
const AHEAD: usize = 1024;

/// Where a product goes.
#[derive(Clone, Copy)]
pub(crate) enum Finish<'a> {
    /// Written with this bias, `[outputs]` or empty.
    Bias(&'a [f32]),
    /// Written with these numbers, `[count, width]`, added.
    Sum(&'a [f32]),
    /// Panels are of pairs: silu(gate) · up is written.
    Gated,
}

/// rows · matrixᵀ.
pub(crate) struct Call<'a> {
    /// `[count]` rows of `inner` numbers, `stride` apart.
    pub(crate) rows: &'a [f32],
    pub(crate) count: usize,
    pub(crate) stride: usize,
    /// Not 0.
    pub(crate) inner: usize,
    /// `[panels, inner, PANEL]`
    pub(crate) panels: &'a [f32],
    /// Numbers of a row of the result.
    pub(crate) width: usize,
    pub(crate) finish: Finish<'a>,
}

/// Brings `[outputs, inner]` into panels. What lies behind the last output is 0.
pub(crate) fn pack(matrix: &[f32], inner: usize, to: &mut [f32]) {
    pack_rows(to, inner, |panel, lane| {
        let output = panel * PANEL + lane;
        matrix.get(output * inner..(output + 1) * inner)
    });
}

/// Brings gates and ups, `[width, inner]` each, into panels of pairs.
pub(crate) fn pack_pairs(gate: &[f32], up: &[f32], inner: usize, to: &mut [f32]) {
    pack_rows(to, inner, |panel, lane| {
        let output = panel * PAIRS + lane % PAIRS;
        let matrix = if lane < PAIRS { gate } else { up };
        matrix.get(output * inner..(output + 1) * inner)
    });
}

fn pack_rows<'a>(to: &mut [f32], inner: usize, row: impl Fn(usize, usize) -> Option<&'a [f32]> + Sync) {
    let size = inner * PANEL;
    let panels = to.len() / size;
    let target = Target::new(to);
    parallel::for_each(panels, |panel| {
        // SAFETY: panel < panels, and each is one task's.
        let to = unsafe { target.part(panel * size, size) };
        for lane in 0..PANEL {
            let numbers = to[lane..].iter_mut().step_by(PANEL);
            match row(panel, lane) {
                Some(row) => numbers.zip(row).for_each(|(to, number)| *to = *number),
                None => numbers.for_each(|to| *to = 0.0),
            }
        }
    });
}

/// Computes `call` into `to`, `[count, width]`.
pub(crate) fn product(isa: Isa, call: &Call<'_>, to: &mut [f32]) {
    if call.count == 0 || call.width == 0 {
        return;
    }
    let isa = isa.or_best();
    let height = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::ROWS,
        Isa::Portable => portable::ROWS,
    };
    let plan = Plan::new(call, height);
    let target = Target::new(to);
    parallel::for_each_with(plan.blocks * plan.groups, Borrowed::new, |Borrowed(scratch), index| {
        let task = Task { call, plan: &plan, block: index / plan.groups, group: index % plan.groups, to: &target };
        match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `or_best` gives what this CPU has.
            Isa::Avx512 => unsafe { avx512::run(&task, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2::run(&task, scratch) },
            Isa::Portable => portable::run(&task, scratch),
        }
    });
}

/// How a call is cut into tasks: blocks of strips times groups of panels.
struct Plan {
    blocks: usize,
    groups: usize,
    /// Rows a strip.
    height: usize,
    /// Strips a block.
    strips: usize,
    /// All panels, and those of a group.
    panels: usize,
    group: usize,
    /// Steps of a part of the inner size, and how many parts.
    depth: usize,
    depths: usize,
}

impl Plan {
    fn new(call: &Call<'_>, height: usize) -> Self {
        let panels = call.panels.len() / (call.inner * PANEL);
        let strips = call.count.div_ceil(height);
        let blocks = strips.div_ceil(STRIPS);
        let most = if blocks > 1 { GROUP } else { (panels / (TASKS * parallel::threads())).clamp(1, GROUP) };
        let groups = panels.div_ceil(most);
        // A single strip is packed once, whatever its length.
        let depths = if strips == 1 { 1 } else { call.inner.div_ceil(DEPTH) };
        Self {
            blocks,
            groups,
            height,
            strips: strips.div_ceil(blocks),
            panels,
            group: panels.div_ceil(groups),
            depth: call.inner.div_ceil(depths),
            depths,
        }
    }
}

struct Task<'a> {
    call: &'a Call<'a>,
    plan: &'a Plan,
    block: usize,
    group: usize,
    to: &'a Target<f32>,
}

thread_local! {
    /// What a thread keeps from call to call: about a megabyte.
    static KEPT: Cell<Scratch> = Cell::default();
}

/// A thread's memory while a call runs.
#[derive(Default)]
struct Scratch {
    /// Which block and part of the inner size is packed.
    packed: Option<(usize, usize)>,
    /// `[strips][depth][STRIP]`
    strips: Vec<f32>,
    /// Sums of tiles, `[height][PANEL]` each: of one, or of all of the task if the inner size has several parts.
    sums: Vec<f32>,
}

/// The thread's scratch, which goes back to the thread.
struct Borrowed(Scratch);

impl Borrowed {
    fn new() -> Self {
        Self(Scratch { packed: None, ..KEPT.take() })
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        KEPT.set(std::mem::take(&mut self.0));
    }
}

impl Task<'_> {
    /// The first and the last row, exclusive, of a strip of this block; none for strips behind the last row.
    fn rows(&self, strip: usize) -> std::ops::Range<usize> {
        let first = (self.block * self.plan.strips + strip) * self.plan.height;
        first.min(self.call.count)..(first + self.plan.height).min(self.call.count)
    }

    /// Packs the strips of this block for steps `from..from + depth`, unless this thread has done so for the task before.
    fn pack(&self, part: usize, depth: usize, scratch: &mut Scratch) {
        if scratch.packed == Some((self.block, part)) {
            return;
        }
        scratch.packed = Some((self.block, part));
        let from = part * self.plan.depth;
        let size = depth * STRIP;
        scratch.strips.resize(self.plan.strips * size, 0.0);
        for (strip, to) in scratch.strips.chunks_exact_mut(size).enumerate() {
            let rows = self.rows(strip);
            // Some steps at once, whose lines of the strip stay near while every row writes its lane of them.
            for (block, to) in to.chunks_mut(STEPS * STRIP).enumerate() {
                let (from, steps) = (from + block * STEPS, to.len() / STRIP);
                for (lane, row) in rows.clone().enumerate() {
                    let row = &self.call.rows[row * self.call.stride + from..][..steps];
                    for (to, number) in to.chunks_exact_mut(STRIP).zip(row) {
                        to[lane] = *number;
                    }
                }
            }
        }
    }

    /// Writes the sums of `rows` with `panel`.
    #[inline(always)]
    fn finish(&self, rows: std::ops::Range<usize>, panel: usize, sums: &[f32]) {
        let lanes = if matches!(self.call.finish, Finish::Gated) { PAIRS } else { PANEL };
        let first = panel * lanes;
        let count = lanes.min(self.call.width.saturating_sub(first));
        for (row, sums) in rows.zip(sums.chunks_exact(PANEL)) {
            // SAFETY: row < count and first + count ≤ width, in `[count, width]`; these numbers are this task's alone.
            let to = unsafe { self.to.part(row * self.call.width + first, count) };
            match self.call.finish {
                Finish::Bias([]) => to.copy_from_slice(&sums[..count]),
                Finish::Bias(bias) => {
                    for ((to, sum), bias) in to.iter_mut().zip(sums).zip(&bias[first..]) {
                        *to = sum + bias;
                    }
                }
                Finish::Sum(other) => {
                    for ((to, sum), other) in to.iter_mut().zip(sums).zip(&other[row * self.call.width + first..]) {
                        *to = other + sum;
                    }
                }
                Finish::Gated => {
                    let (gates, ups) = sums.split_at(PAIRS);
                    for ((to, gate), up) in to.iter_mut().zip(gates).zip(ups) {
                        *to = silu(*gate) * up;
                    }
                }
            }
        }
    }
}

macro_rules! panels_kernel {
    ($module:ident, $($feature:literal)?, $width:literal, $rows:literal, [$($fewer:literal),*]) => {
        mod $module {
            use super::super::vectors::$module::{V, fma, load, splat, store, zero};
            use super::super::vectors::fetch;
            use super::{AHEAD, LINE, LINES, PANEL, STRIDE, STRIP, Scratch, Task};

            /// Rows a strip: with two vectors each, their sums fill the registers.
            pub(super) const ROWS: usize = $rows;
            const VECTORS: usize = 2;
            /// Outputs at once.
            const COLUMNS: usize = VECTORS * $width;

            /// Every tile of a task.
            $(#[target_feature(enable = $feature)])?
            pub(super) fn run(task: &Task<'_>, scratch: &mut Scratch) {
                let (call, plan) = (task.call, task.plan);
                let panels = task.group * plan.group..plan.panels.min((task.group + 1) * plan.group);
                let tile = ROWS * PANEL;
                let kept = if plan.depths > 1 { plan.group * plan.strips } else { 1 };
                scratch.sums.resize(kept * tile, 0.0);
                for part in 0..plan.depths {
                    let from = part * plan.depth;
                    let depth = plan.depth.min(call.inner - from);
                    task.pack(part, depth, scratch);
                    for (place, panel) in panels.clone().enumerate() {
                        let start = (panel * call.inner + from) * PANEL;
                        let numbers = &call.panels[start..start + depth * PANEL];
                        for (strip, packed) in scratch.strips.chunks_exact(depth * STRIP).enumerate() {
                            let rows = task.rows(strip);
                            if rows.is_empty() {
                                break;
                            }
                            let at = if plan.depths > 1 { place * plan.strips + strip } else { 0 };
                            let sums = &mut scratch.sums[at * tile..(at + 1) * tile];
                            if part == 0 {
                                sums.fill(0.0);
                            }
                            // One strip asks for what comes next in its panel; several ask for the next panel, in turns.
                            let (ahead, lines) = match plan.strips {
                                1 => (start + AHEAD, LINES),
                                strips => {
                                    let lines = LINES.div_ceil(strips);
                                    let next = start + call.inner * PANEL;
                                    (next + strip * depth / STRIDE * lines * LINE, lines)
                                }
                            };
                            match rows.len() {
                                $(0..=$fewer => multiply::<$fewer>(packed, numbers, sums, (call.panels, ahead, lines)),)*
                                _ => multiply::<ROWS>(packed, numbers, sums, (call.panels, ahead, lines)),
                            }
                            if part + 1 == plan.depths {
                                task.finish(rows, panel, sums);
                            }
                        }
                    }
                }
            }

            /// sums += strip · panel. `ahead`: asks for so many lines of these numbers from a place on, every few steps.
            $(#[target_feature(enable = $feature)])?
            fn multiply<const ROWS: usize>(
                strip: &[f32],
                panel: &[f32],
                sums: &mut [f32],
                ahead: (&[f32], usize, usize),
            ) {
                for column in (0..PANEL).step_by(COLUMNS) {
                    let mut held = [[zero(); VECTORS]; ROWS];
                    for row in 0..ROWS {
                        for vector in 0..VECTORS {
                            held[row][vector] = load(&sums[row * PANEL + column + vector * $width..]);
                        }
                    }
                    let (numbers, mut place, lines) = ahead;
                    let mut strips = strip.chunks_exact(STRIDE * STRIP);
                    let mut panels = panel.chunks_exact(STRIDE * PANEL);
                    for (strip, panel) in (&mut strips).zip(&mut panels) {
                        for line in 0..lines {
                            fetch(numbers, place + line * LINE);
                        }
                        place += lines * LINE;
                        for step in 0..STRIDE {
                            let (row, panel) = (&strip[step * STRIP..], &panel[step * PANEL + column..]);
                            step_of::<ROWS>(&mut held, row, panel);
                        }
                    }
                    let rest = strips.remainder().chunks_exact(STRIP).zip(panels.remainder().chunks_exact(PANEL));
                    for (strip, panel) in rest {
                        step_of::<ROWS>(&mut held, strip, &panel[column..]);
                    }
                    for row in 0..ROWS {
                        for vector in 0..VECTORS {
                            store(&mut sums[row * PANEL + column + vector * $width..], held[row][vector]);
                        }
                    }
                }
            }

            /// One step along the inner size.
            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn step_of<const ROWS: usize>(held: &mut [[V; VECTORS]; ROWS], strip: &[f32], panel: &[f32]) {
                let strip = &strip[..STRIP];
                let numbers: [V; VECTORS] = std::array::from_fn(|vector| load(&panel[vector * $width..]));
                for row in 0..ROWS {
                    let value = splat(strip[row]);
                    for vector in 0..VECTORS {
                        held[row][vector] = fma(value, numbers[vector], held[row][vector]);
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
panels_kernel!(avx512, "avx512f", 16, 14, [1, 2, 4, 8]);
#[cfg(target_arch = "x86_64")]
panels_kernel!(avx2, "avx2,fma", 8, 6, [1, 2, 4]);
panels_kernel!(portable, , 4, 4, [1, 2]);

#[cfg(test)]
mod tests;
