//! F1 over words, English and Chinese (LongBench, arXiv:2308.14508, `qa_f1` and `qa_f1_zh`). One answer at a time.

use std::collections::HashMap;
use std::sync::LazyLock;

use jieba_rs::Jieba;

/// The dictionary takes a moment to load, and only Chinese tasks need it.
static SEGMENTER: LazyLock<Jieba> = LazyLock::new(Jieba::new);

/// Marks that LongBench drops from Chinese beside the ASCII ones and the full-width forms of those. Its list has `》` and no `《`.
const CHINESE_MARKS: &str = "｟｠｡｢｣､、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏";

/// F1 over words: lower case, no ASCII punctuation, no articles.
pub(super) fn words(prediction: &str, answer: &str) -> f64 {
    f1(&english(prediction), &english(answer))
}

/// F1 over the segmenter's words: lower case, no punctuation.
pub(super) fn chinese(prediction: &str, answer: &str) -> f64 {
    f1(&segments(prediction), &segments(answer))
}

fn f1(prediction: &[String], answer: &[String]) -> f64 {
    let mut left: HashMap<&str, usize> = HashMap::new();
    for word in answer {
        *left.entry(word).or_default() += 1;
    }
    let mut common = 0_usize;
    for word in prediction {
        if let Some(count) = left.get_mut(word.as_str())
            && *count > 0
        {
            *count -= 1;
            common += 1;
        }
    }
    if common == 0 {
        return 0.0;
    }
    let precision = common as f64 / prediction.len() as f64;
    let recall = common as f64 / answer.len() as f64;
    2.0 * precision * recall / (precision + recall)
}

fn english(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let plain: String = lower.chars().filter(|char| !char.is_ascii_punctuation()).collect();
    without_articles(&plain).split_whitespace().map(str::to_owned).collect()
}

/// Puts a space for each article that stands as a word of its own. A word ends where letters and digits end, so one in
/// typographic quotation marks is found too.
fn without_articles(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut word = String::new();
    for char in text.chars() {
        if char.is_alphanumeric() || char == '_' {
            word.push(char);
            continue;
        }
        keep(&mut kept, &mut word);
        kept.push(char);
    }
    keep(&mut kept, &mut word);
    kept
}

fn keep(kept: &mut String, word: &mut String) {
    kept.push_str(if matches!(word.as_str(), "a" | "an" | "the") { " " } else { word });
    word.clear();
}

fn segments(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    for token in SEGMENTER.cut(text, true) {
        let lower = token.word.to_lowercase();
        let word: String = lower.chars().filter(|&char| !char.is_whitespace() && !is_mark(char)).collect();
        if !word.is_empty() {
            words.push(word);
        }
    }
    words
}

fn is_mark(char: char) -> bool {
    char.is_ascii_punctuation() || is_full_width_mark(char) || CHINESE_MARKS.contains(char)
}

/// The full-width forms of ASCII stand 0xfee0 above it.
fn is_full_width_mark(char: char) -> bool {
    let narrow = (char as u32).checked_sub(0xfee0).and_then(char::from_u32);
    narrow.is_some_and(|narrow| narrow.is_ascii_punctuation())
}
