//! The object parser on bytes from nowhere and on objects with something changed: it refuses, or accepts just what the writer
//! makes. Two seconds by default; `KVSPLICE_FUZZ_SECONDS=60` for a minute (`make fuzz`).

use std::time::{Duration, Instant};

use kvsplice_kv::object::{self, FIRST_READ_BYTES, Header, MAX_HEADER_BYTES};
use kvsplice_kv::{ChunkKey, Encoding, KvLayout, ModelDigest, Variant};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use tonic::Code;

use crate::support::{Server, VARIANT, chunk};

fn time() -> Duration {
    let seconds = std::env::var("KVSPLICE_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(2);
    Duration::from_secs(seconds)
}

fn valid(layers: u32, tokens: u32) -> Vec<u8> {
    let layout = KvLayout { layers, kv_heads: 2, head_dim: 4, encoding: Encoding::Bf16 };
    let key = ChunkKey::new(ModelDigest::from_bytes([3; 32]), &[1], &[layers, tokens], "default");
    let data: Vec<Vec<u8>> = (0..layers).map(|layer| vec![layer as u8; layout.layer_bytes(tokens)]).collect();
    object::write(&key, &layout, VARIANT, tokens, "f32", &data).unwrap()
}

/// What may be done to an object.
#[derive(Clone, Debug)]
enum Change {
    Byte(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index, usize),
    Length(u64),
    /// One text of the header for another of any length.
    Text(&'static str, String),
}

fn change() -> impl Strategy<Value = Change> {
    let place = any::<prop::sample::Index>;
    let texts = prop::sample::select(vec![
        ("\"tokens\":\"5\"", "\"tokens\":\"16777216\""),
        ("\"tokens\":\"5\"", "\"tokens\":\"99999999999999999999\""),
        ("\"layers\":\"3\"", "\"layers\":\"999\""),
        ("\"layers\":\"3\"", "\"layers\":\"0\""),
        ("\"head_dim\":\"4\"", "\"head_dim\":\"1024\""),
        ("\"kv_heads\":\"2\"", "\"kv_heads\":\"4294967295\""),
        ("bf16-clean-1", "f32-clean-1"),
        ("bf16-clean-1", "int3-clean-1"),
        ("bf16-clean-1", "bf16-clean-99999999999"),
        ("\"format_version\":\"1\"", "\"format_version\":\"2\""),
        // Offsets that overlap, end before they begin, and lie outside.
        ("\"data_offsets\":[0,80]", "\"data_offsets\":[0,160]"),
        ("\"data_offsets\":[80,160]", "\"data_offsets\":[160,80]"),
        ("\"data_offsets\":[80,160]", "\"data_offsets\":[80,18446744073709551615]"),
        ("\"shape\":[5,2,4]", "\"shape\":[5,2,4,1]"),
        ("\"default\"", "\"\\u0000\""),
        ("__metadata__", "__metadatA__"),
        ("\"chunk_id\":", "\"chunk_id\":[[[[[[[["),
    ]);
    prop_oneof![
        4 => (place(), any::<u8>()).prop_map(|(place, byte)| Change::Byte(place, byte)),
        1 => place().prop_map(Change::Cut),
        2 => (place(), prop::collection::vec(any::<u8>(), 1..40)).prop_map(|(place, bytes)| Change::Insert(place, bytes)),
        2 => (place(), 1usize..40).prop_map(|(place, count)| Change::Remove(place, count)),
        1 => any::<u64>().prop_map(Change::Length),
        1 => (0u64..20).prop_map(|pages| Change::Length((pages << 15).wrapping_sub(8))),
        4 => texts.prop_map(|(from, to)| Change::Text(from, to.to_owned())),
        1 => "[\\[{\",:0-9]{0,60}".prop_map(|junk| Change::Text("\"model\":", junk)),
    ]
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    let header = bytes.len().min(2500);
    if header == 0 {
        return;
    }
    match change {
        Change::Byte(place, byte) => {
            let place = place.index(header);
            bytes[place] = *byte;
        }
        Change::Cut(place) => bytes.truncate(place.index(bytes.len())),
        Change::Insert(place, new) => {
            let place = place.index(header);
            bytes.splice(place..place, new.iter().copied());
        }
        Change::Remove(place, count) => {
            let place = place.index(header);
            bytes.drain(place..(place + count).min(header));
        }
        Change::Length(length) => bytes.splice(..8.min(header), length.to_le_bytes()).for_each(drop),
        Change::Text(from, to) => {
            let found = bytes.windows(from.len()).position(|window| window == from.as_bytes());
            if let Some(found) = found {
                bytes.splice(found..found + from.len(), to.bytes());
            }
        }
    }
}

/// Accepts only what the writer makes, and never asks for more than the longest header.
fn check(bytes: &[u8]) -> Result<bool, TestCaseError> {
    match Header::parse(bytes) {
        Ok(header) => {
            let rendered = header.render().map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert_eq!(bytes.get(..rendered.len()), Some(rendered.as_slice()));
            prop_assert!(header.check_id(header.key.id()).is_ok());
            let last = header.layer_range(header.layout.layers - 1);
            prop_assert_eq!(last.end, header.object_bytes());
            Ok(true)
        }
        Err(object::Error::Truncated { got, need }) => {
            prop_assert!(got < need && need <= MAX_HEADER_BYTES);
            Ok(false)
        }
        Err(error) => {
            prop_assert!(error.to_string().len() < 400, "an error of {} bytes", error.to_string().len());
            Ok(false)
        }
    }
}

/// The seed of this run: printed, and repeated with `KVSPLICE_FUZZ_SEED`.
fn seed() -> u64 {
    let given = std::env::var("KVSPLICE_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok());
    given.unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().map_or(1, |age| age.as_nanos() as u64))
}

/// Runs batches of cases until the time is over; prints the seed first.
fn run<S: Strategy>(what: &str, time: Duration, strategy: &S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let (start, mut cases, seed) = (Instant::now(), 0, seed());
    println!("{what}: KVSPLICE_FUZZ_SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    while cases == 0 || start.elapsed() < time {
        let config = Config { cases: 200, failure_persistence: None, ..Config::default() };
        bytes[8..16].copy_from_slice(&(cases as u64).to_le_bytes());
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let ran = TestRunner::new_with_rng(config, random).run(strategy, &test);
        ran.unwrap_or_else(|error| panic!("{what}: {error}"));
        cases += 200;
    }
    println!("{what}: {cases} cases in {:?}", start.elapsed());
}

#[test]
fn the_parser_refuses_what_its_writer_does_not_make() {
    let objects = [valid(3, 5), valid(1, 1), valid(70, 2)];
    for object in &objects {
        assert!(check(object).unwrap());
    }
    let changed = (0..objects.len(), prop::collection::vec(change(), 1..4));
    run("changed objects", time() / 2, &changed, |(which, changes)| {
        let mut bytes = objects[which].clone();
        changes.iter().for_each(|change| apply(&mut bytes, change));
        let accepted = check(&bytes)?;
        let same = bytes.get(..FIRST_READ_BYTES) == objects[which].get(..FIRST_READ_BYTES);
        prop_assert!(!accepted || same, "accepted after {changes:?}");
        Ok(())
    });
    let start = prop_oneof![Just(0u64), Just((FIRST_READ_BYTES - 8) as u64), any::<u64>()];
    let anything = (start, prop::collection::vec(any::<u8>(), 0..FIRST_READ_BYTES + 100));
    run("any bytes", time() / 4, &anything, |(length, rest)| {
        prop_assert!(!check(&[length.to_le_bytes().as_slice(), &rest].concat())?);
        Ok(())
    });
    let json = "[\\[\\]{}\",:a-z0-9_\\\\. -]{0,400}";
    run("texts", time() / 4, &json, |text| {
        let mut bytes = ((FIRST_READ_BYTES - 8) as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{\"__metadata__\":{");
        bytes.extend_from_slice(text.as_bytes());
        bytes.resize(FIRST_READ_BYTES, b' ');
        prop_assert!(!check(&bytes)?);
        Ok(())
    });
}

#[tokio::test]
async fn hostile_objects_are_refused_by_name_before_they_are_sent_whole() {
    let server = Server::start(std::sync::Arc::new(object_store::memory::InMemory::new())).await;
    let good = chunk(1, 2, 3);
    let mut long_header = good.object.to_vec();
    long_header[..8].copy_from_slice(&(100u64 << 20).to_le_bytes());
    let mut overlap = valid(3, 5);
    apply(&mut overlap, &Change::Text("\"data_offsets\":[80,160]", "\"data_offsets\":[00,160]".into()));
    for (bytes, reason) in [(long_header, "header length"), (overlap, "header")] {
        let status = server.client.put_chunk(good.id, VARIANT, bytes.into()).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(reason), "{status}");
    }
    // A size of 10 GB is not believed: the header says what the size is.
    let (messages, receiver) = tokio::sync::mpsc::channel(4);
    let start = kvsplice_proto::v1::PutChunkStart {
        chunk: good.id.to_string(),
        variant: Variant::clean(Encoding::Bf16).to_string(),
        size: 10_000_000_000,
        encode_us_per_token: 0.0,
    };
    use kvsplice_proto::v1::put_chunk_request::Message;
    for message in [Message::Start(start), Message::Data(good.object.clone())] {
        messages.send(kvsplice_proto::v1::PutChunkRequest { message: Some(message) }).await.unwrap();
    }
    let mut client = kvsplice_proto::v1::cache_client::CacheClient::new(server.channel.clone());
    let status = client.put_chunk(tokio_stream::wrappers::ReceiverStream::new(receiver)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("start.size must be"), "{status}");
    drop((messages, client));
    server.stop().await;
}
