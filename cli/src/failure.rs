//! What went wrong, as the exit code and the one line that a user sees.

use tonic::{Code, Status};

/// The kind of a failure; its number is the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Wrong usage or configuration.
    Usage = 64,
    /// Bad input: a document, a prompt, an unknown corpus.
    Data = 65,
    /// A server cannot be reached or refuses.
    Unavailable = 69,
    /// Everything else.
    Internal = 70,
    /// Ctrl-C.
    #[cfg(feature = "client")]
    Interrupted = 130,
}

/// A failure that says what the user can do.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    kind: Kind,
    message: String,
}

impl Failure {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
    Failure::new(Kind::Usage, message).into()
}

pub(crate) fn unavailable(message: impl Into<String>) -> anyhow::Error {
    Failure::new(Kind::Unavailable, message).into()
}

#[cfg(feature = "client")]
pub(crate) fn data(message: impl Into<String>) -> anyhow::Error {
    Failure::new(Kind::Data, message).into()
}

#[cfg(feature = "client")]
pub(crate) fn interrupted() -> anyhow::Error {
    Failure::new(Kind::Interrupted, "interrupted").into()
}

/// The answer of a server, with what to do about it. `server` is its address.
#[cfg(feature = "client")]
pub(crate) fn refused(status: Status, server: &str) -> anyhow::Error {
    let status = kvsplice_proto::client::explain(status);
    // Only what went wrong at this end has a source: a connection that broke in the middle is no answer of the server.
    let broke = matches!(status.code(), Code::Unknown | Code::Internal) && std::error::Error::source(&status).is_some();
    let kind = if broke { Kind::Unavailable } else { kind_of(&status) };
    let hint = match if broke { Code::Unavailable } else { status.code() } {
        Code::Unavailable => format!("; see that the server at {server} and those behind it are up (kvsplice doctor)"),
        Code::ResourceExhausted => "; try again later".to_owned(),
        Code::DeadlineExceeded => "; give it more time with --timeout".to_owned(),
        Code::Unimplemented => format!("; what listens at {server} is no such kvsplice role"),
        _ => String::new(),
    };
    // Transport errors hide what happened behind "transport error" or "tcp connect error".
    let mut cause = String::new();
    let mut source = std::error::Error::source(&status);
    while let Some(inner) = source {
        let text = inner.to_string();
        if !status.message().contains(&text) && !cause.contains(&text) {
            cause = format!("{cause}: {text}");
        }
        source = inner.source();
    }
    let message = if status.message().is_empty() { status.code().description() } else { status.message() };
    Failure::new(kind, format!("{message}{cause}{hint}")).into()
}

fn kind_of(status: &Status) -> Kind {
    match status.code() {
        Code::InvalidArgument | Code::NotFound | Code::OutOfRange | Code::AlreadyExists => Kind::Data,
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::ResourceExhausted
        | Code::Cancelled
        | Code::FailedPrecondition
        | Code::Unauthenticated
        | Code::PermissionDenied
        | Code::Unimplemented => Kind::Unavailable,
        _ => Kind::Internal,
    }
}

/// Why a role did not start. The roles' errors show a model's error as their own, so it is no cause of theirs.
fn role_kind(cause: &(dyn std::error::Error + 'static)) -> Option<Kind> {
    #[cfg(feature = "head")]
    match cause.downcast_ref::<kvsplice_head::Error>() {
        Some(kvsplice_head::Error::Config { .. }) => return Some(Kind::Usage),
        Some(kvsplice_head::Error::Model(model)) => return Some(model_kind(model)),
        _ => {}
    }
    #[cfg(feature = "worker")]
    match cause.downcast_ref::<kvsplice_gpu_worker::Error>() {
        Some(kvsplice_gpu_worker::Error::Config(_)) => return Some(Kind::Usage),
        Some(kvsplice_gpu_worker::Error::Model(model)) => return Some(model_kind(model)),
        _ => {}
    }
    #[cfg(feature = "cache")]
    match cause.downcast_ref::<kvsplice_cache_service::Error>() {
        Some(kvsplice_cache_service::Error::Config { .. }) => return Some(Kind::Usage),
        Some(kvsplice_cache_service::Error::Open { .. }) => return Some(Kind::Unavailable),
        _ => {}
    }
    #[cfg(any(feature = "head", feature = "worker"))]
    if let Some(model) = cause.downcast_ref::<kvsplice_model::Error>() {
        return Some(model_kind(model));
    }
    #[cfg(not(any(feature = "head", feature = "worker", feature = "cache")))]
    let _no_role = cause;
    None
}

#[cfg(any(feature = "head", feature = "worker"))]
fn model_kind(error: &kvsplice_model::Error) -> Kind {
    use kvsplice_model::Error;
    match error {
        Error::NotFound { .. } | Error::Option(_) | Error::Device { .. } => Kind::Usage,
        Error::Read { .. } | Error::Format { .. } | Error::Unsupported { .. } | Error::Shape { .. } => Kind::Data,
        _ => Kind::Internal,
    }
}

/// The exit code of an error: that of the first cause that has one.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if let Some(failure) = cause.downcast_ref::<Failure>() {
            return failure.kind as u8;
        }
        if let Some(models) = cause.downcast_ref::<crate::models::Error>() {
            return models.exit_code();
        }
        if let Some(status) = cause.downcast_ref::<Status>() {
            return kind_of(status) as u8;
        }
        if let Some(kind) = role_kind(cause) {
            return kind as u8;
        }
    }
    Kind::Internal as u8
}

/// Whether whoever reads our output has gone, which is no failure (`kvsplice ... | head`).
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_broken = |cause: &std::io::Error| cause.kind() == std::io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref().is_some_and(is_broken))
}

/// The error with its causes on one line; a cause that the text before it already contains is left out.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if line.contains(text.as_str()) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&text);
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn the_first_cause_with_a_code_decides() {
        let error = Err::<(), _>(usage("bad key")).context("read the configuration").unwrap_err();
        assert_eq!(exit_code(&error), 64);
        assert_eq!(one_line(&error), "read the configuration: bad key");
        assert_eq!(exit_code(&anyhow::anyhow!("lost")), 70);
        assert_eq!(exit_code(&Status::not_found("corpus").into()), 65);
        assert_eq!(exit_code(&Status::resource_exhausted("full").into()), 69);
    }

    #[test]
    fn a_failure_is_one_line() {
        let error = anyhow::anyhow!("first\n  second").context("first\n  second: read");
        assert_eq!(one_line(&error), "first second: read");
    }

    #[cfg(feature = "client")]
    #[test]
    fn a_refusal_says_what_to_do() {
        let error = refused(Status::unavailable("worker down"), "a:1");
        assert_eq!(exit_code(&error), 69);
        assert!(one_line(&error).contains("worker down; see that the server at a:1"));
        // A connection that breaks, against a failure that the server tells.
        let error = refused(Status::from_error("broken pipe".into()), "a:1");
        assert_eq!(exit_code(&error), 69);
        assert!(one_line(&error).contains("broken pipe; see that the server at a:1"), "{error}");
        assert_eq!(exit_code(&refused(Status::unknown("lost"), "a:1")), 70);
    }
}
