//! Proof and figures of a GPU: its kernels against the CPU's, and what they reach of its measured peak.
//!
//! Everything runs on the compute thread, after [`crate::Spec::open_device`]. Times include the launch; between two runs
//! a buffer larger than the cache is written.

use std::time::Instant;

use kvsplice_kernels::attention::ragged_causal;
use kvsplice_kv::{Encoding, KvLayout};
use tch::{Cuda, Device, Kind, Tensor};

use crate::cache::KvCache;
use crate::resident::LayerKv;
use crate::stored::StoredLayer;
use crate::{Config, Error};

/// Larger than the second-level cache of any chip so far.
const FLUSH_BYTES: i64 = 256 << 20;
/// Measured runs of each operation, after two that are not.
const RUNS: usize = 7;

/// One comparison with the CPU.
#[derive(Clone, Debug)]
pub struct Parity {
    /// What was compared.
    pub what: String,
    /// Largest difference.
    pub error: f64,
    /// What it may be.
    pub bound: f64,
}

impl Parity {
    /// Whether the difference is within the bound; one that is not a number is not.
    pub fn holds(&self) -> bool {
        self.error <= self.bound
    }
}

/// One measured operation.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What ran.
    pub what: String,
    /// Seconds a run, ascending.
    pub seconds: Vec<f64>,
    /// Floating-point operations a run.
    pub flops: f64,
}

impl Figure {
    /// Median seconds.
    pub fn median(&self) -> f64 {
        self.seconds.get(self.seconds.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// Operations a second at the median.
    pub fn rate(&self) -> f64 {
        self.flops / self.median()
    }
}

fn random(shape: &[i64], seed: i64) -> Result<Tensor, Error> {
    tch::manual_seed(seed);
    Ok(Tensor::f_randn(shape, (Kind::Float, Device::Cpu))?.f_to_kind(Kind::BFloat16)?)
}

fn largest(difference: &Tensor) -> Result<f64, Error> {
    if difference.numel() == 0 {
        return Ok(0.0);
    }
    Ok(difference.f_abs()?.f_max()?.f_double_value(&[])?)
}

/// Rows of a set, by name.
fn rows(set: &str, keys: u32) -> Vec<u32> {
    match set {
        "full" => (0..keys).collect(),
        "scattered" => (0..keys).filter(|slot| slot % 7 == 3 || slot % 11 == 0).collect(),
        "clustered" => (0..keys).filter(|slot| slot % 61 < 9).collect(),
        "first" => vec![0],
        _ => vec![keys - 1],
    }
}

/// Compares attention and placing on `device` with the CPU's, in bf16 on the same numbers.
pub fn parity(device: Device) -> Result<Vec<Parity>, Error> {
    let mut found = Vec::new();
    for (heads, kv_heads, dim) in [(14, 2, 64), (40, 8, 128)] {
        for keys in [1u32, 97, 257, 1025, 4097] {
            for set in ["full", "scattered", "clustered", "first", "last"] {
                let what = format!("attention, {keys} keys, {set} rows, {heads}/{kv_heads} heads of {dim}");
                found.push(attention(device, what, [heads, kv_heads, dim], keys, &rows(set, keys))?);
            }
        }
    }
    let few: Vec<u32> = (0..33).map(|row| row * 1000 + 999).collect();
    found.push(attention(device, "attention, 33000 keys, 33 rows".to_owned(), [40, 8, 128], 33_000, &few)?);
    for encoding in [Encoding::F32, Encoding::Bf16, Encoding::Int8, Encoding::Fp8, Encoding::Int4] {
        found.extend(placing(device, encoding)?);
    }
    Ok(found)
}

/// The bound is a bf16 unit of the greatest number, for the rounding of weights and output: values are within ±5.
fn attention(
    device: Device,
    what: String,
    [heads, kv_heads, dim]: [i64; 3],
    keys: u32,
    rows: &[u32],
) -> Result<Parity, Error> {
    let shape = [i64::from(keys), kv_heads, dim];
    let (all_keys, values) = (random(&shape, 1)?, random(&shape, 2)?);
    let query = random(&[rows.len() as i64, heads, dim], 3)?;
    let wide = |tensor: &Tensor| tensor.f_to_kind(Kind::Float);
    let exact = ragged_causal(&wide(&query)?, &wide(&all_keys)?, &wide(&values)?, rows)?;
    let there = |tensor: &Tensor| tensor.f_to_device(device);
    let got = ragged_causal(&there(&query)?, &there(&all_keys)?, &there(&values)?, rows)?;
    let error = largest(&wide(&got.f_to_device(Device::Cpu)?)?.f_sub(&exact)?)?;
    Ok(Parity { what, error, bound: largest(&exact)? / 128.0 })
}

/// Placed rows against the CPU's: both round once, so they differ by a unit of the greatest number at most. And those of a
/// layer that lies on the device against those of the host's: the very bits.
fn placing(device: Device, encoding: Encoding) -> Result<[Parity; 2], Error> {
    let config = Config { layers: 1, kv_heads: 8, head_dim: 128, ..Config::tiny(16) };
    let layout = KvLayout { layers: 1, kv_heads: 8, head_dim: 128, encoding };
    let (tokens, first) = (257u32, 70u32);
    let shape = [i64::from(tokens), 8, 128];
    let wide = |seed: i64| random(&shape, seed)?.f_to_kind(Kind::Float).map_err(Error::from);
    let stored = StoredLayer::encode(layout, &wide(4)?, &wide(5)?)?;
    let slots: Vec<u32> = (0..tokens - first).map(|row| row + row / 50 + 3).collect();
    let resident = LayerKv::Device(stored.to_device(device)?);
    let stored = LayerKv::Host(stored);
    let mut caches = Vec::new();
    for (place, layer) in [(Device::Cpu, &stored), (device, &stored), (device, &resident)] {
        let rope = kvsplice_kernels::rope::RopeTable::new(&config.inverse_frequencies(), 512)?.to_device(place)?;
        let mut cache = KvCache::new(&config, 320, Kind::BFloat16, place)?;
        cache.place(0, &slots, &[(layer, first)], &rope.at(&slots)?)?;
        let (keys, values) = cache.layer(0);
        let both = Tensor::f_stack(&[keys, values], 0)?;
        caches.push(both.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?);
    }
    let [expected, got, there] = &caches[..] else { return Err(Error::Argument("three caches".to_owned())) };
    let error = |got: &Tensor, expected: &Tensor| largest(&got.f_sub(expected)?);
    let what = format!("place-and-rotate, {encoding}");
    Ok([
        Parity { error: error(got, expected)?, bound: largest(expected)? / 128.0, what: what.clone() },
        Parity { error: error(there, got)?, bound: 0.0, what: format!("{what}, from the device") },
    ])
}

/// Median and spread of `run` on `device`.
fn time(device: usize, mut run: impl FnMut() -> Result<(), Error>) -> Result<Vec<f64>, Error> {
    let mut flush = Tensor::f_empty([FLUSH_BYTES], (Kind::Uint8, Device::Cuda(device)))?;
    let mut seconds = Vec::with_capacity(RUNS);
    for turn in 0..RUNS + 2 {
        let _ = flush.f_fill_(turn as i64)?;
        Cuda::synchronize(device as i64);
        let start = Instant::now();
        run()?;
        Cuda::synchronize(device as i64);
        if turn >= 2 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

/// The bf16 matrix product that the device sustains.
pub fn peak(device: usize) -> Result<Figure, Error> {
    let size = 8192i64;
    let none: Option<Tensor> = None;
    let matrix = || Tensor::f_randn([size, size], (Kind::BFloat16, Device::Cuda(device)));
    let (left, right) = (matrix()?, matrix()?);
    let seconds = time(device, || left.f_linear(&right, none.as_ref()).map(drop).map_err(Error::from))?;
    Ok(Figure { what: "bf16 matrix product, 8192 cubed".to_owned(), seconds, flops: 2.0 * (size as f64).powi(3) })
}

/// Bytes a second of reading device memory.
pub fn read_bandwidth(device: usize) -> Result<f64, Error> {
    let numbers = 1i64 << 30;
    let data = Tensor::f_ones([numbers], (Kind::BFloat16, Device::Cuda(device)))?;
    let seconds = time(device, || data.f_sum(Kind::Float).map(drop).map_err(Error::from))?;
    let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN);
    Ok(2.0 * numbers as f64 / median)
}

/// Attention with the 14B shape's heads over `keys` keys: all rows, and a fifth of them in runs of eight.
pub fn figures(device: usize, keys: u32) -> Result<Vec<Figure>, Error> {
    let on = (Kind::BFloat16, Device::Cuda(device));
    let (heads, kv_heads, dim) = (40i64, 8i64, 128i64);
    let shape = [i64::from(keys), kv_heads, dim];
    let (all_keys, values) = (Tensor::f_randn(shape, on)?, Tensor::f_randn(shape, on)?);
    let sets: [(&str, Vec<u32>); 3] = [
        ("all rows", (0..keys).collect()),
        ("a fifth of the rows in runs of 8", (0..keys).filter(|slot| slot % 40 < 8).collect()),
        ("32 last rows", (keys.saturating_sub(32)..keys).collect()),
    ];
    let mut found = Vec::new();
    for (name, rows) in sets {
        let query = Tensor::f_randn([rows.len() as i64, heads, dim], on)?;
        let pairs: f64 = rows.iter().map(|&slot| f64::from(slot) + 1.0).sum();
        let seconds = time(device, || ragged_causal(&query, &all_keys, &values, &rows).map(drop).map_err(Error::from))?;
        let flops = 4.0 * (heads * dim) as f64 * pairs;
        found.push(Figure { what: format!("attention, {keys} keys, {name}"), seconds, flops });
    }
    Ok(found)
}
