use super::*;
use crate::testing::{Random, numbers};

/// Sequences of the test: slots in the cache, rows, and the slots that are asked about.
type Asked<'a> = &'a [(usize, usize, Range<usize>)];

/// Every key's weight from scores and a log-sum-exp in double precision; the caches lie in blocks, in reverse.
fn check<Q: Number, T: Number>(seed: u64, asked: Asked<'_>, (heads, kv_heads, dim): (usize, usize, usize)) {
    println!("seed {seed}");
    let mut random = Random(seed);
    let block = crate::BLOCK as usize;
    let group = heads / kv_heads;
    let mut of = |count: usize| numbers(&mut random, count);
    let caches: Vec<(Vec<T>, Vec<u32>)> = asked
        .iter()
        .map(|(keys, ..)| {
            let blocks = keys.div_ceil(block);
            let pool = of(blocks * block * kv_heads * dim).into_iter().map(T::from_f32).collect();
            (pool, (0..blocks as u32).rev().collect())
        })
        .collect();
    let rows: usize = asked.iter().map(|(_, rows, _)| rows).sum();
    let query: Vec<Q> = of(rows * heads * dim).into_iter().map(Q::from_f32).collect();
    let mut all = query.chunks_exact(dim);
    // By sequence, row and head, the weights of the slots that are asked about.
    let (mut sums, mut weights) = (Vec::new(), Vec::new());
    for ((keys, rows, slots), (pool, table)) in asked.iter().zip(&caches) {
        let mut of_sequence = Vec::new();
        for at in 0..rows * heads {
            let query = all.next().unwrap();
            let score = |slot: usize| -> f64 {
                let row = table[slot / block] as usize * block + slot % block;
                let key = &pool[(row * kv_heads + at % heads / group) * dim..][..dim];
                let dot: f64 = query.iter().zip(key).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum();
                dot / (dim as f64).sqrt()
            };
            let total: f64 = (0..*keys).map(|slot| score(slot).exp()).sum();
            sums.push(total.ln() as f32);
            of_sequence.push(slots.clone().map(|slot| score(slot).exp() / total).collect::<Vec<f64>>());
        }
        weights.push(of_sequence);
    }
    let sequences: Vec<Rows<'_, T>> = asked
        .iter()
        .zip(&caches)
        .map(|((_, rows, slots), (keys, table))| Rows { keys, table: Some(table), rows: *rows, slots: slots.clone() })
        .collect();
    for isa in Isa::available() {
        for greatest in [false, true] {
            let call = Call {
                query: &query,
                stride: heads * dim,
                sequences: &sequences,
                heads,
                kv_heads,
                head_dim: dim,
                scale: 1.0 / (dim as f32).sqrt(),
                sums: &sums,
                greatest,
            };
            let mut found = vec![f32::NAN; asked.iter().map(|(.., slots)| slots.len()).sum()];
            masses(isa, &call, &mut found);
            let mut found = found.into_iter();
            for (weights, (_, rows, slots)) in weights.iter().zip(asked) {
                for slot in 0..slots.len() {
                    let by_head = weights.iter().map(|weights| weights[slot]);
                    let expected = match greatest {
                        true => by_head.fold(0.0, f64::max),
                        false => by_head.sum::<f64>() / (rows * heads) as f64,
                    };
                    let got = f64::from(found.next().unwrap());
                    assert!(
                        (got - expected).abs() < 1e-5 * expected + 1e-9,
                        "{isa:?} slot {slot}: {got}, not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn weights_equal_the_plain_twin_for_odd_sizes() {
    check::<f32, f32>(1, &[(1, 1, 0..1)], (2, 1, 16));
    check::<f32, f32>(2, &[(97, 5, 3..90), (70, 3, 0..70), (130, 1, 64..65)], (6, 3, 18));
    check::<half::bf16, half::bf16>(3, &[(130, 4, 60..130), (65, 2, 64..64)], (5, 5, 20));
    check::<f32, half::bf16>(4, &[(66, 9, 1..66)], (14, 2, 64));
}

#[test]
fn long_runs_equal_the_plain_twin() {
    check::<f32, f32>(5, &[(1025, 32, 30..1001), (318, 32, 30..286)], (9, 3, 64));
}

#[test]
fn nobody_asks() {
    check::<f32, f32>(6, &[], (2, 1, 16));
}
