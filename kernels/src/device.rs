//! Attention of tensors on a GPU: our kernel where it fits, else the library's operations on a few rows at a time.

use tch::{Device, Kind, Tensor};

use crate::blocks::Rows;
use crate::{Error, argument, cuda};

/// Rows at a time without a kernel: their scores are materialized.
const SLICE: usize = 64;

/// As [`crate::attention::ragged_causal`] and, with `ends`, [`crate::attention::ragged_causal_sums`]; the arguments are
/// checked. Types without a kernel (f32) and other head sizes are correct and slow.
pub(crate) fn ragged_causal(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    last: &[u32],
    ends: Option<&[u32]>,
) -> Result<(Tensor, Option<Tensor>), Error> {
    let gpu = gpu(query)?;
    let kernel = matches!(query.kind(), Kind::BFloat16 | Kind::Half)
        && query.size().last().is_some_and(|dim| cuda::attention::HEAD_DIMS.contains(dim));
    if !kernel {
        return plain(query, keys, values, last, ends);
    }
    let (query, keys, values) = (query.f_contiguous()?, keys.f_contiguous()?, values.f_contiguous()?);
    cuda::attention::ragged_causal(&*cuda::gpu(gpu)?, &query, &keys, &values, &[Rows { last, table: None }], ends)
}

/// As [`ragged_causal`], through a block table; there is no other way than the kernel.
pub(crate) fn in_blocks(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    rows: Rows<'_>,
    ends: Option<&[u32]>,
) -> Result<(Tensor, Option<Tensor>), Error> {
    cuda::attention::ragged_causal(&*cuda::gpu(gpu(query)?)?, query, keys, values, &[rows], ends)
}

/// The number of the GPU that holds a tensor.
fn gpu(tensor: &Tensor) -> Result<usize, Error> {
    match tensor.device() {
        Device::Cuda(index) => Ok(index),
        other => Err(argument("ragged_causal", format!("runs on the CPU and on CUDA, not on {other:?}"))),
    }
}

fn plain(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    last: &[u32],
    ends: Option<&[u32]>,
) -> Result<(Tensor, Option<Tensor>), Error> {
    let (_, heads, dim) = query.size3()?;
    let kv_heads = keys.size3()?.1;
    let (group, device) = (heads / kv_heads, query.device());
    let float = (Kind::Float, device);
    let mut outputs = vec![Tensor::f_empty([0, heads, dim], float)?];
    let mut sums = vec![Tensor::f_empty([0, heads, ends.map_or(0, <[u32]>::len) as i64], float)?];
    for (index, last) in last.chunks(SLICE).enumerate() {
        let rows = last.len() as i64;
        let visible = i64::from(last.last().map_or(0, |&slot| slot + 1));
        // [rows, kv_heads, group, dim] → [kv_heads, rows · group, dim]
        let query = query.f_narrow(0, (index * SLICE) as i64, rows)?.f_to_kind(Kind::Float)?;
        let query = query.f_reshape([rows, kv_heads, group, dim])?.f_transpose(0, 1)?.f_reshape([kv_heads, -1, dim])?;
        let shared = |tensor: &Tensor| tensor.f_narrow(0, 0, visible)?.f_to_kind(Kind::Float)?.f_transpose(0, 1);
        let scores = query.f_matmul(&shared(keys)?.f_transpose(1, 2)?)?.f_mul_scalar(1.0 / (dim as f64).sqrt())?;
        let slots: Vec<i64> = last.iter().map(|&slot| i64::from(slot)).collect();
        let slots = Tensor::f_from_slice(&slots)?.f_to_device(device)?.f_unsqueeze(1)?;
        let hidden = Tensor::f_arange(visible, (Kind::Int64, device))?.f_unsqueeze(0)?.f_gt_tensor(&slots)?;
        let scores = scores.f_view([kv_heads, rows, group, visible])?;
        let scores = scores.f_masked_fill(&hidden.f_view([1, rows, 1, visible])?, f64::NEG_INFINITY)?;
        let weights = scores.f_softmax(-1, Kind::Float)?.f_view([kv_heads, rows * group, visible])?;
        let by_row = |tensor: &Tensor, numbers: i64| -> Result<Tensor, Error> {
            let split = tensor.f_reshape([kv_heads, rows, group, numbers])?;
            Ok(split.f_transpose(0, 1)?.f_reshape([rows, heads, numbers])?)
        };
        outputs.push(by_row(&weights.f_matmul(&shared(values)?)?, dim)?);
        let mut columns = Vec::new();
        for &end in ends.unwrap_or(&[]) {
            columns.push(match i64::from(end).min(visible) {
                0 => Tensor::f_full([rows, heads, 1], f64::NEG_INFINITY, float)?,
                end => by_row(&scores.f_narrow(3, 0, end)?.f_logsumexp([-1], true)?, 1)?,
            });
        }
        if !columns.is_empty() {
            sums.push(Tensor::f_cat(&columns, 2)?);
        }
    }
    let sums = match ends {
        Some(_) => Some(Tensor::f_cat(&sums, 0)?),
        None => None,
    };
    Ok((Tensor::f_cat(&outputs, 0)?.f_to_kind(query.kind())?, sums))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::ragged_causal_sums;

    #[test]
    fn rows_without_a_kernel_equal_the_cpu() {
        tch::manual_seed(1);
        let float = (Kind::Float, Device::Cpu);
        let (query, keys) = (Tensor::randn([150, 6, 16], float), Tensor::randn([333, 2, 16], float));
        let values = Tensor::randn([333, 2, 16], float);
        let last: Vec<u32> = (0..150).map(|row| row * 2 + row % 3).collect();
        let ends = [0, 1, 64, 200, 200, 333];
        let (expected, expected_sums) = ragged_causal_sums(&query, &keys, &values, &last, &ends).unwrap();
        let (got, sums) = plain(&query, &keys, &values, &last, Some(&ends)).unwrap();
        assert!((got - expected).abs().max().double_value(&[]) < 1e-5);
        let sums = sums.unwrap();
        assert!(sums.isneginf().equal(&expected_sums.isneginf()));
        let difference = (sums.exp() - expected_sums.exp()).abs() / (expected_sums.exp() + 1e-3);
        assert!(difference.max().double_value(&[]) < 1e-4);
    }
}
