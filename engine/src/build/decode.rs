//! Plane-2 records as rows.

use crate::{
    kernel::RacyBytes,
    quantize::{Model, plane2},
};

/// Decodes a record. One that does not hold finite numbers, which no writer makes, becomes the origin: it is
/// carried along like any other, and neither centroids nor distances are spoilt by it.
pub(crate) fn decode_into(record: &[u8], out: &mut [f32]) {
    plane2::decode(RacyBytes::new(record), out);
    if !out.iter().all(|x| x.is_finite()) {
        out.fill(0.0);
    }
}

/// Decodes n records to n x P values.
pub(crate) fn decode_rows(model: &Model, records: &[u8]) -> Vec<f32> {
    let (bytes, width) = (plane2::record_bytes(model.padded_dim()), model.padded_dim());
    let mut decoded = vec![0.0; records.len() / bytes * width];
    for (record, row) in records.chunks_exact(bytes).zip(decoded.chunks_exact_mut(width)) {
        decode_into(record, row);
    }
    decoded
}
