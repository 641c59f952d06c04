//! The library's fused kernel on tiles of ascending rows: what our own kernel is measured against.
//!
//! The keys are cut at a tile's last slot, and a mask hides the rest inside of it. Neither of the library's own causal
//! masks fits scattered rows: one aligns top-left, the other bottom-right.

use tch::{Kind, Tensor};

use crate::Error;

/// Rows a tile: enough work a call, few masked keys (measured best of 64, 128 and 256 on AVX2 and AVX-512).
const TILE: usize = 128;

/// As [`super::ragged_causal`] of f32 tensors whose shapes and slots are known to fit; for benchmarks.
pub fn tiled(query: &Tensor, keys: &Tensor, values: &Tensor, last: &[u32]) -> Result<Tensor, Error> {
    if last.len() <= TILE {
        return tile(query, keys, values, last);
    }
    let mut outputs = Vec::with_capacity(last.len().div_ceil(TILE));
    for (index, tile_slots) in last.chunks(TILE).enumerate() {
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
