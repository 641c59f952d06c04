//! Ranks a corpus's chunks against a question by BM25: a convenience for people without a retriever.
//!
//! Words are runs of letters and digits in lower case; there is no stemming and no list of stop words. Ties go to the
//! earlier chunk; chunks that share no word with the question come last, in order.

use bm25::{Embedder, EmbedderBuilder, Scorer};

struct Words;

impl bm25::Tokenizer for Words {
    fn tokenize(&self, text: &str) -> Vec<String> {
        text.split(|character: char| !character.is_alphanumeric())
            .filter(|word| !word.is_empty())
            .map(str::to_lowercase)
            .collect()
    }
}

/// An index over texts, which it does not keep.
pub(crate) struct Ranker {
    embedder: Embedder<u64, Words>,
    scorer: Scorer<usize, u64>,
    texts: usize,
}

impl Ranker {
    /// Reads every text once.
    pub(crate) fn new(texts: &[&str]) -> Self {
        let embedder = EmbedderBuilder::with_tokenizer_and_fit_to_corpus(Words, texts).build();
        let mut scorer = Scorer::new();
        for (index, text) in texts.iter().enumerate() {
            scorer.upsert(&index, embedder.embed(text));
        }
        Self { embedder, scorer, texts: texts.len() }
    }

    /// The `count` best texts, the best first.
    pub(crate) fn best(&self, question: &str, count: usize) -> Vec<usize> {
        let mut matches = self.scorer.matches(&self.embedder.embed(question));
        matches.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.id.cmp(&b.id)));
        let mut best: Vec<usize> = matches.into_iter().map(|scored| scored.id).take(count).collect();
        for index in 0..self.texts {
            if best.len() >= count {
                break;
            }
            if !best.contains(&index) {
                best.push(index);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_with_the_rare_words_comes_first_and_the_rest_in_order() {
        let texts = ["The mill grinds rye.", "The ferry leaves at nine.", "The tower clock is late."];
        let ranker = Ranker::new(&texts);
        assert_eq!(ranker.best("When does the FERRY leave?", 2)[0], 1);
        assert_eq!(ranker.best("xyz", 5), [0, 1, 2]);
        assert_eq!(ranker.best("the", 3), [0, 1, 2]);
        assert!(Ranker::new(&[]).best("the", 3).is_empty());
    }
}
