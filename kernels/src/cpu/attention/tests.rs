use super::*;
use crate::testing::{Random, numbers};

/// One sequence of a test: its cache lies in blocks of a pool, in the order of its table.
struct Sequence {
    table: Vec<u32>,
    last: Vec<u32>,
}

struct Case<T> {
    query: Vec<f32>,
    keys: Vec<T>,
    values: Vec<T>,
    sequences: Vec<Sequence>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    from: usize,
    ends: Vec<u32>,
}

fn rows_of(kind: &str, from: u32, keys: u32) -> Vec<u32> {
    match kind {
        "full" => (from..keys).collect(),
        "scattered" => (from..keys).filter(|slot| slot % 7 == 3 || slot % 11 == 0).collect(),
        "clustered" => (from..keys).filter(|slot| slot % 61 < 9).collect(),
        "first" => vec![from],
        "last" => vec![keys - 1],
        "repeated" => vec![keys - 1; 5],
        _ => Vec::new(),
    }
}

impl<T: Number> Case<T> {
    /// Sequences of these lengths and kinds of rows over one pool whose blocks they hold in random order.
    fn new(seed: u64, sequences: &[(u32, &str)], shape: (usize, usize, usize), from: u32, ends: &[u32]) -> Self {
        let mut random = Random(seed);
        let (heads, kv_heads, head_dim) = shape;
        let blocks: usize = sequences.iter().map(|(keys, _)| keys.div_ceil(crate::BLOCK) as usize).sum();
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        let sequences: Vec<Sequence> = sequences
            .iter()
            .map(|&(keys, kind)| Sequence {
                table: (0..keys.div_ceil(crate::BLOCK)).map(|_| free.swap_remove(random.below(free.len()))).collect(),
                last: rows_of(kind, from, keys),
            })
            .collect();
        let rows: usize = sequences.iter().map(|sequence| sequence.last.len()).sum();
        let mut pool = || -> Vec<T> {
            numbers(&mut random, blocks * BLOCK_KEYS * kv_heads * head_dim).into_iter().map(T::from_f32).collect()
        };
        let (keys, values) = (pool(), pool());
        let query = numbers(&mut random, rows * heads * head_dim);
        Self { query, keys, values, sequences, heads, kv_heads, head_dim, from: from as usize, ends: ends.to_vec() }
    }

    fn run(&self, isa: Isa) -> (Vec<f32>, Vec<f32>) {
        let rows: Vec<Rows<'_, T>> = self
            .sequences
            .iter()
            .map(|Sequence { table, last }| Rows { keys: &self.keys, values: &self.values, table: Some(table), last })
            .collect();
        let call = Call {
            query: &self.query,
            stride: self.heads * self.head_dim,
            sequences: &rows,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            from: self.from,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            ends: &self.ends,
        };
        let count = self.query.len() / self.head_dim * self.ends.len();
        let (mut output, mut sums) = (vec![f32::NAN; self.query.len()], vec![f32::NAN; count]);
        attend(isa, &call, &mut output, &mut sums);
        (output, sums)
    }

    /// The obvious twin: softmax over all keys of every row, in double precision.
    fn plain(&self) -> (Vec<f64>, Vec<f64>) {
        let (dim, group) = (self.head_dim, self.heads / self.kv_heads);
        let (mut output, mut sums) = (Vec::new(), Vec::new());
        let mut query = self.query.chunks(dim);
        for Sequence { table, last } in &self.sequences {
            for &last in last {
                for head in 0..self.heads {
                    let query = query.next().unwrap();
                    let number = |pool: &[T], slot: usize, number: usize| {
                        let row = table[slot / BLOCK_KEYS] as usize * BLOCK_KEYS + slot % BLOCK_KEYS;
                        f64::from(pool[(row * self.kv_heads + head / group) * dim + number].to_f32())
                    };
                    let seen = self.from..last as usize + 1;
                    let scores: Vec<f64> = seen
                        .clone()
                        .map(|slot| {
                            let dot: f64 = (0..dim).map(|i| f64::from(query[i]) * number(&self.keys, slot, i)).sum();
                            dot / (dim as f64).sqrt()
                        })
                        .collect();
                    let total: f64 = scores.iter().map(|score| score.exp()).sum();
                    for i in 0..dim {
                        let sum: f64 =
                            seen.clone().zip(&scores).map(|(slot, s)| s.exp() * number(&self.values, slot, i)).sum();
                        output.push(sum / total);
                    }
                    for &end in &self.ends {
                        let before = (end as usize).saturating_sub(self.from).min(scores.len());
                        sums.push(scores[..before].iter().map(|score| score.exp()).sum::<f64>().ln());
                    }
                }
            }
        }
        (output, sums)
    }

    fn check(&self, what: &str) {
        let (plain, plain_sums) = self.plain();
        for isa in Isa::available() {
            let (output, sums) = self.run(isa);
            for (got, expected) in output.iter().zip(&plain) {
                assert!((f64::from(*got) - expected).abs() < 2e-6, "{what} {isa:?}: {got}, not {expected}");
            }
            for (got, expected) in sums.iter().zip(&plain_sums) {
                let equal = f64::from(*got) == *expected || (f64::from(*got) - expected).abs() < 1e-5;
                assert!(equal, "{what} {isa:?}: sum {got}, not {expected}");
            }
        }
    }
}

const KINDS: [&str; 7] = ["full", "scattered", "clustered", "first", "last", "repeated", "none"];

/// Tests named `long_` are left out where every instruction is checked.
fn rows_of_every_kind_equal_the_twin(keys: u32, shape: (usize, usize, usize), kinds: &[&str]) {
    for kind in kinds {
        println!("seed {keys} {kind}");
        Case::<f32>::new(u64::from(keys), &[(keys, kind)], shape, 0, &[]).check(kind);
        Case::<half::bf16>::new(u64::from(keys), &[(keys, kind)], shape, 0, &[]).check(kind);
    }
}

#[test]
fn rows_equal_the_plain_twin_for_odd_sizes_and_row_sets() {
    for (keys, shape) in [(1, (2, 1, 16)), (97, (6, 3, 16)), (130, (5, 5, 18))] {
        rows_of_every_kind_equal_the_twin(keys, shape, &KINDS);
    }
}

#[test]
fn long_sequences_equal_the_plain_twin() {
    rows_of_every_kind_equal_the_twin(257, (14, 2, 64), &KINDS);
    // Without the full set, which takes the twin too long.
    rows_of_every_kind_equal_the_twin(1025, (9, 3, 64), &KINDS[1..]);
}

#[test]
fn several_sequences_of_one_pool_do_not_see_each_other() {
    for seed in 1..=3 {
        println!("seed {seed}");
        let sequences =
            [(70, "last"), (65, "none"), (300, "scattered"), (1, "first"), (129, "full"), (64, "clustered")];
        Case::<f32>::new(seed, &sequences, (6, 2, 32), 0, &[]).check("several");
        Case::<half::bf16>::new(seed, &sequences, (4, 4, 10), 0, &[]).check("several");
    }
}

/// Few rows over many keys: split along the keys.
fn decode_equals_the_twin(seed: u64, keys: u32) {
    println!("seed {seed}");
    for kind in ["last", "repeated"] {
        Case::<f32>::new(seed, &[(keys, kind)], (14, 2, 64), 0, &[]).check(kind);
    }
    let sequences = [(keys, "last"), (keys / 2, "last"), (17, "last")];
    Case::<half::bf16>::new(seed, &sequences, (3, 1, 16), 0, &[]).check("decode");
}

#[test]
fn few_rows_over_many_keys_equal_the_plain_twin() {
    decode_equals_the_twin(1, 2 * SPLIT_KEYS as u32 + 63);
}

#[test]
fn long_decode_equals_the_plain_twin() {
    decode_equals_the_twin(2, 8191);
    decode_equals_the_twin(3, 33_000);
}

#[test]
fn sums_and_a_first_slot_equal_the_plain_twin() {
    let ends = [0, 1, 64, 65, 200, 200, 333];
    for (seed, from) in [(1, 0), (2, 1), (3, 63), (4, 65), (5, 300)] {
        println!("seed {seed}");
        for kind in ["scattered", "last", "repeated"] {
            Case::<f32>::new(seed, &[(333, kind)], (6, 2, 32), from, &ends).check(kind);
            Case::<f32>::new(seed, &[(333, kind)], (6, 2, 32), from, &[]).check(kind);
        }
    }
}

#[test]
fn changing_a_future_key_changes_no_bit() {
    for (keys, kind) in [(300, "scattered"), (2000, "repeated"), (300, "full")] {
        let mut case = Case::<f32>::new(7, &[(keys, kind)], (14, 2, 64), 0, &[]);
        // Rows that end early, so that every one has a future.
        for last in &mut case.sequences[0].last {
            *last = last.saturating_sub(20);
        }
        let last = case.sequences[0].last.clone();
        for isa in Isa::available() {
            let before = case.run(isa).0;
            for seen in (0..last.len()).step_by(13) {
                let mut changed = Case {
                    keys: case.keys.clone(),
                    values: case.values.clone(),
                    ..Case::new(7, &[(keys, kind)], (14, 2, 64), 0, &[])
                };
                changed.sequences[0].last.clone_from(&last);
                for slot in last[seen] as usize + 1..keys as usize {
                    let row = changed.sequences[0].table[slot / BLOCK_KEYS] as usize * BLOCK_KEYS + slot % BLOCK_KEYS;
                    changed.keys[row * 128..(row + 1) * 128].fill(1e4);
                    changed.values[row * 128..(row + 1) * 128].fill(1e4);
                }
                let same = (seen + 1) * 14 * 64;
                assert_eq!(changed.run(isa).0[..same], before[..same], "{kind} {isa:?} row {seen}");
            }
        }
    }
}

#[test]
fn the_same_call_gives_the_same_bits() {
    let case = Case::<half::bf16>::new(11, &[(9000, "last"), (4000, "repeated")], (14, 2, 64), 0, &[]);
    for isa in Isa::available() {
        let first = case.run(isa).0;
        for _ in 0..5 {
            assert_eq!(case.run(isa).0, first, "{isa:?}");
        }
    }
}
