//! What can go wrong, and the one table to gRPC statuses.

use std::error::Error as StdError;
use std::io;

use kvsplice_kv::object;
use kvsplice_proto::{convert, server};
use tonic::{Code, Status};

/// Why the service did not start, stopped, or refused a request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting is not valid.
    #[error("{field} {detail}")]
    Config {
        /// The setting.
        field: &'static str,
        /// What it must be, and what it is.
        detail: String,
    },
    /// The object store cannot be used.
    #[error("open the store {store}: {detail}; {advice}")]
    Open {
        /// Its URL without credentials.
        store: String,
        /// What is wrong.
        detail: String,
        /// What to do.
        advice: &'static str,
    },
    /// Serving failed.
    #[error("{source}")]
    Serve {
        /// Why.
        #[source]
        source: server::Error,
    },
    /// A request's field is not valid.
    #[error("{field} {detail}")]
    Request {
        /// The field.
        field: &'static str,
        /// What it must be, and what it is.
        detail: String,
    },
    /// A request's field does not convert.
    #[error("{source}")]
    Convert {
        /// Why.
        #[from]
        source: convert::Error,
    },
    /// A chunk object was refused.
    #[error("chunk object {chunk} refused: {source}")]
    Refused {
        /// The chunk it was sent as.
        chunk: String,
        /// What is wrong with it.
        #[source]
        source: object::Error,
    },
    /// There is no such record.
    #[error("no record {key:?}")]
    NoRecord {
        /// The key.
        key: String,
    },
    /// Too much of something.
    #[error("too many {what}: the limit is {limit}; {advice}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there may be.
        limit: usize,
        /// What to do.
        advice: &'static str,
    },
    /// The object store did not do what it was asked to.
    #[error("{action} in the store: {}", root(.source))]
    Store {
        /// What it was asked to do.
        action: &'static str,
        /// What it said.
        #[source]
        source: object_store::Error,
    },
    /// The object store sent less than it announced.
    #[error("{action} in the store: {got} of {need} bytes arrived")]
    ShortRead {
        /// What it was asked to do.
        action: &'static str,
        /// Bytes that came.
        got: u64,
        /// Bytes that it announced.
        need: u64,
    },
    /// A record is not as it was written.
    #[error("record {key:?} is damaged; if it stays so, delete it and ingest its documents again")]
    DamagedRecord {
        /// The key.
        key: String,
    },
    /// An object that must be read to know whether it is needed was not.
    #[error("read {path}: {detail}; nothing is removed")]
    Unread {
        /// Its path.
        path: String,
        /// Why not.
        detail: String,
    },
    /// A record is not what a document or a corpus is.
    #[error("record {key:?} is not a {what}: {source}; nothing is removed")]
    ForeignRecord {
        /// The key.
        key: String,
        /// What it should be.
        what: &'static str,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// The object store did not answer in time.
    #[error("{action} in the store: no answer within {seconds} s")]
    StoreTimeout {
        /// What it was asked to do.
        action: &'static str,
        /// The limit.
        seconds: u64,
    },
}

/// What a failure of the store means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    NotFound,
    Exists,
    /// The object is not the one that was looked at before.
    Changed,
    Full,
    Refused,
    /// The connection broke while a request was on it.
    Broken,
    Other,
}

impl Error {
    /// The kind of a store's failure; [`Fault::Other`] for everything else.
    pub(crate) fn fault(&self) -> Fault {
        match self {
            Error::Store { source, .. } => fault(source),
            _ => Fault::Other,
        }
    }
}

fn fault(error: &object_store::Error) -> Fault {
    use object_store::Error as E;
    match error {
        E::NotFound { .. } => return Fault::NotFound,
        E::AlreadyExists { .. } => return Fault::Exists,
        E::Precondition { .. } | E::NotModified { .. } => return Fault::Changed,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => return Fault::Refused,
        _ => {}
    }
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Fault::Full,
                io::ErrorKind::PermissionDenied
                | io::ErrorKind::ReadOnlyFilesystem
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::IsADirectory => Fault::Refused,
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted => {
                    Fault::Broken
                }
                _ => Fault::Other,
            };
        }
        cause = error.source();
    }
    Fault::Other
}

/// The error's own words and those of its cause at the bottom, which its own words may leave out.
pub(crate) fn root(error: &object_store::Error) -> String {
    let text = error.to_string();
    let mut last: &dyn StdError = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    let bottom = last.to_string();
    if text.contains(&bottom) { text } else { format!("{text}: {bottom}") }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Config { .. } | Error::Open { .. } => Code::FailedPrecondition,
            Error::Serve { .. } => Code::Internal,
            Error::Request { .. } | Error::Convert { .. } | Error::Refused { .. } => Code::InvalidArgument,
            Error::NoRecord { .. } => Code::NotFound,
            Error::TooMany { .. } => Code::ResourceExhausted,
            Error::StoreTimeout { .. } | Error::ShortRead { .. } | Error::Unread { .. } => Code::Unavailable,
            Error::DamagedRecord { .. } | Error::ForeignRecord { .. } => Code::DataLoss,
            Error::Store { source, .. } => match fault(source) {
                Fault::NotFound => Code::NotFound,
                Fault::Exists => Code::AlreadyExists,
                Fault::Full => Code::ResourceExhausted,
                Fault::Refused => Code::FailedPrecondition,
                Fault::Changed | Fault::Broken | Fault::Other => Code::Unavailable,
            },
        };
        Status::new(code, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(kind: io::ErrorKind) -> Status {
        let source = object_store::Error::Generic { store: "test", source: io::Error::from(kind).into() };
        Error::Store { action: "put a chunk", source }.into()
    }

    #[test]
    fn a_full_and_a_read_only_store_have_their_own_status() {
        assert_eq!(status(io::ErrorKind::StorageFull).code(), Code::ResourceExhausted);
        assert_eq!(status(io::ErrorKind::ReadOnlyFilesystem).code(), Code::FailedPrecondition);
        assert_eq!(status(io::ErrorKind::PermissionDenied).code(), Code::FailedPrecondition);
        assert_eq!(status(io::ErrorKind::ConnectionReset).code(), Code::Unavailable);
    }
}
