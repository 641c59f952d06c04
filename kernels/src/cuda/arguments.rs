//! The argument of each CUDA kernel: the structs of `cuda/arguments.h`, field by field.

use std::ffi::c_void;

/// A run of lanes that one thread block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    pub(super) table: i32,
    pub(super) first_row: i32,
    pub(super) end_row: i32,
    pub(super) first_lane: i32,
}

#[repr(C)]
pub(super) struct Attend {
    pub(super) query: *const c_void,
    pub(super) keys: *const c_void,
    pub(super) values: *const c_void,
    pub(super) output: *mut c_void,
    pub(super) parts: *mut c_void,
    pub(super) part_sums: *mut c_void,
    pub(super) sums: *mut c_void,
    pub(super) last: *const c_void,
    pub(super) tiles: *const c_void,
    pub(super) tables: *const c_void,
    pub(super) ends: *const c_void,
    pub(super) end_count: i32,
    pub(super) rows: i32,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) group: i32,
    pub(super) inverse_group: u32,
    pub(super) splits: i32,
    pub(super) scale: f32,
}

#[repr(C)]
pub(super) struct Merge {
    pub(super) parts: *const c_void,
    pub(super) part_sums: *const c_void,
    pub(super) output: *mut c_void,
    pub(super) splits: i32,
    pub(super) pairs: i32,
    pub(super) head_dim: i32,
}

#[repr(C)]
pub(super) struct Place {
    pub(super) stored_keys: *const c_void,
    pub(super) stored_values: *const c_void,
    pub(super) key_scales: *const c_void,
    pub(super) value_scales: *const c_void,
    pub(super) keys: *mut c_void,
    pub(super) values: *mut c_void,
    pub(super) cosines: *const c_void,
    pub(super) sines: *const c_void,
    pub(super) slots: *const c_void,
    pub(super) table: *const c_void,
    pub(super) first_token: i32,
    pub(super) rows: i32,
    pub(super) kv_heads: i32,
    pub(super) head_dim: i32,
    pub(super) encoding: i32,
}

#[repr(C)]
pub(super) struct Scatter {
    pub(super) projected: *const c_void,
    pub(super) bias: *const c_void,
    pub(super) cosines: *const c_void,
    pub(super) sines: *const c_void,
    pub(super) slots: *const c_void,
    pub(super) table: *const c_void,
    pub(super) query: *mut c_void,
    pub(super) keys: *mut c_void,
    pub(super) values: *mut c_void,
    pub(super) rows: i32,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) head_dim: i32,
}

#[repr(C)]
pub(super) struct Norm {
    pub(super) input: *const c_void,
    pub(super) weight: *const c_void,
    pub(super) output: *mut c_void,
    pub(super) width: i32,
    pub(super) epsilon: f32,
}

#[repr(C)]
pub(super) struct Gate {
    pub(super) gate_up: *const c_void,
    pub(super) output: *mut c_void,
    pub(super) rows: i32,
    pub(super) width: i32,
}
