//! Frames of chunk KV on the wire: what GetChunks sends goes out of the memory that holds it, and comes in the same way.
//!
//! The code that tonic generates copies each message once to send it and once to read it, which costs as much as the network. Here
//! the fields of a frame and its data are two pieces of one message. Nothing changes on the wire: either end works with a
//! generated one. Compressed messages are left to the generated code.

mod incoming;
mod outgoing;

pub use self::incoming::Frames;
pub(crate) use self::incoming::call;
pub use self::outgoing::ChunkServer;

/// The method's path.
const GET_CHUNKS: &str = "/kvsplice.v1.Cache/GetChunks";
/// Whether a message is compressed, and its length, before each message.
const PREFIX_BYTES: usize = 5;
