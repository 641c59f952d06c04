//! What this machine can do, measured: the ceilings beside which a benchmark prints its figures.

pub mod kernels;

use std::time::{Duration, Instant};

use kvsplice_kernels::memory::read;
use kvsplice_kernels::product::{Panels, Plus, in_panels};
use tch::{Device, Tensor};

use crate::{Dtype, Error};

/// The mean time of one run, in seconds, over `span` of runs after a warm-up of a third of that: the rate that the machine
/// sustains, with the time that others take from it, which is what a prefill of seconds can reach. A burst is faster by a
/// tenth or more.
fn sustained<T>(span: Duration, mut run: impl FnMut() -> Result<T, Error>) -> Result<f64, Error> {
    let warm = Instant::now();
    while warm.elapsed() < span / 3 {
        drop(run()?);
    }
    let (measured, mut runs) = (Instant::now(), 0u32);
    while measured.elapsed() < span || runs < 3 {
        drop(run()?);
        runs += 1;
    }
    Ok(measured.elapsed().as_secs_f64() / f64::from(runs))
}

/// Rows, inner size and columns of the products that the peak is the best of: tall, square and wide.
const PRODUCTS: [(i64, i64, i64); 4] = [(1024, 896, 1152), (1024, 896, 9728), (2048, 2048, 2048), (1024, 4096, 4096)];

/// How long each ceiling is measured.
const SPAN: Duration = Duration::from_secs(1);

/// GFLOPS of a matrix product in `dtype`, sustained: at the best of some shapes, the library's or the kernels' own,
/// whichever is faster on this CPU.
pub fn matmul_gflops(dtype: Dtype) -> Result<f64, Error> {
    let none: Option<Tensor> = None;
    let mut best = 0.0f64;
    for (rows, inner, columns) in PRODUCTS {
        let left = Tensor::f_ones([rows, inner], (dtype.kind(), Device::Cpu))?;
        let right = Tensor::f_ones([columns, inner], (dtype.kind(), Device::Cpu))?;
        let mut seconds = sustained(SPAN, || Ok(left.f_linear(&right, none.as_ref())?))?;
        if in_panels(dtype.kind(), inner) {
            let panels = Panels::new(&right)?;
            seconds = seconds.min(sustained(SPAN, || Ok(panels.product(&left, Plus::Nothing)?))?);
        }
        best = best.max(2.0 * (rows * inner * columns) as f64 / seconds / 1e9);
    }
    Ok(best)
}

/// GB/s of reading memory that no cache holds, with all threads.
pub fn read_bandwidth_gbs() -> Result<f64, Error> {
    let numbers = vec![1f32; READ_NUMBERS];
    let seconds = sustained(SPAN, || Ok(std::hint::black_box(read(&numbers))))?;
    Ok(4.0 * numbers.len() as f64 / seconds / 1e9)
}

/// Numbers that are read for the bandwidth: 1 GiB.
const READ_NUMBERS: usize = 256 << 20;

/// Threads of the library's pool.
pub fn threads() -> i32 {
    tch::get_num_threads()
}
