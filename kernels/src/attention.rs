//! Attention of scattered query rows over the KV of one or several sequences.
//!
//! The mask is explicit: a row whose last slot is s sees the keys of slots up to s. Computed in f32 whatever the tensors'
//! type, without a mask tensor, without a copy of the keys: those that are not f32 are converted tile by tile.

use tch::{Device, Kind, Tensor};

use crate::blocks::Rows;
use crate::cpu::attention::Call;
use crate::cpu::number::Number;
use crate::{BLOCK, Error, Isa, argument, cpu, data, device};

mod masses;
mod tiled;

pub use masses::{Reduce, key_masses};
pub use tiled::tiled;

const OP: &str = "ragged_causal";

/// Rows of one sequence, and its KV.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// `[capacity, kv_heads, head_dim]` or, in blocks of 64 tokens, `[blocks, 64, kv_heads, head_dim]`; f32 or bf16,
    /// contiguous, on the CPU. Sequences may share it.
    pub keys: &'a Tensor,
    /// As `keys`.
    pub values: &'a Tensor,
    /// The block of each 64 slots; without one, slot s is row s.
    pub table: Option<&'a [u32]>,
    /// By row, the last slot that it sees, not descending. For causal attention it is the row's own slot.
    pub last: &'a [u32],
}

/// What rows look at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The first slot that rows see.
    pub from: u32,
    /// Scores are query · key / (√head_dim · temperature).
    pub temperature: f32,
    /// Ascending slots; for each, the log-sum-exp of the scores of the keys before it is given.
    pub ends: &'a [u32],
}

impl Default for View<'_> {
    fn default() -> Self {
        Self { from: 0, temperature: 1.0, ends: &[] }
    }
}

/// Attention of the rows of all sequences.
///
/// - `query`: `[rows, heads, head_dim]`, the rows of the first sequence, then of the next; f32 or bf16, on the CPU. Rows
///   may lie apart.
///
/// Returns `[rows, heads, head_dim]` of the query's type, and `[rows, heads, ends]`, f32: log-sum-exps (natural logarithm),
/// −∞ where a row sees no key before an end. The mass of the keys between two ends is the difference of the exponentials.
/// Rows of one call are spread over the pool; few rows over many keys are split along the keys. For one number of
/// threads, equal calls give equal bits.
///
/// Fails on shapes, types, devices and strides that do not fit, on last slots that descend, that are beyond the KV or
/// before `from`, on blocks beyond the KV, and on ends that descend.
pub fn attend(query: &Tensor, sequences: &[Sequence<'_>], view: View<'_>) -> Result<(Tensor, Tensor), Error> {
    if query.device() != Device::Cpu {
        return on_device(query, sequences, view);
    }
    let keys = sequences.iter().find(|sequence| !sequence.last.is_empty()).map(|sequence| sequence.keys.kind());
    let isa = Isa::best();
    match (query.kind(), keys) {
        (Kind::BFloat16, Some(Kind::BFloat16)) => of_kinds::<half::bf16, half::bf16>(isa, query, sequences, view),
        (Kind::BFloat16, _) => of_kinds::<half::bf16, f32>(isa, query, sequences, view),
        (_, Some(Kind::BFloat16)) => of_kinds::<f32, half::bf16>(isa, query, sequences, view),
        _ => of_kinds::<f32, f32>(isa, query, sequences, view),
    }
}

/// As [`attend`], on a GPU: one launch a sequence. There, rows of sequences with a block table see everything from slot 0
/// on.
fn on_device(query: &Tensor, sequences: &[Sequence<'_>], view: View<'_>) -> Result<(Tensor, Tensor), Error> {
    let (rows, heads, head_dim) = query.size3()?;
    check_view(&view)?;
    let query = if view.temperature == 1.0 {
        query.shallow_clone()
    } else {
        query.f_div_scalar(f64::from(view.temperature))?
    };
    let ends: Vec<u32> = view.ends.iter().map(|end| end.saturating_sub(view.from)).collect();
    let asked = (!ends.is_empty()).then_some(ends.as_slice());
    let (mut outputs, mut sums, mut first) = (Vec::new(), Vec::new(), 0);
    for sequence in sequences.iter().filter(|sequence| !sequence.last.is_empty()) {
        check(OP, sequence, view.from, heads, head_dim)?;
        let count = sequence.last.len() as i64;
        if first + count > rows {
            return Err(argument(OP, format!("query {:?} has too few rows", query.size())));
        }
        let mine = query.f_narrow(0, first, count)?;
        first += count;
        if let Some(table) = sequence.table {
            if view.from > 0 {
                return Err(argument(OP, format!("on a GPU, first slot {} does not go with a block table", view.from)));
            }
            let rows = Rows { last: sequence.last, table: Some(table) };
            let (output, found) = device::in_blocks(&mine, sequence.keys, sequence.values, rows, asked)?;
            outputs.push(output);
            sums.extend(found);
            continue;
        }
        let seen = |tensor: &Tensor| -> Result<Tensor, Error> {
            let rows = tensor.f_reshape([-1, tensor.size()[tensor.dim() - 2], head_dim])?;
            Ok(rows.f_narrow(0, i64::from(view.from), rows.size()[0] - i64::from(view.from))?)
        };
        let last: Vec<u32> = sequence.last.iter().map(|last| last - view.from).collect();
        let (output, found) =
            device::ragged_causal(&mine, &seen(sequence.keys)?, &seen(sequence.values)?, &last, asked)?;
        outputs.push(output);
        sums.extend(found);
    }
    if first != rows {
        return Err(argument(OP, format!("query {:?} for {first} last slots", query.size())));
    }
    let joined = |pieces: Vec<Tensor>, last: i64, kind: Kind| -> Result<Tensor, Error> {
        match pieces.len() {
            0 => Ok(Tensor::f_empty([rows, heads, last], (kind, query.device()))?),
            _ => Ok(Tensor::f_cat(&pieces, 0)?),
        }
    };
    Ok((joined(outputs, head_dim, query.kind())?, joined(sums, ends.len() as i64, Kind::Float)?))
}

/// As [`attend`], of f32 tensors, with this instruction set; for benchmarks.
pub fn attend_with(
    isa: Isa,
    query: &Tensor,
    sequences: &[Sequence<'_>],
    view: View<'_>,
) -> Result<(Tensor, Tensor), Error> {
    of_kinds::<f32, f32>(isa, query, sequences, view)
}

/// As [`attend`], of rows of one sequence without a block table.
pub fn ragged_causal(query: &Tensor, keys: &Tensor, values: &Tensor, last: &[u32]) -> Result<Tensor, Error> {
    Ok(attend(query, &[Sequence { keys, values, table: None, last }], View::default())?.0)
}

/// As [`ragged_causal`], with the log-sum-exps before `ends`.
pub fn ragged_causal_sums(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    last: &[u32],
    ends: &[u32],
) -> Result<(Tensor, Tensor), Error> {
    attend(query, &[Sequence { keys, values, table: None, last }], View { ends, ..View::default() })
}

fn of_kinds<Q, T>(
    isa: Isa,
    query: &Tensor,
    sequences: &[Sequence<'_>],
    view: View<'_>,
) -> Result<(Tensor, Tensor), Error>
where
    Q: Number + data::Element,
    T: Number + data::Element,
{
    check_view(&view)?;
    let Shape { rows, heads, kv_heads, head_dim } = shape(OP, query, sequences, view.from)?;
    let (numbers, stride) = data::rows::<Q>(OP, query)?;
    let with_rows = sequences.iter().filter(|sequence| !sequence.last.is_empty());
    let checked = with_rows.map(|sequence| -> Result<_, Error> {
        Ok(cpu::attention::Rows {
            keys: data::numbers::<T>(OP, sequence.keys)?,
            values: data::numbers::<T>(OP, sequence.values)?,
            table: sequence.table,
            last: sequence.last,
        })
    });
    let checked = checked.collect::<Result<Vec<_>, _>>()?;
    let mut output = Tensor::f_empty([rows, heads, head_dim], (Q::KIND, tch::Device::Cpu))?;
    let mut sums = Tensor::f_empty([rows, heads, view.ends.len() as i64], (Kind::Float, tch::Device::Cpu))?;
    let call = Call {
        query: numbers,
        stride,
        sequences: &checked,
        heads: heads as usize,
        kv_heads,
        head_dim: head_dim as usize,
        from: view.from as usize,
        scale: 1.0 / ((head_dim as f32).sqrt() * view.temperature),
        ends: view.ends,
    };
    let (to, to_sums) = (data::numbers_mut::<Q>(OP, &mut output)?, data::numbers_mut::<f32>(OP, &mut sums)?);
    cpu::attention::attend(isa, &call, to, to_sums);
    Ok((output, sums))
}

/// What a query and its sequences agree on.
struct Shape {
    rows: i64,
    heads: i64,
    /// 1 where no sequence has rows.
    kv_heads: usize,
    head_dim: i64,
}

/// Checks a query, of which rows see nothing before `from`, and the sequences that have rows.
fn shape(op: &'static str, query: &Tensor, sequences: &[Sequence<'_>], from: u32) -> Result<Shape, Error> {
    let [rows, heads, head_dim] = query.size()[..] else {
        return Err(argument(op, format!("query {:?} is not [rows, heads, head_dim]", query.size())));
    };
    let (mut count, mut kv_heads) = (0, None);
    for sequence in sequences.iter().filter(|sequence| !sequence.last.is_empty()) {
        let found = check(op, sequence, from, heads, head_dim)?;
        if let Some(known) = kv_heads.filter(|&known| known != found) {
            return Err(argument(op, format!("sequences of {known} and of {found} KV heads")));
        }
        kv_heads = Some(found);
        count += sequence.last.len();
    }
    if rows as usize != count {
        return Err(argument(op, format!("query {:?} for {count} last slots", query.size())));
    }
    Ok(Shape { rows, heads, kv_heads: kv_heads.unwrap_or(1), head_dim })
}

fn check_view(view: &View<'_>) -> Result<(), Error> {
    if view.ends.is_sorted() && view.temperature.is_finite() && view.temperature > 0.0 {
        return Ok(());
    }
    let what = format!("ends {:?} must ascend and temperature {} be positive", view.ends, view.temperature);
    Err(argument(OP, what))
}

/// Checks a sequence with rows; returns its KV heads.
fn check(op: &'static str, sequence: &Sequence<'_>, from: u32, heads: i64, head_dim: i64) -> Result<usize, Error> {
    let Sequence { keys, values, table, last } = sequence;
    let size = keys.size();
    let (capacity, kv_heads, key_dim) = match size[..] {
        [capacity, kv_heads, dim] => (capacity, kv_heads, dim),
        [blocks, block, kv_heads, dim] if block == i64::from(BLOCK) => (blocks * block, kv_heads, dim),
        _ => return Err(argument(op, format!("keys {size:?} are neither rows nor blocks of {BLOCK} rows"))),
    };
    if size != values.size()
        || key_dim != head_dim
        || head_dim < 1
        || kv_heads < 1
        || heads < 1
        || heads % kv_heads != 0
    {
        let what = format!(
            "{heads} query heads of {head_dim}, keys {size:?} and values {:?} do not fit each other",
            values.size()
        );
        return Err(argument(op, what));
    }
    let (first, furthest) = (last.first().copied().unwrap_or(0), last.last().copied().unwrap_or(0));
    if !last.is_sorted() || first < from {
        let what = format!("last slots must ascend from {from} on: every row sees a key; the first is {first}");
        return Err(argument(op, what));
    }
    let Some(table) = table else {
        if i64::from(furthest) >= capacity {
            return Err(argument(op, format!("slot {furthest} is beyond the capacity {capacity}")));
        }
        return Ok(kv_heads as usize);
    };
    let Some(used) = table.get(..(furthest / BLOCK) as usize + 1) else {
        return Err(argument(op, format!("slot {furthest} is beyond a table of {} blocks", table.len())));
    };
    match used.iter().find(|&&block| (i64::from(block) + 1) * i64::from(BLOCK) > capacity) {
        Some(block) => {
            Err(argument(op, format!("block {block} is beyond the {} of the KV", capacity / i64::from(BLOCK))))
        }
        None => Ok(kv_heads as usize),
    }
}

#[cfg(test)]
mod tests;
