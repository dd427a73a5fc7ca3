//! Building: from plane-2 records grouped by cell to encoded cells, and the calibration of recall.
//!
//! A row is reduced to its plane-2 record as soon as it has been read from the heap: the record does
//! not depend on the cell and is a quarter of the row, so four times as many rows fit in memory, and a
//! build and a compaction compute plane 1 from the same input.

mod assemble;
mod calibrate;
mod cell_store;
pub(crate) mod decode;
mod encode;
pub mod in_memory;
mod pipeline;
mod train;

pub(crate) use assemble::write_cells;
pub use assemble::{Assembly, note_slots};
pub use calibrate::Calibrator;
pub use cell_store::{CellStore, MemoryFile, SpillFile};
pub use encode::{EncodedCell, encode_cells};
pub(crate) use encode::{encode_or_split, encode_rows, ids_of, mean_of};
pub use pipeline::{AssignedBatch, Pipeline, PipelineGone, PipelineResult, RowBatch};
pub use train::{TrainError, TrainParams, Trained, is_left_out, train};
