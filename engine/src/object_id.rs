use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The 128-bit random name of an object, index, store or writer. Drawn at creation, never counted up:
/// after a crash, PITR or a promotion a counter would be issued again with other content.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct ObjectId(pub [u8; 16]);

impl ObjectId {
    /// All zero bytes: "none" in fixed-size records.
    pub const NIL: Self = Self([0; 16]);

    /// Draws a new id from the operating system's random source.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// Whether this is [`ObjectId::NIL`].
    pub fn is_nil(&self) -> bool {
        *self == Self::NIL
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an object id is 32 hexadecimal digits")]
pub struct ParseObjectIdError;

impl FromStr for ObjectId {
    type Err = ParseObjectIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.as_bytes();
        if digits.len() != 32 {
            return Err(ParseObjectIdError);
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).ok_or(ParseObjectIdError);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        let id = ObjectId::random().unwrap();
        assert_eq!(id.to_string().parse::<ObjectId>().unwrap(), id);
        assert!("zz".parse::<ObjectId>().is_err());
        assert!("+f".repeat(16).parse::<ObjectId>().is_err());
    }

    #[test]
    fn random_ids_differ_and_are_not_nil() {
        let (a, b) = (ObjectId::random().unwrap(), ObjectId::random().unwrap());
        assert!(a != b && !a.is_nil());
    }
}
