//! Wire messages ⇄ domain types. Input is checked here, once, where it enters; a refused value is named by its field.

use kvsplice_kv as kv;
use kvsplice_kv::receipt::{ChunkReceipt, Models, Source, Span, TokenCounts};
use kvsplice_kv::{ChunkId, ModelDigest, RowRanges, Variant};

use crate::v1;

/// What is wrong with a message.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A value that its type refuses; the message names it.
    #[error(transparent)]
    Value(#[from] kv::Error),
    /// A value of a field whose type does not know the field's name.
    #[error("{field}: {source}")]
    Field {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        #[source]
        source: kv::Error,
    },
    /// A field that must be set is not.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A field's value is outside its range.
    #[error("{field} must be {expected}, got {got}")]
    Range {
        /// The field.
        field: &'static str,
        /// The valid range in words.
        expected: &'static str,
        /// The value as given.
        got: String,
    },
}

impl From<Error> for tonic::Status {
    fn from(error: Error) -> Self {
        tonic::Status::invalid_argument(error.to_string())
    }
}

fn parse<T: std::str::FromStr<Err = kv::Error>>(field: &'static str, text: &str) -> Result<T, Error> {
    text.parse().map_err(|source| Error::Field { field, source })
}

/// A hexadecimal chunk id.
pub fn chunk_id(field: &'static str, text: &str) -> Result<ChunkId, Error> {
    parse(field, text)
}

/// A hexadecimal model digest.
pub fn model_digest(field: &'static str, text: &str) -> Result<ModelDigest, Error> {
    parse(field, text)
}

/// A variant such as `bf16-clean-1`.
pub fn variant(field: &'static str, text: &str) -> Result<Variant, Error> {
    parse(field, text)
}

/// The part of a layer that a frame carries.
pub fn part(frame: &v1::Frame) -> Result<kv::Part, Error> {
    match v1::frame::Part::try_from(frame.part) {
        Ok(v1::frame::Part::Keys) => Ok(kv::Part::Keys),
        Ok(v1::frame::Part::KeyScales) => Ok(kv::Part::KeyScales),
        Ok(v1::frame::Part::Values) => Ok(kv::Part::Values),
        Ok(v1::frame::Part::ValueScales) => Ok(kv::Part::ValueScales),
        Err(_) => Err(Error::Range { field: "part", expected: "in 0..=3", got: frame.part.to_string() }),
    }
}

/// The part of a layer on the wire.
pub fn wire_part(part: kv::Part) -> v1::frame::Part {
    match part {
        kv::Part::Keys => v1::frame::Part::Keys,
        kv::Part::KeyScales => v1::frame::Part::KeyScales,
        kv::Part::Values => v1::frame::Part::Values,
        kv::Part::ValueScales => v1::frame::Part::ValueScales,
    }
}

/// A submessage that must be there.
pub fn required<T>(field: &'static str, value: Option<T>) -> Result<T, Error> {
    value.ok_or(Error::Missing { field })
}

/// Options, or the defaults when there are none.
pub fn options(options: Option<v1::Options>) -> Result<kv::Options, Error> {
    options.unwrap_or_default().try_into()
}

/// Sampling, or the defaults when there is none.
pub fn sampling(sampling: Option<v1::Sampling>) -> Result<kv::Sampling, Error> {
    sampling.unwrap_or_default().try_into()
}

impl TryFrom<v1::Options> for kv::Options {
    type Error = Error;

    fn try_from(wire: v1::Options) -> Result<Self, Error> {
        let strategy = wire.strategy.as_deref().map(str::parse).transpose()?.unwrap_or_default();
        let mut options = kv::Options::of(strategy);
        macro_rules! set {
            ($($field:ident)*) => {$(
                if let Some(value) = &wire.$field {
                    options.set(stringify!($field), &value.to_string())?;
                }
            )*};
        }
        set!(ratio budget group softmax aux_layers reduce shared_prefix renumber mask first_tokens blend guide
             guide_layers context_temperature context_scale context_form early_stop alpha capture prefix_cache);
        options.validate()?;
        Ok(options)
    }
}

impl From<kv::Options> for v1::Options {
    fn from(options: kv::Options) -> Self {
        let mut wire = Self { strategy: Some(options.strategy.to_string()), ..Self::default() };
        for (name, text) in options.entries() {
            macro_rules! put {
                (text $($field:ident)*, parsed $($number:ident)*) => {
                    match name {
                        $(stringify!($field) => wire.$field = Some(text),)*
                        // The text is the value's own; it reads back.
                        $(stringify!($number) => wire.$number = text.parse().ok(),)*
                        _ => {}
                    }
                };
            }
            put!(text budget group softmax aux_layers reduce mask blend guide guide_layers context_form early_stop,
                 parsed ratio shared_prefix renumber first_tokens context_temperature context_scale alpha capture
                 prefix_cache);
        }
        wire
    }
}

impl TryFrom<v1::Sampling> for kv::Sampling {
    type Error = Error;

    fn try_from(wire: v1::Sampling) -> Result<Self, Error> {
        let default = kv::Sampling::default();
        let sampling = kv::Sampling {
            max_tokens: wire.max_tokens.unwrap_or(default.max_tokens),
            temperature: wire.temperature.unwrap_or(default.temperature),
            top_p: wire.top_p.unwrap_or(default.top_p),
            top_k: wire.top_k.unwrap_or(default.top_k),
            seed: wire.seed.unwrap_or(default.seed),
            stop: wire.stop,
            ignore_eos: wire.ignore_eos.unwrap_or(default.ignore_eos),
        };
        sampling.validate()?;
        Ok(sampling)
    }
}

impl From<kv::Sampling> for v1::Sampling {
    fn from(sampling: kv::Sampling) -> Self {
        Self {
            max_tokens: Some(sampling.max_tokens),
            temperature: Some(sampling.temperature),
            top_p: Some(sampling.top_p),
            top_k: Some(sampling.top_k),
            seed: Some(sampling.seed),
            stop: sampling.stop,
            ignore_eos: Some(sampling.ignore_eos),
        }
    }
}

/// Rows from ranges that must be ascending, disjoint and not empty.
pub fn rows(ranges: &[v1::Range]) -> Result<RowRanges, Error> {
    let mut end = 0;
    for range in ranges {
        if range.first < end || range.end <= range.first {
            return Err(Error::Range {
                field: "ranges",
                expected: "ascending, disjoint and not empty",
                got: format!("{}..{} after {end}", range.first, range.end),
            });
        }
        end = range.end;
    }
    Ok(RowRanges::from_ranges(ranges.iter().map(|range| range.first..range.end)))
}

/// Rows as ranges.
pub fn ranges(rows: &RowRanges) -> Vec<v1::Range> {
    rows.ranges().iter().map(|range| v1::Range { first: range.start, end: range.end }).collect()
}

const SOURCES: [Source; 6] =
    [Source::Device, Source::Memory, Source::Disk, Source::Object, Source::Repaired, Source::Fresh];

/// A source by its name.
pub fn source(name: &str) -> Result<Source, Error> {
    let found = SOURCES.into_iter().find(|source| source.name() == name);
    found.ok_or_else(|| Error::Range {
        field: "source",
        expected: "device, memory, disk, object, repaired or fresh",
        got: format!("{name:?}"),
    })
}

impl TryFrom<v1::ChunkReceipt> for ChunkReceipt {
    type Error = Error;

    fn try_from(wire: v1::ChunkReceipt) -> Result<Self, Error> {
        Ok(Self {
            id: chunk_id("chunk receipt id", &wire.id)?,
            tokens: wire.tokens,
            rows: wire.rows,
            source: source(&wire.source)?,
            reason: wire.reason,
            bytes: wire.bytes,
        })
    }
}

impl From<ChunkReceipt> for v1::ChunkReceipt {
    fn from(chunk: ChunkReceipt) -> Self {
        Self {
            id: chunk.id.to_string(),
            tokens: chunk.tokens,
            rows: chunk.rows,
            source: chunk.source.name().to_owned(),
            reason: chunk.reason,
            bytes: chunk.bytes,
        }
    }
}

impl From<v1::TokenCounts> for TokenCounts {
    fn from(wire: v1::TokenCounts) -> Self {
        Self {
            prefix: wire.prefix,
            chunk: wire.chunk,
            question: wire.question,
            reused_exact: wire.reused_exact,
            reused_approximate: wire.reused_approximate,
            recomputed: wire.recomputed,
            output: wire.output,
        }
    }
}

impl From<TokenCounts> for v1::TokenCounts {
    fn from(tokens: TokenCounts) -> Self {
        Self {
            prefix: tokens.prefix,
            chunk: tokens.chunk,
            question: tokens.question,
            reused_exact: tokens.reused_exact,
            reused_approximate: tokens.reused_approximate,
            recomputed: tokens.recomputed,
            output: tokens.output,
        }
    }
}

impl From<v1::Span> for Span {
    fn from(wire: v1::Span) -> Self {
        Self { stage: wire.stage, start_ms: wire.start_ms, end_ms: wire.end_ms }
    }
}

impl From<Span> for v1::Span {
    fn from(span: Span) -> Self {
        Self { stage: span.stage, start_ms: span.start_ms, end_ms: span.end_ms }
    }
}

impl TryFrom<v1::Receipt> for kv::Receipt {
    type Error = Error;

    fn try_from(wire: v1::Receipt) -> Result<Self, Error> {
        let auxiliary = match wire.auxiliary.as_str() {
            "" => None,
            text => Some(model_digest("auxiliary", text)?),
        };
        Ok(Self {
            request_id: wire.request_id,
            requested: required("requested", wire.requested)?.try_into()?,
            effective: parse("effective", &wire.effective)?,
            effective_reason: wire.effective_reason,
            ratio_nominal: wire.ratio_nominal,
            ratio_charged: wire.ratio_charged,
            chunks: wire.chunks.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            auxiliary_source: wire.auxiliary_source,
            tokens: required("tokens", wire.tokens)?.into(),
            spans: wire.spans.into_iter().map(Into::into).collect(),
            models: Models { primary: model_digest("primary", &wire.primary)?, auxiliary },
            finish: wire.finish,
        })
    }
}

impl From<kv::Receipt> for v1::Receipt {
    fn from(receipt: kv::Receipt) -> Self {
        Self {
            request_id: receipt.request_id,
            requested: Some(receipt.requested.into()),
            effective: receipt.effective.to_string(),
            effective_reason: receipt.effective_reason,
            ratio_nominal: receipt.ratio_nominal,
            ratio_charged: receipt.ratio_charged,
            chunks: receipt.chunks.into_iter().map(Into::into).collect(),
            auxiliary_source: receipt.auxiliary_source,
            tokens: Some(receipt.tokens.into()),
            spans: receipt.spans.into_iter().map(Into::into).collect(),
            primary: receipt.models.primary.to_string(),
            auxiliary: receipt.models.auxiliary.map(|digest| digest.to_string()).unwrap_or_default(),
            finish: receipt.finish,
        }
    }
}

#[cfg(test)]
mod tests {
    use kvsplice_kv::Strategy;

    use super::*;

    #[test]
    fn options_survive_the_wire_and_unset_fields_take_their_defaults() {
        for &strategy in Strategy::ALL {
            let options = kv::Options::of(strategy);
            assert_eq!(kv::Options::try_from(v1::Options::from(options)).unwrap(), options);
        }
        let options: kv::Options =
            "clip:0.35:budget=nominal:group=none:softmax=joint:aux_layers=0.2..0.8:reduce=max:mask=bottom-right"
                .parse()
                .unwrap();
        assert_eq!(kv::Options::try_from(v1::Options::from(options)).unwrap(), options);
        let options: kv::Options = "direct:shared_prefix=false:renumber=false:context_temperature=0.9".parse().unwrap();
        assert_eq!(kv::Options::try_from(v1::Options::from(options)).unwrap(), options);
        assert_eq!(super::options(None).unwrap(), kv::Options::default());
        assert_eq!(super::sampling(None).unwrap(), kv::Sampling::default());
    }

    #[test]
    fn a_bad_option_is_refused_by_its_name() {
        type Change = fn(&mut v1::Options);
        let cases: [(&str, Change); 9] = [
            ("strategy", |o| o.strategy = Some("magic".into())),
            ("ratio", |o| o.ratio = Some(1.5)),
            ("ratio", |o| o.ratio = Some(f32::NAN)),
            ("budget", |o| o.budget = Some("free".into())),
            ("group", |o| o.group = Some("3,4".into())),
            ("softmax", |o| o.softmax = Some(String::new())),
            ("aux_layers", |o| o.aux_layers = Some("0.9..0.1".into())),
            ("alpha", |o| o.alpha = Some(1.0)),
            ("renumber", |o| o.renumber = Some(false)),
        ];
        for (name, change) in cases {
            let mut wire = v1::Options::default();
            change(&mut wire);
            let status = tonic::Status::from(kv::Options::try_from(wire).unwrap_err());
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains(name), "{}", status.message());
        }
        let bad = v1::Sampling { temperature: Some(f32::NAN), ..Default::default() };
        assert!(kv::Sampling::try_from(bad).unwrap_err().to_string().contains("temperature"));
    }

    #[test]
    fn a_receipt_survives_the_wire() {
        let receipt = kv::Receipt {
            request_id: "r".into(),
            requested: kv::Options::default(),
            effective: Strategy::Full,
            effective_reason: "every chunk was fresh".into(),
            ratio_nominal: 0.2,
            ratio_charged: 1.0,
            chunks: SOURCES
                .iter()
                .map(|&source| ChunkReceipt {
                    id: ChunkId::from_bytes([3; 32]),
                    tokens: 9,
                    rows: 2,
                    source,
                    reason: "missing".into(),
                    bytes: 77,
                })
                .collect(),
            auxiliary_source: "memory".into(),
            tokens: TokenCounts {
                prefix: 1,
                chunk: 2,
                question: 3,
                reused_exact: 4,
                reused_approximate: 5,
                recomputed: 6,
                output: 7,
            },
            spans: vec![Span { stage: "score".into(), start_ms: 0.5, end_ms: 1.5 }],
            models: Models { primary: ModelDigest::from_bytes([1; 32]), auxiliary: None },
            finish: "eos".into(),
        };
        assert_eq!(kv::Receipt::try_from(v1::Receipt::from(receipt.clone())).unwrap(), receipt);
        let mut wire = v1::Receipt::from(receipt);
        wire.primary = "12".into();
        assert!(kv::Receipt::try_from(wire).unwrap_err().to_string().starts_with("primary: "));
    }

    #[test]
    fn ranges_must_ascend() {
        let wire = |pairs: &[(u32, u32)]| -> Vec<v1::Range> {
            pairs.iter().map(|&(first, end)| v1::Range { first, end }).collect()
        };
        let good = rows(&wire(&[(1, 3), (5, 6)])).unwrap();
        assert_eq!(ranges(&good), wire(&[(1, 3), (5, 6)]));
        for bad in [&[(3, 3)][..], &[(5, 2)], &[(4, 6), (5, 7)], &[(4, 6), (1, 2)]] {
            assert!(rows(&wire(bad)).is_err(), "{bad:?}");
        }
    }
}
