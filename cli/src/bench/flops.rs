//! Floating-point operations of a prefill: what a share of the matrix-product peak is made of.
//!
//! Counts matrix products only (projections, MLP, attention, output), two operations a multiply-add. The last layer
//! computes K and V for every row and the rest for output rows only, as the executor does.

use kvsplice_model::Config;

/// How much a prefill computes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    /// Rows computed.
    pub(super) rows: f64,
    /// (row, key) pairs that attention visits in one layer.
    pub(super) pairs: f64,
    /// Rows whose logits are computed, and the pairs they visit in the last layer.
    pub(super) outputs: f64,
    pub(super) output_pairs: f64,
}

/// Pairs of `rows` consecutive rows, the first of which sees `before` keys and itself.
pub(super) fn causal_pairs(before: f64, rows: f64) -> f64 {
    rows * before + rows * (rows + 1.0) / 2.0
}

/// Operations of `work` on a model.
pub(super) fn prefill(config: &Config, work: Work) -> f64 {
    let (layers, hidden) = (f64::from(config.layers), f64::from(config.hidden));
    let query_width = f64::from(config.heads) * f64::from(config.head_dim);
    let kv_width = f64::from(config.kv_heads) * f64::from(config.head_dim);
    let kv_row = 2.0 * hidden * 2.0 * kv_width;
    let rest_row = 2.0 * (2.0 * hidden * query_width + 3.0 * hidden * f64::from(config.intermediate));
    let pair = 4.0 * query_width;
    layers * work.rows * kv_row
        + (layers - 1.0) * (work.rows * rest_row + work.pairs * pair)
        + work.outputs * (rest_row + 2.0 * hidden * f64::from(config.vocabulary))
        + work.output_pairs * pair
}

/// Numbers that decoding one token reads: every layer's matrices and the output matrix.
pub(super) fn weights(config: &Config) -> f64 {
    let hidden = f64::from(config.hidden);
    let query_width = f64::from(config.heads) * f64::from(config.head_dim);
    let kv_width = f64::from(config.kv_heads) * f64::from(config.head_dim);
    let layer = 2.0 * hidden * query_width + 2.0 * hidden * kv_width + 3.0 * hidden * f64::from(config.intermediate);
    f64::from(config.layers) * layer + hidden * f64::from(config.vocabulary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_and_operations_match_a_count_by_hand() {
        assert_eq!(causal_pairs(2.0, 3.0), 3.0 + 4.0 + 5.0);
        let config = Config { layers: 1, ..Config::tiny(10) };
        // K and V of one row, and one output row that sees one key: 64-wide, 4 heads of 16, 2 KV heads, MLP of 96.
        let work = Work { rows: 1.0, pairs: 1.0, outputs: 1.0, output_pairs: 1.0 };
        let expected = 2 * (2 * 64 * 32) + 2 * (2 * 64 * 64 + 3 * 64 * 96) + 2 * 64 * 10 + 4 * 64;
        assert_eq!(prefill(&config, work), f64::from(expected));
        assert_eq!(weights(&config), f64::from(2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 64 * 10));
    }
}
