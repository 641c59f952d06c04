use super::*;
use tch::Device;

fn random(shape: &[i64], seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(shape, (Kind::Float, Device::Cpu))
}

/// The obvious twin: softmax over all keys with the mask applied, computed in `kind`.
fn plain(query: &Tensor, keys: &Tensor, values: &Tensor, last: &[u32], kind: Kind) -> Tensor {
    let (rows, heads, dim) = query.size3().unwrap();
    let group = heads / keys.size()[1];
    let spread = |t: &Tensor| t.to_kind(kind).repeat_interleave_self_int(group, 1, None).transpose(0, 1);
    let scores = query.to_kind(kind).transpose(0, 1).matmul(&spread(keys).transpose(1, 2)) / (dim as f64).sqrt();
    let last: Vec<i64> = last.iter().map(|&slot| i64::from(slot)).collect();
    let hidden = Tensor::arange(keys.size()[0], (Kind::Int64, Device::Cpu))
        .unsqueeze(0)
        .gt_tensor(&Tensor::from_slice(&last).unsqueeze(1));
    let weights = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, kind);
    weights.matmul(&spread(values)).transpose(0, 1).reshape([rows, heads, dim])
}

fn worst(got: &Tensor, expected: &Tensor) -> f64 {
    (got.to_kind(Kind::Double) - expected.to_kind(Kind::Double)).abs().max().double_value(&[])
}

fn rows_of(kind: &str, capacity: u32) -> Vec<u32> {
    match kind {
        "full" => (0..capacity).collect(),
        "scattered" => (0..capacity).filter(|slot| slot % 7 == 3 || slot % 11 == 0).collect(),
        "clustered" => (0..capacity).filter(|slot| slot % 61 < 9).collect(),
        "first" => vec![0],
        "last" => vec![capacity - 1],
        _ => Vec::new(),
    }
}

#[test]
fn rows_equal_the_plain_twin_for_odd_sizes_types_and_row_sets() {
    for (capacity, heads, kv_heads, dim) in [(1, 2, 1, 16), (97, 6, 3, 20), (257, 14, 2, 64), (1025, 9, 3, 64)] {
        let (keys, values) = (random(&[capacity, kv_heads, dim], 1), random(&[capacity, kv_heads, dim], 2));
        for kind in ["full", "scattered", "clustered", "first", "last", "none"] {
            let last = rows_of(kind, capacity as u32);
            // Queries as they come out of a projection: rows lie apart.
            let query = random(&[last.len() as i64, heads + 3, dim], 3).narrow(1, 1, heads);
            let got = ragged_causal(&query, &keys, &values, &last).unwrap();
            assert_eq!(got.size(), query.size());
            if last.is_empty() {
                continue;
            }
            let exact = plain(&query, &keys, &values, &last, Kind::Double);
            assert!(worst(&got, &exact) < 2e-6, "{capacity} keys, {kind} rows");
            assert!(
                worst(&tiled(&query, &keys, &values, &last).unwrap(), &exact) < 2e-6,
                "{capacity} keys, {kind} rows"
            );
            let half = |tensor: &Tensor| tensor.to_kind(Kind::BFloat16);
            let (query, keys, values) = (half(&query), half(&keys), half(&values));
            let exact = plain(&query, &keys, &values, &last, Kind::Double);
            let bound = 2.0 * worst(&plain(&query, &keys, &values, &last, Kind::BFloat16), &exact);
            let got = ragged_causal(&query, &keys, &values, &last).unwrap();
            assert!(got.kind() == Kind::BFloat16 && worst(&got, &exact) <= bound, "{capacity} keys, {kind} rows, bf16");
            let mixed = ragged_causal(&query.to_kind(Kind::Float), &keys, &values, &last).unwrap();
            assert!(worst(&mixed, &exact) < 2e-6, "{capacity} keys, {kind} rows, bf16 keys");
        }
    }
}

#[test]
fn sequences_with_tables_equal_those_without() {
    let (one, other) = (random(&[200, 2, 32], 1), random(&[130, 2, 32], 2));
    let pool = Tensor::zeros([8, 64, 2, 32], (Kind::Float, Device::Cpu));
    let tables: [&[u32]; 2] = [&[6, 0, 3, 2], &[7, 4, 1]];
    for (table, tensor) in tables.iter().zip([&one, &other]) {
        for (index, &block) in table.iter().enumerate() {
            let first = index as i64 * 64;
            let rows = (tensor.size()[0] - first).min(64);
            pool.select(0, i64::from(block)).narrow(0, 0, rows).copy_(&tensor.narrow(0, first, rows));
        }
    }
    let lasts: [&[u32]; 2] = [&[5, 63, 64, 199], &[129]];
    let query = random(&[5, 6, 32], 3);
    let in_pool: Vec<Sequence<'_>> = tables
        .iter()
        .zip(lasts)
        .map(|(table, last)| Sequence { keys: &pool, values: &pool, table: Some(table), last })
        .collect();
    let own: Vec<Sequence<'_>> = [&one, &other]
        .iter()
        .zip(lasts)
        .map(|(keys, last)| Sequence { keys, values: keys, table: None, last })
        .collect();
    let view = View { ends: &[0, 3, 130], ..View::default() };
    let (got, expected) = (attend(&query, &in_pool, view).unwrap(), attend(&query, &own, view).unwrap());
    assert!(got.0.equal(&expected.0) && got.1.equal(&expected.1));
    let alone = ragged_causal(&query.narrow(0, 4, 1), &other, &other, &[129]).unwrap();
    assert!(worst(&got.0.narrow(0, 4, 1), &alone) < 1e-6);
}

#[test]
fn a_temperature_flattens_as_a_smaller_query_does() {
    let (keys, query) = (random(&[100, 2, 16], 1), random(&[3, 4, 16], 2));
    let sequence = [Sequence { keys: &keys, values: &keys, table: None, last: &[40, 70, 99] }];
    let warm = attend(&query, &sequence, View { temperature: 2.0, from: 7, ..View::default() }).unwrap().0;
    let small = attend(&(&query / 2.0), &sequence, View { from: 7, ..View::default() }).unwrap().0;
    let other = attend(&query, &sequence, View { from: 8, ..View::default() }).unwrap().0;
    assert!(worst(&warm, &small) < 1e-6 && worst(&warm, &other) > 1e-3);
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let (query, keys) = (random(&[2, 4, 8], 1), random(&[5, 2, 8], 2));
    let refuse = |query: &Tensor, keys: &Tensor, values: &Tensor, last: &[u32], what: &str| {
        let error = ragged_causal(query, keys, values, last).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refuse(&query, &keys, &keys, &[1], "for 1 last slots");
    refuse(&query, &keys, &keys, &[3, 2], "ascend");
    refuse(&query, &keys, &keys, &[4, 5], "slot 5 is beyond the capacity 5");
    refuse(&query, &keys.narrow(0, 0, 0), &keys.narrow(0, 0, 0), &[0, 0], "beyond the capacity 0");
    refuse(&query, &random(&[5, 3, 8], 2), &random(&[5, 3, 8], 2), &[0, 1], "do not fit");
    refuse(&query, &keys, &random(&[4, 2, 8], 2), &[0, 1], "do not fit");
    refuse(&random(&[2, 8], 1), &keys, &keys, &[0, 1], "not [rows");
    refuse(&query, &random(&[5, 8], 1), &random(&[5, 8], 1), &[0, 1], "neither rows");
    refuse(&query, &keys, &keys.to_kind(Kind::BFloat16), &[0, 1], "BFloat16");
    refuse(&query.to_kind(Kind::Double), &keys, &keys, &[0, 1], "Double");
    let apart = random(&[5, 4, 8], 2).narrow(1, 0, 2);
    refuse(&query, &apart, &apart, &[0, 1], "strides");
    refuse(&query.transpose(1, 2).contiguous().transpose(1, 2), &keys, &keys, &[0, 1], "strides");

    let pool = random(&[3, 64, 2, 8], 2);
    let refuse = |table: &[u32], last: &[u32], view: View<'_>, what: &str| {
        let sequence = Sequence { keys: &pool, values: &pool, table: Some(table), last };
        let error = attend(&query, &[sequence], view).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refuse(&[2], &[3, 64], View::default(), "slot 64 is beyond a table of 1 blocks");
    refuse(&[2, 3], &[3, 64], View::default(), "block 3 is beyond the 3");
    refuse(&[u32::MAX], &[3, 4], View::default(), "beyond the 3");
    refuse(&[0], &[3, 4], View { from: 4, ..View::default() }, "every row sees a key");
    refuse(&[0], &[3, 4], View { ends: &[2, 1], ..View::default() }, "must ascend");
    refuse(&[0], &[3, 4], View { temperature: 0.0, ..View::default() }, "temperature 0");
}
