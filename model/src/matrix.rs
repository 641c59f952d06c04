//! A layer's weight matrices, in the order that the device's products read them in.
//!
//! On the CPU: panels of this project's own product. Else, and in bf16 on a CPU with AMX: rows, as stored, for the library's;
//! there, few rows are multiplied by a kernel that reads each weight once.

use kvsplice_kernels::activation::silu_mul;
use kvsplice_kernels::cuda::computes;
use kvsplice_kernels::cuda::elementwise::gated;
use kvsplice_kernels::product::{self, FEW_ROWS, Panels, Plus, few_rows};
use tch::{Device, Kind, Tensor};

use crate::Error;

/// Widths that a GPU's own kernels take are multiples of this.
const FUSED_WIDTH_STEP: i64 = 8;

/// Whether the device's own kernels take rows of this width.
pub(crate) fn fused(kind: Kind, device: Device, width: i64) -> bool {
    computes(kind, device) && width % FUSED_WIDTH_STEP == 0
}

/// A matrix `[out, in]`.
#[derive(Debug)]
pub(crate) enum Matrix {
    /// As stored.
    Rows(Tensor),
    /// As the CPU's own product reads it.
    Panels(Panels),
}

impl Matrix {
    pub(crate) fn new(weight: &Tensor, kind: Kind, device: Device) -> Result<Self, Error> {
        let weight = weight.f_to_device(device)?.f_to_kind(kind)?;
        Ok(if in_panels(&weight) { Self::Panels(Panels::new(&weight.f_contiguous()?)?) } else { Self::Rows(weight) })
    }

    /// rows · matrixᵀ + bias: `[rows, in]` → `[rows, out]`.
    pub(crate) fn product(&self, rows: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, Error> {
        match self {
            Self::Panels(panels) => Ok(panels.product(rows, bias.map_or(Plus::Nothing, Plus::Bias))?),
            Self::Rows(weight) => of_rows(rows, weight, bias),
        }
    }

    /// other + rows · matrixᵀ. `other`: `[rows, out]`, contiguous.
    pub(crate) fn sum(&self, rows: &Tensor, other: &Tensor) -> Result<Tensor, Error> {
        match self {
            Self::Panels(panels) => Ok(panels.product(rows, Plus::Rows(other))?),
            Self::Rows(weight) => Ok(of_rows(rows, weight, None)?.f_add_(other)?),
        }
    }
}

/// Gates and ups of an MLP, `[intermediate, hidden]` each.
#[derive(Debug)]
pub(crate) enum Gates {
    /// One below the other.
    Rows(Tensor),
    /// Side by side, for one pass.
    Panels(Panels),
}

impl Gates {
    pub(crate) fn new(gate: &Tensor, up: &Tensor, kind: Kind, device: Device) -> Result<Self, Error> {
        let convert = |tensor: &Tensor| tensor.f_to_device(device)?.f_to_kind(kind)?.f_contiguous();
        let (gate, up) = (convert(gate)?, convert(up)?);
        Ok(if in_panels(&gate) {
            Self::Panels(Panels::gated(&gate, &up)?)
        } else {
            Self::Rows(Tensor::f_cat(&[gate, up], 0)?)
        })
    }

    /// silu(rows · gateᵀ) · (rows · upᵀ): `[rows, hidden]` → `[rows, intermediate]`.
    pub(crate) fn product(&self, rows: &Tensor) -> Result<Tensor, Error> {
        match self {
            Self::Panels(panels) => Ok(panels.product(rows, Plus::Nothing)?),
            Self::Rows(weight) => {
                let both = of_rows(rows, weight, None)?;
                let width = weight.size()[0] / 2;
                Ok(if fused(weight.kind(), weight.device(), width) { gated(&both)? } else { silu_mul(both)? })
            }
        }
    }
}

fn in_panels(weight: &Tensor) -> bool {
    weight.device() == Device::Cpu && product::in_panels(weight.kind(), weight.size().last().copied().unwrap_or(0))
}

/// rows · weightᵀ + bias. `rows`: `[rows, in]`, `weight`: `[out, in]`.
fn of_rows(rows: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, Error> {
    if rows.device() != Device::Cpu || rows.size()[0] > FEW_ROWS {
        return Ok(rows.f_linear(weight, bias)?);
    }
    let mut product = few_rows(rows, weight)?;
    Ok(match bias {
        Some(bias) => product.f_add_(bias)?,
        None => product,
    })
}
