//! Stored keys and values into blocks on CUDA, and projected rows likewise: decoded, rotated and placed in one pass.

use tch::{Kind, Tensor};

use super::arguments::{Place, Scatter};
use super::tensor::{check, check_as, number, pointer, pointer_or_null, upload};
use super::{Grid, Launch};
use crate::blocks::Rows;
use crate::{Error, argument};

const THREADS: u32 = 256;
/// Pairs of numbers that a thread moves.
const PAIRS: usize = 8;
/// Tokens that share a scale of K.
const SCALE_TOKENS: usize = 64;

/// How numbers are stored. Integers and fp8 are symmetric: number = scale · code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// 4 bytes, exact.
    F32,
    /// 2 bytes.
    Bf16,
    /// 1 byte.
    Int8,
    /// 1 byte, e4m3.
    Fp8,
    /// Half a byte, the low one first along head_dim.
    Int4,
}

impl Encoding {
    const fn code(self) -> i32 {
        match self {
            Encoding::F32 => 0,
            Encoding::Bf16 => 1,
            Encoding::Int8 => 2,
            Encoding::Fp8 => 3,
            Encoding::Int4 => 4,
        }
    }

    const fn scaled(self) -> bool {
        matches!(self, Encoding::Int8 | Encoding::Fp8 | Encoding::Int4)
    }

    /// Bits a number.
    const fn bits(self) -> usize {
        match self {
            Encoding::F32 => 32,
            Encoding::Bf16 => 16,
            Encoding::Int8 | Encoding::Fp8 => 8,
            Encoding::Int4 => 4,
        }
    }
}

/// Rows of one chunk as stored, on the device of their blocks.
#[derive(Debug)]
pub struct Stored<'a> {
    /// How keys and values are stored.
    pub encoding: Encoding,
    /// Bytes of K `[rows, kv_heads, head_dim]` before rotation.
    pub keys: &'a Tensor,
    /// Bytes of V, as `keys`.
    pub values: &'a Tensor,
    /// Scales of K `[groups of 64 tokens, kv_heads, head_dim]` f32 and of V `[rows, kv_heads]` f32; unused by floats.
    pub scales: Option<(&'a Tensor, &'a Tensor)>,
    /// Where the first row stands in the first group of scales.
    pub first_token: usize,
}

/// Where rows go.
#[derive(Debug)]
pub struct Target<'a> {
    /// `[slots, kv_heads, head_dim]` or `[blocks, 64, kv_heads, head_dim]`, bf16 or f16.
    pub keys: &'a Tensor,
    /// As `keys`.
    pub values: &'a Tensor,
    /// The rows' slots, ascending, and the table of blocks.
    pub rows: Rows<'a>,
    /// `[rows, head_dim / 2]` of the rows' positions, f32.
    pub cosines: &'a Tensor,
    /// As `cosines`.
    pub sines: &'a Tensor,
}

struct Checked {
    suffix: &'static str,
    kv_heads: usize,
    head_dim: usize,
    slots: Tensor,
    table: Option<Tensor>,
}

impl Target<'_> {
    fn check(&self, op: &'static str) -> Result<Checked, Error> {
        let suffix = check(op, &[self.keys, self.values])?;
        let (device, shape) = (self.keys.device(), self.keys.size());
        let &[.., kv_heads, head_dim] = &shape[..] else { return Err(argument(op, format!("blocks {shape:?}"))) };
        let rows = self.rows.last.len() as i64;
        if self.values.size() != shape || kv_heads <= 0 || head_dim <= 0 || head_dim % (2 * PAIRS as i64) != 0 {
            let what = format!("keys {shape:?} and values {:?}; head sizes are multiples of 16", self.values.size());
            return Err(argument(op, what));
        }
        for table in [self.cosines, self.sines] {
            check_as(op, table, Kind::Float, device)?;
            if table.numel() as i64 != rows * head_dim / 2 {
                return Err(argument(op, format!("rotation {:?} does not fit {rows} rows", table.size())));
            }
        }
        let (kv_heads, head_dim) = (kv_heads as usize, head_dim as usize);
        self.rows.check(op, self.keys.numel() / (kv_heads * head_dim))?;
        Ok(Checked {
            suffix,
            kv_heads,
            head_dim,
            slots: upload(op, self.rows.last.iter().copied(), device)?,
            table: match self.rows.table {
                Some(table) => Some(upload(op, table.iter().copied(), device)?),
                None => None,
            },
        })
    }
}

fn grid(op: &'static str, items: usize, head_dim: usize) -> Result<Grid, Error> {
    let blocks = (items * (head_dim / 2 / PAIRS)).div_ceil(THREADS as usize);
    Ok(Grid { blocks: [number(op, "thread blocks", blocks)? as u32, 1, 1], threads: THREADS })
}

/// Writes stored rows into blocks: keys decoded and rotated in f32 with one rounding, values decoded.
pub(crate) fn place(launch: &impl Launch, stored: &Stored<'_>, target: &Target<'_>) -> Result<(), Error> {
    const OP: &str = "place";
    let Checked { suffix, kv_heads, head_dim, slots, table } = target.check(OP)?;
    let (rows, device) = (target.rows.last.len(), target.keys.device());
    let bytes = (rows * kv_heads * head_dim * stored.encoding.bits()) / 8;
    for tensor in [stored.keys, stored.values] {
        check_as(OP, tensor, Kind::Uint8, device)?;
        if tensor.numel() != bytes {
            let what =
                format!("{} stored bytes are not the {bytes} of {rows} rows in {:?}", tensor.numel(), stored.encoding);
            return Err(argument(OP, what));
        }
    }
    let (mut key_scales, mut value_scales) = (std::ptr::null_mut(), std::ptr::null_mut());
    if stored.encoding.scaled() {
        let Some((keys, values)) = stored.scales else {
            return Err(argument(OP, format!("{:?} needs scales", stored.encoding)));
        };
        check_as(OP, keys, Kind::Float, device)?;
        check_as(OP, values, Kind::Float, device)?;
        let groups = (stored.first_token + rows).div_ceil(SCALE_TOKENS);
        if keys.numel() < groups * kv_heads * head_dim || values.numel() != rows * kv_heads {
            let what = format!("scales {:?} and {:?} do not fit {rows} rows", keys.size(), values.size());
            return Err(argument(OP, what));
        }
        (key_scales, value_scales) = (pointer(keys), pointer(values));
    }
    if rows == 0 {
        return Ok(());
    }
    let arguments = Place {
        stored_keys: pointer(stored.keys),
        stored_values: pointer(stored.values),
        key_scales,
        value_scales,
        keys: pointer(target.keys),
        values: pointer(target.values),
        cosines: pointer(target.cosines),
        sines: pointer(target.sines),
        slots: pointer(&slots),
        table: pointer_or_null(table.as_ref()),
        first_token: number(OP, "first token", stored.first_token)?,
        rows: number(OP, "rows", rows)?,
        kv_heads: number(OP, "KV heads", kv_heads)?,
        head_dim: number(OP, "head size", head_dim)?,
        encoding: stored.encoding.code(),
    };
    let grid = grid(OP, rows * kv_heads, head_dim)?;
    // SAFETY: the kernel takes a `Place`; sizes, types, devices, slots and blocks are checked above.
    unsafe { launch.launch(&format!("place_{suffix}"), grid, 0, &arguments) }
}

/// Splits projected rows `[rows, heads + 2 · kv_heads, head_dim]` (`bias`: one row, added first): returns the queries
/// `[rows, heads, head_dim]`, rotated, and writes keys, rotated, and values into blocks.
pub(crate) fn scatter(
    launch: &impl Launch,
    projected: &Tensor,
    bias: Option<&Tensor>,
    target: &Target<'_>,
) -> Result<Tensor, Error> {
    const OP: &str = "scatter";
    let Checked { suffix, kv_heads, head_dim, slots, table } = target.check(OP)?;
    let mut all = vec![target.keys, projected];
    all.extend(bias);
    check(OP, &all)?;
    let (rows, all_heads, dim) = projected.size3()?;
    let heads = all_heads as usize - (2 * kv_heads).min(all_heads as usize);
    let bias_fits = bias.is_none_or(|bias| bias.numel() as i64 == all_heads * dim);
    if rows as usize != target.rows.last.len() || dim as usize != head_dim || heads == 0 || !bias_fits {
        let what = format!("projected {:?} and bias {:?} do not fit", projected.size(), bias.map(Tensor::size));
        return Err(argument(OP, what));
    }
    let query = Tensor::f_empty([rows, heads as i64, dim], (projected.kind(), projected.device()))?;
    if rows == 0 {
        return Ok(query);
    }
    let arguments = Scatter {
        projected: pointer(projected),
        bias: pointer_or_null(bias),
        cosines: pointer(target.cosines),
        sines: pointer(target.sines),
        slots: pointer(&slots),
        table: pointer_or_null(table.as_ref()),
        query: pointer(&query),
        keys: pointer(target.keys),
        values: pointer(target.values),
        rows: number(OP, "rows", rows as usize)?,
        heads: number(OP, "heads", heads)?,
        kv_heads: number(OP, "KV heads", kv_heads)?,
        head_dim: number(OP, "head size", head_dim)?,
    };
    let grid = grid(OP, rows as usize * all_heads as usize, head_dim)?;
    // SAFETY: the kernel takes a `Scatter`; sizes, types, devices, slots and blocks are checked above.
    unsafe { launch.launch(&format!("scatter_{suffix}"), grid, 0, &arguments)? };
    Ok(query)
}

#[cfg(test)]
mod tests;
