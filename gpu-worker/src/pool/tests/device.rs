use std::cell::Cell;

use kvsplice_model::Error;
use kvsplice_model::stored::StoredLayer;
use tch::Device;

use super::*;

/// Bytes of a layer on the device: keys and values of 500 bytes at multiples of 256, in all a multiple of 512.
const THERE: u64 = 1024;

fn pool(host_bytes: u64, device_bytes: u64) -> Pool {
    Pool::new(Limits { host_bytes, device_bytes }, LAYERS)
}

fn device_status(pool: &Pool) -> v1::ChunkPool {
    pool.status().1
}

fn stored(chunk: u8, layer: u32) -> StoredLayer {
    StoredLayer { layout: LAYOUT, tokens: TOKENS, bytes: vec![10 * chunk + layer as u8; DATA].into() }
}

/// Places a layer of the chunk at `place` as a request does; whether it was placed from the device.
fn place(hold: &Hold, place: usize, number: u8, layer: u32) -> bool {
    let host = LayerKv::Host(stored(number, layer));
    let Some(promotion) = hold.promotion(place, layer) else { return false };
    matches!(promotion.run(host, |layer| layer.to_device(Device::Cpu)), LayerKv::Device(_))
}

/// A request of one chunk, from its beginning to its end; how many layers were placed from the device.
fn ask(pool: &Pool, chunk: u8, cost: f64) -> usize {
    let mut hold = pool.hold(vec![wish(0, chunk, cost)]);
    let there = there(&mut hold, 0);
    let placed = (0..LAYERS).filter(|layer| there.contains(layer) || place(&hold, 0, chunk, *layer));
    placed.count()
}

/// The layers that a request takes from the device.
fn there(hold: &mut Hold, place: usize) -> Vec<u32> {
    let whole = hold.take(place).whole;
    whole.into_iter().filter(|(_, kv)| matches!(kv, LayerKv::Device(_))).map(|(layer, _)| layer).collect()
}

#[test]
fn a_chunk_goes_to_the_device_when_it_is_asked_for_twice_and_is_taken_from_there() {
    for host_bytes in [0, 1 << 20] {
        let pool = pool(host_bytes, 1 << 20);
        assert_eq!(ask(&pool, 1, 1.0), 0, "asked for once");
        load(&pool, 2, 1.0);
        assert_eq!((device_status(&pool).layers, device_status(&pool).misses), (0, 3));
        assert_eq!((ask(&pool, 1, 1.0), ask(&pool, 2, 1.0)), (3, 3));
        let status = device_status(&pool);
        assert_eq!((status.layers, status.bytes, status.hits, status.misses), (6, 6 * THERE, 0, 9));
        let before = host_status(&pool);
        let mut hold = pool.hold(vec![wish(0, 2, 1.0), wish(1, 1, 1.0)]);
        assert_eq!((there(&mut hold, 0), there(&mut hold, 1)), (vec![0, 1, 2], vec![0, 1, 2]));
        assert_eq!((device_status(&pool).hits, device_status(&pool).held), (6, 2));
        // Nothing was looked for on the host.
        let after = host_status(&pool);
        assert_eq!((before.hits, before.misses), (after.hits, after.misses));
        assert_eq!(after == v1::ChunkPool::default(), host_bytes == 0);
    }
}

#[test]
fn two_parts_of_a_prompt_share_a_layer() {
    let pool = pool(0, 1 << 20);
    ask(&pool, 1, 1.0);
    let hold = pool.hold(vec![wish(0, 1, 1.0)]);
    let uploads = Cell::new(0);
    for _ in 0..2 {
        let promotion = hold.promotion(0, 1).unwrap();
        let placed = promotion.run(LayerKv::Host(stored(1, 1)), |layer| {
            uploads.set(uploads.get() + 1);
            layer.to_device(Device::Cpu)
        });
        assert!(matches!(placed, LayerKv::Device(_)));
    }
    assert_eq!((uploads.get(), device_status(&pool).layers), (1, 1));
}

#[test]
fn layers_with_gaps_stay_on_the_host_and_count_as_missing() {
    let pool = pool(1 << 20, 1 << 20);
    let hold = pool.hold(vec![wish(0, 1, 1.0)]);
    for number in 0..LAYERS {
        hold.keeper().take_in(gapped(number, 2..6, 7));
    }
    drop(hold);
    let mut hold = pool.hold(vec![wish(0, 1, 1.0)]);
    let Taken { whole, have } = hold.take(0);
    assert_eq!((whole.len(), have.ranges()), (0, &[0..2, 6..TOKENS][..]));
    // One of them goes there once it is whole: the others are what the next request lacks rows of.
    assert!(place(&hold, 0, 1, 1));
    drop(hold);
    let mut hold = pool.hold(vec![wish(0, 1, 1.0)]);
    let Taken { whole, have } = hold.take(0);
    assert_eq!((whole.len(), whole[0].0, have.ranges()), (1, 1, &[0..2, 6..TOKENS][..]));
}

#[test]
fn under_random_requests_both_limits_hold_and_what_is_held_stays() {
    for seed in 0..40u64 {
        println!("seed {seed}");
        let mut state = seed * 2 + 1;
        // Knuth's MMIX multiplier.
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let limits = (random(8) * ENTRY, random(12) * THERE / 2);
        let pool = pool(limits.0, limits.1);
        let check = || {
            let (host, device) = pool.status();
            assert!(host.bytes <= limits.0 && device.bytes <= limits.1, "{host:?} {device:?}");
            assert_eq!(device.bytes, device.layers * THERE);
        };
        let mut holds: Vec<(u8, Hold)> = Vec::new();
        // By chunk, the layers that were seen on the device while it was held.
        let mut seen: Vec<(u8, Vec<u32>)> = Vec::new();
        for _ in 0..300 {
            match random(10) {
                0..4 => {
                    let chunk = random(6) as u8;
                    let hold = pool.hold(vec![wish(0, chunk, random(100) as f64)]);
                    holds.push((chunk, hold));
                }
                4 if !holds.is_empty() => {
                    let (chunk, _) = holds.swap_remove(random(holds.len() as u64) as usize);
                    if !holds.iter().any(|(other, _)| *other == chunk) {
                        seen.retain(|(other, _)| *other != chunk);
                    }
                }
                5 => {
                    let chunk = random(6) as u8;
                    drop(pool.hold(vec![Wish { confirmed: false, ..wish(0, chunk, 1.0) }]));
                    seen.retain(|(other, _)| *other != chunk);
                }
                _ if !holds.is_empty() => {
                    let (chunk, hold) = &holds[random(holds.len() as u64) as usize];
                    let number = random(LAYERS.into()) as u32;
                    let Some(promotion) = hold.promotion(0, number) else { continue };
                    let placed = promotion.run(LayerKv::Host(stored(*chunk, number)), |layer| {
                        // With the room of what is on its way.
                        let status = device_status(&pool);
                        assert!(status.bytes <= limits.1 && status.bytes == (status.layers + 1) * THERE);
                        layer.to_device(Device::Cpu)
                    });
                    if matches!(placed, LayerKv::Device(_)) {
                        seen.push((*chunk, vec![number]));
                    }
                    hold.keeper().take_in(layer(0, number, Form::Whole));
                }
                _ => {}
            }
            check();
            for (chunk, layers) in &seen {
                let (_, hold) = holds.iter_mut().find(|(other, _)| other == chunk).expect("it is held");
                let found = there(hold, 0);
                assert!(layers.iter().all(|layer| found.contains(layer)), "chunk {chunk}: {layers:?} of {found:?}");
            }
        }
        drop(holds);
        assert_eq!((host_status(&pool).held, device_status(&pool).held), (0, 0));
    }
}

#[test]
fn the_dear_and_often_asked_for_outlive_the_others_on_the_device() {
    let pool = pool(0, 6 * THERE);
    for (chunk, cost) in [(1, 1.0), (2, 9.0)] {
        assert_eq!((ask(&pool, chunk, cost), ask(&pool, chunk, cost)), (0, 3));
    }
    assert_eq!((ask(&pool, 3, 5.0), ask(&pool, 3, 5.0)), (0, 3));
    let mut hold = pool.hold(vec![wish(0, 1, 1.0), wish(1, 2, 9.0), wish(2, 3, 5.0)]);
    assert_eq!([0, 1, 2].map(|place| there(&mut hold, place).len()), [0, 3, 3]);
    assert_eq!(device_status(&pool).evicted, 3);
}

#[test]
fn a_tier_that_is_too_small_for_any_layer_changes_nothing() {
    let (small, without) = (pool(1 << 20, THERE - 1), on_host(1 << 20));
    for pool in [&small, &without] {
        load(pool, 1, 1.0);
        assert_eq!((ask(pool, 1, 1.0), ask(pool, 1, 1.0)), (0, 0));
    }
    assert_eq!(host_status(&small), host_status(&without));
    let status = device_status(&small);
    assert_eq!((status.bytes, status.layers, status.evicted, status.failed), (0, 0, 0, 0));
    assert_eq!(device_status(&without), v1::ChunkPool::default());
}

#[test]
fn an_erased_chunk_and_one_that_nobody_asks_for_leave_both_memories() {
    let pool = pool(1 << 20, 1 << 20);
    for chunk in [1, 2, 3] {
        load(&pool, chunk, 1.0);
        assert_eq!(ask(&pool, chunk, 1.0), 3);
    }
    let layers = |pool: &Pool| (host_status(pool).layers, device_status(pool).layers);
    assert_eq!(layers(&pool), (9, 9));
    drop(pool.hold(vec![Wish { confirmed: false, ..wish(0, 1, 1.0) }]));
    assert_eq!(layers(&pool), (6, 6));
    let hold = pool.hold(vec![wish(0, 2, 1.0)]);
    hold.keeper().take_in(failed(0, "missing: no such object"));
    assert_eq!(layers(&pool), (3, 3));
    drop(hold);
    pool.drop_unasked(Instant::now() + UNASKED);
    assert_eq!((layers(&pool), device_status(&pool).bytes), ((0, 0), 0));
    assert!(pool.state().unwrap().chunks.is_empty());
    assert_eq!(ask(&pool, 1, 1.0), 3, "it was asked for before");
}

#[test]
fn what_is_forgotten_or_let_go_on_its_way_is_not_kept() {
    for forgotten in [true, false] {
        let pool = pool(0, 1 << 20);
        ask(&pool, 1, 1.0);
        let hold = pool.hold(vec![wish(0, 1, 1.0)]);
        let promotion = hold.promotion(0, 0).unwrap();
        let placed = promotion.run(LayerKv::Host(stored(1, 0)), |layer| {
            if forgotten {
                drop(pool.hold(vec![Wish { confirmed: false, ..wish(0, 1, 1.0) }]));
            } else {
                drop(hold);
            }
            assert_eq!(device_status(&pool).bytes, THERE, "its room is still its own");
            layer.to_device(Device::Cpu)
        });
        assert_eq!(bytes(&placed), vec![10; DATA]);
        assert_eq!((device_status(&pool).bytes, device_status(&pool).layers), (0, 0));
    }
}

#[test]
fn a_device_without_memory_is_left_alone_and_the_layer_is_placed_from_the_host() {
    let pool = pool(0, 1 << 20);
    ask(&pool, 1, 1.0);
    let hold = pool.hold(vec![wish(0, 1, 1.0)]);
    let full = |_: &StoredLayer| Err(Error::Argument("out of memory".to_owned()));
    let placed = hold.promotion(0, 0).unwrap().run(LayerKv::Host(stored(1, 0)), full);
    assert_eq!(bytes(&placed), vec![10; DATA]);
    // The next one is not even tried.
    assert!(!place(&hold, 0, 1, 1));
    let status = device_status(&pool);
    assert_eq!((status.bytes, status.layers, status.failed), (0, 0, 1));
    // After a while it is.
    pool.state().unwrap().full_until = Some(Instant::now());
    assert!(place(&hold, 0, 1, 1));
}
