//! What the owner of an index should do, in plain words.

use super::calibrate::Due;

/// The state of an index, as far as something may have to be done about it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Condition {
    /// Rows that a search can return.
    pub rows: u64,
    /// Of these, rows that are not in the store yet.
    pub delta_rows: u64,
    /// `polign.delta_limit`; 0: nothing is done by itself.
    pub delta_limit: u64,
    /// Attempts at maintenance that failed since the last that did not.
    pub failures: u32,
    /// Part of all rows that are dead.
    pub dead_share: f64,
    /// The imbalance factor of the cells.
    pub cell_skew: f64,
    /// By how much rows lie farther from the centroids of their cells than when these were made.
    pub drift: Option<f64>,
    /// Whether a compaction is due.
    pub compaction_due: bool,
    /// Whether another calibration is due.
    pub calibration_due: Option<Due>,
}

/// A search of an index reads so many times the rows that it should, from where on a rebuild pays.
const MUCH_SKEW: f64 = 3.0;
/// Rows lie so much farther from their centroids, from where on a rebuild pays.
const MUCH_DRIFT: f64 = 0.15;
const MUCH_DEAD: f64 = 0.3;
/// Rows that a search reads one by one without being slow.
const MANY_DELTA_ROWS: u64 = 20_000;

/// What to do, most urgent first; nothing if all is well.
pub fn advice(condition: &Condition) -> Option<String> {
    let Condition { rows, delta_rows, delta_limit, failures, .. } = *condition;
    let automatic = delta_limit > 0;
    let mut sentences = Vec::new();
    if failures > 0 {
        sentences.push(format!(
            "Maintenance failed {failures} times in a row: the server log says why. Inserted rows stay in \
             the index, which grows, until it succeeds."
        ));
    } else if delta_rows > MANY_DELTA_ROWS.max(2 * delta_limit) {
        sentences.push(match automatic {
            true => format!(
                "{delta_rows} inserted rows are not in the store yet, which is more than \
                 polign.delta_limit ({delta_limit}): if it stays so, call polign.flush()."
            ),
            false => format!(
                "{delta_rows} inserted rows are not in the store yet, and each search reads all of them: \
                 call polign.flush(), or set polign.delta_limit."
            ),
        });
    }
    if condition.dead_share > MUCH_DEAD {
        let percent = condition.dead_share * 100.0;
        sentences.push(format!(
            "{percent:.0} % of the rows in the index are dead: call polign.compact(), and look whether \
             autovacuum keeps up with the table."
        ));
    } else if condition.compaction_due {
        sentences.push(match automatic {
            true => "Segments are due to be compacted: that begins with the next flush or VACUUM, or by \
                     polign.compact()."
                .to_owned(),
            false => "Segments are due to be compacted, and polign.delta_limit is 0: call \
                      polign.compact()."
                .to_owned(),
        });
    }
    match condition.calibration_due {
        None => {}
        Some(Due::ToRows { rows_then }) => sentences.push(format!(
            "Recall was calibrated with {rows_then} rows, and there are {rows} now: the next VACUUM \
             calibrates it anew, or polign.compact() does."
        )),
        Some(Due::ToQueries { rows_then }) => sentences.push(format!(
            "Recall was calibrated to queries with {rows_then} rows, and there are {rows} now: call \
             polign.calibrate() with queries again, or without to go back to rows."
        )),
    }
    if condition.cell_skew > MUCH_SKEW {
        let skew = condition.cell_skew;
        sentences.push(format!(
            "Cells are of very different sizes, so that a search reads {skew:.1} times the rows that it \
             should: polign.compact() splits large cells; if it stays so, REINDEX INDEX CONCURRENTLY."
        ));
    }
    if let Some(drift) = condition.drift.filter(|&drift| drift > MUCH_DRIFT) {
        let percent = drift * 100.0;
        sentences.push(format!(
            "Rows lie {percent:.0} % farther from the centroids of their cells than when these were \
             made, so that searches need more of them: REINDEX INDEX CONCURRENTLY finds new cells."
        ));
    }
    (!sentences.is_empty()).then(|| sentences.join(" "))
}
