//! The tree against a naive model of it, and cases worked by hand.

mod model;

use std::convert::Infallible;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use model::{Model, Payload};

const COST: Cost = Cost { prefill: Duration::from_millis(640), new_tokens: 64 };

/// Ids of whole blocks, one value a block.
fn ids(blocks: &[u32]) -> Vec<u32> {
    blocks.iter().flat_map(|&value| [value; BLOCK]).collect()
}

fn offer<'a>(ids: &'a [u32], cost: Cost) -> Offer<'a> {
    Offer { salt: "", ids, tokens: ids.len(), reused: 0, bytes_per_block: 1, cost }
}

/// Offers whole blocks; the payload of each is its index.
fn insert(tree: &mut Tree<usize>, blocks: &[u32], cost: Cost) -> Inserted {
    tree.insert(&offer(&ids(blocks), cost), Ok::<_, Infallible>).unwrap()
}

/// Blocks of the prefix that the tree has, without touching it.
fn cached(tree: &Tree<usize>, blocks: &[u32]) -> usize {
    tree.walk("", &ids(blocks)).len()
}

fn find_and_release(tree: &mut Tree<usize>, blocks: &[u32]) -> usize {
    let hold = tree.find("", &ids(blocks), usize::MAX);
    let tokens = hold.tokens();
    tree.release(hold);
    tokens
}

/// Everything that must hold between two calls.
fn check<B>(tree: &Tree<B>) {
    let stats = tree.stats();
    let (mut blocks, mut bytes, mut held, mut held_bytes) = (0, 0, 0, 0);
    let mut free_leaves = BTreeSet::new();
    for (slot, node) in tree.nodes.iter() {
        blocks += 1;
        bytes += node.bytes;
        if node.holders > 0 {
            held += 1;
            held_bytes += node.bytes;
        } else if node.children.is_empty() {
            free_leaves.insert(rank(slot, node));
        }
        let siblings = match &node.parent {
            Parent::Owner(owner) => tree.nodes.first_blocks(owner).unwrap(),
            Parent::Node(parent) => {
                let parent = &tree.nodes[*parent];
                assert!(parent.priority >= node.priority && parent.tick >= node.tick);
                assert!(parent.holders >= node.holders);
                &parent.children
            }
        };
        assert_eq!(siblings.get(&node.block), Some(&slot));
    }
    assert_eq!((stats.blocks, stats.bytes, stats.held, stats.held_bytes), (blocks, bytes, held, held_bytes));
    assert!(stats.bytes <= tree.budget_bytes);
    assert_eq!(tree.evictable, free_leaves);
    assert!(blocks > 0 || tree.nodes.owners() == 0);
}

#[test]
fn a_hit_ends_at_a_whole_block_and_within_the_limit() {
    let mut tree = Tree::new(Policy::Lru, 10);
    assert_eq!(insert(&mut tree, &[1, 2, 3], COST), Inserted { blocks: 3, tokens: 192 });
    let mut longer = ids(&[1, 2]);
    longer.extend([3; BLOCK - 1]);
    longer.extend([9; BLOCK]);
    let hold = tree.find("", &longer, longer.len());
    assert_eq!(hold.tokens(), 128);
    assert_eq!(tree.payloads(&hold).copied().collect::<Vec<_>>(), [0, 1]);
    tree.release(hold);
    // A prompt that is cached whole still needs its last token computed.
    let whole = ids(&[1, 2, 3]);
    let hold = tree.find("", &whole, whole.len() - 1);
    assert_eq!(hold.tokens(), 128);
    tree.release(hold);
    assert_eq!((tree.stats().hits, tree.stats().misses), (4, 1));
    check(&tree);
}

#[test]
fn less_than_a_block_is_neither_kept_nor_found() {
    let mut tree = Tree::new(Policy::Pgdsf, 10);
    for short in [&[][..], &[7; BLOCK - 1]] {
        let inserted = tree.insert(&offer(short, COST), Ok::<_, Infallible>).unwrap();
        assert_eq!(inserted, Inserted { blocks: 0, tokens: 0 });
        let hold = tree.find("", short, usize::MAX);
        assert_eq!(hold.tokens(), 0);
        tree.release(hold);
    }
    let whole = [7; 2 * BLOCK];
    let part = Offer { tokens: BLOCK + 63, ..offer(&whole, COST) };
    assert_eq!(tree.insert(&part, Ok::<_, Infallible>).unwrap().tokens, BLOCK);
    check(&tree);
}

#[test]
fn owners_do_not_see_each_other() {
    let mut tree = Tree::new(Policy::Lru, 10);
    let whole = ids(&[1, 2]);
    tree.insert(&Offer { salt: "a", ..offer(&whole, COST) }, Ok::<_, Infallible>).unwrap();
    for (salt, tokens) in [("a", 128), ("b", 0), ("", 0)] {
        let hold = tree.find(salt, &whole, usize::MAX);
        assert_eq!(hold.tokens(), tokens, "owner {salt:?}");
        tree.release(hold);
    }
    // The last block takes its owner along.
    tree.insert(&Offer { salt: "b", bytes_per_block: 5, ..offer(&whole, COST) }, Ok::<_, Infallible>).unwrap();
    assert_eq!(tree.nodes.owners(), 1);
    check(&tree);
}

#[test]
fn nothing_is_kept_without_a_budget() {
    let mut tree = Tree::new(Policy::Pgdsf, 0);
    let whole = ids(&[1]);
    for bytes_per_block in [0, 1, u64::MAX] {
        let inserted = tree
            .insert(&Offer { bytes_per_block, ..offer(&whole, COST) }, |_| -> Result<(), Infallible> {
                panic!("there is no room")
            })
            .unwrap();
        assert_eq!(inserted.tokens, 0);
    }
    check(&tree);
}

#[test]
fn lru_evicts_what_was_not_used_for_the_longest_time() {
    let mut tree = Tree::new(Policy::Lru, 3);
    for value in 1..=3 {
        insert(&mut tree, &[value], COST);
    }
    assert_eq!(find_and_release(&mut tree, &[1]), BLOCK);
    insert(&mut tree, &[4], COST);
    insert(&mut tree, &[5], COST);
    let left: Vec<usize> = (1..=5).map(|value| cached(&tree, &[value])).collect();
    assert_eq!(left, [1, 0, 0, 1, 1]);
    check(&tree);
}

#[test]
fn pgdsf_keeps_what_is_dear_and_often_used() {
    let dear = Cost { prefill: Duration::from_secs(64), new_tokens: 64 };
    let survives = |policy, uses, cost| {
        let mut tree = Tree::new(policy, 4);
        insert(&mut tree, &[1], cost);
        (0..uses).for_each(|_| assert_eq!(find_and_release(&mut tree, &[1]), BLOCK));
        (2..12).for_each(|value| assert_eq!(insert(&mut tree, &[value], COST).blocks, 1));
        check(&tree);
        cached(&tree, &[1]) == 1
    };
    assert!(survives(Policy::Pgdsf, 3, dear));
    assert!(survives(Policy::Pgdsf, 0, dear));
    assert!(survives(Policy::Pgdsf, 20, COST));
    assert!(!survives(Policy::Pgdsf, 0, COST));
    assert!(!survives(Policy::Lru, 20, dear));
}

#[test]
fn pgdsf_lets_old_fame_fade() {
    let mut tree = Tree::new(Policy::Pgdsf, 4);
    insert(&mut tree, &[1], COST);
    (0..20).for_each(|_| assert_eq!(find_and_release(&mut tree, &[1]), BLOCK));
    for value in 2..200 {
        insert(&mut tree, &[value], COST);
    }
    assert_eq!(cached(&tree, &[1]), 0);
}

#[test]
fn statistics_outlive_an_eviction() {
    let mut tree = Tree::new(Policy::Pgdsf, 1);
    insert(&mut tree, &[1], Cost { prefill: Duration::from_secs(64), new_tokens: 64 });
    insert(&mut tree, &[2], COST);
    assert_eq!(tree.clock, 1.0);
    insert(&mut tree, &[1], Cost { prefill: Duration::from_secs(192), new_tokens: 64 });
    // Two requests computed it, at 1 and at 3 seconds a token; block 2 went at 1 + 0.01.
    assert_eq!(tree.clock, 1.01);
    assert_eq!(tree.nodes[tree.walk("", &ids(&[1]))[0]].priority, 1.01 + 2.0 * 2.0);
}

#[test]
fn two_requests_hold_the_same_blocks() {
    let mut tree = Tree::new(Policy::Lru, 2);
    insert(&mut tree, &[1, 2], COST);
    let first = tree.find("", &ids(&[1, 2]), usize::MAX);
    let second = tree.find("", &ids(&[1, 3]), usize::MAX);
    assert_eq!((first.tokens(), second.tokens(), tree.stats().held), (128, 64, 2));
    tree.release(first);
    check(&tree);
    // Block 1 is held still; block 2 makes room once.
    assert_eq!(insert(&mut tree, &[4, 5], COST), Inserted { blocks: 1, tokens: BLOCK });
    assert_eq!((cached(&tree, &[1, 2]), tree.stats().held), (1, 1));
    tree.release(second);
    assert_eq!(tree.stats().held, 0);
    check(&tree);
}

#[test]
fn an_insert_leaves_its_own_path_alone() {
    let mut tree = Tree::new(Policy::Pgdsf, 3);
    insert(&mut tree, &[1, 2], COST);
    assert_eq!(insert(&mut tree, &[1, 2, 3, 4, 5], COST), Inserted { blocks: 1, tokens: 192 });
    assert_eq!(tree.stats().evicted, 0);
    check(&tree);
}

#[test]
fn what_cannot_fit_evicts_nothing() {
    let mut tree = Tree::new(Policy::Lru, 4);
    insert(&mut tree, &[1, 2], COST);
    insert(&mut tree, &[3], COST);
    let hold = tree.find("", &ids(&[1, 2]), usize::MAX);
    let whole = ids(&[4]);
    let large = Offer { bytes_per_block: 3, ..offer(&whole, COST) };
    assert_eq!(tree.insert(&large, Ok::<_, Infallible>).unwrap().blocks, 0);
    assert_eq!((tree.stats().evicted, tree.stats().blocks), (0, 3));
    tree.release(hold);
    assert_eq!(tree.insert(&large, Ok::<_, Infallible>).unwrap().blocks, 1);
    check(&tree);
}

#[test]
fn a_path_that_lost_its_end_is_completed() {
    let mut tree = Tree::new(Policy::Lru, 3);
    insert(&mut tree, &[1, 2, 3], COST);
    insert(&mut tree, &[9], COST);
    assert_eq!(cached(&tree, &[1, 2, 3]), 2);
    let mut made = Vec::new();
    let whole = ids(&[1, 2, 3]);
    tree.insert(&Offer { reused: 192, ..offer(&whole, COST) }, |index| {
        made.push(index);
        Ok::<_, Infallible>(index)
    })
    .unwrap();
    assert_eq!((made, cached(&tree, &[1, 2, 3]), cached(&tree, &[9])), (vec![2], 3, 0));
    check(&tree);
}

#[test]
fn a_payload_that_cannot_be_made_leaves_a_whole_path() {
    let mut tree = Tree::new(Policy::Pgdsf, 9);
    let whole = ids(&[1, 2, 3]);
    let failed = tree.insert(&offer(&whole, COST), |index| if index < 2 { Ok(index) } else { Err("no memory") });
    assert_eq!(failed, Err("no memory"));
    assert_eq!((cached(&tree, &[1, 2, 3]), tree.stats().held), (2, 0));
    check(&tree);
}

#[test]
fn a_very_long_prompt_needs_no_stack() {
    let mut tree = Tree::new(Policy::Pgdsf, 100_000);
    let long = vec![5; BLOCK * 100_000];
    assert_eq!(tree.insert(&offer(&long, COST), Ok::<_, Infallible>).unwrap().blocks, 100_000);
    let hold = tree.find("", &long, long.len());
    assert_eq!(hold.tokens(), long.len());
    tree.release(hold);
    insert(&mut tree, &[6], COST);
    assert_eq!(tree.stats().evicted, 1);
}

#[derive(Clone, Debug)]
struct Prompt {
    salt: &'static str,
    ids: Vec<u32>,
}

#[derive(Clone, Debug)]
enum Step {
    Find { prompt: Prompt, limit: usize },
    Release(prop::sample::Index),
    Insert { prompt: Prompt, tokens: usize, reused: usize, bytes: u64, millis: u64, fails_at: usize },
}

fn prompt() -> impl Strategy<Value = Prompt> {
    (prop::sample::select(vec!["", "a"]), prop::collection::vec(0u32..3, 0..6), 0..BLOCK).prop_map(
        |(salt, blocks, tail)| {
            let mut ids = ids(&blocks);
            ids.extend(std::iter::repeat_n(1, tail));
            Prompt { salt, ids }
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let tokens = || prop_oneof![Just(usize::MAX), 0..6 * BLOCK];
    let find = (prompt(), tokens()).prop_map(|(prompt, limit)| Step::Find { prompt, limit });
    let insert = (prompt(), tokens(), 0..4 * BLOCK, 0u64..4, 0u64..50, 0usize..12).prop_map(
        |(prompt, tokens, reused, bytes, millis, fails_at)| Step::Insert {
            prompt,
            tokens,
            reused,
            bytes,
            millis,
            fails_at,
        },
    );
    prop_oneof![3 => find, 2 => any::<prop::sample::Index>().prop_map(Step::Release), 4 => insert]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_history_gives_what_the_naive_model_gives(
        pgdsf in any::<bool>(),
        budget in 0u64..24,
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let policy = if pgdsf { Policy::Pgdsf } else { Policy::Lru };
        let mut tree = Tree::new(policy, budget);
        let mut model = Model::new(policy, budget);
        let mut holds: Vec<(Hold, Payload)> = Vec::new();
        for step in steps {
            match step {
                Step::Find { prompt, limit } => {
                    let hold = tree.find(prompt.salt, &prompt.ids, limit);
                    let expected = model.find(prompt.salt, &prompt.ids, limit);
                    prop_assert_eq!(hold.tokens(), expected.1.len());
                    let payloads: Vec<&Payload> = tree.payloads(&hold).collect();
                    prop_assert_eq!(payloads.len(), expected.1.len() / BLOCK);
                    for (index, payload) in payloads.into_iter().enumerate() {
                        prop_assert_eq!(payload.0, prompt.salt);
                        prop_assert_eq!(&payload.1[..], &prompt.ids[..(index + 1) * BLOCK]);
                    }
                    holds.push((hold, expected));
                }
                Step::Release(index) => {
                    if !holds.is_empty() {
                        let (hold, key) = holds.swap_remove(index.index(holds.len()));
                        tree.release(hold);
                        model.release(&key);
                    }
                }
                Step::Insert { prompt, tokens, reused, bytes, millis, fails_at } => {
                    let cost = Cost { prefill: Duration::from_millis(millis), new_tokens: 7 };
                    let Prompt { salt, ids } = &prompt;
                    let offer = Offer { salt, ids, tokens, reused, bytes_per_block: bytes, cost };
                    let inserted = tree.insert(&offer, |index| {
                        let key = (prompt.salt, prompt.ids[..(index + 1) * BLOCK].to_vec());
                        if index < fails_at { Ok(key) } else { Err(()) }
                    });
                    let expected = model.insert(prompt.salt, &offer, fails_at);
                    prop_assert_eq!(inserted, expected);
                }
            }
            check(&tree);
            prop_assert_eq!(tree.stats().blocks, model.cached.len() as u64);
            prop_assert_eq!(tree.stats().bytes, model.bytes());
            for (salt, ids) in model.cached.keys() {
                prop_assert_eq!(tree.walk(salt, ids).len() * BLOCK, ids.len());
            }
            // What is held is there still.
            for (hold, (salt, ids)) in &holds {
                prop_assert_eq!(&tree.walk(salt, ids), &hold.path);
            }
        }
        for (hold, _) in holds {
            tree.release(hold);
        }
        prop_assert_eq!(tree.stats().held, 0);
        prop_assert_eq!(tree.stats().held_bytes, 0);
        check(&tree);
    }
}
