//! Products of rows with a weight matrix on the CPU, which a model spends its time on.

use half::bf16;
use tch::{Device, Kind, Tensor};

use crate::cpu::number::Number;
use crate::cpu::panels::{self, Call, Finish, PAIRS, PANEL};
use crate::{Error, Isa, argument, cpu, data};

const OP: &str = "few_rows";
const PANELS: &str = "panels";

/// An f32 or bf16 weight matrix in the order in which products read it. A row's products have the same bits in every batch.
#[derive(Debug)]
pub struct Panels {
    /// `[panels, inner, 32]`; of bf16, `[panels, inner / 2, 32]`, where a number stands for the bits of two.
    numbers: Tensor,
    /// What the matrix was of.
    kind: Kind,
    /// Numbers of a row of the product.
    width: i64,
    inner: i64,
    pairs: bool,
}

/// Whether [`Panels`] are the faster way to multiply by weights of `kind` and this inner size on this CPU: not in bf16 where
/// the library has AMX, whose tiles do eight times what vectors do.
pub fn in_panels(kind: Kind, inner: i64) -> bool {
    match kind {
        Kind::Float => true,
        Kind::BFloat16 => inner % bf16::STEP as i64 == 0 && !has_amx(),
        _ => false,
    }
}

/// Whether the CPU multiplies tiles of bf16.
fn has_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // Leaf 7, EDX bit 22: AMX-BF16 (Intel's manual, CPUID).
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & 1 << 22 != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// What is added to a product.
#[derive(Clone, Copy, Debug)]
pub enum Plus<'a> {
    /// Nothing.
    Nothing,
    /// To every row, `[outputs]`, of the matrix's type.
    Bias(&'a Tensor),
    /// `[count, outputs]`, of the matrix's type, contiguous.
    Rows(&'a Tensor),
}

impl Panels {
    /// Of `weight`, `[outputs, inner]`, f32 or bf16, contiguous, on the CPU. Fails on anything else, on an inner size of 0, and
    /// on an odd one in bf16.
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
        let kind = weights[0].kind();
        let step = if kind == Kind::BFloat16 { bf16::STEP } else { f32::STEP } as i64;
        if inner == 0 || inner % step != 0 {
            let what = format!("weight {:?} of {kind:?} needs an inner size above 0", weights[0].size());
            return Err(argument(PANELS, if step == 1 { what } else { format!("{what}, a multiple of {step}") }));
        }
        let steps = |weight| match kind {
            Kind::BFloat16 => data::words(PANELS, data::numbers::<bf16>(PANELS, weight)?),
            _ => data::numbers::<f32>(PANELS, weight),
        };
        let matrices = weights.iter().map(|&weight| steps(weight)).collect::<Result<Vec<_>, _>>()?;
        let count = (width as usize).div_ceil(lanes) as i64;
        let mut numbers = Tensor::f_empty([count, inner / step, PANEL as i64], (Kind::Float, Device::Cpu))?;
        let to = data::numbers_mut::<f32>(PANELS, &mut numbers)?;
        match matrices[..] {
            [gate, up] => panels::pack_pairs(gate, up, (inner / step) as usize, to),
            _ => panels::pack(matrices[0], (inner / step) as usize, to),
        }
        Ok(Self { numbers, kind, width, inner, pairs: weights.len() == 2 })
    }

    /// rows · weightᵀ and what is added to it, summed in f32; of a gated matrix, which takes no addend, what [`Panels::gated`]
    /// says.
    ///
    /// - `rows`: `[count, inner]`, of the matrix's type, on the CPU; rows may lie apart.
    ///
    /// Returns `[count, outputs]` of that type. Fails on shapes, types, strides and devices that do not fit.
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
        match self.kind {
            Kind::BFloat16 => self.product_of::<bf16>(rows, plus),
            _ => self.product_of::<f32>(rows, plus),
        }
    }

    fn product_of<T: Number + data::Element>(&self, rows: &Tensor, plus: Plus<'_>) -> Result<Tensor, Error> {
        let finish = match plus {
            Plus::Nothing if self.pairs => Finish::Gated,
            Plus::Nothing => Finish::Bias(&[]),
            Plus::Bias(bias) => Finish::Bias(data::numbers::<T>(PANELS, bias)?),
            Plus::Rows(rows) => Finish::Sum(data::numbers(PANELS, rows)?),
        };
        let count = rows.size()[0];
        let rows = rows.f_unsqueeze(1)?;
        let (numbers, stride) = data::rows::<T>(PANELS, &rows)?;
        let mut aligned;
        let (rows, stride) = match data::words(PANELS, numbers) {
            Ok(steps) if stride % T::STEP == 0 => (steps, stride / T::STEP),
            _ => {
                // Rare: rows that do not all begin with a step.
                aligned = Tensor::f_empty([count, self.inner], (T::KIND, Device::Cpu))?;
                aligned.f_copy_(&rows.f_squeeze_dim(1)?)?;
                (data::words(PANELS, data::numbers::<T>(PANELS, &aligned)?)?, self.inner as usize / T::STEP)
            }
        };
        let call = Call {
            rows,
            count: count as usize,
            stride,
            inner: self.inner as usize / T::STEP,
            panels: data::numbers::<f32>(PANELS, &self.numbers)?,
            width: self.width as usize,
            finish,
        };
        let mut to = Tensor::f_empty([count, self.width], (T::KIND, Device::Cpu))?;
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
        Kind::BFloat16 => of_kind::<bf16>(rows, weight),
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
        for (kind, bound) in [(Kind::Float, 1e-5), (Kind::BFloat16, 1.0 / 64.0)] {
            let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind);
            // To what the library finds in f32.
            let wide = |tensor: &Tensor| tensor.to_kind(Kind::Float);
            let near = |found: &Tensor, expected: &Tensor| {
                assert_eq!((found.size(), found.kind()), (expected.size(), kind));
                let difference = (wide(found) - expected).abs() / (expected.abs() + 4.0);
                assert!(difference.numel() == 0 || difference.max().double_value(&[]) < bound, "{kind:?}");
            };
            let (weight, up, bias) = (random(&[130, 96]), random(&[130, 96]), random(&[130]));
            let (plain, gated) = (Panels::new(&weight).unwrap(), Panels::gated(&weight, &up).unwrap());
            for count in [0, 1, 9, 70] {
                // Rows that lie apart, and that begin with half a step.
                for (first, apart) in [(2, 100), (1, 100), (2, 101)] {
                    let rows = random(&[count, apart]).narrow(1, first, 96);
                    let product = wide(&rows).matmul(&wide(&weight).tr());
                    near(&plain.product(&rows, Plus::Nothing).unwrap(), &product);
                    near(&plain.product(&rows, Plus::Bias(&bias)).unwrap(), &(&product + wide(&bias)));
                    let other = random(&[count, 130]);
                    near(&plain.product(&rows, Plus::Rows(&other)).unwrap(), &(wide(&other) + &product));
                    let ups = wide(&rows).matmul(&wide(&up).tr());
                    near(&gated.product(&rows, Plus::Nothing).unwrap(), &(product.silu() * ups));
                }
            }
        }
    }

    #[test]
    fn panels_refuse_what_does_not_fit() {
        let zeros = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
        let float = |size: &[i64]| zeros(size, Kind::Float);
        assert!(Panels::new(&float(&[4, 0])).is_err() && Panels::new(&float(&[4])).is_err());
        assert!(Panels::new(&zeros(&[4, 6], Kind::Double)).is_err() && Panels::new(&float(&[4, 6]).tr()).is_err());
        let half = |size: &[i64]| zeros(size, Kind::BFloat16);
        assert!(Panels::new(&half(&[4, 5])).is_err() && Panels::gated(&half(&[4, 6]), &float(&[4, 6])).is_err());
        let of_half = Panels::new(&half(&[4, 6])).unwrap();
        assert!(of_half.product(&float(&[2, 6]), Plus::Nothing).is_err());
        assert!(of_half.product(&half(&[2, 6]), Plus::Bias(&float(&[4]))).is_err());
        // Nor do rows that would have to be copied, for they do not begin with a step.
        assert!(of_half.product(&float(&[2, 7]).narrow(1, 0, 6), Plus::Nothing).is_err());
        assert!(of_half.product(&half(&[6, 3]).tr(), Plus::Nothing).is_err());
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
