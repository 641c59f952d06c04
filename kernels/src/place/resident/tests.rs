use super::*;
use crate::place::place;
use crate::place::tests::{Chunk, ENCODINGS};
use crate::rope::RopeTable;
use crate::testing::Random;

const CPU: (Kind, Device) = (Kind::Uint8, Device::Cpu);

#[test]
fn resident_rows_are_placed_bit_by_bit_as_those_of_the_host() {
    for (seed, (tokens, kv_heads, head_dim)) in [(1, 1, 2), (97, 2, 64), (130, 3, 18)].into_iter().enumerate() {
        let shape = Shape { tokens, kv_heads, head_dim };
        let mut random = Random(seed as u64);
        let frequencies: Vec<f64> = (0..head_dim / 2).map(|pair| 0.5f64.powi(pair as i32)).collect();
        for (encoding, kind) in ENCODINGS.into_iter().flat_map(|one| [(one, Kind::Float), (one, Kind::BFloat16)]) {
            println!("seed {seed} {encoding:?} {shape:?} {kind:?}");
            let (kept, sent) = (Chunk::new(&mut random, encoding, shape), Chunk::new(&mut random, encoding, shape));
            let layer = Resident::new(&kept.rows(0..tokens), kv_heads, head_dim, Device::Cpu).unwrap();
            assert_eq!(layer.memory.numel(), Resident::bytes(encoding, shape));
            // From the first row on, from a middle one, some in between, the last alone, and none.
            for rows in [0..tokens, tokens / 2..tokens, tokens / 3..tokens / 2, tokens - 1..tokens, tokens..tokens] {
                let slots: Vec<u32> = (0..(rows.len() + tokens) as u32).map(|row| 2 * row + 1).collect();
                let last = slots.last().unwrap() + 1;
                let rotation = RopeTable::new(&frequencies, last).unwrap().at(&slots).unwrap();
                let placed = |first: Piece<'_>| {
                    let size = [i64::from(last), kv_heads as i64, head_dim as i64];
                    let memory = || Tensor::full(size, -77.0, (kind, Device::Cpu));
                    let (mut keys, mut values) = (memory(), memory());
                    let pieces = [first, sent.rows(0..tokens).into()];
                    place(&mut keys, &mut values, &slots, None, &pieces, &rotation).unwrap();
                    (keys, values)
                };
                let expected = placed(kept.rows(rows.clone()).into());
                let found = placed(Piece::Resident { layer: &layer.clone(), rows: rows.clone() });
                assert!(expected.0.equal(&found.0) && expected.1.equal(&found.1), "rows {rows:?}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_values() {
    let shape = Shape { tokens: 70, kv_heads: 2, head_dim: 4 };
    for encoding in ENCODINGS {
        let chunk = Chunk::new(&mut Random(1), encoding, shape);
        let bytes = Resident::bytes(encoding, shape) as i64;
        let of = |memory: Tensor| Resident::of(encoding, shape, memory).map(drop).map_err(|error| error.to_string());
        assert_eq!(of(Tensor::zeros([bytes], CPU)), Ok(()));
        for memory in [
            Tensor::zeros([bytes - 1], CPU),
            Tensor::zeros([bytes], (Kind::Int8, Device::Cpu)),
            Tensor::zeros([bytes + 8], CPU).narrow(0, 8, bytes),
            Tensor::zeros([2 * bytes], CPU).slice(0, 0, 2 * bytes, 2),
        ] {
            let error = of(memory).unwrap_err();
            assert!(error.contains(&format!("is not {bytes} contiguous u8")), "{error}");
        }
        let new = |stored: Stored<'_>, head_dim| Resident::new(&stored, 2, head_dim, Device::Cpu);
        assert!(new(chunk.rows(0..69), 4).unwrap_err().to_string().contains("not the whole layer"));
        assert!(new(chunk.rows(0..70), 6).unwrap_err().to_string().contains("expected"));
        let short = Stored { values: &chunk.rows(0..70).values[1..], ..chunk.rows(0..70) };
        assert!(new(short, 4).is_err());
        let layer = new(chunk.rows(0..70), 4).unwrap();
        let check = |rows: Range<usize>, heads, device| {
            let checked = Piece::Resident { layer: &layer, rows }.check(heads, 4, device);
            checked.map_err(|error| error.to_string())
        };
        assert_eq!(check(3..70, 2, Device::Cpu), Ok(()));
        for (checked, what) in [
            (check(3..71, 2, Device::Cpu), "3..71"),
            (check(Range { start: 4, end: 3 }, 2, Device::Cpu), "4..3"),
            (check(0..70, 3, Device::Cpu), "[70, 2, 4]"),
            (check(0..70, 2, Device::Cuda(1)), "Cuda(1)"),
        ] {
            let error = checked.unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }
}

#[test]
fn a_size_that_no_memory_has_saturates() {
    let shape = Shape { tokens: usize::MAX, kv_heads: 2, head_dim: 4 };
    assert_eq!(Resident::bytes(Encoding::F32, shape), usize::MAX);
}
