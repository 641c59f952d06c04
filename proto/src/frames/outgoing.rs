//! Sends frames: the fields of each in a buffer of their own, then its data as it lies in memory.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use futures::Stream;
use http_body::{Body as HttpBody, Frame as Piece};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use tonic::body::Body;
use tonic::codec::{Codec, Streaming};
use tonic::codegen::BoxFuture;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response, header};
use tonic::server::NamedService;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tower::Service;

use super::{GET_CHUNKS, PREFIX_BYTES};
use crate::server::MESSAGE_BYTES;
use crate::v1::cache_server::{Cache, CacheServer};
use crate::v1::{Frame, GetChunksRequest};

/// The number of `Frame.data` in the message.
const DATA_TAG: u32 = 7;
/// Data that is copied beside its fields: a piece of its own would cost more.
const SMALL_BYTES: usize = 4 << 10;

/// A cache service whose frames are not copied on their way out.
pub struct ChunkServer<T> {
    service: Arc<T>,
    rest: CacheServer<T>,
}

impl<T: Cache> ChunkServer<T> {
    /// Serves `service`.
    pub fn new(service: T) -> Self {
        let service = Arc::new(service);
        let rest = CacheServer::from_arc(service.clone())
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES);
        Self { service, rest }
    }
}

impl<T> Clone for ChunkServer<T> {
    fn clone(&self) -> Self {
        Self { service: self.service.clone(), rest: self.rest.clone() }
    }
}

impl<T: Cache> NamedService for ChunkServer<T> {
    const NAME: &'static str = <CacheServer<T> as NamedService>::NAME;
}

impl<T: Cache> Service<Request<Body>> for ChunkServer<T> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request<Body>>::poll_ready(&mut self.rest, cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let plain = request.headers().get("grpc-encoding").is_none_or(|encoding| encoding == "identity");
        if request.uri().path() != GET_CHUNKS || !plain {
            return self.rest.call(request);
        }
        let service = self.service.clone();
        Box::pin(async move { Ok(answer(&*service, request).await) })
    }
}

async fn answer<T: Cache>(service: &T, request: Request<Body>) -> Response<Body> {
    let decoder = ProstCodec::<Frame, GetChunksRequest>::default().decoder();
    let messages = |body| Streaming::new_request(decoder, body, None, Some(MESSAGE_BYTES));
    let (metadata, frames, extensions) =
        match service.get_chunks(tonic::Request::from_http(request.map(messages))).await {
            Ok(response) => response.into_parts(),
            Err(status) => return status.into_http(),
        };
    let mut response = Response::new(Body::new(FrameBody { frames: Some(Box::pin(frames)), data: None }));
    *response.headers_mut() = metadata.into_headers();
    *response.extensions_mut() = extensions;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// The body of the answer.
struct FrameBody<S> {
    /// None once it has ended.
    frames: Option<Pin<Box<S>>>,
    /// What belongs to the fields that went out last.
    data: Option<Bytes>,
}

impl<S: Stream<Item = Result<Frame, Status>> + Send> HttpBody for FrameBody<S> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Piece<Bytes>, Status>>> {
        let this = self.get_mut();
        if let Some(data) = this.data.take() {
            return Poll::Ready(Some(Ok(Piece::data(data))));
        }
        let Some(frames) = &mut this.frames else { return Poll::Ready(None) };
        let next = ready!(frames.as_mut().poll_next(cx)).transpose().and_then(|frame| frame.map(message).transpose());
        let status = match next {
            Ok(Some((fields, data))) => {
                this.data = data;
                return Poll::Ready(Some(Ok(Piece::data(fields))));
            }
            Ok(None) => Status::new(Code::Ok, ""),
            Err(status) => status,
        };
        this.frames = None;
        let mut trailers = HeaderMap::new();
        Poll::Ready(Some(status.add_header(&mut trailers).map(|()| Piece::trailers(trailers))))
    }
}

/// One message: its prefix and fields, and what follows them as it is.
fn message(mut frame: Frame) -> Result<(Bytes, Option<Bytes>), Status> {
    let data = if frame.data.len() > SMALL_BYTES { std::mem::take(&mut frame.data) } else { Bytes::new() };
    let mut bytes = frame.encoded_len();
    let fields = bytes;
    if !data.is_empty() {
        bytes += key_len(DATA_TAG) + encoded_len_varint(data.len() as u64) + data.len();
    }
    let length = u32::try_from(bytes).ok().filter(|length| *length as usize <= MESSAGE_BYTES);
    let Some(length) = length else {
        return Err(Status::out_of_range(format!("a frame of {bytes} bytes is longer than {MESSAGE_BYTES}")));
    };
    let mut head = BytesMut::with_capacity(PREFIX_BYTES + fields + 16);
    head.put_u8(0);
    head.put_u32(length);
    frame.encode_raw(&mut head);
    if data.is_empty() {
        return Ok((head.freeze(), None));
    }
    encode_key(DATA_TAG, WireType::LengthDelimited, &mut head);
    encode_varint(data.len() as u64, &mut head);
    Ok((head.freeze(), Some(data)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_in_two_pieces_is_the_frame() {
        for bytes in [0, 1, SMALL_BYTES, SMALL_BYTES + 1, 1 << 20] {
            let data: Bytes = (0..bytes).map(|number| (number % 251) as u8).collect();
            let frame =
                Frame { chunk: 3, layer: 47, rows: 9, source: "disk".into(), data: data.clone(), ..Frame::default() };
            let (fields, rest) = message(frame.clone()).unwrap();
            assert_eq!(rest.is_some(), bytes > SMALL_BYTES);
            // Not copied.
            assert!(rest.as_ref().is_none_or(|rest| rest.as_ptr() == data.as_ptr()));
            let whole = [&fields[..], rest.as_deref().unwrap_or(&[])].concat();
            assert_eq!(u32::from_be_bytes(whole[1..5].try_into().unwrap()) as usize, whole.len() - PREFIX_BYTES);
            assert_eq!(Frame::decode(&whole[PREFIX_BYTES..]).unwrap(), frame);
        }
    }
}
