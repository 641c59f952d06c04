//! Scores an answer against the accepted ones, as the benchmarks do it. Knows no tasks and cuts no output at a newline.
//!
//! Invariant: a score is in 0..=1, and 0 for an empty answer.

mod f1;
mod rouge;

use serde::{Deserialize, Serialize};

/// How an answer is scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// 1 if one of the answers occurs in the output, in any case.
    Contains,
    /// Share of the answers that occur in the output, in any case (RULER's string match).
    Recall,
    /// F1 over words, the best of the answers (LongBench `qa_f1`).
    QaF1,
    /// F1 over the words of a Chinese segmenter, the best of the answers (LongBench `qa_f1_zh`).
    QaF1Zh,
    /// F1 of the longest common subsequence of words, the best of the answers (LongBench `rouge-l`).
    RougeL,
    /// 1 if the output is one of the answers; only white space may differ.
    Exact,
}

/// The score of `prediction`, 0..=1; 0 when there is no answer to compare with.
pub(crate) fn score(metric: Metric, prediction: &str, answers: &[String]) -> f64 {
    match metric {
        Metric::Contains => best(prediction, answers, contains),
        Metric::Recall => recall(prediction, answers),
        Metric::QaF1 => best(prediction, answers, f1::words),
        Metric::QaF1Zh => best(prediction, answers, f1::chinese),
        Metric::RougeL => best(prediction, answers, rouge::rouge_l),
        Metric::Exact => best(prediction, answers, exact),
    }
}

fn best(prediction: &str, answers: &[String], score: impl Fn(&str, &str) -> f64) -> f64 {
    answers.iter().map(|answer| score(prediction, answer)).fold(0.0, f64::max)
}

fn contains(prediction: &str, answer: &str) -> f64 {
    let found = !answer.is_empty() && prediction.to_lowercase().contains(&answer.to_lowercase());
    f64::from(u8::from(found))
}

fn exact(prediction: &str, answer: &str) -> f64 {
    let same = !answer.is_empty() && prediction.split_whitespace().eq(answer.split_whitespace());
    f64::from(u8::from(same))
}

/// Control characters become newlines first: a reference does not match across them.
fn recall(prediction: &str, answers: &[String]) -> f64 {
    if answers.is_empty() {
        return 0.0;
    }
    let plain: String = prediction.trim().chars().map(|char| if char < ' ' { '\n' } else { char }).collect();
    let found: f64 = answers.iter().map(|answer| contains(&plain, answer)).sum();
    found / answers.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(metric: Metric, prediction: &str, answers: &[&str]) -> f64 {
        let answers: Vec<String> = answers.iter().map(|&answer| answer.to_owned()).collect();
        let score = score(metric, prediction, &answers);
        assert!((0.0..=1.0).contains(&score), "{metric:?} of {prediction:?} is {score}");
        score
    }

    fn near(left: f64, right: f64) {
        assert!((left - right).abs() < 1e-12, "{left} is not {right}");
    }

    #[test]
    fn contains_takes_any_answer_in_any_case() {
        near(of(Metric::Contains, "It is in MAREN, I think.", &["Hesterfold", "maren"]), 1.0);
        near(of(Metric::Contains, "It is in Mar en.", &["Maren"]), 0.0);
        near(of(Metric::Contains, "", &["Maren"]), 0.0);
        near(of(Metric::Contains, "anything", &[""]), 0.0);
        near(of(Metric::Contains, "anything", &[]), 0.0);
    }

    #[test]
    fn exact_ignores_white_space_only() {
        near(of(Metric::Exact, "  The  tower\nis here. ", &["x", "The tower is here."]), 1.0);
        near(of(Metric::Exact, "the tower is here.", &["The tower is here."]), 0.0);
        near(of(Metric::Exact, "The tower is here", &["The tower is here."]), 0.0);
        near(of(Metric::Exact, " ", &[""]), 0.0);
    }

    #[test]
    fn recall_is_the_share_of_references_found() {
        let four = ["1234567", "7654321", "Blue-Otter", "0f8e7c2a-1b3d-4e5f-8a9b-0c1d2e3f4a5b"];
        let said = " 1234567, blue-otter and 0F8E7C2A-1B3D-4E5F-8A9B-0C1D2E3F4A5B.";
        near(of(Metric::Recall, said, &four), 0.75);
        near(of(Metric::Recall, "", &four), 0.0);
        near(of(Metric::Recall, "123\u{b}4567", &["1234567"]), 0.0);
        near(of(Metric::Recall, "blue\tsky", &["blue\nsky"]), 1.0);
        // The same number twice in the references counts twice, as in the benchmark.
        near(of(Metric::Recall, "1234567", &["1234567", "1234567", "7654321"]), 2.0 / 3.0);
        near(of(Metric::Recall, "x", &[]), 0.0);
    }

    #[test]
    fn english_f1_drops_case_punctuation_and_articles() {
        near(of(Metric::QaF1, "The Eiffel Tower!", &["eiffel tower"]), 1.0);
        // Words: in paris france | paris. Overlap 1, precision 1/3, recall 1.
        near(of(Metric::QaF1, "In Paris, France", &["Paris"]), 0.5);
        // Punctuation vanishes without a space: "U.S." is "us", "well-known" is "wellknown".
        near(of(Metric::QaF1, "U.S.", &["us"]), 1.0);
        near(of(Metric::QaF1, "well known", &["well-known"]), 0.0);
        // An article is found behind a quotation mark that is no ASCII punctuation, and inside no word.
        near(of(Metric::QaF1, "“the theory”", &["“ theory”"]), 1.0);
        near(of(Metric::QaF1, "another", &["other"]), 0.0);
    }

    #[test]
    fn english_f1_counts_repeats_as_a_multiset() {
        // Prediction: no no no (3), gold: no no yes (3): overlap 2, F1 = 2/3.
        near(of(Metric::QaF1, "no no no", &["no no yes"]), 2.0 / 3.0);
        // Overlap 1 of 4 and of 1: 2 · 0.25 · 1 / 1.25.
        near(of(Metric::QaF1, "red red red red", &["red"]), 0.4);
        near(of(Metric::QaF1, "", &["red"]), 0.0);
        near(of(Metric::QaF1, "the a an", &["the"]), 0.0);
        near(of(Metric::QaF1, "blue", &["red", "blue sky", "blue"]), 1.0);
    }

    #[test]
    fn chinese_f1_counts_words_of_the_segmenter() {
        near(of(Metric::QaF1Zh, "北京。", &["北京"]), 1.0);
        // 我 来到 北京 清华大学 | 清华大学: overlap 1, precision 1/4, recall 1.
        near(of(Metric::QaF1Zh, "我来到北京清华大学。", &["清华大学"]), 0.4);
        // Nothing shared, and nothing said.
        near(of(Metric::QaF1Zh, "上海", &["北京"]), 0.0);
        near(of(Metric::QaF1Zh, "", &["北京"]), 0.0);
        near(of(Metric::QaF1Zh, "，。！", &["。"]), 0.0);
        // Repeats: 北京 twice against once: overlap 1, precision 1/2, recall 1.
        near(of(Metric::QaF1Zh, "北京，北京", &["北京"]), 2.0 / 3.0);
        // Latin letters: lower case, and full-width marks are dropped.
        near(of(Metric::QaF1Zh, "（ABC）", &["abc"]), 1.0);
    }

    #[test]
    fn rouge_l_follows_the_longest_common_subsequence() {
        // police the gunman | police killed the gunman: LCS 3, precision 1, recall 3/4.
        near(of(Metric::RougeL, "police the gunman", &["police killed the gunman"]), 6.0 / 7.0);
        // Another order: LCS "the gunman" (2) of 4 and of 4.
        near(of(Metric::RougeL, "the gunman killed police", &["police killed the gunman"]), 0.5);
        near(of(Metric::RougeL, "a a a", &["a"]), 0.5);
        near(of(Metric::RougeL, "A", &["a"]), 0.0);
        near(of(Metric::RougeL, "", &["a"]), 0.0);
        near(of(Metric::RougeL, "x", &["y", "x"]), 1.0);
    }
}
