//! Records of a build, kept by cell within a memory budget: what does not fit goes to a temporary file
//! and comes back group by group.

use std::io;

/// A temporary file. Postgres gives a `BufFile`, tests a vector.
pub trait SpillFile {
    /// Appends, and returns the offset of the first byte.
    fn append(&mut self, bytes: &[u8]) -> io::Result<u64>;

    /// Reads exactly `out.len()` bytes from `offset` on.
    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()>;
}

/// Bytes of one spill that belong to a cell.
#[derive(Debug, Clone, Copy)]
struct Extent {
    offset: u64,
    len: usize,
}

/// Plane-2 records by cell.
pub struct CellStore<F> {
    record_bytes: usize,
    budget: usize,
    in_memory: Vec<Vec<u8>>,
    /// Bytes allocated for `in_memory`.
    held: usize,
    spilled: Vec<Vec<Extent>>,
    file: F,
}

impl<F: SpillFile> CellStore<F> {
    /// Room for `cells` cells; spills to `file` when more than `budget` bytes are held.
    pub fn new(cells: usize, record_bytes: usize, budget: usize, file: F) -> Self {
        Self {
            record_bytes,
            budget: budget.max(record_bytes),
            in_memory: vec![Vec::new(); cells],
            held: 0,
            spilled: vec![Vec::new(); cells],
            file,
        }
    }

    /// Adds records, one for each entry of `cells`.
    pub fn add(&mut self, cells: &[u32], records: &[u8]) -> io::Result<()> {
        for (&cell, record) in cells.iter().zip(records.chunks_exact(self.record_bytes)) {
            let cell = &mut self.in_memory[cell as usize];
            let before = cell.capacity();
            cell.extend_from_slice(record);
            self.held += cell.capacity() - before;
        }
        if self.held > self.budget { self.spill() } else { Ok(()) }
    }

    fn spill(&mut self) -> io::Result<()> {
        for (bytes, extents) in self.in_memory.iter_mut().zip(&mut self.spilled) {
            if !bytes.is_empty() {
                let offset = self.file.append(bytes)?;
                extents.push(Extent { offset, len: bytes.len() });
                *bytes = Vec::new();
            }
        }
        self.held = 0;
        Ok(())
    }

    /// Number of cells.
    pub fn cells(&self) -> usize {
        self.in_memory.len()
    }

    /// Rows of a cell.
    pub fn rows(&self, cell: usize) -> usize {
        let spilled: usize = self.spilled[cell].iter().map(|extent| extent.len).sum();
        (self.in_memory[cell].len() + spilled) / self.record_bytes
    }

    /// Rows of all cells.
    pub fn total_rows(&self) -> usize {
        (0..self.in_memory.len()).map(|cell| self.rows(cell)).sum()
    }

    /// Ranges of neighbouring cells of at most `rows` rows each (or one larger cell).
    pub fn groups(&self, rows: usize) -> Vec<std::ops::Range<usize>> {
        let mut groups = Vec::new();
        let (mut start, mut held) = (0, 0);
        for cell in 0..self.in_memory.len() {
            let more = self.rows(cell);
            if held > 0 && held + more > rows {
                groups.push(start..cell);
                (start, held) = (cell, 0);
            }
            held += more;
        }
        if held > 0 {
            groups.push(start..self.in_memory.len());
        }
        groups
    }

    /// Takes the records of a cell out, in the order in which they came.
    pub fn take(&mut self, cell: usize) -> io::Result<Vec<u8>> {
        let extents = std::mem::take(&mut self.spilled[cell]);
        let in_memory = std::mem::take(&mut self.in_memory[cell]);
        self.held -= in_memory.capacity();
        if extents.is_empty() {
            return Ok(in_memory);
        }
        let spilled: usize = extents.iter().map(|extent| extent.len).sum();
        let mut records = vec![0; spilled];
        let mut at = 0;
        for Extent { offset, len } in extents {
            self.file.read(offset, &mut records[at..at + len])?;
            at += len;
        }
        records.extend_from_slice(&in_memory);
        Ok(records)
    }
}

/// A spill file in memory, for tests and builds in memory.
#[derive(Debug, Default)]
pub struct MemoryFile(Vec<u8>);

impl SpillFile for MemoryFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<u64> {
        let offset = self.0.len() as u64;
        self.0.extend_from_slice(bytes);
        Ok(offset)
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let bytes = self.0.get(start..start + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_record_comes_back_in_its_cell_and_in_order(
            cells in prop::collection::vec(0u32..5, 0..200),
            budget in 1usize..300,
        ) {
            let mut store = CellStore::new(5, 4, budget, MemoryFile::default());
            for (number, &cell) in (0u32..).zip(&cells) {
                store.add(&[cell], &number.to_le_bytes()).unwrap();
            }
            prop_assert_eq!(store.total_rows(), cells.len());
            let groups = store.groups(50);
            let covered: usize = groups.iter().cloned().flatten().map(|c| store.rows(c)).sum();
            prop_assert_eq!(covered, cells.len());
            for cell in 0..5 {
                let expected: Vec<u8> = (0u32..)
                    .zip(&cells)
                    .filter(|&(_, &c)| c as usize == cell)
                    .flat_map(|(number, _)| number.to_le_bytes())
                    .collect();
                prop_assert_eq!(store.take(cell).unwrap(), expected);
            }
        }
    }

    #[test]
    fn groups_hold_whole_neighbouring_cells() {
        let mut store = CellStore::new(4, 1, 1_000, MemoryFile::default());
        for (cell, rows) in [(0, 3), (1, 9), (2, 1), (3, 1)] {
            store.add(&vec![cell; rows], &vec![0; rows]).unwrap();
        }
        assert_eq!(store.groups(4), [0..1, 1..2, 2..4]);
        assert_eq!(store.groups(100).first(), Some(&(0..4)));
        assert!(CellStore::new(3, 1, 10, MemoryFile::default()).groups(1).is_empty());
    }
}
