use std::collections::HashSet;

use super::super::testing::Words;
use super::*;
use crate::eval::score::score;

const SEED: u64 = 42;
const LENGTHS: [usize; 2] = [2048, 4096];

fn setup(essay: &Essay, length: usize, samples: usize) -> Setup<'_> {
    Setup { length, samples, seed: SEED, ..Setup::published(essay) }
}

fn shipped() -> Essay {
    essay(None).unwrap()
}

/// What the benchmark's table says of each task: haystack, key, value, keys in the text, values of a key, keys asked.
const TABLE: [(&str, &str, &str, &str, usize, usize, usize); 8] = [
    ("single_1", "noise", "words", "numbers", 1, 1, 1),
    ("single_2", "essay", "words", "numbers", 1, 1, 1),
    ("single_3", "essay", "words", "uuids", 1, 1, 1),
    ("multikey_1", "essay", "words", "numbers", 4, 1, 1),
    ("multikey_2", "needles", "words", "numbers", 1, 1, 1),
    ("multikey_3", "needles", "uuids", "uuids", 1, 1, 1),
    ("multivalue", "essay", "words", "numbers", 1, 4, 1),
    ("multiquery", "essay", "words", "numbers", 4, 1, 4),
];

/// Chunks without their overlap, joined.
fn context(sample: &Sample, overlap: usize) -> String {
    let mut text = String::new();
    for (index, chunk) in sample.chunks.iter().enumerate() {
        let shared: String = Words.cut(chunk, overlap, 0).swap_remove(0);
        text.push_str(if index == 0 { chunk } else { &chunk[shared.len()..] });
    }
    text
}

/// Key and value of every needle, in the order of the text.
fn needles(context: &str, values: &str) -> Vec<(String, String)> {
    let start = format!("One of the special magic {values} for ");
    let mut found = Vec::new();
    for after in context.split(&start).skip(1) {
        let (key, rest) = after.split_once(" is ").unwrap();
        let (value, _) = rest.split_once('.').unwrap();
        found.push((key.to_owned(), value.to_owned()));
    }
    found
}

fn is_of(kind: &str, text: &str) -> bool {
    match kind {
        "numbers" => text.parse().is_ok_and(|number: u32| (1_000_000..=9_999_999).contains(&number)),
        "words" => text
            .split_once('-')
            .is_some_and(|(adjective, noun)| words::ADJECTIVES.contains(&adjective) && words::NOUNS.contains(&noun)),
        "uuids" => uuid_version(text) == Some(4),
        other => panic!("{other}"),
    }
}

/// Version of a lower-case uuid of the right form and variant.
fn uuid_version(text: &str) -> Option<u32> {
    let groups: Vec<usize> = text.split('-').map(str::len).collect();
    let hex = text.chars().all(|char| char == '-' || char.is_ascii_digit() || ('a'..='f').contains(&char));
    let variant = matches!(text.chars().nth(19)?, '8' | '9' | 'a' | 'b');
    (groups == [8, 4, 4, 4, 12] && hex && variant).then(|| text.chars().nth(14)?.to_digit(16))?
}

#[test]
fn every_field_is_as_the_benchmark_says() {
    let essay = shipped();
    for length in LENGTHS {
        for (task, row) in Task::ALL.into_iter().zip(TABLE) {
            let (name, haystack, key, value, keys, values, asked) = row;
            assert_eq!(task.name(), name);
            let setup = setup(&essay, length, 3);
            for (index, sample) in generate(task, &setup, &Words).unwrap().into_iter().enumerate() {
                let at = format!("{name} at {length}, prompt {index}");
                assert_eq!(sample.id, format!("{name}-{length}-{index}"));
                assert_eq!((sample.task.as_str(), sample.max_tokens, sample.metric), (name, 128, Metric::Recall));
                assert!(!sample.stop_at_newline && sample.system.is_none());

                let context = context(&sample, setup.overlap);
                let told = needles(&context, value);
                check_haystack(haystack, &context, &told, keys * values, &at);
                assert!(told.iter().all(|(told_key, told)| is_of(key, told_key) && is_of(value, told)), "{at}");
                let distinct: HashSet<_> = told.iter().map(|(told_key, _)| told_key).collect();
                assert_eq!(distinct.len(), told.len() / values, "{at}");

                assert_eq!(sample.answers.len(), asked * values, "{at}");
                let query: Vec<&String> = asked_keys(&told, &sample);
                assert_eq!(query.len(), asked, "{at}");
                let expected: HashSet<_> =
                    told.iter().filter(|(told_key, _)| query.contains(&told_key)).map(|(_, told)| told).collect();
                assert_eq!(expected, sample.answers.iter().collect(), "{at}");
                check_words(&sample, value, &query, &at);
                assert!((score(sample.metric, &sample.gold, &sample.answers) - 1.0).abs() < 1e-12, "{at}");
            }
        }
    }
}

/// Keys that the question names, in the order of the question.
fn asked_keys<'a>(told: &'a [(String, String)], sample: &Sample) -> Vec<&'a String> {
    let unique: HashSet<&String> = told.iter().map(|(key, _)| key).collect();
    let mut named: Vec<&String> = unique.into_iter().filter(|key| sample.question.contains(key.as_str())).collect();
    named.sort_by_key(|key| sample.question.find(key.as_str()));
    named
}

fn check_haystack(haystack: &str, context: &str, told: &[(String, String)], hidden: usize, at: &str) {
    let lines: Vec<&str> = context.split('\n').collect();
    match haystack {
        "noise" => {
            assert_eq!(told.len(), hidden, "{at}");
            let noise = lines.iter().filter(|line| **line == haystack::NOISE).count();
            assert_eq!((noise + hidden, haystack::NOISE.matches('.').count()), (lines.len(), 5), "{at}");
        }
        "needles" => {
            assert_eq!(told.len(), lines.len(), "{at}");
            assert!(lines.iter().all(|line| line.starts_with("One of the special") && line.ends_with('.')), "{at}");
        }
        "essay" => {
            assert_eq!((told.len(), lines.len()), (hidden, 1), "{at}");
            assert!(!context.contains("  "), "{at}");
            let mut plain = context.to_owned();
            for (key, value) in told {
                let numbers = needle::sentence(Type::Numbers, key, value);
                let uuids = needle::sentence(Type::Uuids, key, value);
                let place = plain.find(&numbers).or_else(|| plain.find(&uuids)).unwrap();
                let (before, after) = (plain[..place].trim_end(), &plain[place..]);
                // The words may end in the middle of a sentence, and the deepest needle follows it.
                let last = after == numbers || after == uuids;
                let between = before.is_empty() || before.ends_with(['.', '?', '!', '"', '”', ':']);
                assert!(between || last, "{at}: {before}");
                plain = plain.replace(&numbers, "").replace(&uuids, "");
            }
            let words: Vec<&str> = plain.split_whitespace().collect();
            assert_eq!(words.join(" "), shipped().words(words.len()), "{at}");
        }
        other => panic!("{other}"),
    }
}

fn check_words(sample: &Sample, values: &str, query: &[&String], at: &str) {
    let intro = sample.intro.as_deref().unwrap();
    let one = values.strip_suffix('s').unwrap();
    let asked = match query {
        [key] => (*key).clone(),
        [first, second, third, fourth] => format!("{first}, {second}, {third}, and {fourth}"),
        other => panic!("{at}: {other:?}"),
    };
    let mentioned = format!("for {asked} mentioned in the text above");
    assert!(intro.ends_with('\n') && sample.question.starts_with('\n'), "{at}");
    if sample.answers.len() == 1 {
        assert!(intro.starts_with(&format!("A special magic {one} is ")), "{intro}");
        assert_eq!(sample.question, format!("\nWhat is the special magic {one} {mentioned}?"));
        assert_eq!(sample.answer_prefix, format!("The special magic {one} {mentioned} is"));
        return;
    }
    assert!(intro.starts_with(&format!("Some special magic {values} are ")), "{intro}");
    assert_eq!(sample.question, format!("\nWhat are all the special magic {values} {mentioned}?"));
    assert_eq!(sample.answer_prefix, format!("The special magic {values} {mentioned} are"));
}

#[test]
fn prompts_fill_the_length_and_never_pass_it() {
    let essay = shipped();
    for length in LENGTHS {
        for task in Task::ALL {
            let setup = setup(&essay, length, 4);
            let step = size::Fit { task, plan: task.plan(), setup: &setup, count: &Words }.step();
            for sample in generate(task, &setup, &Words).unwrap() {
                let context = context(&sample, setup.overlap);
                let text = format!("{}{context}{}", sample.intro.unwrap(), sample.question);
                let tokens = Words.tokens(&text) + Words.tokens(&sample.answer_prefix) + setup.overhead + 128;
                assert!(tokens <= length, "{}: {tokens}", sample.id);
                // A line of noise has twenty words, a needle ten.
                let spare = if task.plan().haystack == Haystack::Essay { step } else { 20 * step };
                assert!(tokens + spare >= length, "{}: {tokens}", sample.id);
            }
        }
    }
}

#[test]
fn chunks_keep_to_their_size() {
    let essay = shipped();
    let setup = Setup { chunk_tokens: 300, overlap: 20, ..setup(&essay, 4096, 1) };
    for task in Task::ALL {
        let sample = generate(task, &setup, &Words).unwrap().remove(0);
        assert!(sample.chunks.len() > 5);
        assert!(sample.chunks.iter().all(|chunk| Words.tokens(chunk) <= 300));
    }
}

#[test]
fn needle_order_is_the_same_in_all_prompts_of_a_seed() {
    let essay = shipped();
    let order = |seed, index| {
        let setup = Setup { seed, ..setup(&essay, 4096, index + 1) };
        let sample = generate(Task::Multivalue, &setup, &Words).unwrap().remove(index);
        let told = needles(&context(&sample, setup.overlap), "numbers");
        let place = |(_, value): &(String, String)| sample.answers.iter().position(|answer| answer == value).unwrap();
        told.iter().map(place).collect::<Vec<_>>()
    };
    assert_eq!(order(42, 0), order(42, 3));
    assert!((0..20).any(|seed| order(seed, 0) != order(42, 0)));
}

#[test]
fn the_same_seed_gives_the_same_bytes_whatever_else_is_asked_for() {
    let essay = shipped();
    let of = |seed, samples| {
        let setup = Setup { seed, ..setup(&essay, 2048, samples) };
        generate(Task::Multiquery, &setup, &Words).unwrap()
    };
    let three = of(1, 3);
    assert_eq!(three, of(1, 3));
    assert_eq!(three[..2], of(1, 2));
    assert_ne!(three, of(2, 3));
    assert_ne!(three[0].answers, three[1].answers);
}

#[test]
fn depths_are_forty_rounded_percentages() {
    let depths: Vec<usize> = (0..40).map(haystack::percent).collect();
    assert_eq!(depths[..6], [0, 3, 5, 8, 10, 13]);
    assert_eq!((depths[19], depths[20], depths[39]), (49, 51, 100));
    assert_eq!(depths.iter().collect::<HashSet<_>>().len(), 40);
}

#[test]
fn a_short_essay_repeats_and_a_needle_can_stand_first_and_last() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("essay.txt");
    std::fs::write(&file, "One  two\n three. ".repeat(200)).unwrap();
    let read = essay(Some(&file)).unwrap();
    assert_eq!(read.words(4), "One two three. One");
    assert_eq!(read.words(602).split(' ').count(), 602);
    let all: Vec<String> = (0..40).map(|number| format!("N{number}.")).collect();
    let text = haystack::into_text("One. Two.", &all, &mut random::generator(1, "depths"));
    assert!(text.starts_with("N0. ") && text.ends_with("N38. Two. N39."), "{text}");
}

#[test]
fn what_cannot_be_generated_is_refused_with_what_to_do() {
    let essay_text = shipped();
    let refused = |setup: Setup<'_>| {
        let error = generate(Task::Multikey3, &setup, &Words).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 64);
        error.to_string()
    };
    assert!(refused(setup(&essay_text, 4096, 0)).contains("zero samples"));
    assert!(refused(setup(&essay_text, 200, 1)).contains("200 tokens is too short for multikey_3, which needs about"));
    assert!(refused(Setup { overlap: 1000, ..setup(&essay_text, 4096, 1) }).contains("no less than the chunk of 1000"));
    let unknown = Task::read(&["single_4".to_owned()]).unwrap_err().to_string();
    assert!(unknown.contains("\"single_4\"") && unknown.contains("multikey_3, multivalue"), "{unknown}");
    assert_eq!(Task::read(&["niah_multikey_1".to_owned()]).unwrap(), [Task::Multikey1]);

    let folder = tempfile::tempdir().unwrap();
    let unreadable = |bytes: &[u8]| {
        let file = folder.path().join("hay.txt");
        std::fs::write(&file, bytes).unwrap();
        let error = essay(Some(&file)).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 65);
        error.to_string()
    };
    assert!(unreadable(b"").contains("hay.txt: 0 words are too few"));
    assert!(unreadable(b"too short").contains("2 words are too few"));
    assert!(unreadable(b"caf\xe9").contains("not UTF-8 at byte 3"));
    assert!(essay(Some(&folder.path().join("none.txt"))).unwrap_err().to_string().contains("none.txt"));
}
