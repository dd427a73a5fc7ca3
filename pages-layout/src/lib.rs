//! The formats of the pages of a `polign_ivf` index, as checked functions over page images.
//!
//! Nothing here touches a server: reading takes a page image that the caller has copied or locked,
//! changing takes the image that one generic WAL record will log. A damaged image is an error.
//! The protocol (which page is changed when, and under which lock) is in
//! `docs/decisions/0004-page-protocol.md`.
//!
//! All fields are little-endian, except those of Postgres' own page header, which are native.

pub mod blob;
pub mod codes;
mod image;
pub mod meta;
pub mod objects;
pub mod tombstones;
pub mod vectors;

pub use image::{
    Freshness, HEADER_LEN, Link, PAGE_LEN, PageError, PageKind, PageMut, PageRef, SPECIAL_LEN,
    content_capacity,
};

#[cfg(test)]
mod golden;
