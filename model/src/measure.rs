//! What this machine can do, measured: the ceilings beside which a benchmark prints its figures.

use std::time::Instant;

use tch::{Device, Kind, Tensor};

use crate::{Dtype, Error};

/// The fastest of `rounds` runs, in seconds, after one warm-up.
fn fastest(rounds: usize, mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    run()?;
    let mut best = f64::INFINITY;
    for _ in 0..rounds {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// GFLOPS of the library's matrix product in `dtype`: the best over tall, square and wide shapes.
pub fn matmul_gflops(dtype: Dtype) -> Result<f64, Error> {
    let none: Option<Tensor> = None;
    let mut best = 0.0f64;
    for (rows, inner, columns) in [(512, 896, 9728), (2048, 2048, 2048), (1024, 4096, 4096)] {
        let left = Tensor::f_ones([rows, inner], (dtype.kind(), Device::Cpu))?;
        let right = Tensor::f_ones([columns, inner], (dtype.kind(), Device::Cpu))?;
        let seconds = fastest(6, || left.f_linear(&right, none.as_ref()).map(drop).map_err(Error::from))?;
        best = best.max(2.0 * (rows * inner * columns) as f64 / seconds / 1e9);
    }
    Ok(best)
}

/// GB/s of reading memory that no cache holds, with all threads.
pub fn read_bandwidth_gbs() -> Result<f64, Error> {
    let numbers: i64 = 256 << 20;
    let data = Tensor::f_ones([numbers], (Kind::Float, Device::Cpu))?;
    let seconds = fastest(5, || data.f_sum(Kind::Float).map(drop).map_err(Error::from))?;
    Ok(4.0 * numbers as f64 / seconds / 1e9)
}

/// Threads of the library's pool.
pub fn threads() -> i32 {
    tch::get_num_threads()
}
