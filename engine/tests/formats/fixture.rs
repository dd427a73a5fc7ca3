//! Segments and roots with made-up contents from a fixed seed: the formats do not depend on what the
//! codes mean.

use polign_engine::{
    Metric, ObjectId,
    quantize::{Model, plane2},
    root::{Curve, Curves, RootBuilder, SectionKey},
    segment::{
        CellSpec, Packing, RowPlane, SegmentName, SegmentSpec, SegmentWriter, Shape, SlotRef,
        WrittenSegment, geometry::BLOCK_ROWS,
    },
};

/// SplitMix64.
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % (end.max(1) as u64)) as usize
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

pub fn id(byte: u8) -> ObjectId {
    ObjectId([byte; 16])
}

pub const WRITER: u8 = 0x11;
pub const FOREIGN_WRITER: u8 = 0x22;
pub const INDEX: u8 = 0x33;

/// A segment and what it was made from.
pub struct Segment {
    pub spec: SegmentSpec,
    /// Plane 1 of each cell; a dense segment has one entry for all cells.
    pub blocks: Vec<Vec<u8>>,
    pub refs: Vec<Vec<SlotRef>>,
    pub ids: Vec<u64>,
    pub records: Vec<u8>,
    pub rows: Vec<u8>,
    pub written: WrittenSegment,
    pub bytes: Vec<u8>,
}

pub fn spec(object: u8, dim: u32, bits: u32, rows: &[u32]) -> SegmentSpec {
    let name = SegmentName { writer: id(WRITER), index: id(INDEX), object: id(object) };
    SegmentSpec {
        name,
        model: 0,
        dim,
        bits,
        packing: Packing::PerCell,
        delta: false,
        row_plane: RowPlane::None,
        cells: rows.iter().zip(0..).map(|(&rows, cell)| CellSpec::plain(cell, rows)).collect(),
        references: Vec::new(),
        model_bytes: Vec::new(),
    }
}

pub fn segment(seed: u64, spec: SegmentSpec) -> Segment {
    let mut rng = Rng(seed);
    let shape = Shape::new(spec.dim.next_multiple_of(16), spec.bits).unwrap();
    let blocks_for = |slots: u32, rng: &mut Rng| {
        rng.bytes(slots.div_ceil(BLOCK_ROWS) as usize * shape.block_bytes())
    };
    let rows: u32 = spec.cells.iter().map(|cell| cell.rows).sum();
    let blocks: Vec<Vec<u8>> = match spec.packing {
        Packing::Dense => vec![blocks_for(rows, &mut rng)],
        Packing::PerCell => {
            spec.cells.iter().map(|cell| blocks_for(cell.slots, &mut rng)).collect()
        }
    };
    let refs: Vec<Vec<SlotRef>> = spec
        .cells
        .iter()
        .map(|cell| {
            let slots = if cell.refs { cell.slots } else { 0 };
            let slot = |rng: &mut Rng| SlotRef {
                segment: (rng.below(spec.references.len() + 1) as u32).into(),
                ordinal: (rng.below(rows as usize) as u32).into(),
            };
            (0..slots).map(|_| slot(&mut rng)).collect()
        })
        .collect();
    let ids: Vec<u64> = (0..rows).map(|_| rng.next() >> 16).collect();
    let records = rng.bytes(rows as usize * shape.record_bytes());
    let row_bytes = match spec.row_plane {
        RowPlane::None => 0,
        RowPlane::F16 => 2 * spec.dim,
        RowPlane::F32 => 4 * spec.dim,
    };
    let rows = rng.bytes((rows * row_bytes) as usize);

    let mut writer = SegmentWriter::new(spec.clone(), Vec::new()).unwrap();
    for (blocks, refs) in blocks.iter().zip(&refs) {
        match refs.is_empty() {
            true => writer.plane1(blocks).unwrap(),
            false => writer.plane1_with_refs(blocks, refs).unwrap(),
        }
    }
    writer.ids(&ids).unwrap();
    writer.plane2(&records).unwrap();
    writer.rows(&rows).unwrap();
    let (written, bytes) = writer.finish().unwrap();
    Segment { spec, blocks, refs, ids, records, rows, written, bytes }
}

pub const DIM: u32 = 20;
const ROOT_CELLS: [u32; 6] = [0, 1, 2, 5, 6, 9];
/// Slots of cells with rows; slot 4 is retired.
pub const LIVE_SLOTS: [u32; 5] = [0, 1, 2, 3, 5];

pub fn models() -> Vec<Model> {
    let mean = |scale: f32| (0..DIM).map(|i| i as f32 * scale).collect();
    let model = |id, seed, scale| Model::new(id, Metric::L2, DIM as usize, seed, mean(scale));
    vec![model(0, 42, 0.0).unwrap(), model(7, 43, 0.25).unwrap()]
}

fn with_cells(spec: SegmentSpec) -> SegmentSpec {
    let slots = spec.cells.iter().zip(LIVE_SLOTS);
    let cells = slots.map(|(cell, slot)| CellSpec { cell_id: ROOT_CELLS[slot as usize], ..*cell });
    SegmentSpec { cells: cells.collect(), ..spec }
}

/// A base segment, with its model inside.
pub fn base() -> Segment {
    let model_bytes = models()[0].to_bytes();
    segment(1, with_cells(SegmentSpec { model_bytes, ..spec(0xa1, DIM, 2, &[40, 0, 5, 1, 64]) }))
}

/// One bit a dimension, and padded dimensions that are no power of two.
pub fn one_bit() -> Segment {
    segment(2, spec(0xa2, 260, 1, &[33, 7]))
}

/// A flushed delta: blocks run on through the cells.
pub fn delta() -> Segment {
    let spec = with_cells(spec(0xa3, DIM, 2, &[3, 1, 0, 50, 2]));
    segment(3, SegmentSpec { packing: Packing::Dense, delta: true, ..spec })
}

/// Each slot of two cells names its row; some rows lie in the base segment.
pub fn spilled() -> Segment {
    let mut spec = with_cells(spec(0xa4, DIM, 2, &[10, 3, 4]));
    spec.cells[0] = CellSpec { slots: 35, refs: true, ..spec.cells[0] };
    spec.cells[2] = CellSpec { slots: 2, refs: true, ..spec.cells[2] };
    segment(4, SegmentSpec { references: vec![id(0xa1), id(0xee)], ..spec })
}

/// Inherited from another writer, coded by another model.
pub fn foreign() -> Segment {
    let mut spec = with_cells(spec(0xa5, DIM, 2, &[2, 0, 0, 0, 3]));
    spec.name.writer = id(FOREIGN_WRITER);
    segment(5, SegmentSpec { model: 7, ..spec })
}

/// Uncompressed rows.
pub fn rows(row_plane: RowPlane) -> Segment {
    segment(6, SegmentSpec { row_plane, ..spec(0xa6, 3, 2, &[4, 1]) })
}

fn centroid(seed: u64, id: u32) -> Vec<u8> {
    let mut rng = Rng(seed ^ u64::from(id));
    let padded = DIM.next_multiple_of(16) as usize;
    // Small codes and a power of two: exact in every arithmetic.
    let mut record: Vec<u8> = (0..padded).map(|_| (rng.below(31) as i8 - 15) as u8).collect();
    record.extend_from_slice(&0.5f32.to_le_bytes());
    record.extend_from_slice(&0f32.to_le_bytes());
    record.extend_from_slice(&u64::from(id).to_le_bytes());
    assert_eq!(record.len(), plane2::record_bytes(padded));
    record
}

pub fn centroid_of(model: usize, slot: u32) -> Vec<u8> {
    centroid(100 + model as u64, ROOT_CELLS[slot as usize])
}

pub fn group_centroid(group: u32) -> Vec<u8> {
    centroid(200, group)
}

pub fn curves() -> Curves {
    let mut rng = Rng(9);
    let curve = |k: u32, rng: &mut Rng| {
        Curve::from_ranks(k, 4, (0..4 * k).map(|_| (rng.below(3) * rng.below(3)) as u32))
    };
    Curves::new([10, 100].map(|k| curve(k, &mut rng)).to_vec())
}

/// Everything that a root can hold.
pub fn root_builder() -> RootBuilder {
    let mut builder = RootBuilder::new(models());
    for (slot, cell) in (0..).zip(ROOT_CELLS) {
        let centroids = [0, 1].map(|model| centroid_of(model, slot));
        let centroids = [&centroids[0][..], &centroids[1][..]];
        let added = match LIVE_SLOTS.contains(&slot) {
            true => builder.cell(cell, &centroids),
            false => builder.retired_cell(cell, 9, &centroids),
        };
        assert_eq!(added, slot);
    }
    assert_eq!(builder.segment(&base().written, &LIVE_SLOTS), 0);
    assert_eq!(builder.segment(&delta().written, &LIVE_SLOTS), 1);
    assert_eq!(builder.segment(&spilled().written, &LIVE_SLOTS), 2);
    assert_eq!(builder.segment(&foreign().written, &LIVE_SLOTS), 3);
    builder.references(2, &[0, polign_engine::root::Reference::GONE]);
    builder.group(&group_centroid(0), &[(0, 2), (5, 1)]);
    builder.group(&group_centroid(1), &[(2, 3)]);
    builder.curves(curves());
    builder
}

pub fn root_sections() -> Vec<(SectionKey, Vec<u8>)> {
    root_builder().build().unwrap()
}
