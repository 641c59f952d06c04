use proptest::prelude::*;
use proptest::sample::subsequence;

use super::*;
use crate::Encoding;

fn id(byte: u8) -> ChunkId {
    ChunkId::from_bytes([byte; 32])
}

fn ids(bytes: &[u8]) -> Vec<ChunkId> {
    bytes.iter().copied().map(id).collect()
}

/// A capture behind `prefix`, whose masses are all the same unless a test changes them.
fn capture(prefix: &[u8], tokens: u32) -> Capture {
    let prefix = ids(prefix);
    Capture {
        variant: Variant::context(Encoding::Bf16, &prefix),
        inter: vec![0.5; prefix.len()],
        prefix_tokens: vec![10; prefix.len()],
        intra: 2.0,
        external: vec![0.25; tokens as usize],
        uses: 1.25,
        created_ms: 1_700_000_000_000,
        prefix,
        ..Capture::clean(id(255), Variant::clean(Encoding::Bf16), tokens)
    }
}

/// Captures of chunk 255 behind up to 8 of the chunks 0..12, repeats among them, with any masses.
fn captures() -> impl Strategy<Value = Capture> {
    let mass = || prop_oneof![3 => 0.0f32..40.0, 1 => Just(0.0), 1 => 0.0f32..1e-6];
    (prop::collection::vec(0u8..12, 0..8), 1u32..50).prop_flat_map(move |(prefix, tokens)| {
        let places = prefix.len();
        (
            Just(capture(&prefix, tokens)),
            prop::collection::vec(mass(), places),
            prop::collection::vec(1u32..2000, places),
            mass(),
            prop::collection::vec(mass(), tokens as usize),
        )
            .prop_map(|(capture, inter, prefix_tokens, intra, external)| Capture {
                inter,
                prefix_tokens,
                intra,
                external,
                ..capture
            })
    })
}

fn prefixes() -> impl Strategy<Value = Vec<ChunkId>> {
    prop::collection::vec(0u8..14, 0..10).prop_map(|bytes| ids(&bytes))
}

proptest! {
    #[test]
    fn a_capture_survives_its_record(capture in captures()) {
        prop_assert_eq!(Capture::from_json(&capture.to_json().unwrap()).unwrap(), capture);
    }

    #[test]
    fn every_number_stays_in_its_range(capture in captures(), new in prefixes(), alpha in 0.0f64..4.0) {
        prop_assert!((0.5..1.0).contains(&capture.cci()), "cci {}", capture.cci());
        prop_assert!((0.0..=1.0).contains(&capture.beta(&new)), "beta {}", capture.beta(&new));
        prop_assert!((0.0..=1.0).contains(&capture.gamma(&new)), "gamma {}", capture.gamma(&new));
        prop_assert!((0.0..=1.0).contains(&capture.cfo(alpha, &new)), "cfo {}", capture.cfo(alpha, &new));
    }

    #[test]
    fn an_unchanged_prefix_costs_nothing(capture in captures(), alpha in 0.0f64..4.0) {
        let cfo = capture.cfo(alpha, &capture.prefix.clone());
        prop_assert_eq!(cfo, 0.0);
        prop_assert!(capture.rows(cfo).is_empty());
    }

    #[test]
    fn chunks_added_behind_the_old_prefix_do_not_matter(capture in captures(), more in prefixes()) {
        prop_assume!(!capture.prefix.is_empty());
        prop_assert_eq!(capture.cfo(1.0, &[capture.prefix.clone(), more].concat()), 0.0);
    }

    #[test]
    fn a_disjoint_prefix_costs_alpha_times_cci(capture in captures(), new in 20u8..30, alpha in 0.0f64..4.0) {
        prop_assert_eq!(capture.cfo(alpha, &ids(&[new, new + 1])), (alpha * capture.cci()).clamp(0.0, 1.0));
    }

    #[test]
    fn a_greater_alpha_never_costs_less(capture in captures(), new in prefixes(), low in 0.0f64..4.0, more in 0.0f64..4.0) {
        prop_assert!(capture.cfo(low, &new) <= capture.cfo(low + more, &new));
    }

    #[test]
    fn another_order_costs_more(
        (prefix, shuffled) in subsequence((0u8..12).collect::<Vec<_>>(), 2..10)
            .prop_flat_map(|prefix| (Just(prefix.clone()), Just(prefix).prop_shuffle())),
    ) {
        let capture = capture(&prefix, 7);
        let (same, other) = (capture.cfo(0.8, &ids(&prefix)), capture.cfo(0.8, &ids(&shuffled)));
        prop_assert_eq!(prefix == shuffled, other == same, "{} and {}", same, other);
        prop_assert!(other >= same);
        prop_assert!(capture.cfo(0.8, &ids(&prefix.iter().rev().copied().collect::<Vec<_>>())) >= other);
    }

    #[test]
    fn dropping_a_chunk_costs_more(prefix in subsequence((0u8..12).collect::<Vec<_>>(), 1..10), at in any::<prop::sample::Index>()) {
        let capture = capture(&prefix, 7);
        let mut fewer = prefix.clone();
        fewer.remove(at.index(prefix.len()));
        let expected = if fewer.is_empty() { 0.0 } else { fewer.len() as f64 / prefix.len() as f64 };
        prop_assert!((capture.beta(&ids(&fewer)) - expected).abs() < 1e-12);
        prop_assert!(capture.cfo(0.8, &ids(&fewer)) > 0.0);
    }

    #[test]
    fn gamma_is_the_naive_count_of_discordant_pairs(old in prop::collection::vec(0u8..12, 0..16), new in prop::collection::vec(0u8..12, 0..16)) {
        let place = |list: &[u8], byte: u8| list.iter().position(|&other| other == byte);
        let common: Vec<u8> = (0..12).filter(|&byte| old.contains(&byte) && new.contains(&byte)).collect();
        let (mut pairs, mut discordant) = (0, 0);
        for (index, &one) in common.iter().enumerate() {
            for &other in &common[..index] {
                pairs += 1;
                discordant += u32::from((place(&old, one) < place(&old, other)) != (place(&new, one) < place(&new, other)));
            }
        }
        let expected = if pairs == 0 { 0.0 } else { f64::from(discordant) / f64::from(pairs) };
        prop_assert_eq!(capture(&old, 3).gamma(&ids(&new)), expected);
    }

    #[test]
    fn rows_are_as_many_as_asked_ascending_and_the_heaviest(capture in captures(), cfo in prop_oneof![0.0f64..=1.0, Just(0.0), Just(1.0)]) {
        let rows = capture.rows(cfo);
        prop_assert_eq!(rows.len(), (cfo * f64::from(capture.tokens)).ceil() as usize);
        prop_assert!(rows.is_sorted_by(|one, other| one < other));
        prop_assert!(rows.iter().all(|&row| row < capture.tokens));
        let mass = |row: u32| capture.external[row as usize];
        for out in (0..capture.tokens).filter(|row| !rows.contains(row)) {
            for &row in &rows {
                prop_assert!(mass(row) > mass(out) || (mass(row) == mass(out) && row < out), "{row} and {out}");
            }
        }
    }

    #[test]
    fn the_choice_costs_least_and_is_the_first_of_equals(variants in prop::collection::vec(captures(), 1..6), new in prefixes()) {
        let (index, cfo) = choose(&variants, 1.0, &new).unwrap();
        prop_assert_eq!(variants[index].cfo(1.0, &new), cfo);
        prop_assert!(variants[..index].iter().all(|variant| variant.cfo(1.0, &new) > cfo));
        prop_assert!(variants.iter().all(|variant| variant.cfo(1.0, &new) >= cfo));
    }
}

#[test]
fn the_formulas_give_a_hand_worked_example() {
    // Two chunks of 4 and 5 tokens before one of 10: a = 2/40 + 1/50 = 0.07, b = 7/100, so CCI = 1/(1+e^-1).
    let capture = Capture {
        inter: vec![2.0, 1.0],
        prefix_tokens: vec![4, 5],
        intra: 7.0,
        external: vec![0.1, 0.9, 0.3, 0.9, 0.0, 0.2, 0.9, 0.1, 0.4, 0.5],
        ..capture(&[1, 2], 10)
    };
    let cci = 1.0 / (1.0 + (-1.0f64).exp());
    assert!((capture.cci() - cci).abs() < 1e-9);
    assert!((capture.beta(&ids(&[3, 1])) - 2.0 / 3.0).abs() < 1e-9);
    assert!((capture.cfo(1.0, &ids(&[3, 1])) - cci / 3.0).abs() < 1e-9);
    // Both are there, in the other order: gamma 1 takes all of beta away.
    assert_eq!((capture.beta(&ids(&[2, 1])), capture.gamma(&ids(&[2, 1]))), (1.0, 1.0));
    assert!((capture.cfo(1.0, &ids(&[2, 1])) - cci).abs() < 1e-9);
    // ceil(0.2437 × 10) = 3, and the three tokens of mass 0.9.
    assert_eq!(capture.rows(capture.cfo(1.0, &ids(&[3, 1]))), [1, 3, 6]);
    assert_eq!(capture.rows(0.11), [1, 3]);
    assert_eq!(capture.rows(0.4), [1, 3, 6, 9]);
}

#[test]
fn an_isolated_chunk_is_repaired_unless_it_stands_alone_again() {
    let clean = Capture::clean(id(1), Variant::clean(Encoding::Bf16), 9);
    assert_eq!(clean.cfo(1.0, &[]), 0.0);
    assert_eq!(clean.cfo(1.0, &ids(&[2])), 0.5);
    assert_eq!(clean.beta(&ids(&[2])), 0.0);
    assert_eq!(clean.rows(0.5), [0, 1, 2, 3, 4]);
    assert_eq!(Capture::from_json(&clean.to_json().unwrap()).unwrap(), clean);
}

#[test]
fn a_capture_moved_to_the_front_is_repaired() {
    assert_eq!(capture(&[1, 2], 9).beta(&[]), 0.0);
}

#[test]
fn repeats_count_once_at_their_first_place() {
    let capture = Capture { inter: vec![3.0, 1.0, 100.0], ..capture(&[1, 2, 1], 5) };
    assert_eq!(capture.beta(&ids(&[1])), 0.75);
    assert_eq!(capture.gamma(&ids(&[1, 2, 1])), 0.0);
    assert_eq!(capture.gamma(&ids(&[2, 1, 2])), 1.0);
}

#[test]
fn without_mass_on_the_prefix_only_all_of_it_is_an_overlap() {
    let capture = Capture { inter: vec![0.0, 0.0], ..capture(&[1, 2], 5) };
    assert_eq!(capture.cci(), 0.5);
    assert_eq!(capture.beta(&ids(&[3, 1, 2])), 1.0);
    assert_eq!(capture.beta(&ids(&[1])), 0.0);
}

#[test]
fn the_cci_stays_open_without_mass_on_the_chunk_itself() {
    let capture = Capture { intra: 0.0, ..capture(&[1], 5) };
    assert!(capture.cci() < 1.0);
}

#[test]
fn no_variant_is_no_choice_and_a_capture_in_place_beats_the_clean_one() {
    assert_eq!(choose(&[], 1.0, &ids(&[1])), None);
    let variants = [Capture::clean(id(255), Variant::clean(Encoding::Bf16), 5), capture(&[1], 5)];
    assert_eq!(choose(&variants, 1.0, &ids(&[1])), Some((1, 0.0)));
    assert_eq!(choose(&variants, 1.0, &[]), Some((0, 0.0)));
}

#[test]
fn a_record_lies_below_its_chunk() {
    let capture = capture(&[1], 5);
    assert_eq!(capture.key(), format!("craft/{}/{}", capture.chunk, capture.variant));
    assert!(capture.key().starts_with(&Capture::folder(capture.chunk)));
}

#[test]
fn a_damaged_record_names_its_field() {
    let good = capture(&[1, 2], 3);
    let damages: [(&str, &str, serde_json::Value); 15] = [
        ("format", "format", 2.into()),
        ("chunk", "chunk", "xyz".into()),
        ("variant", "variant", "bf16-clean-1".into()),
        ("variant", "variant", "bf16-ctx-1".into()),
        ("tokens", "tokens", 0.into()),
        ("tokens", "external", 4.into()),
        ("prefix", "variant", serde_json::json!([id(2), id(1)])),
        ("inter", "inter", serde_json::json!([1.0])),
        ("inter", "inter[1]", serde_json::json!([1.0, -0.5])),
        ("inter", "inter[0]", serde_json::json!([1e39, 0.5])),
        ("prefix_tokens", "prefix_tokens[1]", serde_json::json!([1, 0])),
        ("intra", "intra", "much".into()),
        ("external", "external[2]", serde_json::json!([0.1, 0.1, null])),
        ("external", "external", serde_json::json!([])),
        ("uses", "uses", (-1).into()),
    ];
    for (place, named, value) in damages {
        let mut record: serde_json::Value = serde_json::from_slice(&good.to_json().unwrap()).unwrap();
        record[place] = value;
        let error = Capture::from_json(record.to_string().as_bytes()).unwrap_err();
        assert!(matches!(&error, Error::Capture { field, .. } if field == named), "{place} → {named}: {error}");
    }
    for (name, _) in serde_json::to_value(&good).unwrap().as_object().unwrap() {
        let mut record = serde_json::to_value(&good).unwrap();
        record.as_object_mut().unwrap().remove(name);
        let error = Capture::from_json(record.to_string().as_bytes()).unwrap_err();
        assert!(error.to_string().contains(name.as_str()), "{name}: {error}");
    }
    let longer = [good.to_json().unwrap(), b"x".to_vec()].concat();
    for bytes in [&b""[..], b"[]", &good.to_json().unwrap()[1..], &longer] {
        let error = Capture::from_json(bytes).unwrap_err();
        assert!(matches!(&error, Error::Capture { field, .. } if field == "record"), "{error}");
    }
    assert!(Capture { intra: f32::NAN, ..good }.to_json().is_err());
}
