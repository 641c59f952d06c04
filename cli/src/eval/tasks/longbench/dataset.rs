//! The datasets that can be read: their output tokens, score and prompt. The wording is our own.

use crate::eval::score::Metric;
use crate::failure::usage;

/// One dataset.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Dataset {
    pub(super) name: &'static str,
    pub(super) max_tokens: u32,
    pub(super) metric: Metric,
    /// Holds `{context}` once, and `{input}`.
    pub(super) template: &'static str,
}

const PASSAGES: &str = "Answer the question from the passages below. Give only the answer and nothing else.\n\n\
    These are the passages.\n{context}\n\n\
    Answer the question from the passages above. Give only the answer and nothing else.\n\n\
    Question: {input}\nAnswer:";

const TEXT: &str = "Read the text below and answer the question after it in a few words.\n\n{context}\n\n\
    Now answer the question from the text above. Give only the answer and nothing else.\n\n\
    Question: {input}\nAnswer:";

const CHINESE_TEXT: &str = "请阅读下面的文字，并用中文简短地回答后面的问题。\n\n{context}\n\n\
    现在请根据上面的文章回答问题。只写出答案，不要写别的话。\n\n问题：{input}\n回答：";

const PAPER: &str = "Below is a scientific article, and after it a question. Answer as briefly as you can, with a phrase or a \
    sentence. If the article does not answer the question, write \"unanswerable\". If it is a yes/no question, write \"yes\", \
    \"no\" or \"unanswerable\". Explain nothing.\n\nArticle: {context}\n\n\
    Answer the question from the article above in the way described.\n\nQuestion: {input}\nAnswer:";

const STORY: &str = "Below is a story, a book or a script, and after it a question. Answer as briefly as you can, with a phrase \
    if that is enough. Explain nothing.\n\nStory: {context}\n\n\
    Now answer the question from the story above as briefly as you can.\n\nQuestion: {input}\nAnswer:";

/// Every dataset, in the order in which results are told.
pub(super) const ALL: &[Dataset] = &[
    Dataset { name: "hotpotqa", max_tokens: 32, metric: Metric::QaF1, template: PASSAGES },
    Dataset { name: "2wikimqa", max_tokens: 32, metric: Metric::QaF1, template: PASSAGES },
    Dataset { name: "musique", max_tokens: 32, metric: Metric::QaF1, template: PASSAGES },
    Dataset { name: "multifieldqa_en", max_tokens: 64, metric: Metric::QaF1, template: TEXT },
    Dataset { name: "multifieldqa_zh", max_tokens: 64, metric: Metric::QaF1Zh, template: CHINESE_TEXT },
    Dataset { name: "qasper", max_tokens: 128, metric: Metric::QaF1, template: PAPER },
    Dataset { name: "narrativeqa", max_tokens: 128, metric: Metric::QaF1, template: STORY },
];

/// The dataset with this name.
///
/// # Errors
/// A usage failure that lists the valid names.
pub(super) fn named(name: &str) -> anyhow::Result<&'static Dataset> {
    let found = ALL.iter().find(|dataset| dataset.name == name);
    found.ok_or_else(|| usage(format!("unknown dataset {name:?}; valid are {} and all", names())))
}

/// Every name, for a message.
pub(super) fn names() -> String {
    let names: Vec<&str> = ALL.iter().map(|dataset| dataset.name).collect();
    names.join(", ")
}
