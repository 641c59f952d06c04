//! Attention over blocks of 64 tokens: rows of several requests, each with its own table of blocks.

use tch::{Device, Tensor};

use crate::attention::ragged_causal;
use crate::{BLOCK, Error, argument, cuda};

/// The rows of one request.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The last slot that each row sees, not descending.
    pub last: &'a [u32],
    /// Where the request's blocks are: slot s is token s mod 64 of block `table[s / 64]`. `None`: block i is at i.
    pub table: Option<&'a [u32]>,
}

impl Rows<'_> {
    /// Fails on slots that descend or have no block, and on blocks beyond `capacity` (slots of all blocks).
    pub(crate) fn check(&self, op: &'static str, capacity: usize) -> Result<(), Error> {
        if !self.last.is_sorted() {
            return Err(argument(op, "slots descend"));
        }
        let slots = match self.table {
            None => capacity,
            Some(table) => {
                let blocks = capacity / BLOCK as usize;
                if let Some(&block) = table.iter().find(|&&block| block as usize >= blocks) {
                    return Err(argument(op, format!("block {block} is beyond the {blocks} blocks")));
                }
                table.len().saturating_mul(BLOCK as usize)
            }
        };
        match self.last.last() {
            Some(&slot) if slot as usize >= slots => {
                Err(argument(op, format!("slot {slot} is beyond the request's {slots}")))
            }
            _ => Ok(()),
        }
    }
}

/// Causal attention of the rows of `requests`, one after another.
///
/// - `query`: `[rows, heads, head_dim]`.
/// - `keys`, `values`: `[blocks, 64, kv_heads, head_dim]`, same type and device as `query`.
///
/// Returns `[rows, heads, head_dim]`. On CUDA this is one launch, in bf16 or f16, for head sizes 64 and 128; elsewhere
/// the requests run one after another on a copy of their blocks.
pub fn ragged_causal_blocks(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    requests: &[Rows<'_>],
) -> Result<Tensor, Error> {
    const OP: &str = "ragged_causal_blocks";
    if let Device::Cuda(index) = query.device() {
        return Ok(cuda::attention::ragged_causal(&*cuda::gpu(index)?, query, keys, values, requests, None)?.0);
    }
    let (blocks, tokens, kv_heads, head_dim) = keys.size4()?;
    let rows: usize = requests.iter().map(|request| request.last.len()).sum();
    if tokens != i64::from(BLOCK) || rows as i64 != query.size3()?.0 || keys.size() != values.size() {
        let what = format!("{rows} rows, query {:?}, keys {:?}, values {:?}", query.size(), keys.size(), values.size());
        return Err(argument(OP, what));
    }
    let mut outputs = vec![query.f_narrow(0, 0, 0)?];
    let mut first = 0;
    for request in requests {
        request.check(OP, (blocks * tokens) as usize)?;
        let joined = |tensor: &Tensor| -> Result<Tensor, Error> {
            let chosen = match request.table {
                None => tensor.shallow_clone(),
                Some(table) => {
                    let index: Vec<i64> = table.iter().map(|&block| i64::from(block)).collect();
                    tensor.f_index_select(0, &Tensor::f_from_slice(&index)?)?
                }
            };
            Ok(chosen.f_reshape([-1, kv_heads, head_dim])?)
        };
        let rows = request.last.len() as i64;
        let query = query.f_narrow(0, first, rows)?;
        outputs.push(ragged_causal(&query, &joined(keys)?, &joined(values)?, request.last)?);
        first += rows;
    }
    Ok(Tensor::f_cat(&outputs, 0)?)
}
