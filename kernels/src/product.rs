//! Products of rows with a weight matrix on the CPU, which a model spends its time on.

use tch::{Device, Kind, Tensor};

use crate::cpu::number::Number;
use crate::cpu::panels::{self, Call, Finish, PAIRS, PANEL};
use crate::{Error, Isa, argument, cpu, data};

const OP: &str = "few_rows";
const PANELS: &str = "panels";

/// An f32 weight matrix in the order in which products read it. A row's products have the same bits in every batch.
#[derive(Debug)]
pub struct Panels {
    /// `[panels, inner, 32]`
    numbers: Tensor,
    /// Numbers of a row of the product.
    width: i64,
    inner: i64,
    pairs: bool,
}

/// What is added to a product.
#[derive(Clone, Copy, Debug)]
pub enum Plus<'a> {
    /// Nothing.
    Nothing,
    /// To every row, `[outputs]`, f32.
    Bias(&'a Tensor),
    /// `[count, outputs]`, f32, contiguous.
    Rows(&'a Tensor),
}

impl Panels {
    /// Of `weight`, `[outputs, inner]`, f32, contiguous, on the CPU. Fails on anything else, and on an inner size of 0.
    pub fn new(weight: &Tensor) -> Result<Self, Error> {
        Self::of(&[weight], PANEL)
    }

    /// Of the gates and the ups of an MLP, each as in [`Panels::new`]: the product is silu(rows · gateᵀ) · (rows · upᵀ).
    pub fn gated(gate: &Tensor, up: &Tensor) -> Result<Self, Error> {
        if gate.size() != up.size() {
            return Err(argument(PANELS, format!("gates {:?} and ups {:?}", gate.size(), up.size())));
        }
        Self::of(&[gate, up], PAIRS)
    }

    fn of(weights: &[&Tensor], lanes: usize) -> Result<Self, Error> {
        let [width, inner] = weights[0].size()[..] else {
            return Err(argument(PANELS, format!("weight {:?} is not [outputs, inner]", weights[0].size())));
        };
        if inner == 0 {
            return Err(argument(PANELS, format!("weight {:?} has no inner size", weights[0].size())));
        }
        let matrices =
            weights.iter().map(|weight| data::numbers::<f32>(PANELS, weight)).collect::<Result<Vec<_>, _>>()?;
        let count = (width as usize).div_ceil(lanes) as i64;
        let mut numbers = Tensor::f_empty([count, inner, PANEL as i64], (Kind::Float, Device::Cpu))?;
        let to = data::numbers_mut::<f32>(PANELS, &mut numbers)?;
        match matrices[..] {
            [gate, up] => panels::pack_pairs(gate, up, inner as usize, to),
            _ => panels::pack(matrices[0], inner as usize, to),
        }
        Ok(Self { numbers, width, inner, pairs: weights.len() == 2 })
    }

    /// rows · weightᵀ and what is added to it; of a gated matrix, which takes no addend, what [`Panels::gated`] says.
    ///
    /// - `rows`: `[count, inner]`, f32, on the CPU; rows may lie apart.
    ///
    /// Returns `[count, outputs]`, f32. Fails on shapes, types, strides and devices that do not fit.
    pub fn product(&self, rows: &Tensor, plus: Plus<'_>) -> Result<Tensor, Error> {
        let [count, inner] = rows.size()[..] else {
            return Err(argument(PANELS, format!("rows {:?} are not [count, inner]", rows.size())));
        };
        if inner != self.inner {
            return Err(argument(
                PANELS,
                format!("rows {:?} for a weight [{}, {}]", rows.size(), self.width, self.inner),
            ));
        }
        let (addend, expected) = match plus {
            Plus::Nothing => (None, vec![]),
            Plus::Bias(bias) => (Some(bias), vec![self.width]),
            Plus::Rows(rows) => (Some(rows), vec![count, self.width]),
        };
        if let Some(addend) = addend.filter(|addend| self.pairs || addend.size() != expected) {
            let what = if self.pairs { ", which takes no addend" } else { "" };
            let weight = format!("a weight [{}, {}]{what}", self.width, self.inner);
            return Err(argument(PANELS, format!("addend {:?} to {count} rows for {weight}", addend.size())));
        }
        let finish = match plus {
            Plus::Nothing if self.pairs => Finish::Gated,
            Plus::Nothing => Finish::Bias(&[]),
            Plus::Bias(bias) => Finish::Bias(data::numbers(PANELS, bias)?),
            Plus::Rows(rows) => Finish::Sum(data::numbers(PANELS, rows)?),
        };
        let rows = rows.f_unsqueeze(1)?;
        let (numbers, stride) = data::rows::<f32>(PANELS, &rows)?;
        let call = Call {
            rows: numbers,
            count: count as usize,
            stride,
            inner: inner as usize,
            panels: data::numbers::<f32>(PANELS, &self.numbers)?,
            width: self.width as usize,
            finish,
        };
        let mut to = Tensor::f_empty([count, self.width], (Kind::Float, Device::Cpu))?;
        panels::product(Isa::best(), &call, data::numbers_mut(PANELS, &mut to)?);
        Ok(to)
    }
}

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
    fn panels_equal_the_library() {
        tch::manual_seed(6);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let near = |found: &Tensor, expected: &Tensor| {
            assert_eq!(found.size(), expected.size());
            let difference = (found - expected).abs();
            assert!(difference.numel() == 0 || difference.max().double_value(&[]) < 1e-3);
        };
        let (weight, up, bias) = (random(&[130, 96]), random(&[130, 96]), random(&[130]));
        let (plain, gated) = (Panels::new(&weight).unwrap(), Panels::gated(&weight, &up).unwrap());
        for count in [0, 1, 9, 70] {
            // Rows that lie apart.
            let rows = random(&[count, 100]).narrow(1, 2, 96);
            let product = rows.matmul(&weight.tr());
            near(&plain.product(&rows, Plus::Nothing).unwrap(), &product);
            near(&plain.product(&rows, Plus::Bias(&bias)).unwrap(), &(&product + &bias));
            let other = random(&[count, 130]);
            near(&plain.product(&rows, Plus::Rows(&other)).unwrap(), &(&other + &product));
            near(&gated.product(&rows, Plus::Nothing).unwrap(), &(product.silu() * rows.matmul(&up.tr())));
        }
    }

    #[test]
    fn panels_refuse_what_does_not_fit() {
        let zeros = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
        let float = |size: &[i64]| zeros(size, Kind::Float);
        assert!(Panels::new(&float(&[4, 0])).is_err() && Panels::new(&float(&[4])).is_err());
        assert!(Panels::new(&zeros(&[4, 6], Kind::BFloat16)).is_err() && Panels::new(&float(&[4, 6]).tr()).is_err());
        assert!(Panels::gated(&float(&[4, 6]), &float(&[4, 5])).is_err());
        let (plain, gated) =
            (Panels::new(&float(&[4, 6])).unwrap(), Panels::gated(&float(&[4, 6]), &float(&[4, 6])).unwrap());
        for rows in [float(&[2, 5]), float(&[6]), zeros(&[2, 6], Kind::BFloat16), float(&[6, 2]).tr()] {
            assert!(plain.product(&rows, Plus::Nothing).is_err(), "{rows:?}");
        }
        let rows = float(&[2, 6]);
        assert!(plain.product(&rows, Plus::Bias(&float(&[5]))).is_err());
        assert!(gated.product(&rows, Plus::Bias(&float(&[4]))).is_err());
        assert!(gated.product(&rows, Plus::Rows(&float(&[2, 4]))).is_err());
        for other in [float(&[2, 5]), float(&[3, 4]), float(&[4, 2]).tr(), zeros(&[2, 4], Kind::BFloat16)] {
            assert!(plain.product(&rows, Plus::Rows(&other)).is_err(), "{other:?}");
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
