//! The MLP's activation, fused with the product behind it.

use tch::{Device, Kind, Tensor};

use crate::{Error, Isa, argument, cpu, data};

/// silu(gate) · up. `gate_up`: `[rows, 2 · width]`, the gates of a row, then its ups; a fresh tensor, which is
/// overwritten. Returns `[rows, width]`, whose rows lie apart. One pass for f32 and bf16 on the CPU, else the library's
/// operations. Fails on another shape.
pub fn silu_mul(mut gate_up: Tensor) -> Result<Tensor, Error> {
    const OP: &str = "silu_mul";
    let [_, both] = gate_up.size()[..] else {
        return Err(argument(OP, format!("{:?} is not [rows, 2 · width]", gate_up.size())));
    };
    if both % 2 != 0 {
        return Err(argument(OP, format!("{:?} has no two halves", gate_up.size())));
    }
    let width = both / 2;
    match (gate_up.device(), gate_up.kind()) {
        (Device::Cpu, Kind::Float) => {
            let rows = data::numbers_mut::<f32>(OP, &mut gate_up)?;
            cpu::activation::silu_mul(Isa::best(), rows, width as usize);
        }
        (Device::Cpu, Kind::BFloat16) => {
            let rows = data::numbers_mut::<half::bf16>(OP, &mut gate_up)?;
            cpu::activation::silu_mul(Isa::best(), rows, width as usize);
        }
        _ => {
            let up = gate_up.f_narrow(1, width, width)?;
            drop(gate_up.f_narrow(1, 0, width)?.f_silu_()?.f_mul_(&up)?);
        }
    }
    Ok(gate_up.f_narrow(1, 0, width)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pass_equals_the_library() {
        tch::manual_seed(3);
        for (kind, bound) in [(Kind::Float, 1e-6), (Kind::BFloat16, 0.05), (Kind::Double, 1e-12)] {
            let both = Tensor::randn([33, 194], (Kind::Float, Device::Cpu)).to_kind(kind);
            let expected = both.narrow(1, 0, 97).silu() * both.narrow(1, 97, 97);
            let got = silu_mul(both).unwrap();
            assert_eq!(got.size(), [33, 97]);
            assert!((got - expected).abs().max().double_value(&[]) < bound, "{kind:?}");
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        for shape in [&[3, 5][..], &[4], &[2, 2, 2]] {
            assert!(silu_mul(Tensor::zeros(shape, (Kind::Float, Device::Cpu))).is_err(), "{shape:?}");
        }
        assert!(silu_mul(Tensor::zeros([4, 6], (Kind::Float, Device::Cpu)).transpose(0, 1)).is_err());
    }
}
