//! Products with a matrix whose numbers were brought into the order of reading once, where the library does that in each
//! call.
//!
//! A panel is 32 outputs, `[inner][32]`. Rows are packed into strips, `[depth][16]`, and a strip times a panel is a tile
//! whose sums stay in registers. A sum is one chain of multiply-adds along the inner size, whatever the rows, tasks and
//! threads: a row's bits do not depend on the rows beside it. One body, three instruction sets, as in [`super::tile`].
//!
//! What is multiplied in one step takes 32 bits: an f32, or two neighbours of bf16. Both are carried as f32 here, as both are
//! moved about in the same way; only the multiply-add looks into them. Sums are f32.

mod plan;

use std::cell::Cell;
use std::ops::Range;

use plan::{Part, Plan};

use super::activation::silu;
use super::isa::Isa;
use super::number::{Number, Target};
use crate::parallel;

/// Outputs a panel.
pub(crate) const PANEL: usize = 32;
/// Gates, and as many ups, of a panel of pairs.
pub(crate) const PAIRS: usize = PANEL / 2;
/// Numbers from one step of a strip to the next: rows, and padding up to a line of memory.
const STRIP: usize = 16;
/// Fewer rows of a strip than this are packed number by number.
const FEW: usize = 4;
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
pub(crate) enum Finish<'a, T> {
    /// Written with this bias, `[outputs]` or empty.
    Bias(&'a [T]),
    /// Written with these numbers, `[count, width]`, added.
    Sum(&'a [T]),
    /// Panels are of pairs: silu(gate) · up is written.
    Gated,
}

/// rows · matrixᵀ of numbers `T`, counted in steps: of one f32, or of two bf16.
pub(crate) struct Call<'a, T> {
    /// `[count]` rows of `inner` steps, `stride` apart.
    pub(crate) rows: &'a [f32],
    pub(crate) count: usize,
    pub(crate) stride: usize,
    /// Not 0.
    pub(crate) inner: usize,
    /// `[panels, inner, PANEL]`
    pub(crate) panels: &'a [f32],
    /// Numbers of a row of the result.
    pub(crate) width: usize,
    pub(crate) finish: Finish<'a, T>,
}

/// Brings `[outputs, inner]` steps into panels. What lies behind the last output is 0.
pub(crate) fn pack(matrix: &[f32], inner: usize, to: &mut [f32]) {
    pack_rows(to, inner, |panel, lane| {
        let output = panel * PANEL + lane;
        matrix.get(output * inner..(output + 1) * inner)
    });
}

/// Brings gates and ups, `[width, inner]` steps each, into panels of pairs.
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
pub(crate) fn product<T: Number>(isa: Isa, call: &Call<'_, T>, to: &mut [T]) {
    if call.count == 0 || call.width == 0 {
        return;
    }
    let kernel = Kernel::of(isa.or_best(), T::STEP > 1);
    let plan = Plan::new(call, kernel.rows());
    let target = Target::new(to);
    parallel::for_each_with(plan.parts.len(), Borrowed::new, |Borrowed(scratch), index| {
        let task = Task { call, plan: &plan, part: &plan.parts[index], to: &target };
        kernel.run(&task, scratch);
    });
}

/// The code for an instruction set and a type of number.
#[derive(Clone, Copy)]
enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Pairs,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx2Pairs,
    Portable,
    PortablePairs,
}

impl Kernel {
    /// `isa` must be one that this CPU has.
    fn of(isa: Isa, pairs: bool) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if !pairs => Self::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if is_x86_feature_detected!("avx512bf16") => Self::Avx512Pairs,
            // AVX-512F includes AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 if pairs => Self::Avx2Pairs,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => Self::Avx2,
            Isa::Portable if pairs => Self::PortablePairs,
            Isa::Portable => Self::Portable,
        }
    }

    /// Rows of a strip.
    fn rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Pairs => avx512_pairs::ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Pairs => avx2_pairs::ROWS,
            Self::Portable => portable::ROWS,
            Self::PortablePairs => portable_pairs::ROWS,
        }
    }

    fn run<T: Number>(self, task: &Task<'_, T>, scratch: &mut Scratch) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `of` gives what this CPU has; so below.
            Self::Avx512 => unsafe { avx512::run(task, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512Pairs => unsafe { avx512_pairs::run(task, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx2 => unsafe { avx2::run(task, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx2Pairs => unsafe { avx2_pairs::run(task, scratch) },
            Self::Portable => portable::run(task, scratch),
            Self::PortablePairs => portable_pairs::run(task, scratch),
        }
    }
}

struct Task<'a, T> {
    call: &'a Call<'a, T>,
    plan: &'a Plan,
    part: &'a Part,
    to: &'a Target<T>,
}

thread_local! {
    /// What a thread keeps from call to call: about a megabyte.
    static KEPT: Cell<Scratch> = Cell::default();
}

/// A thread's memory while a call runs.
#[derive(Default)]
struct Scratch {
    /// Which block is packed, from which step of the inner size on.
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

impl<T: Number> Task<'_, T> {
    /// The first and the last row, exclusive, of a strip of this block; none for strips behind the last row.
    fn rows(&self, strip: usize) -> Range<usize> {
        let first = (self.part.block * self.plan.strips + strip) * self.plan.height;
        first.min(self.call.count)..(first + self.plan.height).min(self.call.count)
    }

    /// Writes the sums of `rows` with `panel`.
    #[inline(always)]
    fn finish(&self, rows: Range<usize>, panel: usize, sums: &[f32]) {
        let lanes = if matches!(self.call.finish, Finish::Gated) { PAIRS } else { PANEL };
        let first = panel * lanes;
        let count = lanes.min(self.call.width.saturating_sub(first));
        for (row, sums) in rows.zip(sums.chunks_exact(PANEL)) {
            // SAFETY: row < count and first + count ≤ width, in `[count, width]`; these numbers are this task's alone.
            let to = unsafe { self.to.part(row * self.call.width + first, count) };
            match self.call.finish {
                Finish::Bias([]) => {
                    for (to, sum) in to.iter_mut().zip(sums) {
                        *to = T::from_f32(*sum);
                    }
                }
                Finish::Bias(bias) => {
                    for ((to, sum), bias) in to.iter_mut().zip(sums).zip(&bias[first..]) {
                        *to = T::from_f32(sum + bias.to_f32());
                    }
                }
                Finish::Sum(other) => {
                    for ((to, sum), other) in to.iter_mut().zip(sums).zip(&other[row * self.call.width + first..]) {
                        *to = T::from_f32(other.to_f32() + sum);
                    }
                }
                Finish::Gated => {
                    let (gates, ups) = sums.split_at(PAIRS);
                    for ((to, gate), up) in to.iter_mut().zip(gates).zip(ups) {
                        *to = T::from_f32(silu(*gate) * up);
                    }
                }
            }
        }
    }
}

macro_rules! panels_kernel {
    ($module:ident, $($feature:literal)?, $width:literal, $rows:literal, [$($fewer:literal),*]) => {
        mod $module {
            use super::super::vectors::$module::{V, fma, load, splat, store, transpose, zero};
            use super::super::vectors::fetch;
            use super::{AHEAD, FEW, LINE, LINES, Number, PANEL, STRIDE, STRIP, Scratch, Task};

            /// Rows a strip: with two vectors each, their sums fill the registers.
            pub(super) const ROWS: usize = $rows;
            const VECTORS: usize = 2;
            /// Vectors of a panel: few rows go through all of them at once, and so through memory as it lies.
            const ALL: usize = PANEL / $width;

            /// Every tile of a task.
            $(#[target_feature(enable = $feature)])?
            pub(super) fn run<T: Number>(task: &Task<'_, T>, scratch: &mut Scratch) {
                let (call, plan) = (task.call, task.plan);
                let panels = &task.part.panels;
                let tile = ROWS * PANEL;
                let kept = if plan.depths > 1 { panels.len() * plan.strips } else { 1 };
                scratch.sums.resize(kept * tile, 0.0);
                for from in (0..call.inner).step_by(plan.depth) {
                    let depth = plan.depth.min(call.inner - from);
                    pack(task, from, depth, scratch);
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
                                $(0..=$fewer => {
                                    const AT_ONCE: usize = if $fewer * ALL < ROWS * VECTORS { ALL } else { VECTORS };
                                    multiply::<$fewer, AT_ONCE>(packed, numbers, sums, from > 0, (call.panels, ahead, lines));
                                })*
                                _ => multiply::<ROWS, VECTORS>(packed, numbers, sums, from > 0, (call.panels, ahead, lines)),
                            }
                            if from + depth == call.inner {
                                task.finish(rows, panel, sums);
                            }
                        }
                    }
                }
            }

            /// Packs the strips of the task's block for steps `from..from + depth`, unless this thread has just done so.
            $(#[target_feature(enable = $feature)])?
            fn pack<T: Number>(task: &Task<'_, T>, from: usize, depth: usize, scratch: &mut Scratch) {
                if scratch.packed == Some((task.part.block, from)) {
                    return;
                }
                scratch.packed = Some((task.part.block, from));
                let size = depth * STRIP;
                scratch.strips.resize(task.plan.strips * size, 0.0);
                for (strip, to) in scratch.strips.chunks_exact_mut(size).enumerate() {
                    let rows = task.rows(strip);
                    let numbers = |row: usize| &task.call.rows[row * task.call.stride + from..][..depth];
                    // Squares of some steps, then what is left.
                    let squares = if rows.len() < FEW { 0 } else { depth / $width };
                    for (square, to) in to.chunks_exact_mut($width * STRIP).take(squares).enumerate() {
                        let mut square_rows = [zero(); $width];
                        for (to, row) in square_rows.iter_mut().zip(rows.clone()) {
                            *to = load(&numbers(row)[square * $width..]);
                        }
                        for (to, step) in to.chunks_exact_mut(STRIP).zip(transpose(square_rows)) {
                            store(to, step);
                        }
                    }
                    let done = squares * $width;
                    for (lane, row) in rows.enumerate() {
                        for (to, number) in to[done * STRIP..].chunks_exact_mut(STRIP).zip(&numbers(row)[done..]) {
                            to[lane] = *number;
                        }
                    }
                }
            }

            /// sums = strip · panel, plus sums if it goes `on`. `ahead`: asks for so many lines of these numbers from a place on, every few steps.
            $(#[target_feature(enable = $feature)])?
            fn multiply<const ROWS: usize, const VECTORS: usize>(
                strip: &[f32],
                panel: &[f32],
                sums: &mut [f32],
                on: bool,
                ahead: (&[f32], usize, usize),
            ) {
                for column in (0..PANEL).step_by(VECTORS * $width) {
                    let mut held = [[zero(); VECTORS]; ROWS];
                    if on {
                        for row in 0..ROWS {
                            for vector in 0..VECTORS {
                                held[row][vector] = load(&sums[row * PANEL + column + vector * $width..]);
                            }
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
                            step_of::<ROWS, VECTORS>(&mut held, row, panel);
                        }
                    }
                    let rest = strips.remainder().chunks_exact(STRIP).zip(panels.remainder().chunks_exact(PANEL));
                    for (strip, panel) in rest {
                        step_of::<ROWS, VECTORS>(&mut held, strip, &panel[column..]);
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
            fn step_of<const ROWS: usize, const VECTORS: usize>(
                held: &mut [[V; VECTORS]; ROWS],
                strip: &[f32],
                panel: &[f32],
            ) {
                let strip = &strip[..STRIP];
                let mut numbers = [zero(); VECTORS];
                for vector in 0..VECTORS {
                    numbers[vector] = load(&panel[vector * $width..]);
                }
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
panels_kernel!(avx512_pairs, "avx512f,avx512bf16", 16, 14, [1, 2, 4, 8]);
#[cfg(target_arch = "x86_64")]
panels_kernel!(avx2, "avx2,fma", 8, 6, [1, 2, 4]);
// The halves of pairs take registers of their own.
#[cfg(target_arch = "x86_64")]
panels_kernel!(avx2_pairs, "avx2,fma", 8, 4, [1, 2]);
panels_kernel!(portable, , 4, 4, [1, 2]);
panels_kernel!(portable_pairs, , 4, 4, [1, 2]);

#[cfg(test)]
mod tests;
