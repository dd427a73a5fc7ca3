use serde::{Serialize, de::DeserializeOwned};

/// Longest object that travels in one message instead of a file.
pub const MAX_OBJECT_BYTES: usize = 16 << 20;
/// Longest frame, not counting its length word.
pub const MAX_FRAME: usize = MAX_OBJECT_BYTES + (64 << 10);

const LENGTH_BYTES: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {0} bytes is longer than the protocol allows ({MAX_FRAME} bytes)")]
    TooLong(usize),
    #[error("a frame holds a message that cannot be read")]
    Malformed,
}

/// Appends the frame of `message` to `out`, which stays as it was if that fails.
pub fn encode_into<T: Serialize>(message: &T, out: &mut Vec<u8>) -> Result<(), FrameError> {
    let frame = encode(message)?;
    out.extend_from_slice(&frame);
    Ok(())
}

/// The frame of `message`.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame =
        postcard::to_extend(message, vec![0; LENGTH_BYTES]).map_err(|_| FrameError::Malformed)?;
    let len = frame.len() - LENGTH_BYTES;
    if len > MAX_FRAME {
        return Err(FrameError::TooLong(len));
    }
    frame[..LENGTH_BYTES].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(frame)
}

/// Splits a byte stream into frames and reads the message in each.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl FrameBuffer {
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        } else if self.start > 64 << 10 && self.start > self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete frame's message. The stream cannot be used any further after an error.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let unread = &self.bytes[self.start..];
        let Some((length, rest)) = unread.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*length) as usize;
        if len > MAX_FRAME {
            return Err(FrameError::TooLong(len));
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let (message, left) = postcard::take_from_bytes(body).map_err(|_| FrameError::Malformed)?;
        if !left.is_empty() {
            return Err(FrameError::Malformed);
        }
        self.start += LENGTH_BYTES + len;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        ObjectId,
        protocol::{Answer, Envelope, Hello, Home, PartOutcome, Reply, Request},
    };

    fn answer(len: usize) -> Answer {
        let outcome = PartOutcome::Bytes(vec![7; len]);
        Answer { id: 3, reply: Reply::Part { object: ObjectId([1; 16]), index: 9, outcome } }
    }

    #[test]
    fn frames_survive_any_splitting() {
        let mut stream = Vec::new();
        let sent: Vec<Answer> = [0, 1, 70_000, 5].map(answer).into();
        for message in &sent {
            encode_into(message, &mut stream).unwrap();
        }
        for step in [1, 3, 1000, 65_536, stream.len()] {
            let mut buffer = FrameBuffer::default();
            let mut seen = Vec::new();
            for piece in stream.chunks(step) {
                buffer.push(piece);
                while let Some(message) = buffer.next_message::<Answer>().unwrap() {
                    seen.push(message);
                }
            }
            assert_eq!(seen, sent, "in steps of {step}");
        }
    }

    #[test]
    fn a_frame_longer_than_allowed_is_refused_both_ways() {
        assert!(matches!(encode(&answer(MAX_FRAME)), Err(FrameError::TooLong(_))));
        assert!(encode(&answer(MAX_OBJECT_BYTES)).is_ok());
        let mut buffer = FrameBuffer::default();
        buffer.push(&u32::MAX.to_le_bytes());
        assert!(matches!(buffer.next_message::<Answer>(), Err(FrameError::TooLong(_))));
    }

    #[test]
    fn trailing_bytes_in_a_frame_are_refused() {
        let mut frame = encode(&answer(3)).unwrap();
        frame.push(0);
        let len = (frame.len() - LENGTH_BYTES) as u32;
        frame[..LENGTH_BYTES].copy_from_slice(&len.to_le_bytes());
        let mut buffer = FrameBuffer::default();
        buffer.push(&frame);
        assert!(matches!(buffer.next_message::<Answer>(), Err(FrameError::Malformed)));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut frame = (body.len() as u32).to_le_bytes().to_vec();
            frame.extend_from_slice(&body);
            let fresh = || {
                let mut buffer = FrameBuffer::default();
                buffer.push(&frame);
                buffer
            };
            let _ = fresh().next_message::<Envelope>();
            let _ = fresh().next_message::<Answer>();
            let _ = fresh().next_message::<Hello>();
            let _ = fresh().next_message::<Home>();
        }

        #[test]
        fn a_flipped_byte_never_panics(at in 4usize..80, with in 1u8..) {
            let request = Request::List {
                store: "file:x".into(),
                prefix: "ab/".into(),
                after: Some("q".into()),
                limit: 5,
            };
            let mut frame = encode(&Envelope { id: 1, request }).unwrap();
            let at = at % (frame.len() - 4) + 4;
            frame[at] ^= with;
            let mut buffer = FrameBuffer::default();
            buffer.push(&frame);
            let _ = buffer.next_message::<Envelope>();
        }
    }
}
