//! What the kernels reach, in turns with the ceilings that they are compared with: one run of everything a round, so that
//! a machine that slows down slows all of it down.

use std::time::{Duration, Instant};

use kvsplice_kernels::Isa;
use kvsplice_kernels::activation::silu_mul;
use kvsplice_kernels::attention::{Sequence, View, attend, attend_with, ragged_causal, tiled};
use kvsplice_kernels::memory::read;
use kvsplice_kernels::norm::rms_norm;
use kvsplice_kernels::place::{Encoding, Stored, place};
use kvsplice_kernels::product::{FEW_ROWS, Panels, Plus, few_rows, in_panels};
use kvsplice_kernels::quantize::{self, Format, Shape};
use kvsplice_kernels::rope::RopeTable;
use tch::{Device, Kind, Tensor};

use super::PRODUCTS;
use crate::Error;

/// Keys of the attention and of the decode figures.
const KEYS: u32 = 8192;
/// Rows of sparse attention: a fifth of the keys.
const ROWS: usize = 1638;
/// Rows of full attention.
const FULL: u32 = 4096;
/// Heads, KV heads and head size: those of the demo's answering model.
const SHAPE: (i64, i64, i64) = (14, 2, 64);
/// Caches, one a layer, that decode and placing go through, so that none is found in a processor's cache.
const LAYERS: usize = 32;
/// Rows, hidden and MLP size of a slice of that model.
const SLICE: (i64, i64, i64) = (1024, 896, 4864);
/// Element-wise operations one after another in one run: in a prompt they follow each other, and the data is near.
pub const REPEATS: usize = 4;

/// What one run does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Floating-point operations, two a multiply-add.
    Operations(f64),
    /// Bytes read and written.
    Bytes(f64),
}

/// The runs of one operation.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Such as `attention` or `place_int8`.
    pub name: String,
    /// What each run does.
    pub work: Work,
    /// How long each took.
    pub seconds: Vec<f64>,
}

type Run = Box<dyn FnMut() -> Result<Duration, Error>>;

struct Contestant {
    name: String,
    work: Work,
    run: Run,
}

/// Measures everything `rounds` times, after a round that does not count. `progress` is told of each round.
pub fn figures(rounds: u32, mut progress: impl FnMut(u32)) -> Result<Vec<Figure>, Error> {
    let mut contestants = contestants()?;
    let figure =
        |contestant: &Contestant| Figure { name: contestant.name.clone(), work: contestant.work, seconds: Vec::new() };
    let mut figures: Vec<Figure> = contestants.iter().map(figure).collect();
    for round in 0..=rounds {
        progress(round);
        for (contestant, figure) in contestants.iter_mut().zip(&mut figures) {
            let time = (contestant.run)()?;
            if round > 0 {
                figure.seconds.push(time.as_secs_f64());
            }
        }
    }
    Ok(figures)
}

/// Operations of one slice's matrix products in one layer of the demo's answering model: beside the time that they take
/// at the peak, other operations are put.
pub fn layer_operations() -> f64 {
    let (rows, hidden, inner) = SLICE;
    let (heads, kv_heads, dim) = SHAPE;
    2.0 * (rows * hidden * ((2 * heads + 2 * kv_heads) * dim + 3 * inner)) as f64
}

/// The time that `run` takes, without that of freeing what it gives.
fn timed<T>(run: impl FnOnce() -> Result<T, Error>) -> Result<Duration, Error> {
    let start = Instant::now();
    let result = run()?;
    let time = start.elapsed();
    drop(result);
    Ok(time)
}

fn contestants() -> Result<Vec<Contestant>, Error> {
    let mut all = Vec::new();
    let mut add = |name: &str, work: Work, run: Run| all.push(Contestant { name: name.to_owned(), work, run });
    let none: Option<Tensor> = None;
    for (rows, inner, columns) in PRODUCTS {
        let (left, right, none) =
            (ones(&[rows, inner])?, ones(&[columns, inner])?, none.as_ref().map(Tensor::shallow_clone));
        let work = Work::Operations(2.0 * (rows * inner * columns) as f64);
        let (panels, own_left) = (Panels::new(&right)?, left.shallow_clone());
        let product = move || timed(|| Ok(left.f_linear(&right, none.as_ref())?));
        add(&format!("product_{rows}_{inner}_{columns}"), work, Box::new(product));
        let own = move || timed(|| Ok(panels.product(&own_left, Plus::Nothing)?));
        add(&format!("panels_{rows}_{inner}_{columns}"), work, Box::new(own));
    }
    attention(&mut add)?;
    memory(&mut add)?;
    for (name, encoding) in [
        ("f32", Encoding::F32),
        ("bf16", Encoding::Bf16),
        ("int8", Encoding::Quantized(Format::Int8)),
        ("fp8", Encoding::Quantized(Format::Fp8)),
        ("int4", Encoding::Quantized(Format::Int4)),
    ] {
        placing(&mut add, name, encoding)?;
        if let Encoding::Quantized(format) = encoding {
            coding(&mut add, name, format);
        }
    }
    for (name, kind) in [("f32", Kind::Float), ("bf16", Kind::BFloat16)] {
        rows(&mut add, name, kind)?;
    }
    elementwise(&mut add)?;
    Ok(all)
}

fn float(kind: Kind) -> (Kind, Device) {
    (kind, Device::Cpu)
}

fn ones(shape: &[i64]) -> Result<Tensor, Error> {
    Ok(Tensor::f_ones(shape, float(Kind::Float))?)
}

fn random(shape: &[i64]) -> Result<Tensor, Error> {
    Ok(Tensor::f_randn(shape, float(Kind::Float))?)
}

/// Numbers of its own.
fn copies(tensor: &Tensor) -> Result<Vec<Tensor>, Error> {
    let copied = |_| {
        let mut copy = tensor.f_empty_like()?;
        copy.f_copy_(tensor)?;
        Ok(copy)
    };
    (0..REPEATS).map(copied).collect()
}

/// A fifth of the keys in runs of 8 to 32, spread over all of them.
fn sparse_rows() -> Vec<u32> {
    let (mut rows, mut slot, mut state) = (Vec::new(), 0u32, 1u32);
    while slot < KEYS {
        // The usual constants of a linear congruential generator (Numerical Recipes, §7.1).
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let run = 8 + (state >> 16) % 25;
        rows.extend(slot..KEYS.min(slot + run));
        slot += 5 * run;
    }
    rows.truncate(ROWS);
    rows
}

fn pairs(last: &[u32]) -> f64 {
    last.iter().map(|&slot| f64::from(slot) + 1.0).sum()
}

fn attention(add: &mut impl FnMut(&str, Work, Run)) -> Result<(), Error> {
    let (heads, kv_heads, dim) = SHAPE;
    let work = |last: &[u32]| Work::Operations(4.0 * pairs(last) * (heads * dim) as f64);
    let cache = |tokens: u32| random(&[i64::from(tokens), kv_heads, dim]);
    let last = sparse_rows();
    let query = random(&[last.len() as i64, heads, dim])?;
    let (keys, values) = (cache(KEYS)?, cache(KEYS)?);
    let copies = || (query.shallow_clone(), keys.shallow_clone(), values.shallow_clone(), last.clone());
    let (q, k, v, rows) = copies();
    add("attention", work(&last), Box::new(move || timed(|| Ok(ragged_causal(&q, &k, &v, &rows)?))));
    let (q, k, v, rows) = copies();
    add("attention_tiled_library", work(&last), Box::new(move || timed(|| Ok(tiled(&q, &k, &v, &rows)?))));
    for isa in Isa::available().into_iter().skip(1) {
        let (q, k, v, rows) = copies();
        let run = move || {
            let sequence = Sequence { keys: &k, values: &v, table: None, last: &rows };
            timed(|| Ok(attend_with(isa, &q, &[sequence], View::default())?))
        };
        add(&format!("attention_{isa:?}").to_lowercase(), work(&last), Box::new(run));
    }

    let all: Vec<u32> = (0..FULL).collect();
    let query = random(&[i64::from(FULL), heads, dim])?;
    let (keys, values) = (cache(FULL)?, cache(FULL)?);
    let (q, k, v, rows) = (query.shallow_clone(), keys.shallow_clone(), values.shallow_clone(), all.clone());
    add("full", work(&all), Box::new(move || timed(|| Ok(ragged_causal(&q, &k, &v, &rows)?))));
    let library = move || {
        let group = heads / kv_heads;
        // As the batch, the query heads that share a KV head: no copy of keys.
        let query = query.f_view([-1, kv_heads, group, dim])?.f_permute([2, 1, 0, 3])?;
        let shared = |tensor: &Tensor| -> Result<Tensor, Error> {
            Ok(tensor.f_transpose(0, 1)?.f_unsqueeze(0)?.f_expand([group, kv_heads, i64::from(FULL), dim], false)?)
        };
        let (keys, values) = (shared(&keys)?, shared(&values)?);
        let none: Option<&Tensor> = None;
        timed(|| Ok(Tensor::f_scaled_dot_product_attention(&query, &keys, &values, none, 0.0, true, None, false)?))
    };
    add("full_library", work(&all), Box::new(library));

    for (name, kind) in [("decode_f32", Kind::Float), ("decode_bf16", Kind::BFloat16)] {
        let layer = || Ok((cache(KEYS)?.f_to_kind(kind)?, cache(KEYS)?.f_to_kind(kind)?));
        let layers = (0..LAYERS).map(|_| layer()).collect::<Result<Vec<_>, Error>>()?;
        let query = random(&[1, heads, dim])?.f_to_kind(kind)?;
        let bytes = LAYERS * KEYS as usize * (2 * kv_heads * dim) as usize * kind.elt_size_in_bytes();
        let run = move || {
            timed(|| {
                for (keys, values) in &layers {
                    let sequence = Sequence { keys, values, table: None, last: &[KEYS - 1] };
                    drop(attend(&query, &[sequence], View::default())?);
                }
                Ok(())
            })
        };
        add(name, Work::Bytes(bytes as f64), Box::new(run));
    }
    Ok(())
}

/// The ceilings of what is bound by memory: reading, and copying.
fn memory(add: &mut impl FnMut(&str, Work, Run)) -> Result<(), Error> {
    let count: i64 = 128 << 20;
    let (numbers, data) = (vec![1f32; count as usize], ones(&[count])?);
    let bytes = 4.0 * count as f64;
    add("read", Work::Bytes(bytes), Box::new(move || timed(|| Ok(std::hint::black_box(read(&numbers))))));
    let half = count / 2;
    let copy = move || {
        let (from, mut to) = (data.f_narrow(0, 0, half)?, data.f_narrow(0, half, half)?);
        timed(|| Ok(to.f_copy_(&from)?))
    };
    add("copy", Work::Bytes(bytes), Box::new(copy));
    Ok(())
}

/// Placing a chunk of [`FULL`] tokens in each of [`LAYERS`] layers: f32 into f32, everything else into bf16.
fn placing(add: &mut impl FnMut(&str, Work, Run), name: &str, encoding: Encoding) -> Result<(), Error> {
    let (_, kv_heads, dim) = SHAPE;
    let (tokens, width) = (FULL as usize, (kv_heads * dim) as usize);
    let kind = if encoding == Encoding::F32 { Kind::Float } else { Kind::BFloat16 };
    let bits = match encoding {
        Encoding::F32 => 32,
        Encoding::Bf16 => 16,
        Encoding::Quantized(Format::Int8 | Format::Fp8) => 8,
        Encoding::Quantized(Format::Int4) => 4,
    };
    let shape = Shape { tokens, kv_heads: kv_heads as usize, head_dim: dim as usize };
    let bytes = tokens * width * bits / 8;
    // Codes that are ordinary numbers in every encoding.
    let stored: Vec<Vec<u8>> = (0..2 * LAYERS).map(|_| vec![0x3b; bytes]).collect();
    let (key_scales, value_scales) = match encoding {
        Encoding::Quantized(_) => (vec![1.0; quantize::key_scales(shape)], vec![1.0; quantize::value_scales(shape)]),
        _ => (Vec::new(), Vec::new()),
    };
    let memory = || Tensor::f_ones([i64::from(FULL), kv_heads, dim], float(kind));
    let mut layers = (0..LAYERS).map(|_| Ok((memory()?, memory()?))).collect::<Result<Vec<_>, Error>>()?;
    let slots: Vec<u32> = (0..FULL).collect();
    let frequencies: Vec<f64> = (0..dim / 2).map(|pair| 1e6f64.powf(-(pair as f64) / (dim / 2) as f64)).collect();
    let rotation = RopeTable::new(&frequencies, FULL)?.at(&slots)?;
    let moved = 2 * LAYERS * (bytes + tokens * width * kind.elt_size_in_bytes());
    let run = move || {
        timed(|| {
            for ((keys, values), stored) in layers.iter_mut().zip(stored.chunks_exact(2)) {
                let piece = Stored {
                    encoding,
                    tokens,
                    rows: 0..tokens,
                    keys: &stored[0],
                    values: &stored[1],
                    key_scales: &key_scales,
                    value_scales: &value_scales,
                };
                place(keys, values, &slots, None, &[piece.into()], &rotation)?;
            }
            Ok(())
        })
    };
    add(&format!("place_{name}"), Work::Bytes(moved as f64), Box::new(run));
    Ok(())
}

/// Encoding and decoding of keys and values, on one thread.
fn coding(add: &mut impl FnMut(&str, Work, Run), name: &str, format: Format) {
    let (_, kv_heads, dim) = SHAPE;
    let shape = Shape { tokens: 4 * FULL as usize, kv_heads: kv_heads as usize, head_dim: dim as usize };
    let count = shape.tokens * (kv_heads * dim) as usize;
    // Numbers that differ from one to the next.
    let numbers: Vec<f32> = (0..count).map(|index| (index * 7919 % 1021) as f32 / 510.0 - 1.0).collect();
    let length = quantize::data_length(format, shape.tokens, shape);
    let moved = Work::Bytes(2.0 * (4 * count + length) as f64);
    let mut data = vec![0u8; length];
    let (mut keys, mut values) = (vec![0.0; quantize::key_scales(shape)], vec![0.0; quantize::value_scales(shape)]);
    let encode = move || {
        timed(|| {
            quantize::encode_keys(format, &numbers, shape, &mut data, &mut keys)?;
            Ok(quantize::encode_values(format, &numbers, shape, &mut data, &mut values)?)
        })
    };
    add(&format!("encode_{name}"), moved, Box::new(encode));
    let data = vec![0x3b; length];
    let (keys, values) = (vec![1.0; quantize::key_scales(shape)], vec![1.0; quantize::value_scales(shape)]);
    let mut numbers = vec![0.0; count];
    let decode = move || {
        timed(|| {
            quantize::decode_keys(format, &data, &keys, shape, 0..shape.tokens, &mut numbers)?;
            Ok(quantize::decode_values(format, &data, &values, shape, 0..shape.tokens, &mut numbers)?)
        })
    };
    add(&format!("decode_{name}_codes"), moved, Box::new(decode));
}

/// What decoding does with weights: one row, and eight, through some of the MLP's. Each run has weights of its own, for a
/// large cache would still hold those of the run before.
fn rows(add: &mut impl FnMut(&str, Work, Run), name: &str, kind: Kind) -> Result<(), Error> {
    let (_, hidden, inner) = SLICE;
    let matrices = LAYERS / 4;
    let weights = || -> Result<Vec<Tensor>, Error> {
        (0..matrices).map(|_| Ok(ones(&[2 * inner, hidden])?.f_to_kind(kind)?)).collect()
    };
    let bytes = matrices * (2 * inner * hidden) as usize * kind.elt_size_in_bytes();
    for count in [1, FEW_ROWS] {
        let row = random(&[count, hidden])?.f_to_kind(kind)?;
        let (own, own_row) = (weights()?, row.shallow_clone());
        let run = move || {
            timed(|| {
                for weight in &own {
                    drop(few_rows(&own_row, weight)?);
                }
                Ok(())
            })
        };
        add(&format!("rows_{count}_{name}"), Work::Bytes(bytes as f64), Box::new(run));
        if in_panels(kind, hidden) {
            let own = weights()?.iter().map(Panels::new).collect::<Result<Vec<_>, _>>()?;
            let own_row = row.shallow_clone();
            let run = move || {
                timed(|| {
                    for weight in &own {
                        drop(weight.product(&own_row, Plus::Nothing)?);
                    }
                    Ok(())
                })
            };
            add(&format!("rows_{count}_{name}_panels"), Work::Bytes(bytes as f64), Box::new(run));
        }
        let own = weights()?;
        let library = move || {
            timed(|| {
                for weight in &own {
                    let none: Option<&Tensor> = None;
                    drop(row.f_linear(weight, none)?);
                }
                Ok(())
            })
        };
        add(&format!("rows_{count}_{name}_library"), Work::Bytes(bytes as f64), Box::new(library));
    }
    Ok(())
}

/// Both on a slice of rows, f32, beside the library's.
fn elementwise(add: &mut impl FnMut(&str, Work, Run)) -> Result<(), Error> {
    let (rows, hidden, inner) = SLICE;
    let times = REPEATS as f64;
    for name in ["rms_norm", "rms_norm_library"] {
        let (input, weight) = (random(&[rows, hidden])?, ones(&[hidden])?);
        let norm = move || {
            timed(|| {
                for _ in 0..REPEATS {
                    drop(match name {
                        "rms_norm" => rms_norm(&input, &weight, 1e-6)?,
                        _ => input.f_rms_norm([hidden], Some(&weight), 1e-6)?,
                    });
                }
                Ok(())
            })
        };
        add(name, Work::Bytes(8.0 * times * (rows * hidden) as f64), Box::new(norm));
    }
    let moved = Work::Bytes(12.0 * times * (rows * inner) as f64);
    let both = random(&[rows, 2 * inner])?;
    let fresh = both.shallow_clone();
    let fused = move || {
        let copies = copies(&fresh)?;
        timed(|| Ok(copies.into_iter().map(silu_mul).collect::<Result<Vec<_>, _>>()?))
    };
    add("silu_mul", moved, Box::new(fused));
    let library = move || {
        let copies = copies(&both)?;
        timed(|| {
            for copy in &copies {
                let up = copy.f_narrow(1, inner, inner)?;
                drop(copy.f_narrow(1, 0, inner)?.f_silu_()?.f_mul_(&up)?);
            }
            Ok(copies)
        })
    };
    add("silu_mul_library", moved, Box::new(library));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_rows_are_a_fifth_of_the_keys_and_reach_the_last_of_them() {
        let rows = sparse_rows();
        assert!(rows.is_sorted() && rows.len().abs_diff(ROWS) < 100, "{}", rows.len());
        assert!(rows.last().is_some_and(|&last| last < KEYS && last > KEYS - 400), "{:?}", rows.last());
        assert_eq!(pairs(&[0, 3]), 5.0);
    }
}
