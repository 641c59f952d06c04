//! Ragged causal attention on CUDA: cuts rows into tiles, chooses kernel and splits, launches.

use tch::{Kind, Tensor};

use super::arguments::{Attend, Merge, Tile};
use super::tensor::{check, number, pointer, pointer_or_null, send, upload};
use super::{Grid, Launch};
use crate::blocks::Rows;
use crate::{BLOCK, Error, argument};

const OP: &str = "ragged_causal";
/// Head sizes that have kernels.
pub(crate) const HEAD_DIMS: [i64; 2] = [64, 128];
/// Lanes of all requests together are below this, so that the kernels' division is exact.
const LANE_LIMIT: usize = 1 << 24;
const GROUP_LIMIT: usize = 1 << 7;
/// Steps of a split at least: below, merging costs more than it hides.
const STEPS_EACH: usize = 4;
const SPLIT_LIMIT: usize = 64;

/// A family of kernels; sizes as in attention.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Wide,
    Narrow,
    Sums,
}

impl Family {
    const fn name(self) -> &'static str {
        match self {
            Family::Wide => "attend",
            Family::Narrow => "attend_narrow",
            Family::Sums => "attend_sums",
        }
    }

    const fn lanes(self) -> usize {
        match self {
            Family::Wide => 128,
            Family::Narrow => 16,
            Family::Sums => 64,
        }
    }

    const fn threads(self) -> u32 {
        match self {
            Family::Wide | Family::Sums => 128,
            Family::Narrow => 32,
        }
    }

    /// Keys a step.
    const fn keys(self, head_dim: usize) -> usize {
        match self {
            Family::Wide if head_dim == 128 => 32,
            _ => 64,
        }
    }

    /// Queries, keys and values.
    const fn shared_bytes(self, head_dim: usize) -> usize {
        (self.lanes() + 2 * self.keys(head_dim)) * head_dim * 2
    }

    /// Thread blocks that keep a multiprocessor busy.
    const fn busy(self) -> usize {
        match self {
            Family::Wide | Family::Sums => 2,
            Family::Narrow => 6,
        }
    }
}

/// Attention of the rows of several requests, and with `ends` the log-sum-exps up to each.
///
/// `query` `[rows, heads, head_dim]`; `keys` and `values` `[slots, kv_heads, head_dim]`, or `[blocks, 64, kv_heads,
/// head_dim]` when the requests have tables. Checks everything before anything runs.
pub(crate) fn ragged_causal(
    launch: &impl Launch,
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    requests: &[Rows<'_>],
    ends: Option<&[u32]>,
) -> Result<(Tensor, Option<Tensor>), Error> {
    let suffix = check(OP, &[query, keys, values])?;
    let (rows, heads, head_dim) = query.size3()?;
    let kv_heads = check_shapes(query, keys, values)?;
    check_requests(requests, rows as usize, keys.numel() / (kv_heads * head_dim as usize))?;
    let (device, kind) = (query.device(), query.kind());
    let (rows, heads, head_dim) = (rows as usize, heads as usize, head_dim as usize);
    let group = heads / kv_heads;
    if rows * group >= LANE_LIMIT || group > GROUP_LIMIT {
        return Err(argument(OP, format!("{rows} rows of {group} heads a KV head are too many for one call")));
    }
    let ends = match ends {
        Some(ends) if !ends.is_sorted() => return Err(argument(OP, format!("ends {ends:?} descend"))),
        ends => ends,
    };
    let output = Tensor::f_empty(query.size(), (kind, device))?;
    let sums_shape = [rows, heads, ends.map_or(0, <[u32]>::len)].map(|size| size as i64);
    let sums = Tensor::f_empty(sums_shape, (Kind::Float, device))?;
    if rows == 0 {
        return Ok((output, ends.map(|_| sums)));
    }
    let most_lanes = requests.iter().map(|request| request.last.len() * group).max().unwrap_or(0);
    let family = match ends {
        Some(_) => Family::Sums,
        None if most_lanes <= 2 * Family::Narrow.lanes() => Family::Narrow,
        None => Family::Wide,
    };
    let tiles = tiles(requests, group, family.lanes())?;
    let stop = requests.iter().filter_map(|request| request.last.last()).max().map_or(0, |&slot| slot as usize + 1);
    let wanted = family.busy() * launch.multiprocessors();
    let splits = match family {
        Family::Sums => 1,
        _ => splits(tiles.len() * kv_heads, wanted, stop.div_ceil(family.keys(head_dim))),
    };
    let numbers: Vec<i32> =
        tiles.iter().flat_map(|tile| [tile.table, tile.first_row, tile.end_row, tile.first_lane]).collect();
    let tile_numbers = send(&Tensor::f_from_slice(&numbers)?, device)?;
    let last = upload(OP, requests.iter().flat_map(|request| request.last.iter().copied()), device)?;
    let tables = match requests.iter().any(|request| request.table.is_some()) {
        true => {
            Some(upload(OP, requests.iter().flat_map(|request| request.table.unwrap_or(&[]).iter().copied()), device)?)
        }
        false => None,
    };
    let end_list = match ends {
        Some(ends) => Some(upload(OP, ends.iter().copied(), device)?),
        None => None,
    };
    let float = (Kind::Float, device);
    let part_rows = if splits > 1 { (splits * rows * heads) as i64 } else { 0 };
    let parts = Tensor::f_empty([part_rows, head_dim as i64], float)?;
    let part_sums = Tensor::f_empty([part_rows], float)?;
    let arguments = Attend {
        query: pointer(query),
        keys: pointer(keys),
        values: pointer(values),
        output: pointer(&output),
        parts: pointer(&parts),
        part_sums: pointer(&part_sums),
        sums: pointer(&sums),
        last: pointer(&last),
        tiles: pointer(&tile_numbers),
        tables: pointer_or_null(tables.as_ref()),
        ends: pointer_or_null(end_list.as_ref()),
        end_count: number(OP, "ends", ends.map_or(0, <[u32]>::len))?,
        rows: number(OP, "rows", rows)?,
        heads: number(OP, "heads", heads)?,
        kv_heads: number(OP, "KV heads", kv_heads)?,
        group: number(OP, "group", group)?,
        inverse_group: (1u32 << 31).div_ceil(group as u32),
        splits: number(OP, "splits", splits)?,
        scale: (std::f64::consts::LOG2_E / (head_dim as f64).sqrt()) as f32,
    };
    let grid = Grid { blocks: [tiles.len() as u32, kv_heads as u32, splits as u32], threads: family.threads() };
    let kernel = format!("{}_{suffix}_{head_dim}", family.name());
    // SAFETY: the kernel takes an `Attend`; its tensors are checked above, and freed memory is given out again only to
    // later work of the same stream.
    unsafe { launch.launch(&kernel, grid, family.shared_bytes(head_dim), &arguments)? };
    if splits > 1 {
        let merge = Merge {
            parts: pointer(&parts),
            part_sums: pointer(&part_sums),
            output: pointer(&output),
            splits: arguments.splits,
            pairs: number(OP, "rows and heads", rows * heads)?,
            head_dim: head_dim as i32,
        };
        let grid = Grid { blocks: [(rows * heads).div_ceil(4) as u32, 1, 1], threads: 128 };
        // SAFETY: as above, with a `Merge`.
        unsafe { launch.launch(&format!("merge_{suffix}"), grid, 0, &merge)? };
    }
    Ok((output, ends.map(|_| sums)))
}

/// Returns the number of KV heads.
fn check_shapes(query: &Tensor, keys: &Tensor, values: &Tensor) -> Result<usize, Error> {
    let (shape, key_shape) = (query.size(), keys.size());
    let fits = match (&shape[..], &key_shape[..]) {
        (&[_, heads, dim], &[.., kv_heads, key_dim]) => {
            let blocks = key_shape.len() == 3 || (key_shape.len() == 4 && key_shape[1] == i64::from(BLOCK));
            blocks && dim == key_dim && HEAD_DIMS.contains(&dim) && kv_heads > 0 && heads > 0 && heads % kv_heads == 0
        }
        _ => false,
    };
    if !fits || keys.size() != values.size() || key_shape[key_shape.len() - 2] > 65535 {
        let what = format!(
            "query {shape:?}, keys {key_shape:?} and values {:?} do not fit; heads have 64 or 128 numbers",
            values.size()
        );
        return Err(argument(OP, what));
    }
    Ok(key_shape[key_shape.len() - 2] as usize)
}

/// `capacity`: slots of all blocks.
fn check_requests(requests: &[Rows<'_>], rows: usize, capacity: usize) -> Result<(), Error> {
    let given: usize = requests.iter().map(|request| request.last.len()).sum();
    if given != rows {
        return Err(argument(OP, format!("{rows} rows of queries and {given} slots do not fit")));
    }
    let with_table = requests.iter().filter(|request| request.table.is_some()).count();
    if with_table != 0 && with_table != requests.len() {
        return Err(argument(OP, "either all requests have a block table or none"));
    }
    for request in requests {
        request.check(OP, capacity)?;
    }
    Ok(())
}

/// Tiles of all requests, the longest first: what runs last should be short.
fn tiles(requests: &[Rows<'_>], group: usize, lanes_each: usize) -> Result<Vec<Tile>, Error> {
    let mut tiles: Vec<(u32, Tile)> = Vec::new();
    let (mut table, mut first_row) = (0, 0);
    for request in requests {
        let end_row = first_row + request.last.len();
        let lanes = request.last.len() * group;
        for first_lane in (0..lanes).step_by(lanes_each) {
            let last_row = (lanes.min(first_lane + lanes_each) - 1) / group;
            let tile = Tile {
                table: number(OP, "block tables", table)?,
                first_row: number(OP, "rows", first_row)?,
                end_row: number(OP, "rows", end_row)?,
                first_lane: number(OP, "lanes", first_lane)?,
            };
            tiles.push((request.last[last_row], tile));
        }
        first_row = end_row;
        table += request.table.map_or(0, <[u32]>::len);
    }
    tiles.sort_by_key(|&(last, _)| std::cmp::Reverse(last));
    Ok(tiles.into_iter().map(|(_, tile)| tile).collect())
}

/// How many thread blocks share the keys of a tile, so that about `wanted` run.
fn splits(blocks: usize, wanted: usize, steps: usize) -> usize {
    if blocks >= wanted {
        return 1;
    }
    wanted.div_ceil(blocks).min(steps / STEPS_EACH).clamp(1, SPLIT_LIMIT)
}

#[cfg(test)]
mod tests;
