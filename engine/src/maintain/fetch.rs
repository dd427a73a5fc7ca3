//! Reading whole columns through a part source: many parts, asked for ahead.

use crate::{
    kernel::RacyBytes,
    quantize::plane2,
    root::Root,
    segment::{PartError, PartRef, PartSource, Piece, SourceError, Want},
};

/// Parts asked for at a time: about 4 MB of plane 2. The next ones are asked for before these are used.
const AT_A_TIME: usize = 512;

/// A row wanted, and its place among those that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Wanted {
    pub segment: u32,
    pub ordinal: u32,
    pub place: u32,
}

/// Copies the plane-2 records of these rows to their places in `records`. Returns the bytes read. `wanted` is
/// put in order.
pub(super) fn read_records(
    root: &Root,
    source: &mut dyn PartSource,
    wanted: &mut [Wanted],
    records: &mut [u8],
) -> Result<u64, SourceError> {
    wanted.sort_unstable();
    // For each part, which of the rows it holds.
    let (mut parts, mut held) = (Vec::new(), Vec::new());
    let mut from = 0;
    while let Some(first) = wanted.get(from) {
        let part_of = |row: &Wanted| {
            let chunk = root.geometry(row.segment).chunk_of(row.ordinal);
            chunk.map(|(part, at)| (row.segment, part, at))
        };
        // The root was checked: pieces lie within their segments.
        let Some((segment, part, _)) = part_of(first) else {
            from += 1;
            continue;
        };
        let same = |row: &&Wanted| part_of(row).is_some_and(|other| other.1.key == part.key);
        let count = wanted[from..].iter().take_while(same).count();
        parts.push((segment, part));
        held.push(from..from + count);
        from += count;
    }
    read_parts(root, source, &parts, &mut |number, payload| {
        let rows = &wanted[held[number].clone()];
        rows.iter().try_for_each(|row| {
            let geometry = root.geometry(row.segment);
            let bytes = geometry.shape().record_bytes();
            let at = geometry.chunk_of(row.ordinal).map_or(0, |(_, at)| at);
            let place = row.place as usize * bytes;
            let copied = payload.copy_to(at, &mut records[place..place + bytes]);
            if copied { Ok(()) } else { Err(at + bytes) }
        })
    })
}

/// The plane-1 blocks of each of these pieces, which have blocks of their own, without references.
pub(super) fn read_blocks(
    root: &Root,
    source: &mut dyn PartSource,
    pieces: &[Piece],
) -> Result<(Vec<Vec<u8>>, u64), SourceError> {
    let (mut parts, mut places) = (Vec::new(), Vec::new());
    let mut blocks = Vec::with_capacity(pieces.len());
    for (number, piece) in pieces.iter().enumerate() {
        let segment = piece.segment.get();
        let geometry = root.geometry(segment);
        let block = geometry.shape().block_bytes();
        let mut bytes = 0;
        for plane1 in geometry.plane1_parts(piece) {
            let len = plane1.blocks as usize * block;
            parts.push((segment, plane1.part));
            places.push((number, bytes..bytes + len));
            bytes += len;
        }
        blocks.push(vec![0; bytes]);
    }
    let read = read_parts(root, source, &parts, &mut |number, payload| {
        let (piece, place) = places[number].clone();
        let needed = place.len();
        if payload.copy_to(0, &mut blocks[piece][place]) { Ok(()) } else { Err(needed) }
    })?;
    Ok((blocks, read))
}

/// Shows `visit` the payload of each part, with its number. It may come twice, the first time with bytes that
/// were not stable. `visit` returns how many bytes it needs if there are fewer.
fn read_parts(
    root: &Root,
    source: &mut dyn PartSource,
    parts: &[(u32, PartRef)],
    visit: &mut dyn FnMut(usize, RacyBytes<'_>) -> Result<(), usize>,
) -> Result<u64, SourceError> {
    request(root, source, parts, 0);
    let mut bytes = 0;
    for (number, &(segment, part)) in parts.iter().enumerate() {
        if number % AT_A_TIME == 0 {
            source.check_interrupts()?;
            request(root, source, parts, number + AT_A_TIME);
        }
        let name = root.segment_name(segment);
        loop {
            let view = source.acquire(Want { object: &name, part })?;
            let visited = visit(number, view.bytes());
            if !source.still_valid(&view) {
                continue;
            }
            if let Err(needed) = visited {
                let (needed, found) = (needed as u64, view.bytes().len() as u64);
                return Err(SourceError::Damaged {
                    object: name.key(),
                    store: source.store().to_owned(),
                    part: part.key,
                    cause: PartError::TooShort { needed, found }.to_string(),
                });
            }
            break;
        }
        bytes += u64::from(part.len);
    }
    Ok(bytes)
}

/// Asks for the parts from `first` on, a batch of them.
fn request(root: &Root, source: &mut dyn PartSource, parts: &[(u32, PartRef)], first: usize) {
    let Some(rest) = parts.get(first..).filter(|rest| !rest.is_empty()) else { return };
    let batch = &rest[..rest.len().min(AT_A_TIME)];
    let missing: Vec<_> = batch.iter().filter(|(_, part)| !source.contains(part)).collect();
    let names: Vec<_> = missing.iter().map(|(segment, _)| root.segment_name(*segment)).collect();
    let wants: Vec<_> =
        names.iter().zip(missing).map(|(object, (_, part))| Want { object, part: *part }).collect();
    if !wants.is_empty() {
        source.request(&wants);
    }
}

/// Bytes of a record of the first model.
pub(super) fn record_bytes(root: &Root) -> usize {
    plane2::record_bytes(root.models()[0].padded_dim())
}
