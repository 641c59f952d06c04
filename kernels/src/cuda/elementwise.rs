//! RMS norm and the MLP's gate on CUDA.

use tch::{Device, Tensor};

use super::arguments::{Gate, Norm};
use super::tensor::{check, number, pointer};
use super::{Grid, Launch};
use crate::{Error, argument};

const THREADS: u32 = 256;
/// Numbers that a thread moves at a time.
const NUMBERS: i64 = 8;

/// input / √(mean(input²) + epsilon) · weight. `input`: `[.., width]`, `weight`: `[width]`, bf16 or f16 on CUDA, width a
/// multiple of 8.
pub fn rms_norm(input: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor, Error> {
    norm(&*super::gpu(device("rms_norm", input)?)?, input, weight, epsilon)
}

/// silu(gate) · up. `gate_up`: `[rows, 2 · width]`, gate first, bf16 or f16 on CUDA, width a multiple of 8. Returns
/// `[rows, width]`.
pub fn gated(gate_up: &Tensor) -> Result<Tensor, Error> {
    gate(&*super::gpu(device("gated", gate_up)?)?, gate_up)
}

fn device(op: &'static str, tensor: &Tensor) -> Result<usize, Error> {
    match tensor.device() {
        Device::Cuda(index) => Ok(index),
        other => Err(argument(op, format!("needs a tensor on CUDA, got {other:?}"))),
    }
}

fn norm(launch: &impl Launch, input: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor, Error> {
    const OP: &str = "rms_norm";
    let suffix = check(OP, &[input, weight])?;
    let shape = input.size();
    let width = shape.last().copied().unwrap_or(0);
    if width == 0 || width % NUMBERS != 0 || weight.size() != [width] {
        return Err(argument(OP, format!("input {shape:?} and weight {:?} do not fit", weight.size())));
    }
    let output = input.f_empty_like()?;
    let rows = input.numel() / width as usize;
    if rows == 0 {
        return Ok(output);
    }
    let arguments = Norm {
        input: pointer(input),
        weight: pointer(weight),
        output: pointer(&output),
        width: number(OP, "width", width as usize)?,
        epsilon: epsilon as f32,
    };
    let grid = Grid { blocks: [number(OP, "rows", rows)? as u32, 1, 1], threads: THREADS };
    let shared_bytes = THREADS as usize / 32 * size_of::<f32>();
    // SAFETY: the kernel takes a `Norm`; its tensors are checked above. Shared memory holds one sum a warp.
    unsafe { launch.launch(&format!("norm_{suffix}"), grid, shared_bytes, &arguments)? };
    Ok(output)
}

fn gate(launch: &impl Launch, gate_up: &Tensor) -> Result<Tensor, Error> {
    const OP: &str = "gated";
    let suffix = check(OP, &[gate_up])?;
    let (rows, both) = gate_up.size2()?;
    if both % (2 * NUMBERS) != 0 {
        return Err(argument(OP, format!("gate and up {:?} are not twice a multiple of 8", gate_up.size())));
    }
    let width = both / 2;
    let output = Tensor::f_empty([rows, width], (gate_up.kind(), gate_up.device()))?;
    let pieces = (rows * width / NUMBERS) as usize;
    if pieces == 0 {
        return Ok(output);
    }
    let arguments = Gate {
        gate_up: pointer(gate_up),
        output: pointer(&output),
        rows: number(OP, "rows", rows as usize)?,
        width: number(OP, "width", width as usize)?,
    };
    let blocks = number(OP, "thread blocks", pieces.div_ceil(THREADS as usize))? as u32;
    // SAFETY: the kernel takes a `Gate`; its tensors are checked above.
    unsafe {
        launch.launch(&format!("gate_{suffix}"), Grid { blocks: [blocks, 1, 1], threads: THREADS }, 0, &arguments)?
    };
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::super::emulated::Emulated;
    use super::*;
    use tch::Kind;

    fn random(shape: &[i64], kind: Kind, seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind)
    }

    /// Against f32, at most twice the error of rounding the exact answer.
    fn check_close(got: &Tensor, exact: &Tensor, what: &str) {
        let error = |tensor: &Tensor| (tensor.to_kind(Kind::Float) - exact).abs().max().double_value(&[]);
        let (own, rounding) = (error(got), error(&exact.to_kind(got.kind())));
        assert!(own <= 2.0 * rounding + 1e-6, "{what}: error {own}, rounding alone {rounding}");
    }

    #[test]
    fn norm_equals_the_plain_twin() {
        for kind in [Kind::BFloat16, Kind::Half] {
            for (rows, width) in [(1, 8), (3, 520), (7, 5120)] {
                let (input, weight) = (random(&[rows, width], kind, 1), random(&[width], kind, 2));
                let wide = input.to_kind(Kind::Float);
                let mean = (&wide * &wide).mean_dim([-1].as_slice(), true, Kind::Float);
                let exact = wide / (mean + 1e-6).sqrt() * weight.to_kind(Kind::Float);
                for launch in Emulated::all(1) {
                    let got = norm(&launch, &input, &weight, 1e-6).unwrap();
                    check_close(&got, &exact, &format!("{kind:?} {rows} x {width} {launch:?}"));
                }
            }
        }
    }

    #[test]
    fn gate_equals_the_plain_twin() {
        for kind in [Kind::BFloat16, Kind::Half] {
            for (rows, width) in [(1, 8), (5, 104), (3, 1032)] {
                let input = random(&[rows, 2 * width], kind, 3) * 4;
                let (gates, ups) = (
                    input.narrow(1, 0, width).to_kind(Kind::Float),
                    input.narrow(1, width, width).to_kind(Kind::Float),
                );
                let exact = gates.silu() * ups;
                for launch in Emulated::all(1) {
                    check_close(
                        &gate(&launch, &input).unwrap(),
                        &exact,
                        &format!("{kind:?} {rows} x {width} {launch:?}"),
                    );
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let launch = Emulated { mode: 0, multiprocessors: 1 };
        let (input, weight) = (random(&[2, 16], Kind::Half, 1), random(&[16], Kind::Half, 2));
        assert!(norm(&launch, &input, &weight.narrow(0, 0, 8), 1e-6).is_err());
        assert!(norm(&launch, &input, &weight.to_kind(Kind::BFloat16), 1e-6).is_err());
        assert!(norm(&launch, &input.to_kind(Kind::Float), &weight.to_kind(Kind::Float), 1e-6).is_err());
        assert!(norm(&launch, &input.transpose(0, 1), &weight, 1e-6).is_err());
        assert!(gate(&launch, &input.narrow(1, 0, 8).contiguous()).is_err());
        assert!(rms_norm(&input, &weight, 1e-6).is_err());
        assert!(gated(&input).is_err());
        assert_eq!(gate(&launch, &input.narrow(0, 0, 0)).unwrap().size(), [0, 8]);
    }
}
