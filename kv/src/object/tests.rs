use proptest::prelude::*;

use super::*;
use crate::ModelDigest;

fn make(layers: u32, tokens: u32, encoding: Encoding, owner: &str) -> (ChunkKey, KvLayout, Vec<Vec<u8>>, Vec<u8>) {
    let head_dim = if encoding.quantized() { 8 } else { 3 };
    let layout = KvLayout { layers, kv_heads: 2, head_dim, encoding };
    let key = ChunkKey::new(ModelDigest::from_bytes([9; 32]), &[1], &[2, 3], owner);
    let data: Vec<Vec<u8>> = (0..layers)
        .map(|layer| {
            let seed = layer * 31 + tokens;
            (0..layout.layer_bytes(tokens) as u32).map(|i| ((i * 7 + seed) % 251) as u8).collect()
        })
        .collect();
    let object = write(&key, &layout, Variant::clean(encoding), tokens, "f32", &data).unwrap();
    (key, layout, data, object)
}

#[test]
fn the_metadata_alone_give_the_header() {
    for (layers, most) in [(2, 2 << 10), (24, 4 << 10), (48, 6 << 10), (90, 9 << 10)] {
        for encoding in [Encoding::Bf16, Encoding::Int8] {
            let (_, _, _, object) = make(layers, 5, encoding, "an \"owner\"");
            let whole = Header::parse(&object).unwrap();
            let (header, took) = Header::parse_start(&object).unwrap();
            assert_eq!(header, whole);
            assert!(took <= most, "{layers} layers take {took} bytes");
            assert_eq!(Header::parse_start(&object[..took]), Some((whole, took)));
            for short in [0, 7, 8, 30, took / 2, took - 1] {
                assert_eq!(Header::parse_start(&object[..short]), None, "{short} of {took}");
            }
            // Any bit of what is read, its length and seal included.
            for place in (0..took).step_by(7).chain(took - 70..took) {
                let mut damaged = object[..took].to_vec();
                damaged[place] ^= 1;
                assert_eq!(Header::parse_start(&damaged), None, "bit 0 of byte {place}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_is_written_is_read(
        layers in 1u32..70,
        tokens in 1u32..200,
        encoding in prop::sample::select(Encoding::ALL.to_vec()),
        owner in "\\PC{1,60}",
    ) {
        let (key, layout, data, object) = make(layers, tokens, encoding, &owner);
        let header = Header::parse(&object).unwrap();
        prop_assert_eq!(&header.key, &key);
        prop_assert_eq!(header.layout, layout);
        prop_assert_eq!(header.tokens, tokens);
        prop_assert_eq!(header.object_bytes(), object.len());
        header.check_id(key.id()).unwrap();
        for layer in 0..layers {
            let bytes = &object[header.layer_range(layer)];
            prop_assert_eq!(bytes, data[layer as usize].as_slice());
            header.verify_layer(layer, bytes).unwrap();
        }
        prop_assert_eq!(object, make(layers, tokens, encoding, &owner).3);
    }

    #[test]
    fn a_flipped_bit_is_seen(place in any::<prop::sample::Index>(), bit in 0u32..8, in_header in any::<bool>()) {
        let (key, layout, _, mut object) = make(3, 5, Encoding::Bf16, "default");
        let range = if in_header { 2000 } else { object.len() };
        object[place.index(range)] ^= 1 << bit;
        let refused = Header::parse(&object).and_then(|header| {
            header.check_id(key.id())?;
            (0..layout.layers).try_for_each(|layer| header.verify_layer(layer, &object[header.layer_range(layer)]))
        });
        prop_assert!(refused.is_err());
    }

    #[test]
    fn a_truncated_header_says_what_it_needs(length in 0usize..(32 << 10)) {
        let (.., object) = make(3, 5, Encoding::Bf16, "default");
        let refused = Header::parse(&object[..length]).unwrap_err();
        prop_assert_eq!(refused, Error::Truncated { got: length, need: 32 << 10 });
    }

    #[test]
    fn arbitrary_bytes_are_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200), framed in any::<bool>()) {
        if framed {
            let mut file = ((32u64 << 10) - 8).to_le_bytes().to_vec();
            file.append(&mut bytes);
            file.resize(32 << 10, b' ');
            bytes = file;
        }
        prop_assert!(Header::parse(&bytes).is_err());
    }
}

#[test]
fn the_safetensors_library_opens_an_object() {
    for (layers, tokens) in [(1, 5), (3, 130), (64, 5), (65, 5), (999, 1)] {
        for encoding in Encoding::ALL {
            let (_, layout, data, object) = make(layers, tokens, encoding, "söme \"owner\"");
            let file = safetensors::SafeTensors::deserialize(&object).unwrap();
            let (_, metadata) = safetensors::SafeTensors::read_metadata(&object).unwrap();
            assert_eq!(metadata.metadata().as_ref().unwrap()["owner"], "söme \"owner\"");
            assert_eq!(file.len(), layout.parts().len() * layers as usize);
            for (layer, bytes) in data.iter().enumerate() {
                for &part in layout.parts() {
                    let tensor = file.tensor(&format!("layers.{layer:03}.{}", part.name())).unwrap();
                    assert_eq!(tensor.shape()[0], part.rows(tokens) as usize);
                    assert_eq!(tensor.data(), &bytes[layout.part_range(part, tokens)]);
                }
            }
            let keys = file.tensor("layers.000.k").unwrap();
            let (dtype, dim) = match encoding {
                Encoding::F32 => (safetensors::Dtype::F32, 3),
                Encoding::Bf16 => (safetensors::Dtype::BF16, 3),
                Encoding::Int8 => (safetensors::Dtype::I8, 8),
                Encoding::Fp8 => (safetensors::Dtype::F8_E4M3, 8),
                Encoding::Int4 => (safetensors::Dtype::U8, 4),
            };
            assert_eq!((keys.dtype(), keys.shape()[2]), (dtype, dim), "{encoding}");
        }
    }
}

/// An object whose header says something else than its writer wrote.
fn with_header(change: impl Fn(String) -> String) -> Result<Header, Error> {
    let (.., object) = make(2, 5, Encoding::Bf16, "default");
    let json = change(std::str::from_utf8(&object[8..32 << 10]).unwrap().trim_end().to_owned());
    let mut bytes = ((32u64 << 10) - 8).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(32 << 10, b' ');
    Header::parse(&bytes)
}

#[test]
fn a_header_that_lies_is_refused() {
    assert!(with_header(|json| json).is_ok());
    let lies = [
        ("\"data_offsets\":[0,60]", "\"data_offsets\":[0,61]"),
        ("\"data_offsets\":[60,120]", "\"data_offsets\":[0,60]"),
        ("layers.001.v", "layers.001.w"),
        ("\"dtype\":\"BF16\"", "\"dtype\":\"F16\""),
        ("\"shape\":[5,2,3]", "\"shape\":[5,3,2]"),
        ("\"tokens\":\"5\"", "\"tokens\":\"6\""),
        ("\"tokens\":\"5\"", "\"tokens\":\"4294967295\""),
        ("\"tokens\":\"5\"", "\"tokens\":\"05\""),
        ("\"tokens\":\"5\"", "\"tokens\":5"),
        ("\"layers\":\"2\"", "\"layers\":\"4000000000\""),
        ("\"layers\":\"2\"", "\"layers\":\"1\""),
        ("bf16-clean-1", "int3-clean-1"),
        ("bf16-clean-1", "int4-clean-1"),
        ("bf16-clean-1", "f32-clean-1"),
        ("bf16-clean-1", "bf16-clean-2"),
        ("\"format_version\":\"1\"", "\"format_version\":\"2\""),
        ("\"owner\":\"default\"", "\"owner\":\"someone\""),
        ("\"compute_dtype\":\"f32\"", "\"compute_dtype\":\"f64\""),
        ("{\"__metadata__\"", "{\"extra\":1,\"__metadata__\""),
        ("{\"__metadata__\"", " {\"__metadata__\""),
    ];
    for (from, to) in lies {
        let refused = with_header(|json| {
            assert!(json.contains(from), "{from}");
            json.replacen(from, to, 1)
        });
        assert!(refused.is_err(), "{from} → {to}");
    }
}

#[test]
fn a_header_of_100_mb_is_not_even_asked_for() {
    for length in [0, 1, 100_000_000, (32 << 10) - 7, u64::MAX, u64::MAX - 7] {
        let refused = Header::parse(&[length.to_le_bytes().as_slice(), b"{}"].concat()).unwrap_err();
        assert!(matches!(refused, Error::Foreign { .. }), "{length}: {refused}");
    }
    let deep = format!("{{\"__metadata__\":{}", "[".repeat(30_000));
    assert!(with_header(|_| deep.clone()).is_err());
}

#[test]
fn the_writer_refuses_what_does_not_fit() {
    let (key, layout, data, _) = make(2, 5, Encoding::Bf16, "default");
    let variant = Variant::clean(Encoding::Bf16);
    let refused = |layout: KvLayout, variant, tokens, layers: &[Vec<u8>]| {
        write(&key, &layout, variant, tokens, "f32", layers).unwrap_err()
    };
    refused(layout, variant, 4, &data);
    refused(layout, variant, 5, &data[..1]);
    refused(layout, variant, 0, &[vec![], vec![]]);
    refused(layout, Variant::clean(Encoding::F32), 5, &data);
    refused(KvLayout { layers: 0, ..layout }, variant, 5, &[]);
    let nobody = ChunkKey { owner: String::new(), ..key.clone() };
    assert!(write(&nobody, &layout, variant, 5, "f32", &data).is_err());
}
