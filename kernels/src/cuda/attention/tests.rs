//! The kernels of attention.cu, emulated on the CPU, against the plain twin.

use tch::{Device, Kind, Tensor};

use super::super::emulated::Emulated;
use super::*;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn random(shape: &[i64], kind: Kind, seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(shape, FLOAT).to_kind(kind)
}

/// Scores `[heads, rows, keys]` in f32, −∞ where a row does not see a key.
fn scores(query: &Tensor, keys: &Tensor, last: &[u32]) -> Tensor {
    let group = query.size()[1] / keys.size()[1];
    let wide = |tensor: &Tensor| tensor.to_kind(Kind::Double).transpose(0, 1);
    let keys_of_heads = wide(&keys.repeat_interleave_self_int(group, 1, None));
    let scores = wide(query).matmul(&keys_of_heads.transpose(1, 2)) / (query.size()[2] as f64).sqrt();
    let last: Vec<i64> = last.iter().map(|&slot| i64::from(slot)).collect();
    let slots = Tensor::arange(keys.size()[0], (Kind::Int64, Device::Cpu)).unsqueeze(0);
    let hidden = slots.gt_tensor(&Tensor::from_slice(&last).unsqueeze(1));
    scores.masked_fill(&hidden, f64::NEG_INFINITY)
}

/// The exact answer, and the plain one in the tensors' own precision: weights and output rounded.
fn plain(query: &Tensor, keys: &Tensor, values: &Tensor, last: &[u32]) -> (Tensor, Tensor) {
    let kind = query.kind();
    let group = query.size()[1] / keys.size()[1];
    let weights = scores(query, keys, last).softmax(-1, Kind::Double);
    let values = values.repeat_interleave_self_int(group, 1, None).to_kind(Kind::Double).transpose(0, 1);
    let product = |weights: &Tensor| weights.matmul(&values).transpose(0, 1);
    let rounded = |tensor: &Tensor| tensor.to_kind(kind).to_kind(Kind::Double);
    (product(&weights), rounded(&product(&rounded(&weights))))
}

fn largest(difference: Tensor) -> f64 {
    difference.abs().max().double_value(&[])
}

/// At most twice the error of the plain version in the same precision.
fn check_close(got: &Tensor, (exact, same_precision): &(Tensor, Tensor), what: &str) {
    let own = largest(got.to_kind(Kind::Double) - exact);
    let bound = 2.0 * largest(same_precision - exact);
    assert!(own.is_finite() && own <= bound + 1e-6, "{what}: error {own}, bound {bound}");
}

fn rows_of(kind: &str, capacity: u32) -> Vec<u32> {
    match kind {
        "full" => (0..capacity).collect(),
        "scattered" => (0..capacity).filter(|slot| slot % 7 == 3 || slot % 11 == 0).collect(),
        "clustered" => (0..capacity).filter(|slot| slot % 61 < 9).collect(),
        "first" => vec![0],
        "last" => vec![capacity - 1],
        "few" => vec![capacity / 2, capacity - 1],
        _ => Vec::new(),
    }
}

fn one(last: &[u32]) -> [Rows<'_>; 1] {
    [Rows { last, table: None }]
}

#[test]
fn rows_equal_the_plain_twin_for_odd_sizes_and_row_sets() {
    let shapes =
        [(1, 2, 1, 64), (97, 6, 3, 64), (257, 14, 2, 64), (129, 5, 1, 128), (300, 8, 8, 128), (97, 20, 1, 128)];
    let sets = ["full", "scattered", "clustered", "first", "last", "few", "none"];
    for (place, (capacity, heads, kv_heads, dim)) in shapes.into_iter().enumerate() {
        for (turn, set) in sets.into_iter().enumerate() {
            let kind = [Kind::BFloat16, Kind::Half][(place + turn) % 2];
            let keys = random(&[capacity, kv_heads, dim], kind, 1);
            let values = random(&[capacity, kv_heads, dim], kind, 2);
            let last = rows_of(set, capacity as u32);
            let query = random(&[last.len() as i64, heads, dim], kind, 3);
            let plain = if last.is_empty() { None } else { Some(plain(&query, &keys, &values, &last)) };
            // One multiprocessor: nothing is split. Many: as much as may be.
            for launch in [1, 4096].into_iter().map(|processors| Emulated::all(processors)[(place + turn) % 4]) {
                let what =
                    format!("{kind:?}, {capacity} keys, {heads}/{kv_heads} heads of {dim}, {set} rows, {launch:?}");
                let (got, _) = ragged_causal(&launch, &query, &keys, &values, &one(&last), None).unwrap();
                assert_eq!(got.size(), query.size());
                if let Some(plain) = &plain {
                    check_close(&got, plain, &what);
                }
            }
        }
    }
}

#[test]
fn every_order_of_threads_and_copies_gives_the_same_bits() {
    let last = rows_of("scattered", 200);
    for (kind, dim) in [(Kind::BFloat16, 64), (Kind::Half, 128)] {
        for processors in [1, 64] {
            let (keys, values) = (random(&[200, 2, dim], kind, 1), random(&[200, 2, dim], kind, 2));
            let query = random(&[last.len() as i64, 6, dim], kind, 3);
            for ends in [None, Some(&[0, 70, 128, 200][..])] {
                let runs = Emulated::all(processors)
                    .map(|launch| ragged_causal(&launch, &query, &keys, &values, &one(&last), ends).unwrap());
                for run in &runs[1..] {
                    assert!(run.0.equal(&runs[0].0), "{kind:?} {dim} {processors}");
                    if let (Some(sums), Some(first)) = (&run.1, &runs[0].1) {
                        assert!(sums.equal(first));
                    }
                }
            }
        }
    }
}

#[test]
fn requests_with_tables_out_of_order_do_not_see_each_other() {
    for (kind, dim, heads, kv_heads) in [(Kind::BFloat16, 64, 14, 2), (Kind::Half, 128, 10, 2)] {
        let blocks = 9;
        // What no table names is NaN: reading it shows.
        let mut keys = Tensor::full([blocks, 64, kv_heads, dim], f64::NAN, FLOAT).to_kind(kind);
        let mut values = keys.copy();
        let tables: [&[u32]; 3] = [&[7, 2, 5], &[0], &[8, 3]];
        let lasts: [Vec<u32>; 3] = [(0..180).step_by(3).collect(), vec![41], (100..120).collect()];
        let ends = [0, 10, 41, 64, 100, 128];
        let (mut expected, mut expected_sums) = (Vec::new(), Vec::new());
        let mut queries = Vec::new();
        for (request, (table, last)) in tables.iter().zip(&lasts).enumerate() {
            let seed = 10 * request as i64;
            let own = [1, 2].map(|n| random(&[table.len() as i64 * 64, kv_heads, dim], kind, seed + n));
            for (place, &block) in table.iter().enumerate() {
                for (all, own) in [(&mut keys, &own[0]), (&mut values, &own[1])] {
                    all.select(0, i64::from(block)).copy_(&own.narrow(0, place as i64 * 64, 64));
                }
            }
            let query = random(&[last.len() as i64, heads, dim], kind, seed + 3);
            let [own_keys, own_values] = own.map(|own| own.view([-1, kv_heads, dim]));
            let launch = Emulated { mode: 0, multiprocessors: 8 };
            let sums = ragged_causal(&launch, &query, &own_keys, &own_values, &one(last), Some(&ends)).unwrap().1;
            expected_sums.push(sums.unwrap());
            expected.push(plain(&query, &own_keys, &own_values, last));
            queries.push(query);
        }
        let query = Tensor::cat(&queries, 0);
        let requests: Vec<Rows<'_>> =
            tables.iter().zip(&lasts).map(|(table, last)| Rows { last, table: Some(table) }).collect();
        for launch in [1, 64].into_iter().flat_map(Emulated::all) {
            let (got, _) = ragged_causal(&launch, &query, &keys, &values, &requests, None).unwrap();
            let mut first = 0;
            for (last, plain) in lasts.iter().zip(&expected) {
                let rows = last.len() as i64;
                check_close(&got.narrow(0, first, rows), plain, &format!("{kind:?} {launch:?}, rows from {first}"));
                first += rows;
            }
            // Where a request's blocks are changes no bit of its sums.
            let (_, sums) = ragged_causal(&launch, &query, &keys, &values, &requests, Some(&ends)).unwrap();
            assert!(sums.unwrap().equal(&Tensor::cat(&expected_sums, 0)), "{kind:?} {launch:?}");
        }
    }
}

#[test]
fn changing_a_future_key_changes_no_bit() {
    let (keys, values) = (random(&[300, 2, 64], Kind::BFloat16, 1), random(&[300, 2, 64], Kind::BFloat16, 2));
    let last: Vec<u32> = (0..280).step_by(5).collect();
    let query = random(&[last.len() as i64, 14, 64], Kind::BFloat16, 3);
    let launch = Emulated { mode: 0, multiprocessors: 1 };
    let run =
        |keys: &Tensor, values: &Tensor| ragged_causal(&launch, &query, keys, values, &one(&last), None).unwrap().0;
    let before = run(&keys, &values);
    for (row, &slot) in last.iter().enumerate().step_by(13) {
        let future = |tensor: &Tensor| {
            let changed = tensor.copy();
            let _ = changed.narrow(0, i64::from(slot) + 1, 299 - i64::from(slot)).fill_(1e4);
            changed
        };
        let seen = row as i64 + 1;
        let after = run(&future(&keys), &future(&values));
        assert!(before.narrow(0, 0, seen).equal(&after.narrow(0, 0, seen)), "slot {slot}");
    }
}

#[test]
fn sums_equal_the_plain_twin() {
    for (kind, dim, capacity) in [(Kind::BFloat16, 64, 333), (Kind::Half, 128, 150)] {
        let (keys, values) = (random(&[capacity, 2, dim], kind, 1) * 3, random(&[capacity, 2, dim], kind, 2));
        let last: Vec<u32> =
            (0..capacity as u32).filter(|slot| slot % 5 == 1).chain([capacity as u32 - 1; 2]).collect();
        let query = random(&[last.len() as i64, 6, dim], kind, 3);
        let ends = [0, 1, 64, 65, 100, 100, 128, capacity as u32];
        let scores = scores(&query, &keys, &last).transpose(0, 1);
        let plain = plain(&query, &keys, &values, &last);
        let launch = Emulated { mode: 1, multiprocessors: 8 };
        let (got, sums) = ragged_causal(&launch, &query, &keys, &values, &one(&last), Some(&ends)).unwrap();
        check_close(&got, &plain, &format!("{kind:?}"));
        let sums = sums.unwrap().to_kind(Kind::Double);
        for (place, &end) in ends.iter().enumerate() {
            let got = sums.select(2, place as i64);
            if end == 0 {
                assert!(got.max().double_value(&[]) == f64::NEG_INFINITY);
                continue;
            }
            let expected = scores.narrow(2, 0, i64::from(end)).logsumexp([-1], false);
            assert!(largest(got - expected) < 1e-4, "{kind:?} end {end}");
        }
    }
}

#[test]
fn one_row_over_33000_keys_equals_the_plain_twin() {
    let (keys, values) = (random(&[33_000, 1, 64], Kind::BFloat16, 1), random(&[33_000, 1, 64], Kind::BFloat16, 2));
    let query = random(&[1, 7, 64], Kind::BFloat16, 3) * 2;
    let plain = plain(&query, &keys, &values, &[32_999]);
    for launch in [1, 132].map(|multiprocessors| Emulated { mode: 0, multiprocessors }) {
        let (got, _) = ragged_causal(&launch, &query, &keys, &values, &one(&[32_999]), None).unwrap();
        check_close(&got, &plain, &format!("{launch:?}"));
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_values() {
    let launch = Emulated { mode: 0, multiprocessors: 1 };
    let half = |shape: &[i64]| random(shape, Kind::Half, 1);
    let (query, keys) = (half(&[2, 4, 64]), half(&[5, 2, 64]));
    let refuse =
        |query: &Tensor, keys: &Tensor, values: &Tensor, requests: &[Rows<'_>], ends: Option<&[u32]>, why: &str| {
            let text = ragged_causal(&launch, query, keys, values, requests, ends).unwrap_err().to_string();
            assert!(text.contains(why), "{text:?} does not say {why:?}");
        };
    let good = one(&[0, 4]);
    refuse(&query, &keys, &keys, &one(&[1]), None, "2 rows of queries and 1 slots");
    refuse(&query, &keys, &keys, &one(&[3, 2]), None, "descend");
    refuse(&query, &keys, &keys, &one(&[4, 5]), None, "slot 5 is beyond");
    refuse(&query, &keys, &half(&[6, 2, 64]), &good, None, "do not fit");
    refuse(&query, &half(&[5, 3, 64]), &half(&[5, 3, 64]), &good, None, "do not fit");
    refuse(&half(&[2, 4, 32]), &half(&[5, 2, 32]), &half(&[5, 2, 32]), &good, None, "64 or 128");
    refuse(&query, &half(&[0, 2, 64]), &half(&[0, 2, 64]), &good, None, "beyond the request's 0");
    refuse(&query.to_kind(Kind::BFloat16), &keys, &keys, &good, None, "do not go together");
    refuse(&query.to_kind(Kind::Float), &keys.to_kind(Kind::Float), &keys.to_kind(Kind::Float), &good, None, "Float");
    refuse(&query, &half(&[2, 5, 64]).transpose(0, 1), &keys, &good, None, "not contiguous");
    refuse(&query, &keys, &keys, &good, Some(&[3, 2]), "descend");
    let blocks = half(&[3, 64, 2, 64]);
    let table = |table: &'static [u32]| [Rows { last: &[0, 70], table: Some(table) }];
    refuse(&query, &blocks, &blocks, &table(&[0, 3]), None, "block 3 is beyond the 3 blocks");
    refuse(&query, &blocks, &blocks, &table(&[2]), None, "slot 70 is beyond the request's 64");
    let mixed = [Rows { last: &[0], table: Some(&[1]) }, Rows { last: &[0], table: None }];
    refuse(&query, &blocks, &blocks, &mixed, None, "or none");
}

#[test]
fn short_work_is_split_and_long_work_is_not() {
    assert_eq!(splits(8, 264, 256), 33);
    assert_eq!(splits(300, 264, 256), 1);
    assert_eq!(splits(1, 264, 3), 1);
    assert_eq!(splits(1, 100_000, 100_000), SPLIT_LIMIT);
}
