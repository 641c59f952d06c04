//! Figures of the index. Long ones run with `KVSPLICE_LONG=1`.

use std::time::Instant;

use kvsplice_kv::eviction::Eviction;
use kvsplice_kv::{ChunkId, ChunkKey, Encoding, KvLayout, ModelDigest, Variant, object};

use super::*;

fn key(number: u32) -> ObjectKey {
    let mut bytes = [7; 32];
    bytes[..4].copy_from_slice(&number.wrapping_mul(2_654_435_761).to_be_bytes());
    ObjectKey { chunk: ChunkId::from_bytes(bytes), variant: Variant::clean(Encoding::Bf16) }
}

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// 10,000 records, or a million.
#[test]
fn the_index_of_a_million_chunks_is_small_and_fast() {
    let long = std::env::var_os("KVSPLICE_LONG").is_some();
    let count: u32 = if long { 1_000_000 } else { 10_000 };
    for eviction in [Eviction::Lru, Eviction::Value] {
        let before = resident();
        let start = Instant::now();
        let mut index = Index { book: Book::new(eviction, u64::MAX), layers: 0 };
        for number in 0..count {
            index.book.insert(key(number), Entry { layers: 48, partial: None }, 40 << 20, f64::from(number % 1000 + 1));
        }
        let (built, bytes) = (start.elapsed(), resident().saturating_sub(before));
        let mut times: Vec<u128> = (0..200_000u32)
            .map(|step| {
                let key = key(step.wrapping_mul(7919) % count);
                let start = Instant::now();
                index.book.touch(&key);
                assert!(index.book.get(&key).is_some());
                start.elapsed().as_nanos()
            })
            .collect();
        times.sort_unstable();
        let (median, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
        let per_record = bytes / u64::from(count);
        println!(
            "{eviction:?}, {count} records: built in {built:?}, {per_record} bytes each, request {median} ns, p99 {p99} ns"
        );
        assert!(per_record < 1024 && p99 < 1_000_000);
        let start = Instant::now();
        let (evicted, room) = index.book.make_room(u64::MAX - index.book.bytes() + (40 << 20) * 1000, |_| false);
        assert!(room && evicted.len() == 1000);
        println!("1000 evictions in {:?}", start.elapsed());
    }
}

/// 500 files, or 20,000.
#[test]
fn a_folder_of_many_files_is_read_at_the_start() {
    let long = std::env::var_os("KVSPLICE_LONG").is_some();
    let count: u32 = if long { 20_000 } else { 500 };
    let folder = tempfile::tempdir().unwrap();
    let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 1, encoding: Encoding::Bf16 };
    let variant = Variant::clean(Encoding::Bf16);
    let files = Folder::new(folder.path().to_owned());
    for number in 0..count {
        let chunk = ChunkKey::new(ModelDigest::from_bytes([1; 32]), &[], &[number], "default");
        let object = object::write(&chunk, &layout, variant, 1, "f32", [[0u8; 4]]).unwrap();
        let path = files.whole(&ObjectKey { chunk: chunk.id(), variant });
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, object).unwrap();
    }
    let config = Config { disk_bytes: 1 << 40, disk_dir: folder.path().to_owned(), ..Config::default() };
    let start = Instant::now();
    let disk = Disk::open(&config, Arc::new(Protection::new()), Arc::default(), Costs::new(&config));
    let took = start.elapsed();
    assert_eq!(disk.usage().unwrap().layers, u64::from(count));
    println!("{count} files: {took:?}, {:.0} files/s", f64::from(count) / took.as_secs_f64());
}
