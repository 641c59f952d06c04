//! Attention weights by key: what rows look at, without a matrix of weights.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::{Sequence, Shape, shape};
use crate::cpu::masses::{Call, Rows, masses};
use crate::cpu::number::Number;
use crate::{Error, Isa, argument, data};

const OP: &str = "key_masses";

/// How the rows and heads of a key become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The mean weight.
    Mean,
    /// The greatest weight.
    Max,
}

/// The weights of some keys, reduced over rows and heads: exp(query · key / √head_dim − log-sum-exp). On the CPU.
///
/// - `query`, `sequences`: as [`super::attend`] takes them; a sequence's values are not looked at.
/// - `slots`: of each sequence, the keys that are asked about; every row of it must see them.
/// - `sums`: `[rows, heads]` or `[rows, heads, 1]`, f32, contiguous: each row's log-sum-exp, as [`super::attend`] gives it.
///
/// Returns one number a slot, of the first sequence, then of the next. Equal calls give equal bits, whatever the number of
/// threads. Fails on shapes, types and devices that do not fit, on a sequence without rows that is asked about, and on
/// slots that a row does not see.
pub fn key_masses(
    query: &Tensor,
    sequences: &[Sequence<'_>],
    slots: &[Range<u32>],
    sums: &Tensor,
    reduce: Reduce,
) -> Result<Vec<f32>, Error> {
    let keys = sequences.first().map(|sequence| sequence.keys.kind());
    match (query.kind(), keys) {
        (Kind::BFloat16, Some(Kind::BFloat16)) => {
            of_kinds::<half::bf16, half::bf16>(query, sequences, slots, sums, reduce)
        }
        (Kind::BFloat16, _) => of_kinds::<half::bf16, f32>(query, sequences, slots, sums, reduce),
        (_, Some(Kind::BFloat16)) => of_kinds::<f32, half::bf16>(query, sequences, slots, sums, reduce),
        _ => of_kinds::<f32, f32>(query, sequences, slots, sums, reduce),
    }
}

fn of_kinds<Q, T>(
    query: &Tensor,
    sequences: &[Sequence<'_>],
    slots: &[Range<u32>],
    sums: &Tensor,
    reduce: Reduce,
) -> Result<Vec<f32>, Error>
where
    Q: Number + data::Element,
    T: Number + data::Element,
{
    if sequences.len() != slots.len() {
        return Err(argument(OP, format!("{} ranges of slots for {} sequences", slots.len(), sequences.len())));
    }
    for (sequence, slots) in sequences.iter().zip(slots) {
        let seen = sequence.last.first().map_or(0, |last| last.saturating_add(1));
        if slots.start > slots.end || slots.end > seen {
            return Err(argument(OP, format!("slots {slots:?}, of which a row sees those before {seen}")));
        }
    }
    let Shape { rows, heads, kv_heads, head_dim } = shape(OP, query, sequences, 0)?;
    if sums.numel() as i64 != rows * heads {
        return Err(argument(OP, format!("query {:?} and sums {:?} do not fit", query.size(), sums.size())));
    }
    let (numbers, stride) = data::rows::<Q>(OP, query)?;
    let with_rows = sequences.iter().zip(slots).filter(|(sequence, _)| !sequence.last.is_empty());
    let checked = with_rows.map(|(sequence, slots)| -> Result<_, Error> {
        Ok(Rows {
            keys: data::numbers::<T>(OP, sequence.keys)?,
            table: sequence.table,
            rows: sequence.last.len(),
            slots: slots.start as usize..slots.end as usize,
        })
    });
    let checked = checked.collect::<Result<Vec<_>, _>>()?;
    let call = Call {
        query: numbers,
        stride,
        sequences: &checked,
        heads: heads as usize,
        kv_heads,
        head_dim: head_dim as usize,
        scale: 1.0 / (head_dim as f32).sqrt(),
        sums: data::numbers::<f32>(OP, sums)?,
        greatest: reduce == Reduce::Max,
    };
    let mut found = vec![0.0; checked.iter().map(|rows| rows.slots.len()).sum()];
    masses(Isa::best(), &call, &mut found);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::super::{View, attend};
    use super::*;

    fn random(shape: &[i64], seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn(shape, (Kind::Float, Device::Cpu))
    }

    #[test]
    fn weights_of_all_keys_are_a_distribution() {
        let lasts: [&[u32]; 2] = [&[69, 69, 69], &[99, 99]];
        let query = random(&[5, 9, 64], 1).narrow(1, 0, 6);
        let caches = [random(&[70, 2, 64], 2), random(&[100, 2, 64], 3)];
        let sequences: Vec<Sequence<'_>> =
            caches.iter().zip(lasts).map(|(keys, last)| Sequence { keys, values: keys, table: None, last }).collect();
        let (_, sums) = attend(&query, &sequences, View { ends: &[100], ..View::default() }).unwrap();
        let found = key_masses(&query, &sequences, &[0..70, 0..100], &sums, Reduce::Mean).unwrap();
        for of_sequence in [&found[..70], &found[70..]] {
            let total: f32 = of_sequence.iter().sum();
            assert!((total - 1.0).abs() < 1e-5, "{total}");
        }
        let some = key_masses(&query, &sequences, &[60..65, 0..0], &sums, Reduce::Mean).unwrap();
        assert_eq!(some, found[60..65]);
        let greatest = key_masses(&query, &sequences, &[0..70, 0..100], &sums, Reduce::Max).unwrap();
        assert!(greatest.iter().zip(&found).all(|(greatest, mean)| greatest >= mean && *greatest <= 1.0 + 1e-5));
    }

    #[test]
    fn arguments_that_do_not_fit_are_refused() {
        let (query, keys) = (random(&[2, 4, 8], 1), random(&[5, 2, 8], 2));
        let sums = random(&[2, 4], 3);
        let refuse = |query: &Tensor, last: &[u32], slots: Option<Range<u32>>, sums: &Tensor, what: &str| {
            let sequence = Sequence { keys: &keys, values: &keys, table: None, last };
            let error = key_masses(query, &[sequence], slots.as_slice(), sums, Reduce::Mean).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        refuse(&query, &[3, 4], Some(0..5), &sums, "slots 0..5, of which a row sees those before 4");
        refuse(&query, &[], Some(0..1), &sums, "those before 0");
        refuse(&query, &[4, 4], Some(0..5), &sums.narrow(0, 0, 1), "sums [1, 4]");
        refuse(&query, &[4, 4], None, &sums, "0 ranges");
        refuse(&query, &[4], Some(0..5), &sums, "for 1 last slots");
        refuse(&query, &[4, 5], Some(0..5), &sums, "beyond the capacity");
        refuse(&query, &[4, 4], Some(0..5), &sums.to_kind(Kind::Double), "Float");
        refuse(&query.narrow(0, 0, 1).squeeze(), &[4], Some(0..5), &sums, "not [rows");
    }
}
