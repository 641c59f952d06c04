//! Stored keys and values into blocks on CUDA, and projected rows likewise: decoded, rotated and placed in one pass.

use std::ffi::c_void;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::arguments::{Place, Scatter};
use super::tensor::{check, check_as, number, pointer, pointer_or_null, upload};
use super::{Grid, Launch};
use crate::blocks::Rows;
use crate::place::{Encoding, Piece, Stored};
use crate::quantize::Format;
use crate::rope::Rotation;
use crate::{Error, argument};

const THREADS: u32 = 256;
/// Pairs of numbers that a thread moves.
const PAIRS: usize = 8;
/// Head sizes that the kernels take are multiples of this.
pub(crate) const HEAD_DIM_STEP: i64 = 2 * PAIRS as i64;

const fn code(encoding: Encoding) -> i32 {
    match encoding {
        Encoding::F32 => 0,
        Encoding::Bf16 => 1,
        Encoding::Quantized(Format::Int8) => 2,
        Encoding::Quantized(Format::Fp8) => 3,
        Encoding::Quantized(Format::Int4) => 4,
    }
}

/// Where rows go.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    /// `[slots, kv_heads, head_dim]` or `[blocks, 64, kv_heads, head_dim]`, bf16 or f16.
    pub(crate) keys: &'a Tensor,
    /// As `keys`.
    pub(crate) values: &'a Tensor,
    /// The rows' slots, ascending, and the table of blocks.
    pub(crate) rows: Rows<'a>,
    /// `[rows, head_dim / 2]` of the rows' positions, f32.
    pub(crate) cosines: &'a Tensor,
    /// As `cosines`.
    pub(crate) sines: &'a Tensor,
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
        if self.values.size() != shape || kv_heads <= 0 || head_dim <= 0 || head_dim % HEAD_DIM_STEP != 0 {
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

/// Writes the rows of all `pieces`, one after another, into blocks: keys decoded and rotated in f32 with one rounding,
/// values decoded. Bytes of the host go through pinned memory on a stream of their own, beside what is computed; what is
/// resident is read where it is, and the order of the current stream protects it.
pub(crate) fn place(launch: &impl Launch, pieces: &[Piece<'_>], target: &Target<'_>) -> Result<(), Error> {
    const OP: &str = "place";
    let Checked { suffix, kv_heads, head_dim, slots, table } = target.check(OP)?;
    let mut rows = 0usize;
    let mut sent = Vec::new();
    for piece in pieces {
        piece.check(kv_heads, head_dim, target.keys.device())?;
        rows = rows.saturating_add(piece.rows().len());
        if let Piece::Host(stored) = piece {
            sent.extend(stored.parts(kv_heads));
        }
    }
    if rows != target.rows.last.len() {
        return Err(argument(OP, format!("{rows} stored rows do not fit {} slots", target.rows.last.len())));
    }
    launch.with_staged(&sent, |staged| {
        let mut staged = staged.as_chunks::<4>().0.iter();
        let mut first = 0;
        for piece in pieces {
            let parts = match piece {
                Piece::Host(_) => staged.next().copied(),
                Piece::Resident { layer, rows } => Some(layer.pointers(rows)),
            };
            let Some([stored_keys, stored_values, key_scales, value_scales]) = parts else {
                return Err(argument(OP, "a piece was not sent"));
            };
            let rows = piece.rows();
            if rows.is_empty() {
                continue;
            }
            let of_row = |table: &Tensor| pointer_at(table, first * head_dim / 2 * size_of::<f32>());
            let arguments = Place {
                stored_keys,
                stored_values,
                key_scales,
                value_scales,
                keys: pointer(target.keys),
                values: pointer(target.values),
                cosines: of_row(target.cosines),
                sines: of_row(target.sines),
                slots: pointer_at(&slots, first * size_of::<i32>()),
                table: pointer_or_null(table.as_ref()),
                first_token: number(OP, "first token", rows.start)?,
                rows: number(OP, "rows", rows.len())?,
                kv_heads: number(OP, "KV heads", kv_heads)?,
                head_dim: number(OP, "head size", head_dim)?,
                encoding: code(piece.encoding()),
            };
            let grid = grid(OP, rows.len() * kv_heads, head_dim)?;
            // SAFETY: the kernel takes a `Place`; sizes, types, devices, slots and blocks are checked above, and
            // `first` + `rows` are within the slots and the rotation.
            unsafe { launch.launch(&format!("place_{suffix}"), grid, 0, &arguments)? };
            first += rows.len();
        }
        Ok(())
    })
}

/// Writes a whole layer's parts into `memory` (u8, on the device), each at its place, the same way; what comes on the
/// current stream later finds them.
pub(crate) fn keep(
    launch: &impl Launch,
    whole: &Stored<'_>,
    kv_heads: usize,
    memory: &Tensor,
    places: &[Range<usize>; 4],
) -> Result<(), Error> {
    const OP: &str = "keep";
    check_as(OP, memory, Kind::Uint8, memory.device())?;
    let parts = whole.parts(kv_heads);
    let fits = |(part, place): (&&[u8], &Range<usize>)| part.len() == place.len() && place.end <= memory.numel();
    if !parts.iter().zip(places).all(fits) {
        let lengths = parts.map(<[u8]>::len);
        return Err(argument(OP, format!("parts of {lengths:?} bytes do not fit {places:?} of {}", memory.numel())));
    }
    launch.with_staged(&parts, |staged| {
        for (&from, place) in staged.iter().zip(places).filter(|(_, place)| !place.is_empty()) {
            // SAFETY: what was staged has the part's length, and so has its place, which lies in the tensor; both are of
            // this device.
            unsafe { launch.copy(from, pointer_at(memory, place.start).cast_mut(), place.len())? };
        }
        Ok(())
    })
}

/// One layer's projected rows `[rows, heads + 2 · kv_heads, head_dim]`, with `bias` (one row) added, at once: returns the
/// queries `[rows, heads, head_dim]`, rotated, and writes keys, rotated, and values at `slots` (ascending) of
/// `[capacity, kv_heads, head_dim]`. bf16 or f16 on CUDA, head sizes that are multiples of 16.
pub fn scatter_rows(
    projected: &Tensor,
    bias: Option<&Tensor>,
    keys: &mut Tensor,
    values: &mut Tensor,
    slots: &[u32],
    rotation: &Rotation,
) -> Result<Tensor, Error> {
    let Device::Cuda(index) = projected.device() else {
        return Err(argument("scatter", format!("needs tensors on CUDA, got {:?}", projected.device())));
    };
    let (cosines, sines) = rotation.tables();
    let target = Target { keys, values, rows: Rows { last: slots, table: None }, cosines, sines };
    scatter(&*super::gpu(index)?, projected, bias, &target)
}

/// `bytes` behind where a tensor's numbers begin, which must be within them.
fn pointer_at(tensor: &Tensor, bytes: usize) -> *const c_void {
    pointer(tensor).cast::<u8>().wrapping_add(bytes).cast()
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
