//! The scanned rows of a search: flat columns of estimates and bounds, and where each stretch of them
//! came from.

use super::rows::DeltaScores;

/// Where a scanned row lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A row of a segment, by the segment's position in the root.
    Segment { segment: u32, ordinal: u32 },
    /// A row of the delta, by its handle.
    Delta { handle: u32 },
}

/// A stretch of rows that lie together.
#[derive(Debug, Clone, Copy)]
struct Run {
    start: usize,
    source: RunSource,
}

#[derive(Debug, Clone, Copy)]
enum RunSource {
    Segment {
        segment: u32,
        first_ordinal: u32,
    },
    Delta {
        first_handle: usize,
    },
    /// What [`Columns::keep`] left.
    Kept,
    /// Rows that name their place.
    Placed {
        first_place: usize,
    },
}

/// Estimate and lower bound of every scanned row. A NaN bound marks padding and dead rows.
#[derive(Debug, Default)]
pub struct Columns {
    pub est: Vec<f32>,
    pub lower: Vec<f32>,
    handles: Vec<u32>,
    /// Segment and ordinal of rows that name their place: one row may be in two cells.
    places: Vec<(u32, u32)>,
    /// The places of the rows that [`Columns::keep`] left.
    kept: Vec<Place>,
    runs: Vec<Run>,
}

impl Columns {
    pub fn clear(&mut self) {
        self.est.clear();
        self.lower.clear();
        self.handles.clear();
        self.places.clear();
        self.kept.clear();
        self.runs.clear();
    }

    pub fn len(&self) -> usize {
        self.lower.len()
    }

    /// Undoes everything after the first `len` rows, when what was scanned turned out to be unstable.
    pub fn truncate(&mut self, len: usize) {
        self.est.truncate(len);
        self.lower.truncate(len);
        self.runs.truncate(self.runs.partition_point(|run| run.start < len));
    }

    /// Says that the rows from `start` on are rows `first_ordinal..` of a segment.
    pub fn push_segment_run(&mut self, start: usize, segment: u32, first_ordinal: u32) {
        self.runs.push(Run { start, source: RunSource::Segment { segment, first_ordinal } });
    }

    /// Says that the rows from `start` on lie at `places` (segment and ordinal).
    pub fn push_placed_run(&mut self, start: usize, places: impl Iterator<Item = (u32, u32)>) {
        let first_place = self.places.len();
        self.places.extend(places);
        self.runs.push(Run { start, source: RunSource::Placed { first_place } });
    }

    /// Lets `score` append rows of the delta. Returns how many came.
    pub fn push_delta_run(&mut self, score: impl FnOnce(&mut DeltaScores<'_>)) -> usize {
        let (start, first_handle) = (self.len(), self.handles.len());
        score(&mut DeltaScores {
            est: &mut self.est,
            lower: &mut self.lower,
            handles: &mut self.handles,
        });
        let rows = self.len() - start;
        if rows > 0 {
            self.runs.push(Run { start, source: RunSource::Delta { first_handle } });
        }
        rows
    }

    /// Drops all rows but these, which are in ascending order; they are numbered anew from 0.
    pub fn keep(&mut self, rows: &[usize]) {
        let kept: Vec<Place> = rows.iter().map(|&row| self.place(row)).collect();
        for (to, &from) in rows.iter().enumerate() {
            self.est[to] = self.est[from];
            self.lower[to] = self.lower[from];
        }
        self.est.truncate(rows.len());
        self.lower.truncate(rows.len());
        self.handles.clear();
        self.places.clear();
        self.kept = kept;
        self.runs.clear();
        self.runs.push(Run { start: 0, source: RunSource::Kept });
    }

    /// Segment and ordinal of a row that is in a segment.
    pub fn segment_place(&self, row: usize) -> Option<(u32, u32)> {
        match self.place(row) {
            Place::Segment { segment, ordinal } => Some((segment, ordinal)),
            Place::Delta { .. } => None,
        }
    }

    /// Where a scanned row lives.
    pub fn place(&self, row: usize) -> Place {
        let run = self.runs[self.runs.partition_point(|run| run.start <= row) - 1];
        let within = row - run.start;
        match run.source {
            RunSource::Segment { segment, first_ordinal } => {
                Place::Segment { segment, ordinal: first_ordinal.wrapping_add(within as u32) }
            }
            RunSource::Placed { first_place } => {
                let (segment, ordinal) = self.places[first_place + within];
                Place::Segment { segment, ordinal }
            }
            RunSource::Kept => self.kept[within],
            RunSource::Delta { first_handle } => {
                Place::Delta { handle: self.handles[first_handle + within] }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_where_they_came_from() {
        let mut columns = Columns::default();
        columns.push_segment_run(0, 3, 100);
        columns.est.resize(32, 0.0);
        columns.lower.resize(32, 0.0);
        let added = columns.push_delta_run(|out| {
            out.push(7, 1.0, 0.5);
            out.push(9, 1.0, 0.5);
        });
        assert_eq!((added, columns.len()), (2, 34));
        assert_eq!(columns.push_delta_run(|_| ()), 0);
        assert_eq!(columns.place(0), Place::Segment { segment: 3, ordinal: 100 });
        assert_eq!(columns.place(31), Place::Segment { segment: 3, ordinal: 131 });
        assert_eq!(columns.place(33), Place::Delta { handle: 9 });
    }

    #[test]
    fn rows_that_are_kept_keep_their_places() {
        let mut columns = Columns::default();
        columns.push_segment_run(0, 3, 100);
        columns.est.extend((0..32).map(|row| row as f32));
        columns.lower.extend((0..32).map(|row| row as f32));
        columns.push_delta_run(|out| out.push(7, 32.0, 32.0));
        columns.push_placed_run(33, [(8, 1), (9, 2)].into_iter());
        columns.est.extend([33.0, 34.0]);
        columns.lower.extend([33.0, 34.0]);
        for _ in 0..2 {
            let before: Vec<(f32, Place)> =
                (1..columns.len()).map(|row| (columns.lower[row], columns.place(row))).collect();
            columns.keep(&(1..columns.len()).collect::<Vec<_>>());
            let after: Vec<(f32, Place)> =
                (0..columns.len()).map(|row| (columns.lower[row], columns.place(row))).collect();
            assert_eq!(before, after);
        }
        let start = columns.len();
        columns.push_segment_run(start, 5, 0);
        columns.est.push(0.0);
        columns.lower.push(0.0);
        assert_eq!(columns.place(start), Place::Segment { segment: 5, ordinal: 0 });
    }

    #[test]
    fn truncating_forgets_whole_runs() {
        let mut columns = Columns::default();
        for part in 0..2 {
            columns.push_segment_run(part * 32, 0, part as u32 * 32);
            columns.est.resize((part + 1) * 32, 0.0);
            columns.lower.resize((part + 1) * 32, 0.0);
        }
        columns.truncate(32);
        columns.push_segment_run(32, 5, 0);
        columns.est.resize(64, 0.0);
        columns.lower.resize(64, 0.0);
        assert_eq!(columns.place(40), Place::Segment { segment: 5, ordinal: 8 });
    }
}
