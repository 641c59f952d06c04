//! What a prompt of each kind tells and asks: the facts it needs, false trails of the same form, the question, the answer.
//!
//! Places nothing. Invariant: the facts alone decide the answer, and no false trail contradicts them.

use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::super::random::{distinct, pick};
use super::filler::capitalized;
use super::{Kind, world};
use crate::eval::score::Metric;

/// Numbers that name one thing among others.
const KEY_DIGITS: u32 = 7;
/// Numbers of which one thing has several.
const ITEM_DIGITS: u32 = 5;
/// Values of a key in `multivalue`, and events asked for in `ordering`.
const SEVERAL: usize = 3;

/// One prompt before it is laid out in chunks.
pub(super) struct Story {
    /// Each goes into a chunk of its own.
    pub(super) facts: Vec<String>,
    /// The facts stand in the text in the order that they have here.
    pub(super) in_order: bool,
    /// Facts of the same form about others; as many as there is room for are told.
    pub(super) trails: Vec<String>,
    pub(super) question: String,
    pub(super) answer_prefix: String,
    pub(super) gold: String,
    pub(super) answers: Vec<String>,
    pub(super) metric: Metric,
    pub(super) max_tokens: u32,
}

/// A story of `kind` with about `trails` false trails.
pub(super) fn tell(kind: Kind, rng: &mut ChaCha8Rng, trails: usize) -> Story {
    let mut story = match kind {
        Kind::Hop => two_hops(rng, trails, true),
        Kind::Hop2 => two_hops(rng, trails, false),
        Kind::Needle => needle(rng),
        Kind::Multikey => multikey(rng, trails),
        Kind::Multivalue => multivalue(rng, trails),
        Kind::Ordering => ordering(rng, trails),
    };
    story.trails.shuffle(rng);
    story
}

/// How a person stands to a thing: the fact, and the word for that person.
const ROLES: &[(&str, &str)] = &[
    ("The {thing} belongs to {person}.", "owner"),
    ("The {thing} was made by {person}.", "maker"),
    ("The {thing} was restored by {person}.", "restorer"),
    ("The {thing} was found by {person}.", "finder"),
    ("The {thing} is looked after by {person}.", "keeper"),
];

/// How a person stands to a town: as a statement, and the two halves of a question.
const TIES: &[(&str, &str, &str)] = &[
    ("lives in", "does", "live"),
    ("was born in", "was", "born"),
    ("went to school in", "did", "go to school"),
    ("runs a bakery in", "does", "run a bakery"),
];

/// Thing to person, person to town. The person is the bridge; `named` has the answer's start say who it is.
fn two_hops(rng: &mut ChaCha8Rng, trails: usize, named: bool) -> Story {
    let (told, role) = pick(rng, ROLES);
    let (tie, verb, rest) = pick(rng, TIES);
    let others = trails.div_ceil(2);
    let people = world::people(rng, others + 1);
    let things = world::things(rng, others + 1);
    let about_thing = |thing: &str, person: &str| told.replace("{thing}", thing).replace("{person}", person);
    let about_person = |person: &str, town: &str| format!("{person} {tie} {town}.");

    let (person, thing) = (&people[0], &things[0]);
    let town = world::town(rng);
    let mut told_of_others = Vec::new();
    for (other, owned) in people.iter().zip(&things).skip(1) {
        told_of_others.push(about_thing(owned, other));
        told_of_others.push(about_person(other, world::town_but(rng, town)));
    }
    let answer_prefix = if named {
        format!("The {role} of the {thing} is {person}, who {tie}")
    } else {
        format!("The {role} of the {thing} {tie}")
    };
    Story {
        facts: vec![about_thing(thing, person), about_person(person, town)],
        in_order: false,
        trails: told_of_others,
        question: format!("In which town {verb} the {role} of the {thing} {rest}?"),
        answer_prefix,
        gold: format!(" {town}."),
        answers: vec![town.to_owned()],
        metric: Metric::Contains,
        max_tokens: 24,
    }
}

/// One number in plain filler.
fn needle(rng: &mut ChaCha8Rng) -> Story {
    let things = world::things(rng, 1);
    let thing = &things[0];
    let number = world::numbers(rng, KEY_DIGITS, 1)[0];
    let (what, how) = pick(
        rng,
        &[("code", "engraved in"), ("number", "painted on"), ("number", "stamped on"), ("code", "hidden in")],
    );
    Story {
        facts: vec![format!("The {what} {how} the {thing} is {number}.")],
        in_order: false,
        trails: Vec::new(),
        question: format!("Which {what} is {how} the {thing}?"),
        answer_prefix: format!("The {what} {how} the {thing} is"),
        gold: format!(" {number}."),
        answers: vec![number.to_string()],
        metric: Metric::Contains,
        max_tokens: 24,
    }
}

/// One number of one person among those of others.
fn multikey(rng: &mut ChaCha8Rng, trails: usize) -> Story {
    let people = world::people(rng, trails + 1);
    let numbers = world::numbers(rng, KEY_DIGITS, people.len());
    let what = pick(rng, &["account number", "license number", "locker code", "membership number", "safe combination"]);
    let fact = |person: &str, number: u32| format!("The {what} of {person} is {number}.");
    let (person, number) = (&people[0], numbers[0]);
    let trails = people.iter().zip(&numbers).skip(1).map(|(person, &number)| fact(person, number)).collect();
    Story {
        facts: vec![fact(person, number)],
        in_order: false,
        trails,
        question: format!("What is the {what} of {person}?"),
        answer_prefix: format!("The {what} of {person} is"),
        gold: format!(" {number}."),
        answers: vec![number.to_string()],
        metric: Metric::Contains,
        max_tokens: 24,
    }
}

/// Several numbers of one person, in the order of the text, among those of others.
fn multivalue(rng: &mut ChaCha8Rng, trails: usize) -> Story {
    let others = trails.div_ceil(SEVERAL);
    let people = world::people(rng, others + 1);
    let numbers = world::numbers(rng, ITEM_DIGITS, SEVERAL * people.len());
    let (verb, base, what) = pick(
        rng,
        &[
            ("sent", "send", "crate"),
            ("bought", "buy", "ticket"),
            ("signed", "sign", "receipt"),
            ("repaired", "repair", "engine"),
        ],
    );
    let fact = |person: &str, number: u32| format!("{person} {verb} {what} {number}.");
    let mut told = people.iter().zip(numbers.chunks(SEVERAL));
    let (person, own) = told.next().map_or((String::new(), Vec::new()), |(person, own)| (person.clone(), own.to_vec()));
    let trails = told.flat_map(|(person, numbers)| numbers.iter().map(|&number| fact(person, number))).collect();
    let answers: Vec<String> = own.iter().map(u32::to_string).collect();
    Story {
        facts: own.iter().map(|&number| fact(&person, number)).collect(),
        in_order: true,
        trails,
        question: format!(
            "Which three {what}s did {person} {base}? Give their numbers in the order in which the passages tell of them."
        ),
        answer_prefix: format!("{person} {verb} the {what}s"),
        gold: format!(" {}.", listed(&answers, "and")),
        answers,
        metric: Metric::Recall,
        max_tokens: 40,
    }
}

/// Three events with their years: which was first, or all from first to last.
fn ordering(rng: &mut ChaCha8Rng, trails: usize) -> Story {
    let events = world::events(rng, trails + SEVERAL);
    let years: Vec<usize> = distinct(rng, 300, events.len()).into_iter().map(|year| 1600 + year).collect();
    let (form, how) = pick(
        rng,
        &[
            ("took place in", "did these take place"),
            ("is dated to", "are these dated"),
            ("fell in the year", "did these fall"),
        ],
    );
    let fact = |event: &str, year: usize| capitalized(&format!("{event} {form} {year}."));
    // More events than years: the last ones are left out.
    let dated: Vec<(&str, usize)> = events.iter().map(String::as_str).zip(years).collect();
    let (asked, others) = dated.split_at(SEVERAL.min(dated.len()));
    let mut by_year = asked.to_vec();
    by_year.sort_by_key(|&(_, year)| year);
    let names = |list: &[(&str, usize)]| list.iter().map(|&(event, _)| event.to_owned()).collect::<Vec<_>>();
    let (asked_names, sorted_names) = (names(asked), names(&by_year));

    let (question, answer_prefix, answer) = if rng.random_bool(0.5) {
        let question = format!("Which came first: {}?", listed(&asked_names, "or"));
        (question, "The one that came first was".to_owned(), sorted_names[0].clone())
    } else {
        let question = format!("In which order {how}, the earliest first: {}?", listed(&asked_names, "and"));
        (question, "From the earliest to the latest:".to_owned(), listed(&sorted_names, "and"))
    };
    Story {
        facts: asked.iter().map(|&(event, year)| fact(event, year)).collect(),
        in_order: false,
        trails: others.iter().map(|&(event, year)| fact(event, year)).collect(),
        question,
        answer_prefix,
        gold: format!(" {answer}."),
        answers: vec![answer],
        metric: Metric::Contains,
        max_tokens: 64,
    }
}

/// `a, b and c`, with another word for `and` if wanted.
fn listed(items: &[String], and: &str) -> String {
    match items.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, before)) => format!("{} {and} {last}", before.join(", ")),
        None => String::new(),
    }
}
