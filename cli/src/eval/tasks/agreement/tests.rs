use std::collections::HashSet;

use super::super::testing::Words;
use super::*;
use crate::eval::score::{Metric, score};

const SEED: u64 = 20_261_130;

fn many() -> Vec<Sample> {
    println!("seed {SEED}");
    let setup = Setup { samples: 300, seed: SEED, tokens: 1000, chunk_tokens: 150, ..Setup::default() };
    generate(&setup, &Words).unwrap()
}

/// Sentences with the chunk they stand in.
fn sentences(sample: &Sample) -> Vec<(usize, String)> {
    let mut all = Vec::new();
    for (chunk, text) in sample.chunks.iter().enumerate() {
        all.extend(text.trim_end().trim_end_matches('.').split(". ").map(|sentence| (chunk, sentence.to_owned())));
    }
    all
}

/// The one sentence that `matches`.
fn only(sample: &Sample, matches: impl Fn(&str) -> bool) -> (usize, String) {
    let mut found: Vec<_> = sentences(sample).into_iter().filter(|(_, sentence)| matches(sentence)).collect();
    assert_eq!(found.len(), 1, "{}: {found:?}", sample.id);
    found.remove(0)
}

fn last_words(sentence: &str, amount: usize) -> String {
    let words: Vec<&str> = sentence.split(' ').collect();
    words[words.len() - amount..].join(" ")
}

/// Follows the facts in the text from the question to the answers; also gives the chunks that were needed.
fn derive(sample: &Sample) -> (Vec<String>, Vec<usize>) {
    let question = &sample.question;
    let between = |from: &str, to: &str| {
        let after = question.split_once(from).unwrap().1;
        after.rsplit_once(to).map_or(after, |(before, _)| before).to_owned()
    };
    match sample.task.as_str() {
        "hop" | "hop2" => {
            let thing: Vec<&str> = question.split(" of the ").nth(1).unwrap().split(' ').collect();
            let named = |sentence: &str| {
                let starts = sentence.strip_prefix(&format!("The {} {}", thing[0], thing[1]));
                starts.is_some() && sentence.split(' ').count() > 4
            };
            let (first, told) = only(sample, |sentence| {
                // The thing may have three words; its verb tells where it ends.
                named(sentence) && question.contains(&sentence_thing(sentence))
            });
            let person = last_words(&told, 2);
            let (second, home) = only(sample, |sentence| sentence.starts_with(&format!("{person} ")));
            let town = home.split(" in ").last().unwrap().to_owned();
            assert_eq!(sample.answer_prefix.contains(&person), sample.task == "hop", "{}", sample.answer_prefix);
            (vec![town], vec![first, second])
        }
        "needle" => {
            let (chunk, told) = only(sample, |sentence| sentence.contains(|char: char| char.is_ascii_digit()));
            assert!(told.starts_with(&sample.answer_prefix));
            (vec![last_words(&told, 1)], vec![chunk])
        }
        "multikey" => {
            let (chunk, told) = only(sample, |sentence| sentence.starts_with(&sample.answer_prefix));
            (vec![last_words(&told, 1)], vec![chunk])
        }
        "multivalue" => {
            let person = between(" did ", " ").split(' ').take(2).collect::<Vec<_>>().join(" ");
            let mut told = sentences(sample);
            told.retain(|(_, sentence)| sentence.starts_with(&format!("{person} ")));
            told.into_iter().map(|(chunk, sentence)| (last_words(&sentence, 1), chunk)).unzip()
        }
        "ordering" => {
            let events = between(": ", "?").replace(" or ", ", ").replace(" and ", ", ");
            let mut dated: Vec<(String, &str, usize)> = Vec::new();
            for event in events.split(", ") {
                let start = format!("{} ", filler::capitalized(event));
                let (chunk, told) = only(sample, |sentence| sentence.starts_with(&start));
                dated.push((last_words(&told, 1), event, chunk));
            }
            dated.sort();
            let names: Vec<&str> = dated.iter().map(|(_, event, _)| *event).collect();
            let answer = match question.contains("first: ") && question.starts_with("Which") {
                true => names[0].to_owned(),
                false => format!("{}, {} and {}", names[0], names[1], names[2]),
            };
            (vec![answer], dated.iter().map(|(_, _, chunk)| *chunk).collect())
        }
        other => panic!("{other}"),
    }
}

/// The thing that a sentence such as `The brass lantern belongs to …` is about.
fn sentence_thing(sentence: &str) -> String {
    let ends = [" belongs ", " was ", " is "].into_iter().filter_map(|verb| sentence.find(verb)).min();
    ends.map_or_else(String::new, |end| format!("of the {} ", &sentence["The ".len()..end]))
}

#[test]
fn the_answer_follows_from_facts_in_different_chunks() {
    for sample in many() {
        let (answers, chunks) = derive(&sample);
        assert_eq!(answers, sample.answers, "{}", sample.id);
        assert_eq!(chunks.iter().collect::<HashSet<_>>().len(), chunks.len(), "{}: {chunks:?}", sample.id);
    }
}

#[test]
fn gold_scores_full_marks_and_nothing_scores_none() {
    for sample in many() {
        assert!(sample.gold.starts_with(' ') && sample.gold.ends_with('.'), "{}", sample.gold);
        assert!((score(sample.metric, &sample.gold, &sample.answers) - 1.0).abs() < 1e-12, "{}", sample.id);
        assert!(score(sample.metric, "", &sample.answers) < 1e-12);
        assert!((Words.tokens(&sample.gold) as u32) < sample.max_tokens);
        assert!(matches!(sample.metric, Metric::Contains | Metric::Recall));
    }
}

#[test]
fn three_hundred_prompts_are_distinct_and_so_are_their_chunks() {
    let samples = many();
    let ids: HashSet<_> = samples.iter().map(|sample| &sample.id).collect();
    let prompts: HashSet<_> = samples.iter().map(|sample| (&sample.chunks, &sample.question)).collect();
    assert_eq!((ids.len(), prompts.len()), (300, 300));
    for kind in Kind::ALL {
        let of_kind = samples.iter().filter(|sample| sample.task == kind.name()).count();
        assert_eq!(of_kind, 50);
    }
    let chunks: HashSet<_> = samples.iter().flat_map(|sample| &sample.chunks).collect();
    assert_eq!(chunks.len(), samples.iter().map(|sample| sample.chunks.len()).sum::<usize>());
}

#[test]
fn false_trails_abound() {
    for sample in many() {
        let digits = |sentence: &str| sentence.contains(|char: char| char.is_ascii_digit());
        let numbered = sentences(&sample).iter().filter(|(_, sentence)| digits(sentence)).count();
        match sample.task.as_str() {
            "hop" | "hop2" => {
                let people = sentences(&sample).iter().filter(|(_, sentence)| is_tie(sentence)).count();
                assert!(people >= 4, "{}: {people}", sample.id);
            }
            "needle" => assert_eq!(numbered, 1),
            _ => assert!(numbered >= 7, "{}: {numbered}", sample.id),
        }
    }
}

fn is_tie(sentence: &str) -> bool {
    [" lives in ", " was born in ", " went to school in ", " runs a bakery in "]
        .iter()
        .any(|tie| sentence.contains(tie))
}

#[test]
fn prompts_and_chunks_keep_to_their_sizes() {
    for sample in many() {
        assert_eq!(sample.intro, None);
        let mut total = 40 + Words.tokens(&sample.question) + Words.tokens(&sample.answer_prefix);
        for chunk in &sample.chunks {
            let tokens = Words.tokens(chunk);
            assert!((120..=150).contains(&tokens), "{}: a chunk of {tokens}", sample.id);
            assert!(chunk.ends_with(".\n"));
            total += tokens;
        }
        assert!((750..=1000).contains(&total), "{}: {total} tokens", sample.id);
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_whatever_else_is_asked_for() {
    let of = |setup: Setup<'_>| generate(&setup, &Words).unwrap();
    let setup = Setup { samples: 24, seed: 7, ..Setup::default() };
    let all = of(setup);
    assert_eq!(all, of(setup));
    assert_ne!(all, of(Setup { seed: 8, ..setup }));
    let one = of(Setup { kinds: &[Kind::Multivalue], samples: 4, ..setup });
    let same: Vec<Sample> = all.into_iter().filter(|sample| sample.task == "multivalue").collect();
    assert_eq!(one, same);
}

#[test]
fn long_prompts_have_names_enough() {
    let setup = Setup { samples: 6, tokens: 40_000, chunk_tokens: 1000, ..Setup::default() };
    let samples = generate(&setup, &Words).unwrap();
    assert!(samples.iter().all(|sample| sample.chunks.len() == 39));
}

#[test]
fn what_cannot_be_generated_is_refused_with_what_to_do() {
    let refused = |kinds: &[Kind], samples, tokens, chunk_tokens| {
        let setup = Setup { kinds, samples, tokens, chunk_tokens, ..Setup::default() };
        let error = generate(&setup, &Words).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 64);
        error.to_string()
    };
    assert!(refused(&Kind::ALL, 0, 1300, 200).contains("zero samples"));
    assert!(refused(&[], 5, 1300, 200).contains("zero samples"));
    assert!(refused(&Kind::ALL, 5, 1300, 20).contains("chunks of 20 tokens"));
    assert!(refused(&[Kind::Ordering], 5, 500, 200).contains("500 tokens are too few for ordering-0"));
    let unknown = Kind::read(&["hop".to_owned(), "hop3".to_owned()]).unwrap_err().to_string();
    assert!(unknown.contains("\"hop3\"") && unknown.contains("multivalue, ordering"), "{unknown}");
    assert_eq!(Kind::read(&["hop2".to_owned(), "hop2".to_owned()]).unwrap(), [Kind::Hop2]);
    assert_eq!(Kind::read(&[]).unwrap(), Kind::ALL);
}
