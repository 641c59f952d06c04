//! ROUGE-L F1: the longest common subsequence over words (Lin 2004, §3.1, with beta 1, as LongBench reports it).

/// F1 of the longest common subsequence of the words between white space; case and punctuation count.
pub(super) fn rouge_l(prediction: &str, answer: &str) -> f64 {
    let prediction: Vec<&str> = prediction.split_whitespace().collect();
    let answer: Vec<&str> = answer.split_whitespace().collect();
    let common = longest_common(&prediction, &answer);
    if common == 0 {
        return 0.0;
    }
    let precision = common as f64 / prediction.len() as f64;
    let recall = common as f64 / answer.len() as f64;
    2.0 * precision * recall / (precision + recall)
}

/// One row of the usual table at a time: `lengths[j]` is the length for the first `j` words of `right`.
fn longest_common(left: &[&str], right: &[&str]) -> usize {
    let mut lengths = vec![0_usize; right.len() + 1];
    for word in left {
        let mut diagonal = 0;
        for (index, other) in right.iter().enumerate() {
            let above = lengths[index + 1];
            lengths[index + 1] = if word == other { diagonal + 1 } else { above.max(lengths[index]) };
            diagonal = above;
        }
    }
    lengths[right.len()]
}
