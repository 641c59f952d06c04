//! Names of the little world that the generated facts are about. None of them occurs in the filler.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::super::random::{distinct, pick};

#[rustfmt::skip] // one word a line would be pages
const FIRST: &[&str] = &[
    "Adela", "Alwin", "Anneke", "Arvid", "Beata", "Bertil", "Bruna", "Caspar", "Celia", "Clemens", "Corin", "Dagny", "Delia",
    "Dorian", "Edda", "Egon", "Elske", "Emeric", "Esme", "Fabian", "Fenna", "Florian", "Frida", "Gerda", "Gideon", "Greta",
    "Hanno", "Hedda", "Hester", "Ignaz", "Ilka", "Ingmar", "Isolde", "Ivo", "Jarl", "Jocasta", "Jorun", "Kasimir", "Katrin",
    "Klara", "Lambert", "Leonie", "Linus", "Lorna", "Magnus", "Maren", "Matthis", "Mirela", "Nadine", "Nestor", "Odile",
    "Oskar", "Paulina", "Perrin", "Quentin", "Ragna", "Roland", "Rosalind", "Selma", "Silvan", "Tamsin", "Theodor", "Ulrike",
    "Valentin", "Wanda", "Wendel", "Yvette", "Zacharias",
];

#[rustfmt::skip] // one word a line would be pages
const LAST: &[&str] = &[
    "Abbott", "Alder", "Amsel", "Barlow", "Bexley", "Blythe", "Brandt", "Calder", "Carrow", "Coyle", "Dace", "Dunmore",
    "Eckhart", "Ellery", "Fairfax", "Falk", "Fenwick", "Garrick", "Gale", "Grimaldi", "Hallam", "Hartog", "Holt", "Hurst",
    "Imhoff", "Jarrow", "Jessop", "Keller", "Kendrick", "Kirkby", "Lamb", "Larsson", "Lindqvist", "Lovell", "Marlow", "Mertens",
    "Moray", "Nairn", "Newcombe", "Norling", "Oakes", "Orchard", "Osgood", "Pascoe", "Pettifer", "Quill", "Radley", "Rask",
    "Rooke", "Sandoval", "Sayer", "Selwyn", "Tarrant", "Thorne", "Tolliver", "Underhill", "Vance", "Verhoeven", "Vickers",
    "Wadham", "Westrup", "Winslow", "Yardley", "Zeller",
];

#[rustfmt::skip] // one word a line would be pages
const TOWNS: &[&str] = &[
    "Alderwick", "Amberly", "Ashmoor", "Barrowden", "Bellmarsh", "Birkholm", "Bramblehurst", "Brightwater", "Carrickmoor",
    "Chalkstead", "Cindermouth", "Cold Harbor", "Copperfold", "Cranbeck", "Dovermere", "Dunhollow", "Eastmarch", "Elderfen",
    "Falconridge", "Ferncombe", "Flintgate", "Foxley", "Gallowmere", "Glenhaven", "Goldcroft", "Greywick", "Hagthorpe",
    "Harrowby", "Hawksmouth", "Hollowbridge", "Inverlyn", "Ironbeck", "Jasperton", "Kelmarsh", "Kestrelford", "Kingsbarrow",
    "Lambsgate", "Larkhill", "Linden Cross", "Lowmoor", "Maplestead", "Marlhaven", "Millbrook", "Nettlecombe", "Northwold",
    "Oakhanger", "Ottersby", "Pebblecove", "Pinefell", "Quarrington", "Ravenstoke", "Redcastle", "Rookhope", "Saltersby",
    "Silverdale", "Stonebury", "Swanmere", "Tarnside", "Thistleton", "Umberleigh", "Violet Hill", "Wexcombe", "Willowford",
    "Yewbarrow",
];

#[rustfmt::skip] // one word a line would be pages
const MATERIALS: &[&str] = &[
    "amber", "birch", "brass", "bronze", "cedar", "cherrywood", "chrome", "copper", "crystal", "ebony", "enamel", "glass",
    "golden", "granite", "ivory", "iron", "jade", "lacquered", "leather", "maple", "marble", "oak", "pewter", "porcelain",
    "rosewood", "silk", "silver", "slate", "steel", "tin", "velvet", "walnut",
];

#[rustfmt::skip] // one word a line would be pages
const THINGS: &[&str] = &[
    "abacus", "accordion", "anchor", "armchair", "barometer", "bell", "bird cage", "bookend", "bracelet", "brooch",
    "candlestick", "cello", "chess set", "cigar box", "clarinet", "clock", "compass", "cradle", "dagger", "doll house",
    "drum", "fan", "flute", "fountain pen", "globe", "goblet", "hand mirror", "harp", "hourglass", "inkwell", "jewel box",
    "kettle", "key ring", "lantern", "letter opener", "locket", "mandolin", "mask", "medal", "metronome", "music box",
    "necklace", "nutcracker", "paperweight", "pepper mill", "picture frame", "pocket watch", "puppet", "quill case",
    "rocking horse", "saddle", "sewing box", "ship model", "snuffbox", "spinning top", "spyglass", "statuette", "sundial",
    "teapot", "telescope", "thimble", "tray", "umbrella stand", "vase", "violin", "walking stick", "weather vane", "writing desk",
];

#[rustfmt::skip] // one word a line would be pages
const EVENTS: &[&str] = &[
    "fire at the mill", "flood in the market square", "opening of the bridge", "strike of the bakers", "theft of the church bell",
    "founding of the library", "collapse of the water tower", "visit of the circus", "great hailstorm", "election of the first mayor",
    "laying of the tramway", "closing of the quarry", "regatta", "plague of locusts", "rebuilding of the town hall",
    "landslide", "festival of lanterns", "discovery of the spring", "wreck of the coal barge", "planting of the avenue",
    "trial of the forger", "arrival of the railway", "earthquake", "sale of the castle",
];

/// `amount` people, each full name once.
pub(super) fn people(rng: &mut ChaCha8Rng, amount: usize) -> Vec<String> {
    pairs(rng, FIRST, LAST, amount).into_iter().map(|(first, last)| format!("{first} {last}")).collect()
}

/// `amount` things such as `brass lantern`, each once.
pub(super) fn things(rng: &mut ChaCha8Rng, amount: usize) -> Vec<String> {
    pairs(rng, MATERIALS, THINGS, amount).into_iter().map(|(material, thing)| format!("{material} {thing}")).collect()
}

/// `amount` events with their article, such as `the Ashmoor fire at the mill`, each once.
pub(super) fn events(rng: &mut ChaCha8Rng, amount: usize) -> Vec<String> {
    pairs(rng, EVENTS, TOWNS, amount).into_iter().map(|(event, town)| format!("the {town} {event}")).collect()
}

/// One town.
pub(super) fn town(rng: &mut ChaCha8Rng) -> &'static str {
    pick(rng, TOWNS)
}

/// One town that is not `other`.
pub(super) fn town_but(rng: &mut ChaCha8Rng, other: &str) -> &'static str {
    let towns: Vec<&'static str> = TOWNS.iter().copied().filter(|&town| town != other).collect();
    pick(rng, &towns)
}

/// `amount` distinct numbers of `digits` digits, 1 to 9; none of them contains another.
pub(super) fn numbers(rng: &mut ChaCha8Rng, digits: u32, amount: usize) -> Vec<u32> {
    let smallest = 10_u32.pow(digits - 1);
    let mut numbers = Vec::with_capacity(amount);
    while numbers.len() < amount {
        let number = rng.random_range(smallest..smallest * 10);
        if !numbers.contains(&number) {
            numbers.push(number);
        }
    }
    numbers
}

/// `amount` distinct combinations; fewer only when there are no more.
fn pairs(
    rng: &mut ChaCha8Rng,
    left: &'static [&'static str],
    right: &'static [&'static str],
    amount: usize,
) -> Vec<(&'static str, &'static str)> {
    let chosen = distinct(rng, left.len() * right.len(), amount);
    chosen.into_iter().map(|index| (left[index / right.len()], right[index % right.len()])).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::eval::tasks::random::generator;

    #[test]
    fn every_list_is_long_enough_and_has_no_name_twice() {
        for list in [FIRST, LAST, TOWNS, THINGS] {
            assert!(list.len() >= 60, "{} starts a list of {}", list[0], list.len());
        }
        for list in [FIRST, LAST, TOWNS, THINGS, MATERIALS, EVENTS] {
            assert_eq!(list.iter().collect::<HashSet<_>>().len(), list.len(), "{} starts a list with repeats", list[0]);
        }
    }

    #[test]
    fn what_is_drawn_is_distinct() {
        let mut rng = generator(1, "world");
        let people = people(&mut rng, 1000);
        assert_eq!(people.iter().collect::<HashSet<_>>().len(), 1000);
        let numbers = numbers(&mut rng, 7, 500);
        assert!(numbers.iter().all(|number| (1_000_000..10_000_000).contains(number)));
        assert_eq!(numbers.iter().collect::<HashSet<_>>().len(), 500);
        assert!((0..500).all(|_| town_but(&mut rng, "Ashmoor") != "Ashmoor"));
    }
}
