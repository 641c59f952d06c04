//! Products of few rows with a weight matrix, which decoding spends its time on.

use tch::{Device, Kind, Tensor};

use crate::cpu::number::Number;
use crate::{Error, Isa, argument, cpu, data};

const OP: &str = "few_rows";

/// Rows up to which [`few_rows`] reads the matrix faster than the library's product, which packs it first.
pub const FEW_ROWS: i64 = 8;

/// rows · weightᵀ, summed in f32, bound by the reading of `weight` as long as rows are few.
///
/// - `rows`: `[count, inner]`, f32 or bf16, on the CPU.
/// - `weight`: `[outputs, inner]`, contiguous, of the same type.
///
/// Returns `[count, outputs]` of that type. A row's numbers do not depend on the other rows. Fails on shapes, types,
/// strides and devices that do not fit.
pub fn few_rows(rows: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
    match rows.kind() {
        Kind::BFloat16 => of_kind::<half::bf16>(rows, weight),
        _ => of_kind::<f32>(rows, weight),
    }
}

fn of_kind<T: Number + data::Element>(rows: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
    let ([count, inner], [outputs, width]) = (&rows.size()[..], &weight.size()[..]) else {
        return Err(argument(OP, format!("rows {:?} and weight {:?} are not matrices", rows.size(), weight.size())));
    };
    if inner != width || *inner == 0 {
        return Err(argument(OP, format!("rows {:?} and weight {:?} do not fit", rows.size(), weight.size())));
    }
    let mut to = Tensor::f_empty([*count, *outputs], (T::KIND, Device::Cpu))?;
    let rows = rows.f_contiguous()?;
    let numbers = data::numbers::<T>(OP, &rows)?;
    let wide: Vec<f32> = numbers.iter().map(|number| number.to_f32()).collect();
    let weight = data::numbers::<T>(OP, weight)?;
    cpu::product::few_rows(Isa::best(), &wide, weight, *inner as usize, data::numbers_mut(OP, &mut to)?);
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_equal_the_library() {
        tch::manual_seed(5);
        for count in [0, 1, 3, 8] {
            for (kind, bound) in [(Kind::Float, 1e-4), (Kind::BFloat16, 0.2)] {
                let random = |rows: i64| Tensor::randn([rows, 96], (Kind::Float, Device::Cpu)).to_kind(kind);
                let (rows, weight) = (random(count), random(130));
                let found = few_rows(&rows, &weight).unwrap();
                assert_eq!((found.size(), found.kind()), (vec![count, 130], kind));
                let difference = (found - rows.matmul(&weight.tr())).abs().to_kind(Kind::Float);
                assert!(difference.numel() == 0 || difference.max().double_value(&[]) < bound, "{count} {kind:?}");
            }
        }
    }

    #[test]
    fn shapes_and_types_that_do_not_fit_are_refused() {
        let zeros = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
        let weight = zeros(&[4, 6], Kind::Float);
        for rows in [zeros(&[2, 5], Kind::Float), zeros(&[6], Kind::Float), zeros(&[2, 6], Kind::BFloat16)] {
            assert!(few_rows(&rows, &weight).is_err(), "{rows:?}");
        }
        assert!(few_rows(&zeros(&[2, 4], Kind::Float), &weight.tr()).is_err());
        assert!(few_rows(&zeros(&[2, 0], Kind::Float), &zeros(&[3, 0], Kind::Float)).is_err());
        assert!(few_rows(&zeros(&[2, 6], Kind::Double), &zeros(&[4, 6], Kind::Double)).is_err());
    }
}
