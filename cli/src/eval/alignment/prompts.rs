//! The prompts of each length: generated, or made of the user's own documents. Lengths are tokens of the primary model.

use std::path::Path;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use crate::documents;
use crate::eval::tasks::{Count, Sample, agreement};
use crate::failure::{data, usage};

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    /// Unique and stable, such as `hop-3@1000`.
    pub(super) id: String,
    /// As asked.
    pub(super) length: u32,
    /// Its place among the prompts of the length.
    pub(super) number: u32,
    pub(super) chunks: Vec<String>,
    pub(super) question: String,
}

impl Prompt {
    /// Of the random numbers of a seed, those that are this prompt's.
    pub(super) fn stream(&self) -> u64 {
        u64::from(self.length) << 32 | u64::from(self.number)
    }
}

/// What the prompts are.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    /// Tokens of a whole prompt.
    pub(super) lengths: Vec<u32>,
    /// Prompts of each length.
    pub(super) samples: u32,
    pub(super) seed: u64,
    /// Each chunk, at most.
    pub(super) chunk_tokens: usize,
    /// What the chat template adds around chunks and question.
    pub(super) overhead: usize,
    /// Texts and question of the user; none takes generated prompts.
    pub(super) own: Option<Own>,
}

/// Texts and the question about them.
pub(super) type Own = (Vec<String>, String);

/// The texts of a .jsonl file and the question about them, checked.
pub(super) fn own(path: &Path, question: &str) -> anyhow::Result<Own> {
    if question.trim().is_empty() {
        return Err(data("the question is empty; give it with --question"));
    }
    Ok((documents::chunks(path)?, question.to_owned()))
}

/// Hexadecimal digest of texts and question.
pub(super) fn digest((texts, question): &Own) -> String {
    let mut digest = Sha256::new();
    for text in texts.iter().chain([question]) {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text);
    }
    digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// All prompts, length by length.
///
/// # Errors
/// A usage failure for a length too short for its facts, or more tokens than the documents have.
pub(super) fn all(setup: &Setup, count: &dyn Count) -> anyhow::Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    for &length in &setup.lengths {
        match &setup.own {
            Some((texts, question)) => prompts.extend(of_documents(length, texts, question, setup, count)?),
            None => prompts.extend(generated(length, setup, count)?),
        }
    }
    Ok(prompts)
}

fn generated(length: u32, setup: &Setup, count: &dyn Count) -> anyhow::Result<Vec<Prompt>> {
    let asked = agreement::Setup {
        samples: setup.samples as usize,
        seed: setup.seed,
        tokens: length as usize,
        chunk_tokens: setup.chunk_tokens,
        overhead: setup.overhead,
        ..agreement::Setup::default()
    };
    let samples = agreement::generate(&asked, count)?;
    let prompt = |(number, sample): (u32, Sample)| Prompt {
        id: format!("{}@{length}", sample.id),
        length,
        number,
        chunks: sample.chunks,
        question: sample.question,
    };
    Ok((0..).zip(samples).map(prompt).collect())
}

/// Each prompt takes the documents in another order until it is full; the last chunk is cut to fit.
fn of_documents(
    length: u32,
    texts: &[String],
    question: &str,
    setup: &Setup,
    count: &dyn Count,
) -> anyhow::Result<Vec<Prompt>> {
    let around = setup.overhead + count.tokens(question);
    let room = (length as usize).saturating_sub(around);
    if room == 0 {
        return Err(usage(format!("{length} tokens are too few: the question takes {around} with the template")));
    }
    let held: usize = texts.iter().map(|text| count.tokens(text)).sum();
    if held < room {
        let most = held + around;
        return Err(data(format!(
            "the documents have {held} tokens, enough for --lengths {most} but not for {length}"
        )));
    }
    let mut prompts = Vec::new();
    for number in 0..setup.samples {
        let mut rng = ChaCha8Rng::seed_from_u64(setup.seed);
        rng.set_stream(u64::from(number));
        let mut order: Vec<&String> = texts.iter().collect();
        order.shuffle(&mut rng);
        let chunks = fill(&order, room, setup.chunk_tokens, count);
        let id = format!("own-{number}@{length}");
        prompts.push(Prompt { id, length, number, chunks, question: question.to_owned() });
    }
    Ok(prompts)
}

/// Pieces of the texts in this order, `room` tokens in all, or all that there is.
fn fill(texts: &[&String], mut room: usize, chunk_tokens: usize, count: &dyn Count) -> Vec<String> {
    let mut chunks = Vec::new();
    for text in texts {
        for piece in count.cut(text, chunk_tokens, 0) {
            let tokens = count.tokens(&piece);
            if tokens > room {
                let fitting = count.cut(&piece, room, 0).into_iter().next();
                chunks.extend(fitting.filter(|text| !text.trim().is_empty()));
                return chunks;
            }
            if !piece.trim().is_empty() {
                room -= tokens;
                chunks.push(piece);
            }
            if room == 0 {
                return chunks;
            }
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token is a character.
    struct Characters;

    impl Count for Characters {
        fn tokens(&self, text: &str) -> usize {
            text.chars().count()
        }

        fn cut(&self, text: &str, chunk: usize, _overlap: usize) -> Vec<String> {
            let characters: Vec<char> = text.chars().collect();
            characters.chunks(chunk).map(|piece| piece.iter().collect()).collect()
        }
    }

    fn setup(lengths: &[u32], samples: u32) -> Setup {
        let own = Some((vec!["a".repeat(30), "b".repeat(25), "c".repeat(10)], "why?".to_owned()));
        Setup { lengths: lengths.to_vec(), samples, seed: 3, chunk_tokens: 20, overhead: 40, own }
    }

    #[test]
    fn own_documents_fill_each_length_in_changing_orders() {
        // 44 of 94 tokens are the template and the question.
        let prompts = all(&setup(&[74, 94], 8), &Characters).unwrap();
        assert_eq!(prompts.len(), 16);
        for prompt in &prompts {
            let tokens: usize = prompt.chunks.iter().map(String::len).sum();
            assert_eq!(tokens + 44, prompt.length as usize, "{prompt:?}");
            assert!(prompt.chunks.iter().all(|chunk| (1..=20).contains(&chunk.len())), "{prompt:?}");
        }
        let firsts = |letter: &str| prompts.iter().filter(|prompt| prompt.chunks[0].starts_with(letter)).count();
        assert!(["a", "b", "c"].into_iter().filter(|letter| firsts(letter) > 0).count() > 1, "seed 3 keeps one order");
        assert_eq!(prompts, all(&setup(&[74, 94], 8), &Characters).unwrap());
    }

    #[test]
    fn what_cannot_be_filled_is_one_line() {
        let fails = |setup: &Setup, part: &str| {
            let error = all(setup, &Characters).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        fails(&setup(&[110], 1), "the documents have 65 tokens, enough for --lengths 109 but not for 110");
        fails(&setup(&[44], 1), "too few");
    }
}
