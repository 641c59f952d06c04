//! Attention of scattered query rows over one sequence's keys.
//!
//! The mask is explicit: a row at slot s sees the keys of slots 0..=s. Neither of the library's own causal masks fits
//! scattered rows (one aligns top-left, the other bottom-right). Two ways to the same numbers: our own
//! CPU kernel, which computes in f32 whatever the tensors' type, and the library's fused kernel on tiles of ascending
//! rows, with the keys cut at the tile's last slot and a mask inside it, for shapes that ours does not take.

use tch::{Device, Kind, Tensor};

use crate::cpu::attention::Shape;
use crate::{Error, Isa, argument, cpu, data, device};

/// Rows a tile: enough work a call, few masked keys (measured best of 64, 128 and 256 on AVX2 and AVX-512).
const TILE: usize = 128;

/// Attention of `last.len()` rows.
///
/// - `query`: `[rows, heads, head_dim]`.
/// - `keys`, `values`: `[capacity, kv_heads, head_dim]`, indexed by slot, same type as `query`.
/// - `last`: the last slot that each row sees, not descending; row i reads `0..=last[i]` and nothing beyond. For causal
///   attention it is the row's own slot.
///
/// Returns `[rows, heads, head_dim]`. Fails on shapes that do not fit and on slots that descend or are beyond the
/// capacity.
pub fn ragged_causal(query: &Tensor, keys: &Tensor, values: &Tensor, last: &[u32]) -> Result<Tensor, Error> {
    let dim = check(query, keys, values, last)?;
    if query.device() != Device::Cpu {
        return Ok(device::ragged_causal(query, keys, values, last, None)?.0);
    }
    if !dim.is_multiple_of(cpu::attention::HEAD_DIM_STEP) && !last.is_empty() {
        return library(query, keys, values, last);
    }
    Ok(own(Isa::best(), query, keys, values, last, &[])?.0)
}

/// As [`ragged_causal`], and the log-sum-exp of the scores query · key / √head_dim over the keys before each of `ends`
/// (ascending slots): `[rows, heads, ends]`, f32, natural logarithm, −∞ where a row sees none of them. The mass of the
/// keys between two ends is the difference of the exponentials.
///
/// Fails as [`ragged_causal`], on `ends` that descend, and on a head size that is no multiple of 8.
pub fn ragged_causal_sums(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    last: &[u32],
    ends: &[u32],
) -> Result<(Tensor, Tensor), Error> {
    let dim = check(query, keys, values, last)?;
    if !dim.is_multiple_of(cpu::attention::HEAD_DIM_STEP) || !ends.is_sorted() {
        let what = format!("head size {dim} must be a multiple of 8 and the ends must ascend");
        return Err(argument("ragged_causal_sums", what));
    }
    if query.device() != Device::Cpu {
        let (output, sums) = device::ragged_causal(query, keys, values, last, Some(ends))?;
        return Ok((output, sums.ok_or_else(|| argument("ragged_causal_sums", "no sums"))?));
    }
    own(Isa::best(), query, keys, values, last, ends)
}

/// Checks the arguments; returns the head size.
fn check(query: &Tensor, keys: &Tensor, values: &Tensor, last: &[u32]) -> Result<usize, Error> {
    let (rows, heads, dim) = query.size3()?;
    let (capacity, kv_heads, key_dim) = keys.size3()?;
    if rows as usize != last.len()
        || dim != key_dim
        || kv_heads == 0
        || heads % kv_heads != 0
        || keys.size() != values.size()
    {
        let what = format!(
            "query {:?}, keys {:?}, values {:?} and {} slots do not fit",
            query.size(),
            keys.size(),
            values.size(),
            last.len()
        );
        return Err(argument("ragged_causal", what));
    }
    if !last.is_sorted() {
        return Err(argument("ragged_causal", "slots descend"));
    }
    match last.last() {
        Some(&slot) if i64::from(slot) >= capacity => {
            Err(argument("ragged_causal", format!("slot {slot} is beyond the capacity {capacity}")))
        }
        _ => Ok(dim as usize),
    }
}

/// Our own kernel, in f32; the arguments are checked.
fn own(
    isa: Isa,
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    last: &[u32],
    ends: &[u32],
) -> Result<(Tensor, Tensor), Error> {
    const OP: &str = "ragged_causal";
    let (rows, heads, dim) = query.size3()?;
    let float = (Kind::Float, tch::Device::Cpu);
    let mut sums = Tensor::f_empty([rows, heads, ends.len() as i64], float)?;
    let Some(&furthest) = last.last() else {
        return Ok((query.f_zeros_like()?, sums));
    };
    // Converting the visible keys costs a hundredth of the attention to them.
    let visible = |tensor: &Tensor| tensor.f_narrow(0, 0, i64::from(furthest) + 1)?.f_to_kind(Kind::Float);
    let (keys, values) = (visible(keys)?, visible(values)?);
    let shape =
        Shape { rows: rows as usize, heads: heads as usize, kv_heads: keys.size()[1] as usize, head_dim: dim as usize };
    let floats = query.f_to_kind(Kind::Float)?.f_contiguous()?;
    let mut output = Tensor::f_empty([rows, heads, dim], float)?;
    cpu::attention::ragged_causal(
        isa,
        shape,
        data::numbers(OP, &floats)?,
        data::numbers(OP, &keys)?,
        data::numbers(OP, &values)?,
        last,
        ends,
        data::numbers_mut(OP, &mut output)?,
        data::numbers_mut(OP, &mut sums)?,
    );
    Ok((output.f_to_kind(query.kind())?, sums))
}

/// The library's fused kernel on tiles; the arguments are checked.
fn library(query: &Tensor, keys: &Tensor, values: &Tensor, slots: &[u32]) -> Result<Tensor, Error> {
    if slots.len() <= TILE {
        return tile(query, keys, values, slots);
    }
    let mut outputs = Vec::with_capacity(slots.len().div_ceil(TILE));
    for (index, tile_slots) in slots.chunks(TILE).enumerate() {
        let rows = query.f_narrow(0, (index * TILE) as i64, tile_slots.len() as i64)?;
        outputs.push(tile(&rows, keys, values, tile_slots)?);
    }
    Ok(Tensor::f_cat(&outputs, 0)?)
}

fn tile(query: &Tensor, keys: &Tensor, values: &Tensor, slots: &[u32]) -> Result<Tensor, Error> {
    let (rows, heads, dim) = query.size3()?;
    let kv_heads = keys.size()[1];
    let group = heads / kv_heads;
    let (first, last) = (slots[0], slots[slots.len() - 1]);
    let visible = i64::from(last) + 1;
    // [rows, kv_heads, group, dim] → [group, kv_heads, rows, dim]: the query heads of a KV head become the batch, and
    // keys and values are shared between them without a copy.
    let query = query.f_view([rows, kv_heads, group, dim])?.f_permute([2, 1, 0, 3])?;
    let shared = |tensor: &Tensor| -> Result<Tensor, Error> {
        let cut = tensor.f_narrow(0, 0, visible)?.f_transpose(0, 1)?.f_unsqueeze(0)?;
        Ok(cut.f_expand([group, kv_heads, visible, dim], false)?)
    };
    // One row sees every key that is left: no mask.
    let mask = if first == last { None } else { Some(mask(slots, visible, query.kind())?) };
    let output = Tensor::f_scaled_dot_product_attention(
        &query,
        &shared(keys)?,
        &shared(values)?,
        mask,
        0.0,
        false,
        None,
        false,
    )?;
    Ok(output.f_permute([2, 1, 0, 3])?.f_reshape([rows, heads, dim])?)
}

/// `[1, 1, rows, visible]`: 0 where a row may look, −∞ else.
fn mask(slots: &[u32], visible: i64, kind: Kind) -> Result<Tensor, Error> {
    let slots: Vec<i32> = slots.iter().map(|&slot| slot as i32).collect();
    let rows = Tensor::f_from_slice(&slots)?.f_unsqueeze(1)?;
    let columns = Tensor::f_arange(visible, (Kind::Int, tch::Device::Cpu))?.f_unsqueeze(0)?;
    let hidden = columns.f_gt_tensor(&rows)?;
    let mut mask = Tensor::f_zeros([slots.len() as i64, visible], (kind, tch::Device::Cpu))?;
    let _ = mask.f_masked_fill_(&hidden, f64::NEG_INFINITY)?;
    Ok(mask.f_unsqueeze(0)?.f_unsqueeze(0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(shape: &[i64], seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn(shape, (Kind::Float, Device::Cpu))
    }

    /// The obvious twin: softmax over all keys with the mask applied, in double precision.
    fn plain(query: &Tensor, keys: &Tensor, values: &Tensor, slots: &[u32]) -> Tensor {
        let (rows, heads, dim) = query.size3().unwrap();
        let group = heads / keys.size()[1];
        let spread = |t: &Tensor| t.to_kind(Kind::Double).repeat_interleave_self_int(group, 1, None).transpose(0, 1);
        let scores =
            query.to_kind(Kind::Double).transpose(0, 1).matmul(&spread(keys).transpose(1, 2)) / (dim as f64).sqrt();
        let slots: Vec<i64> = slots.iter().map(|&slot| i64::from(slot)).collect();
        let hidden = Tensor::arange(keys.size()[0], (Kind::Int64, Device::Cpu))
            .unsqueeze(0)
            .gt_tensor(&Tensor::from_slice(&slots).unsqueeze(1));
        let weights = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Double);
        weights.matmul(&spread(values)).transpose(0, 1).reshape([rows, heads, dim]).to_kind(Kind::Float)
    }

    fn rows_of(kind: &str, capacity: u32) -> Vec<u32> {
        match kind {
            "full" => (0..capacity).collect(),
            "scattered" => (0..capacity).filter(|slot| slot % 7 == 3 || slot % 11 == 0).collect(),
            "clustered" => (0..capacity).filter(|slot| slot % 61 < 9).collect(),
            "first" => vec![0],
            "last" => vec![capacity - 1],
            _ => Vec::new(),
        }
    }

    #[test]
    fn rows_equal_the_plain_twin_for_odd_sizes_and_row_sets() {
        for (capacity, heads, kv_heads, dim) in [(1, 2, 1, 16), (97, 6, 3, 16), (257, 14, 2, 64), (1025, 9, 3, 64)] {
            let keys = random(&[capacity, kv_heads, dim], 1);
            let values = random(&[capacity, kv_heads, dim], 2);
            for kind in ["full", "scattered", "clustered", "first", "last", "none"] {
                let slots = rows_of(kind, capacity as u32);
                let query = random(&[slots.len() as i64, heads, dim], 3);
                let got = ragged_causal(&query, &keys, &values, &slots).unwrap();
                assert_eq!(got.size(), query.size());
                if slots.is_empty() {
                    continue;
                }
                let plain = plain(&query, &keys, &values, &slots);
                let check = |way: &str, got: &Tensor| {
                    let error = (got - &plain).abs().max().double_value(&[]);
                    assert!(error < 2e-6, "{way}, {capacity} keys, {kind} rows: error {error}");
                };
                check("dispatched", &got);
                check("library", &library(&query, &keys, &values, &slots).unwrap());
                for isa in Isa::available() {
                    check(&format!("{isa:?}"), &own(isa, &query, &keys, &values, &slots, &[]).unwrap().0);
                }
            }
        }
    }

    #[test]
    fn changing_a_future_key_changes_no_bit() {
        let (keys, values) = (random(&[300, 2, 64], 1), random(&[300, 2, 64], 2));
        let slots: Vec<u32> = (0..280).step_by(2).collect();
        let query = random(&[140, 14, 64], 3);
        let before = ragged_causal(&query, &keys, &values, &slots).unwrap();
        for (row, &slot) in slots.iter().enumerate().step_by(13) {
            let future = |tensor: &Tensor| {
                let changed = tensor.copy();
                let _ = changed.narrow(0, i64::from(slot) + 1, 299 - i64::from(slot)).fill_(1e4);
                changed
            };
            let after = ragged_causal(&query, &future(&keys), &future(&values), &slots).unwrap();
            let seen = (row + 1) as i64;
            assert!(before.narrow(0, 0, seen).equal(&after.narrow(0, 0, seen)), "slot {slot}");
        }
    }

    #[test]
    fn sums_equal_the_plain_twin() {
        let (capacity, heads, kv_heads, dim) = (333, 6, 2, 32);
        let (keys, values) = (random(&[capacity, kv_heads, dim], 1), random(&[capacity, kv_heads, dim], 2));
        let slots: Vec<u32> =
            (0..capacity as u32).filter(|slot| slot % 5 == 1).chain([capacity as u32 - 1; 3]).collect();
        let ends = [0, 1, 64, 65, 200, 200, capacity as u32];
        let query = random(&[slots.len() as i64, heads, dim], 3);
        let spread = keys.to_kind(Kind::Double).repeat_interleave_self_int(heads / kv_heads, 1, None);
        // [heads, rows, keys] → [rows, heads, keys]
        let scores = query.to_kind(Kind::Double).transpose(0, 1).matmul(&spread.permute([1, 2, 0])).transpose(0, 1);
        let scores = scores / (dim as f64).sqrt();
        let plain_output = plain(&query, &keys, &values, &slots);
        for isa in Isa::available() {
            let (output, sums) = own(isa, &query, &keys, &values, &slots, &ends).unwrap();
            assert!((output - &plain_output).abs().max().double_value(&[]) < 2e-6, "{isa:?}");
            for (row, &slot) in slots.iter().enumerate() {
                for (place, &end) in ends.iter().enumerate() {
                    let seen = i64::from(end.min(slot + 1));
                    let got =
                        sums.narrow(0, row as i64, 1).narrow(2, place as i64, 1).reshape([heads]).to_kind(Kind::Double);
                    let expected =
                        scores.narrow(0, row as i64, 1).narrow(2, 0, seen).logsumexp([-1], false).reshape([heads]);
                    if seen == 0 {
                        assert!(got.max().double_value(&[]) == f64::NEG_INFINITY);
                    } else {
                        assert!((got - expected).abs().max().double_value(&[]) < 1e-5, "{isa:?} row {row} end {end}");
                    }
                }
            }
        }
    }

    #[test]
    fn arguments_that_do_not_fit_are_refused() {
        let (query, keys) = (random(&[2, 4, 8], 1), random(&[5, 2, 8], 2));
        for slots in [&[1u32][..], &[3, 2], &[4, 5]] {
            assert!(ragged_causal(&query, &keys, &keys, slots).is_err(), "{slots:?}");
        }
        assert!(ragged_causal(&query, &random(&[5, 3, 8], 2), &keys, &[0, 1]).is_err());
        assert!(ragged_causal(&random(&[2, 8], 1), &keys, &keys, &[0, 1]).is_err());
    }
}
