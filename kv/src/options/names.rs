//! Options that are a name out of a few. The names are those of the wire and the command line.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// An enum with a name for each case: `ALL`, `name`, `Display` and `FromStr`.
macro_rules! names {
    ($(#[$docs:meta])* $type:ident, $what:literal, $known:literal, $first:ident = $first_name:literal: $first_doc:literal
     $(, $case:ident = $name:literal: $doc:literal)* $(,)?) => {
        $(#[$docs])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $type {
            #[doc = $first_doc]
            #[default]
            #[serde(rename = $first_name)]
            $first,
            $(#[doc = $doc] #[serde(rename = $name)] $case,)*
        }

        impl $type {
            /// Every case.
            pub const ALL: &[Self] = &[Self::$first $(, Self::$case)*];

            /// The wire and command-line name.
            pub const fn name(self) -> &'static str {
                match self {
                    Self::$first => $first_name,
                    $(Self::$case => $name,)*
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = Error;

            fn from_str(name: &str) -> Result<Self, Error> {
                let unknown = || Error::UnknownName { what: $what, got: name.to_owned(), known: $known };
                Self::ALL.iter().copied().find(|case| case.name() == name).ok_or_else(unknown)
            }
        }
    };
}

names!(
    /// How a prompt's KV comes about. The first is the default.
    Strategy, "strategy", "clip, full, prefix, direct, ape, lego, blend, craft, guided",
    Clip = "clip": "An auxiliary model picks the rows to recompute (CacheClip, arXiv 2510.10129).",
    Full = "full": "Plain causal prefill of every token; exact.",
    Prefix = "prefix": "What earlier prompts began with is reused, the rest computed; exact (RadixAttention, RAGCache).",
    Direct = "direct": "Every chunk as cached, nothing recomputed but the question (PromptCache, arXiv 2311.04934).",
    Ape = "ape": "Chunks side by side at the same positions, two-part attention (APE, arXiv 2502.05431).",
    Lego = "lego": "The first tokens of each chunk but the first are recomputed (EPIC's LegoLink, arXiv 2410.15332).",
    Blend = "blend": "Tokens whose fresh KV deviates most from the cached are recomputed (CacheBlend, arXiv 2405.16444).",
    Craft = "craft": "Chunks captured in the context of earlier prompts, repaired as far as that context differs (Cache-Craft, \
                      arXiv 2502.15734).",
    Guided = "guided": "The question's own rows over the cached KV pick what is recomputed (ProphetKV, InfoFlow, FusionRAG).",
);

names!(
    /// What the ratio counts.
    Budget, "budget", "charged, nominal",
    Charged = "charged": "N is the tokens that may be selected (chunk 1 left out when it is exact); k is the largest for which \
                          the rows after grouping and remap are at most round(ratio·N).",
    Nominal = "nominal": "The paper: k = round(ratio·N) scored tokens before grouping, chunk 1 included.",
);

names!(
    /// Over which keys an auxiliary score is normalized.
    Softmax, "softmax", "chunk, joint",
    Chunk = "chunk": "Each chunk with its own prefix and question (the paper).",
    Joint = "joint": "One distribution over all chunks' tokens.",
);

names!(
    /// How attention of several rows and heads becomes one score a token.
    Reduce, "reduce", "mean, max",
    Mean = "mean": "Mean over rows and heads (CacheClip).",
    Max = "max": "Greatest over rows and heads (QCFuse).",
);

names!(
    /// Which keys a recomputed row sees.
    Mask, "mask", "right, bottom-right",
    Right = "right": "The keys up to its own slot.",
    BottomRight = "bottom-right": "Wrong, to reproduce others' figures: row i of m sees all but the last m−1−i keys, future ones \
                                   included, as a mask aligned to the bottom right gives (CacheBlend's public code).",
);

names!(
    /// Which CacheBlend.
    BlendMode, "blend", "paper, code",
    Paper = "paper": "Gradual filtering: from layer 1 on, each layer keeps the rows whose K and V deviate most.",
    Code = "code": "The public code: one selection at layer 1, by the deviation of V.",
);

names!(
    /// What the question's rows see when `guided` asks them.
    Guide, "guide", "context, question",
    Context = "context": "The cached KV of all chunks (ProphetKV, InfoFlow).",
    Question = "question": "Only themselves; their last layer's queries meet the chunks' last-layer keys (FusionRAG).",
);

names!(
    /// Which exponent the two-part attention puts on the context's mass.
    ScaleForm, "context_form", "paper, code",
    Paper = "paper": "S, as in the paper's pseudo-code.",
    Code = "code": "S·T, as in the public code.",
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_survives_its_text_and_errors_list_them_all() {
        for &strategy in Strategy::ALL {
            assert_eq!(strategy.to_string().parse(), Ok(strategy));
            let error = "magic".parse::<Strategy>().unwrap_err().to_string();
            assert!(error.contains(strategy.name()), "{error}");
        }
        for &mask in Mask::ALL {
            assert_eq!(mask.to_string().parse(), Ok(mask));
        }
    }
}
