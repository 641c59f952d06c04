use super::*;
use crate::testing::{Random, numbers};

fn packed(matrix: &[f32], inner: usize) -> Vec<f32> {
    let mut to = vec![f32::NAN; (matrix.len() / inner).div_ceil(PANEL) * PANEL * inner];
    pack(matrix, inner, &mut to);
    to
}

fn call<'a>(rows: &'a [f32], panels: &'a [f32], inner: usize, width: usize, finish: Finish<'a, f32>) -> Call<'a, f32> {
    Call { rows, count: rows.len() / inner, stride: inner, inner, panels, width, finish }
}

#[test]
fn products_equal_the_definition_for_every_size_and_set() {
    let sizes = [(0, 5, 3), (1, 1, 1), (3, 97, 5), (8, 1500, 33), (15, 64, 130), (130, 33, 64), (120, 1030, 1060)];
    for (seed, (count, inner, outputs)) in sizes.into_iter().enumerate() {
        println!("seed {seed}");
        let mut random = Random(seed as u64);
        let (rows, matrix) = (numbers(&mut random, count * inner), numbers(&mut random, outputs * inner));
        let (bias, before) = (numbers(&mut random, outputs), numbers(&mut random, count * outputs));
        let panels = packed(&matrix, inner);
        for isa in Isa::available() {
            let run = |finish| {
                let mut to = vec![f32::NAN; count * outputs];
                product(isa, &call(&rows, &panels, inner, outputs, finish), &mut to);
                to
            };
            let (plain, biased, added) = (run(Finish::Bias(&[])), run(Finish::Bias(&bias)), run(Finish::Sum(&before)));
            for index in 0..count * outputs {
                let (row, output) = (index / outputs, index % outputs);
                // Every sum of a small product; of a large one, a part.
                if count * outputs > 10_000 && index % 97 != 0 {
                    continue;
                }
                let terms =
                    (0..inner).map(|at| f64::from(rows[row * inner + at]) * f64::from(matrix[output * inner + at]));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                let near = |found: f32, expected: f64| {
                    let error = (f64::from(found) - expected).abs();
                    assert!(error <= 2e-6 * (size + 1.0), "{isa:?} {index}: {found} for {expected}");
                };
                near(plain[index], sum);
                near(biased[index], sum + f64::from(bias[output]));
                near(added[index], sum + f64::from(before[index]));
            }
        }
    }
}

#[test]
fn pairs_are_gated() {
    let (count, inner, width) = (21, 40, 37);
    let mut random = Random(8);
    let rows = numbers(&mut random, count * inner);
    let (gate, up) = (numbers(&mut random, width * inner), numbers(&mut random, width * inner));
    let mut pairs = vec![f32::NAN; width.div_ceil(PAIRS) * PANEL * inner];
    pack_pairs(&gate, &up, inner, &mut pairs);
    for isa in Isa::available() {
        let mut found = vec![f32::NAN; count * width];
        product(isa, &call(&rows, &pairs, inner, width, Finish::Gated), &mut found);
        let plain = |matrix: &[f32]| {
            let mut to = vec![f32::NAN; count * width];
            product(isa, &call(&rows, &packed(matrix, inner), inner, width, Finish::Bias(&[])), &mut to);
            to
        };
        for ((found, gate), up) in found.iter().zip(plain(&gate)).zip(plain(&up)) {
            let expected = silu(gate) * up;
            assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{isa:?}: {found} for {expected}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_batch() {
    let (count, inner, outputs) = (260, 1201, 90);
    let mut random = Random(3);
    let (rows, matrix) = (numbers(&mut random, count * inner), numbers(&mut random, outputs * inner));
    let panels = packed(&matrix, inner);
    for isa in Isa::available() {
        let run = |rows: &[f32]| {
            let mut to = vec![0f32; rows.len() / inner * outputs];
            product(isa, &call(rows, &panels, inner, outputs, Finish::Bias(&[])), &mut to);
            to
        };
        let all = run(&rows);
        for (first, count) in [(0, 1), (259, 1), (7, 2), (30, 8), (100, 25), (3, 250)] {
            let part = run(&rows[first * inner..(first + count) * inner]);
            assert_eq!(part, all[first * outputs..(first + count) * outputs], "{isa:?} {first} {count}");
        }
    }
}

#[test]
fn rows_may_lie_apart() {
    let (inner, outputs) = (20, 40);
    let mut random = Random(4);
    let (wide, matrix) = (numbers(&mut random, 5 * 33), numbers(&mut random, outputs * inner));
    let panels = packed(&matrix, inner);
    let close: Vec<f32> = wide.chunks_exact(33).flat_map(|row| row[..inner].to_vec()).collect();
    let (mut one, mut other) = (vec![0f32; 5 * outputs], vec![0f32; 5 * outputs]);
    product(Isa::best(), &call(&close, &panels, inner, outputs, Finish::Bias(&[])), &mut one);
    let apart =
        Call { rows: &wide, count: 5, stride: 33, inner, panels: &panels, width: outputs, finish: Finish::Bias(&[]) };
    product(Isa::best(), &apart, &mut other);
    assert_eq!(one, other);
}

/// Numbers of bf16, and each two of them as an f32.
fn halves(random: &mut Random, count: usize) -> (Vec<half::bf16>, Vec<f32>) {
    let halves: Vec<half::bf16> = numbers(random, count).into_iter().map(half::bf16::from_f32).collect();
    let pairs = halves.chunks_exact(2).map(|pair| {
        let [first, second] = [pair[0], pair[1]].map(|half| u32::from(half.to_bits()));
        f32::from_bits(second << 16 | first)
    });
    (halves.clone(), pairs.collect())
}

#[test]
fn halves_equal_the_definition_and_have_the_same_bits_in_every_batch() {
    let sizes = [(1, 1, 1), (3, 49, 5), (8, 1600, 33), (15, 32, 130), (130, 17, 64), (120, 515, 70)];
    for (seed, (count, steps, outputs)) in sizes.into_iter().enumerate() {
        println!("seed {seed}");
        let mut random = Random(seed as u64);
        let (rows, row_pairs) = halves(&mut random, count * steps * 2);
        let (matrix, matrix_pairs) = halves(&mut random, outputs * steps * 2);
        let (bias, _) = halves(&mut random, outputs * 2);
        let panels = packed(&matrix_pairs, steps);
        for isa in Isa::available() {
            let run = |rows: &[f32]| {
                let finish = Finish::Bias(&bias[..outputs]);
                let (count, width) = (rows.len() / steps, outputs);
                let call = Call { rows, count, stride: steps, inner: steps, panels: &panels, width, finish };
                let mut to = vec![half::bf16::NAN; count * outputs];
                product(isa, &call, &mut to);
                to
            };
            let all = run(&row_pairs);
            for (index, found) in all.iter().enumerate() {
                let (row, output) = (index / outputs, index % outputs);
                let term = |at: usize| rows[row * steps * 2 + at].to_f64() * matrix[output * steps * 2 + at].to_f64();
                let terms = (0..steps * 2).map(term).chain([bias[output].to_f64()]);
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
                let error = (found.to_f64() - sum).abs();
                // The result's rounding, and that of the sums.
                assert!(error <= sum.abs() / 250.0 + 4e-6 * size, "{isa:?} {index}: {found} for {sum}");
            }
            for (first, rows) in [(0, 1), (count - 1, 1), (count / 2, count - count / 2)] {
                let part = run(&row_pairs[first * steps..(first + rows) * steps]);
                assert_eq!(part, all[first * outputs..(first + rows) * outputs], "{isa:?} {first} {rows}");
            }
        }
    }
}
