//! RMSNorm.

use tch::{Device, Kind, Tensor};

use crate::cpu::number::Number;
use crate::{Error, Isa, argument, cpu, data};

const OP: &str = "rms_norm";

/// input / √(mean(input²) + epsilon) · weight over the last dimension. `input`: `[.., width]`, `weight`: `[width]`, of one
/// type. One pass for contiguous f32 and bf16 on the CPU, else the library's operations. Fails on a weight that does not
/// fit.
pub fn rms_norm(input: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor, Error> {
    let width = input.size().last().copied().unwrap_or(0);
    if width == 0 || weight.size() != [width] {
        return Err(argument(OP, format!("input {:?} and weight {:?} do not fit", input.size(), weight.size())));
    }
    match (input.device(), input.kind()) {
        (Device::Cpu, Kind::Float) if input.is_contiguous() => of_kind::<f32>(input, weight, epsilon),
        (Device::Cpu, Kind::BFloat16) if input.is_contiguous() => of_kind::<half::bf16>(input, weight, epsilon),
        _ => Ok(input.f_rms_norm([width], Some(weight), epsilon)?),
    }
}

fn of_kind<T: Number + data::Element>(input: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor, Error> {
    let mut to = Tensor::f_empty(input.size(), (T::KIND, Device::Cpu))?;
    let (rows, weight) = (data::numbers::<T>(OP, input)?, data::numbers::<T>(OP, weight)?);
    cpu::norm::rms_norm(Isa::best(), rows, weight, epsilon as f32, data::numbers_mut(OP, &mut to)?);
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pass_equals_the_library() {
        tch::manual_seed(3);
        for (kind, bound) in [(Kind::Float, 1e-5), (Kind::BFloat16, 0.06), (Kind::Double, 1e-12)] {
            let input = Tensor::randn([33, 5, 194], (Kind::Float, Device::Cpu)).to_kind(kind);
            let weight = Tensor::randn([194], (Kind::Float, Device::Cpu)).to_kind(kind);
            for input in [input.shallow_clone(), input.transpose(0, 1), input.narrow(0, 0, 0)] {
                let expected = input.rms_norm([194], Some(&weight), 1e-6);
                let got = rms_norm(&input, &weight, 1e-6).unwrap();
                assert_eq!((got.size(), got.kind()), (input.size(), kind));
                let difference = (got - expected).abs();
                assert!(difference.numel() == 0 || difference.max().double_value(&[]) < bound, "{kind:?}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let zeros = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
        for weight in [zeros(&[3], Kind::Float), zeros(&[1, 4], Kind::Float), zeros(&[4], Kind::BFloat16)] {
            assert!(rms_norm(&zeros(&[2, 4], Kind::Float), &weight, 1e-6).is_err(), "{weight:?}");
        }
        assert!(rms_norm(&zeros(&[2, 0], Kind::Float), &zeros(&[0], Kind::Float), 1e-6).is_err());
    }
}
