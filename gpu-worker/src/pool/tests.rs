mod device;

use std::ops::Range;

use kvsplice_kv::Encoding;
use kvsplice_kv::receipt::Source;
use kvsplice_model::resident::LayerKv;
use kvsplice_proto::load::{Form, Loaded};

use super::*;

const LAYERS: u32 = 3;
const LAYOUT: KvLayout = KvLayout { layers: LAYERS, kv_heads: 1, head_dim: 25, encoding: Encoding::Bf16 };
const TOKENS: u32 = 10;
const DATA: usize = 1000;
/// Bytes of a row of keys, and of values.
const ROW: usize = DATA / 2 / TOKENS as usize;
/// What one layer takes.
const ENTRY: u64 = DATA as u64 + ENTRY_BYTES;

/// A pool on the host alone.
fn on_host(host_bytes: u64) -> Pool {
    Pool::new(Limits { host_bytes, device_bytes: 0 }, LAYERS)
}

fn host_status(pool: &Pool) -> v1::ChunkPool {
    pool.status().0
}

fn key(chunk: u8) -> PoolKey {
    PoolKey { chunk: ChunkId::from_bytes([chunk; 32]), variant: Variant::clean(Encoding::Bf16) }
}

fn wish(place: usize, chunk: u8, cost: f64) -> Wish {
    Wish { place, key: key(chunk), cost, confirmed: true, layout: LAYOUT, tokens: TOKENS }
}

fn layer(chunk: usize, layer: u32, form: Form) -> Loaded {
    let data = Bytes::from(vec![(10 * chunk) as u8 + layer as u8; DATA]);
    Loaded::Layer { chunk, layer, data, form, source: Source::Object, bytes: DATA as u64 }
}

fn bytes(kv: &LayerKv) -> &[u8] {
    let LayerKv::Host(stored) = kv else { panic!("it is on the host") };
    assert_eq!((stored.layout, stored.tokens), (LAYOUT, TOKENS));
    &stored.bytes
}

fn failed(chunk: usize, reason: &str) -> Loaded {
    Loaded::Failed { chunk, reason: reason.to_owned(), service_down: false }
}

fn layers(hold: &mut Hold, place: usize) -> Vec<u32> {
    hold.take(place).whole.into_iter().map(|(layer, _)| layer).collect()
}

/// A request of one chunk, from its beginning to its end.
fn load(pool: &Pool, chunk: u8, cost: f64) {
    let hold = pool.hold(vec![wish(0, chunk, cost)]);
    let keeper = hold.keeper();
    for number in 0..LAYERS {
        keeper.take_in(layer(0, number, Form::Whole));
    }
}

/// The layers of a chunk that are here; counts as a request.
fn here(pool: &Pool, chunk: u8) -> usize {
    pool.hold(vec![wish(0, chunk, 1.0)]).take(0).whole.len()
}

#[test]
fn what_one_request_loaded_the_next_finds_and_only_layers_from_the_wire() {
    let pool = on_host(1 << 20);
    let mut first = pool.hold(vec![wish(0, 1, 1.0), wish(1, 2, 1.0)]);
    assert!(layers(&mut first, 0).is_empty() && layers(&mut first, 1).is_empty());
    let keeper = first.keeper();
    for news in [
        layer(0, 0, Form::Whole),
        layer(0, 2, Form::Mapped),
        layer(1, 2, Form::Whole),
        // Of no chunk of this request.
        layer(7, 0, Form::Whole),
    ] {
        keeper.take_in(news);
    }
    drop(first);
    let mut second = pool.hold(vec![wish(0, 2, 1.0), wish(1, 1, 1.0)]);
    assert_eq!((layers(&mut second, 0), layers(&mut second, 1)), (vec![2], vec![0]));
    assert_eq!(bytes(&second.take(0).whole[0].1), vec![12; DATA]);
    let status = host_status(&pool);
    assert_eq!((status.layers, status.bytes, status.held), (2, 2 * ENTRY, 2));
    assert_eq!((status.hits, status.misses), (3, 12));
    drop(second);
    assert_eq!(host_status(&pool).held, 0);
}

fn gapped(layer: u32, lacks: Range<u32>, byte: u8) -> Loaded {
    let mut data = vec![byte; DATA];
    for part in [0, DATA / 2] {
        data[part + lacks.start as usize * ROW..part + lacks.end as usize * ROW].fill(0);
    }
    let form = Form::Gapped(RowRanges::from_range(lacks));
    Loaded::Layer { chunk: 0, layer, data: data.into(), form, source: Source::Object, bytes: 1 }
}

#[test]
fn what_a_layer_lacks_comes_with_the_next_request() {
    let pool = on_host(1 << 20);
    let first = pool.hold(vec![wish(0, 1, 1.0)]);
    for (number, lacks) in [(0, 2..6), (1, 3..7), (2, 2..6)] {
        let news = first.keeper().take_in(gapped(number, lacks.clone(), 7));
        assert!(
            matches!(news, Loaded::Layer { form: Form::Gapped(found), .. } if found == RowRanges::from_range(lacks))
        );
    }
    drop(first);
    let mut second = pool.hold(vec![wish(0, 1, 1.0)]);
    let Taken { whole, have } = second.take(0);
    assert_eq!((whole.len(), have.ranges()), (0, &[0..2, 7..TOKENS][..]), "every layer has these");
    // The whole, but for what this request computes anew; rows that were here stand where none came.
    let keeper = second.keeper();
    let Loaded::Layer { data, form, .. } = keeper.take_in(gapped(0, 0..3, 8)) else { panic!("a layer") };
    assert_eq!(form, Form::Gapped(RowRanges::from_range(2..3)));
    let rows: Vec<u8> = data.chunks(ROW).map(|row| row[0]).collect();
    let part = [7, 7, 0, 8, 8, 8, 8, 8, 8, 8];
    assert_eq!(rows, [part, part].concat());
    let Loaded::Layer { data, form, .. } = keeper.take_in(gapped(1, 0..3, 8)) else { panic!("a layer") };
    assert_eq!((form, data.chunks(ROW).map(|row| row[0]).min()), (Form::Whole, Some(7)));
    drop(second);
    let mut third = pool.hold(vec![wish(0, 1, 1.0)]);
    let Taken { whole, have } = third.take(0);
    assert_eq!((whole.len(), whole[0].0, have.ranges()), (1, 1, &[0..2, 6..TOKENS][..]));
    assert_eq!((host_status(&pool).layers, host_status(&pool).bytes), (3, 3 * ENTRY));
    // What lacks more does not take the place of what lacks less.
    third.keeper().take_in(gapped(1, 0..9, 9));
    drop(third);
    assert_eq!(here(&pool, 1), 1);
    // A layer that is not here at all: nothing is had of every layer.
    let fresh = on_host(1 << 20);
    let mut hold = fresh.hold(vec![wish(0, 1, 1.0)]);
    hold.keeper().take_in(gapped(1, 2..6, 7));
    assert!(hold.take(0).have.is_empty());
    // Another shape cannot be joined.
    let Loaded::Layer { data, .. } = gapped(1, 0..9, 9) else { panic!("a layer") };
    let form = Form::Gapped(RowRanges::from_range(0..9));
    let short = Loaded::Layer { chunk: 0, layer: 1, data: data.slice(..9), form, source: Source::Object, bytes: 1 };
    assert!(matches!(hold.keeper().take_in(short), Loaded::Failed { reason, .. } if reason.starts_with("foreign: ")));
}

#[test]
fn the_limit_holds_and_what_is_held_stays() {
    for limit in [0, 1, ENTRY, 4 * ENTRY, 5 * ENTRY + 7] {
        let pool = on_host(limit);
        let mut hold = pool.hold(vec![wish(0, 1, 1.0)]);
        for number in 0..LAYERS {
            hold.keeper().take_in(layer(0, number, Form::Whole));
        }
        let kept = (limit / ENTRY).min(LAYERS.into());
        for chunk in 2..20 {
            // Dearer than the one that is held.
            load(&pool, chunk, 1e9);
            assert!(host_status(&pool).bytes <= limit, "{:?} of {limit}", host_status(&pool));
        }
        assert_eq!(hold.take(0).whole.len() as u64, kept, "{limit}");
        drop(hold);
        for chunk in 20..40 {
            load(&pool, chunk, 1e9);
        }
        assert_eq!(here(&pool, 1), 0, "its request is over");
        let (status, most) = (host_status(&pool), limit / ENTRY * ENTRY);
        assert!(status.bytes == most && status.held == 0, "{status:?} of {limit}");
        assert_eq!(status.evicted > 0, limit >= ENTRY);
    }
}

#[test]
fn the_dear_and_often_asked_for_outlive_the_others() {
    let pool = on_host(9 * ENTRY);
    for (chunk, cost) in [(1, 1.0), (2, 9.0), (3, 1.0)] {
        load(&pool, chunk, cost);
    }
    for _ in 0..20 {
        assert_eq!(here(&pool, 3), LAYERS as usize);
    }
    load(&pool, 4, 2.0);
    assert_eq!([1, 2, 3, 4].map(|chunk| here(&pool, chunk)), [0, 3, 3, 3]);
}

#[test]
fn a_chunk_that_two_requests_hold_stays_until_both_are_over() {
    let pool = on_host(3 * ENTRY);
    load(&pool, 1, 1.0);
    let (one, mut other) = (pool.hold(vec![wish(0, 1, 1.0)]), pool.hold(vec![wish(5, 1, 1.0)]));
    drop(one);
    load(&pool, 2, 1e9);
    assert_eq!((layers(&mut other, 5), here(&pool, 2)), (vec![0, 1, 2], 0));
    drop(other);
    load(&pool, 2, 1e9);
    assert_eq!((here(&pool, 1), here(&pool, 2)), (0, 3));
}

#[test]
fn without_the_services_word_nothing_is_taken_or_kept() {
    let pool = on_host(1 << 20);
    load(&pool, 1, 1.0);
    load(&pool, 2, 1.0);
    let mut hold = pool.hold(vec![Wish { confirmed: false, ..wish(0, 1, 1.0) }, wish(1, 2, 1.0)]);
    assert_eq!((layers(&mut hold, 0), layers(&mut hold, 1)), (vec![], vec![0, 1, 2]));
    hold.keeper().take_in(layer(0, 0, Form::Whole));
    drop(hold);
    assert_eq!((here(&pool, 1), here(&pool, 2)), (0, 3));
}

#[test]
fn a_chunk_that_the_service_cannot_give_is_forgotten() {
    for (reason, left) in [("missing: no such object", 0), ("damaged: layer 2", 0), ("store: timed out", 3)] {
        let pool = on_host(1 << 20);
        load(&pool, 1, 1.0);
        load(&pool, 2, 1.0);
        let hold = pool.hold(vec![wish(0, 1, 1.0)]);
        hold.keeper().take_in(failed(0, reason));
        drop(hold);
        assert_eq!((here(&pool, 1), here(&pool, 2)), (left, 3), "{reason}");
    }
}

#[test]
fn what_a_holder_of_a_forgotten_chunk_still_brings_is_not_kept() {
    let pool = on_host(1 << 20);
    let hold = pool.hold(vec![wish(0, 1, 1.0)]);
    hold.keeper().take_in(layer(0, 0, Form::Whole));
    // Another request has learnt that it is gone.
    drop(pool.hold(vec![Wish { confirmed: false, ..wish(0, 1, 1.0) }]));
    hold.keeper().take_in(layer(0, 1, Form::Whole));
    drop(hold);
    assert_eq!(here(&pool, 1), 0);
    // It was stored anew.
    load(&pool, 1, 1.0);
    assert_eq!(here(&pool, 1), LAYERS as usize);
}

#[test]
fn what_comes_after_its_request_is_over_is_not_kept() {
    let pool = on_host(1 << 20);
    let hold = pool.hold(vec![wish(0, 1, 1.0)]);
    let keeper = hold.keeper();
    drop(hold);
    keeper.take_in(layer(0, 0, Form::Whole));
    let status = host_status(&pool);
    assert_eq!((status.bytes, status.layers, status.held), (0, 0, 0));
}

#[test]
fn what_nobody_asks_for_is_dropped_and_what_is_held_is_not() {
    let pool = on_host(1 << 20);
    load(&pool, 1, 1.0);
    load(&pool, 2, 1.0);
    let mut hold = pool.hold(vec![wish(0, 2, 1.0)]);
    pool.drop_unasked(Instant::now() + UNASKED / 2);
    assert_eq!(host_status(&pool).layers, 6);
    pool.drop_unasked(Instant::now() + UNASKED);
    assert_eq!(host_status(&pool).layers, 3);
    assert_eq!(layers(&mut hold, 0), [0, 1, 2]);
    drop(hold);
    pool.drop_unasked(Instant::now() + UNASKED);
    let status = host_status(&pool);
    assert_eq!((status.layers, status.bytes), (0, 0));
    assert!(pool.state().unwrap().chunks.is_empty());
}
