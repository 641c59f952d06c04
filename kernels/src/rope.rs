//! Rotary position embedding: rotation of queries and keys by their positions, in f32 with one rounding.
//!
//! Halves convention: number i of a head pairs with number i + head_dim / 2.

use tch::{Device, Kind, Tensor};

use crate::cpu::number::Number;
use crate::cpu::rope::{Angles, rotate};
use crate::{Error, argument, data};

/// Cosines and sines of every position.
#[derive(Debug)]
pub struct RopeTable {
    /// `[positions, head_dim / 2]`, f32.
    cos: Tensor,
    /// `[positions, head_dim / 2]`, f32.
    sin: Tensor,
}

impl RopeTable {
    /// The table for `positions` positions and one inverse frequency a pair.
    pub fn new(inverse_frequencies: &[f64], positions: u32) -> Result<Self, Error> {
        let frequencies = Tensor::f_from_slice(inverse_frequencies)?.f_unsqueeze(0)?;
        let positions = Tensor::f_arange(i64::from(positions), (Kind::Double, Device::Cpu))?.f_unsqueeze(1)?;
        let angles = positions.f_mul(&frequencies)?;
        Ok(Self { cos: angles.f_cos()?.f_to_kind(Kind::Float)?, sin: angles.f_sin()?.f_to_kind(Kind::Float)? })
    }

    /// The table on another device.
    pub fn to_device(&self, device: Device) -> Result<Self, Error> {
        Ok(Self { cos: self.cos.f_to_device(device)?, sin: self.sin.f_to_device(device)? })
    }

    /// How many positions the table has.
    pub fn positions(&self) -> u32 {
        self.cos.size()[0] as u32
    }

    /// The rows of the table for these positions. Fails when one is beyond the table.
    pub fn at(&self, positions: &[u32]) -> Result<Rotation, Error> {
        if let Some(&position) = positions.iter().find(|&&position| position >= self.positions()) {
            return Err(argument("rope", format!("position {position} is beyond the model's {}", self.positions())));
        }
        let index: Vec<i64> = positions.iter().map(|&position| i64::from(position)).collect();
        let index = Tensor::f_from_slice(&index)?.f_to_device_(self.cos.device(), Kind::Int64, true, false)?;
        Ok(Rotation {
            cos: self.cos.f_index_select(0, &index)?.f_unsqueeze(1)?,
            sin: self.sin.f_index_select(0, &index)?.f_unsqueeze(1)?,
        })
    }
}

/// The rotation of a list of rows.
#[derive(Debug)]
pub struct Rotation {
    /// `[rows, 1, head_dim / 2]`, f32.
    cos: Tensor,
    /// `[rows, 1, head_dim / 2]`, f32.
    sin: Tensor,
}

impl Rotation {
    /// Rotates `heads`: `[rows, heads, head_dim]`, any float type; returns the same shape and type, contiguous.
    pub fn apply(&self, heads: &Tensor) -> Result<Tensor, Error> {
        let (rows, _, dim) = heads.size3()?;
        if rows != self.cos.size()[0] || dim != 2 * self.cos.size()[2] {
            return Err(argument(
                "rope",
                format!("heads {:?} do not fit a table of {:?}", heads.size(), self.cos.size()),
            ));
        }
        match (heads.device(), heads.kind()) {
            (Device::Cpu, Kind::Float) => self.fused::<f32>(heads),
            (Device::Cpu, Kind::BFloat16) => self.fused::<half::bf16>(heads),
            _ => self.library(heads),
        }
    }

    /// In one pass.
    fn fused<T: Number + data::Element>(&self, heads: &Tensor) -> Result<Tensor, Error> {
        const OP: &str = "rope";
        let spread = heads.stride();
        let whole = spread.last() == Some(&1) && spread.get(1) == heads.size().last();
        let copy = if whole { None } else { Some(heads.f_contiguous()?) };
        let (from, stride) = data::rows::<T>(OP, copy.as_ref().unwrap_or(heads))?;
        let mut to = Tensor::f_empty(heads.size(), (T::KIND, Device::Cpu))?;
        let width = (heads.size()[1] * heads.size()[2]) as usize;
        rotate(from, stride, width, self.angles()?, self.half(), data::numbers_mut(OP, &mut to)?);
        Ok(to)
    }

    fn library(&self, heads: &Tensor) -> Result<Tensor, Error> {
        let (kind, half) = (heads.kind(), self.cos.size()[2]);
        let heads = heads.f_to_kind(Kind::Float)?;
        let (first, second) = (heads.f_narrow(2, 0, half)?, heads.f_narrow(2, half, half)?);
        let rotated_first = first.f_mul(&self.cos)?.f_addcmul_(&second, &self.sin.f_neg()?)?;
        let rotated_second = second.f_mul(&self.cos)?.f_addcmul_(&first, &self.sin)?;
        Ok(Tensor::f_cat(&[rotated_first, rotated_second], 2)?.f_to_kind(kind)?)
    }

    /// The rotation on another device.
    pub(crate) fn to_device(&self, device: Device) -> Result<Self, Error> {
        Ok(Self { cos: self.cos.f_to_device(device)?, sin: self.sin.f_to_device(device)? })
    }

    /// Cosines and sines, `[rows, 1, head_dim / 2]` each, f32.
    pub(crate) fn tables(&self) -> (&Tensor, &Tensor) {
        (&self.cos, &self.sin)
    }

    /// How many rows it rotates.
    pub(crate) fn rows(&self) -> usize {
        self.cos.size()[0] as usize
    }

    /// Numbers of half a head.
    pub(crate) fn half(&self) -> usize {
        self.cos.size()[2] as usize
    }

    pub(crate) fn angles(&self) -> Result<Angles<'_>, Error> {
        Ok(Angles { cos: data::numbers("rope", &self.cos)?, sin: data::numbers("rope", &self.sin)? })
    }

    /// The rotation of rows `first..first + count`.
    pub fn narrow(&self, first: usize, count: usize) -> Result<Self, Error> {
        Ok(Self {
            cos: self.cos.f_narrow(0, first as i64, count as i64)?,
            sin: self.sin.f_narrow(0, first as i64, count as i64)?,
        })
    }

    /// The rotation that undoes this one.
    pub fn inverse(&self) -> Result<Self, Error> {
        Ok(Self { cos: self.cos.shallow_clone(), sin: self.sin.f_neg()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> RopeTable {
        let frequencies: Vec<f64> = (0..16).map(|pair| 1e4f64.powf(-f64::from(pair) / 16.0)).collect();
        RopeTable::new(&frequencies, 4096).unwrap()
    }

    #[test]
    fn rotating_there_and_back_is_the_identity() {
        tch::manual_seed(5);
        let heads = Tensor::randn([257, 3, 32], (Kind::Float, Device::Cpu));
        let positions: Vec<u32> = (0..257).map(|row| row * 15).collect();
        let rotation = table().at(&positions).unwrap();
        let there = rotation.apply(&heads).unwrap();
        let back = rotation.inverse().unwrap().apply(&there).unwrap();
        assert!((&back - &heads).abs().max().double_value(&[]) < 1e-5);
        assert!((there - heads).abs().max().double_value(&[]) > 0.5);
    }

    #[test]
    fn one_pass_equals_the_library_for_rows_that_lie_apart() {
        tch::manual_seed(7);
        for (rows, heads, kind, bound) in
            [(1, 3, Kind::Float, 1e-6), (97, 5, Kind::Float, 1e-6), (257, 2, Kind::BFloat16, 0.02)]
        {
            let all = Tensor::randn([rows, heads + 2, 32], (Kind::Float, Device::Cpu)).to_kind(kind);
            let rotation = table().at(&(0..rows as u32).map(|row| row * 3).collect::<Vec<_>>()).unwrap();
            let views = [
                all.narrow(1, 1, heads),
                all.narrow(1, 0, heads).contiguous(),
                all.narrow(1, 0, heads).transpose(1, 2).contiguous().transpose(1, 2),
            ];
            for heads in views {
                let (fused, library) = (rotation.apply(&heads).unwrap(), rotation.library(&heads).unwrap());
                assert!(fused.is_contiguous() && fused.kind() == kind);
                let error = (fused.to_kind(Kind::Float) - library.to_kind(Kind::Float)).abs().max().double_value(&[]);
                assert!(error < bound, "{rows} {kind:?}: {error}");
            }
        }
    }

    #[test]
    fn shifting_by_a_then_b_equals_shifting_by_their_sum() {
        tch::manual_seed(6);
        let heads = Tensor::randn([97, 2, 32], (Kind::Float, Device::Cpu));
        let at = |position: u32| table().at(&vec![position; 97]).unwrap();
        let twice = at(31).apply(&at(700).apply(&heads).unwrap()).unwrap();
        let once = at(731).apply(&heads).unwrap();
        assert!((twice - once).abs().max().double_value(&[]) < 1e-5);
    }

    #[test]
    fn a_position_beyond_the_table_is_refused() {
        assert!(table().at(&[4096]).is_err());
        assert!(table().at(&[1]).unwrap().apply(&Tensor::zeros([2, 1, 32], (Kind::Float, Device::Cpu))).is_err());
    }
}
