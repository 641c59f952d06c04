//! Reads frames: data that came in one piece stays where the transport put it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use futures::{Stream, StreamExt, future};
use http_body::Body as HttpBody;
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::{Codec, EncodeBody};
use tonic::codegen::http::{HeaderValue, Method, Request, Uri, Version, header};
use tonic::transport::Channel;
use tonic_prost::ProstCodec;
use tower::Service;

use super::{GET_CHUNKS, PREFIX_BYTES};
use crate::server::MESSAGE_BYTES;
use crate::v1::{Frame, GetChunksRequest};

/// Opens a stream of frames over `channel`.
pub(crate) async fn call(
    mut channel: Channel,
    request: tonic::Request<impl Stream<Item = GetChunksRequest> + Send + 'static>,
) -> Result<Frames, Status> {
    let (metadata, extensions, messages) = request.into_parts();
    let encoder = ProstCodec::<GetChunksRequest, Frame>::default().encoder();
    let body = EncodeBody::new_client(encoder, messages.map(Ok), None, Some(MESSAGE_BYTES));
    let mut request = Request::new(Body::new(body));
    *request.method_mut() = Method::POST;
    *request.version_mut() = Version::HTTP_2;
    *request.uri_mut() = Uri::from_static(GET_CHUNKS);
    *request.extensions_mut() = extensions;
    *request.headers_mut() = metadata.into_headers();
    request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
    request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    let failed = |error: tonic::transport::Error| Status::from_error(Box::new(error));
    future::poll_fn(|cx| channel.poll_ready(cx)).await.map_err(failed)?;
    let response = channel.call(request).await.map_err(failed)?;
    if !response.status().is_success() {
        return Err(Status::unavailable(format!("the cache service answered HTTP {}", response.status())));
    }
    let ended = Status::from_header_map(response.headers());
    if let Some(status) = ended.as_ref().filter(|status| status.code() != tonic::Code::Ok) {
        return Err(status.clone());
    }
    Ok(Frames { body: response.into_body(), arrived: Arrived::default(), expected: None, ended: ended.is_some() })
}

/// The frames of one stream, in the order in which they come. Dropping it ends the stream.
#[derive(Debug)]
pub struct Frames {
    body: Body,
    arrived: Arrived,
    /// Bytes of the message whose prefix has been read.
    expected: Option<usize>,
    ended: bool,
}

impl Frames {
    /// The next frame; none after the last one.
    ///
    /// # Errors
    /// The status that the service ended the stream with, or what is wrong with what came.
    pub async fn message(&mut self) -> Result<Option<Frame>, Status> {
        self.next().await.transpose()
    }

    /// Takes the next frame if all of it has arrived.
    fn take(&mut self) -> Result<Option<Frame>, Status> {
        let bytes = match self.expected {
            Some(bytes) => bytes,
            None if self.arrived.bytes < PREFIX_BYTES => return Ok(None),
            None => {
                if self.arrived.get_u8() != 0 {
                    return Err(Status::internal("a frame is compressed, which nobody asked for"));
                }
                let bytes = self.arrived.get_u32() as usize;
                if bytes > MESSAGE_BYTES {
                    return Err(Status::out_of_range(format!(
                        "a frame of {bytes} bytes is longer than {MESSAGE_BYTES}"
                    )));
                }
                *self.expected.insert(bytes)
            }
        };
        if self.arrived.bytes < bytes {
            return Ok(None);
        }
        self.expected = None;
        let frame = Frame::decode((&mut self.arrived).take(bytes));
        frame.map(Some).map_err(|error| Status::internal(format!("read a frame: {error}")))
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Frame>, Status>> {
        loop {
            if let Some(frame) = self.take()? {
                return Poll::Ready(Ok(Some(frame)));
            }
            let Some(piece) = ready!(Pin::new(&mut self.body).poll_frame(cx)).transpose()? else {
                let rest = self.arrived.bytes;
                let whole = rest == 0 && self.expected.is_none();
                let cut = || Status::internal(format!("the stream ended within a frame, after {rest} bytes of it"));
                return Poll::Ready(if whole { Ok(None) } else { Err(cut()) });
            };
            match piece.into_data() {
                Ok(data) => self.arrived.push(data),
                Err(piece) => {
                    let status = piece.trailers_ref().and_then(Status::from_header_map);
                    let failed = status.filter(|status| status.code() != tonic::Code::Ok);
                    return Poll::Ready(failed.map_or(Ok(None), Err));
                }
            }
        }
    }
}

impl Stream for Frames {
    type Item = Result<Frame, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let next = ready!(this.poll(cx));
        this.ended = !matches!(next, Ok(Some(_)));
        Poll::Ready(next.transpose())
    }
}

/// Bytes as they came, in order.
#[derive(Debug, Default)]
struct Arrived {
    /// None of them empty.
    pieces: VecDeque<Bytes>,
    bytes: usize,
}

impl Arrived {
    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.bytes += piece.len();
            self.pieces.push_back(piece);
        }
    }

    /// As many of the next `most` bytes as lie together.
    fn split(&mut self, most: usize) -> Bytes {
        let Some(front) = self.pieces.front_mut() else { return Bytes::new() };
        let piece = front.split_to(front.len().min(most));
        if front.is_empty() {
            self.pieces.pop_front();
        }
        self.bytes -= piece.len();
        piece
    }
}

impl Buf for Arrived {
    fn remaining(&self) -> usize {
        self.bytes
    }

    fn chunk(&self) -> &[u8] {
        self.pieces.front().map_or(&[], |front| front.as_ref())
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.bytes, "more is taken than has arrived");
        while count > 0 {
            count -= self.split(count).len();
        }
    }

    fn copy_to_bytes(&mut self, count: usize) -> Bytes {
        assert!(count <= self.bytes, "more is taken than has arrived");
        let first = self.split(count);
        if first.len() == count {
            return first;
        }
        let mut joined = BytesMut::with_capacity(count);
        joined.extend_from_slice(&first);
        while joined.len() < count {
            let piece = self.split(count - joined.len());
            joined.extend_from_slice(&piece);
        }
        joined.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(pieces: &[&[u8]]) -> Frames {
        let mut arrived = Arrived::default();
        pieces.iter().for_each(|piece| arrived.push(Bytes::copy_from_slice(piece)));
        Frames { body: Body::empty(), arrived, expected: None, ended: false }
    }

    fn messages(frames: &[Frame]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for frame in frames {
            bytes.push(0);
            bytes.extend((frame.encoded_len() as u32).to_be_bytes());
            frame.encode(&mut bytes).unwrap();
        }
        bytes
    }

    #[tokio::test]
    async fn frames_are_read_however_they_are_cut() {
        let frame = |layer, bytes| Frame { layer, rows: 1, data: vec![layer as u8; bytes].into(), ..Frame::default() };
        let sent = [frame(1, 10), Frame::default(), frame(2, 3000), frame(3, 0)];
        let bytes = messages(&sent);
        for size in [1, 2, 7, 100, 1000, bytes.len()] {
            let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
            let read: Vec<Frame> = frames(&pieces).map(Result::unwrap).collect().await;
            assert_eq!(read, sent, "pieces of {size}");
        }
    }

    #[tokio::test]
    async fn data_in_one_piece_is_not_copied() {
        let bytes = messages(&[Frame { data: vec![5; 3000].into(), ..Frame::default() }]);
        let piece = Bytes::from(bytes);
        let mut stream = frames(&[]);
        stream.arrived.push(piece.clone());
        let frame = stream.message().await.unwrap().unwrap();
        assert!(piece.as_ptr_range().contains(&frame.data.as_ptr()));
        assert!(stream.message().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn what_is_no_frame_is_an_error_and_ends_the_stream() {
        let whole = messages(&[Frame { layer: 7, ..Frame::default() }]);
        let cut = &whole[..whole.len() - 1];
        let lone_prefix = &whole[..PREFIX_BYTES];
        let cases: [&[u8]; 5] =
            [cut, lone_prefix, &[1, 0, 0, 0, 0], &[0, 255, 255, 255, 255], &[0, 0, 0, 0, 2, 0x3a, 99]];
        for bytes in cases {
            let mut stream = frames(&[bytes]);
            assert!(stream.message().await.is_err(), "{bytes:?}");
            assert!(stream.message().await.unwrap().is_none(), "{bytes:?}");
        }
    }
}
