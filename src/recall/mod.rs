//! Recall as it is: searches of an index compared with exact search, by statements that the caller could run
//! as well; and the queries of users, from their own statements.

mod forced_plan;
mod indexed;
mod list;
mod measure;
pub mod queries;
mod spi;

pub use indexed::Indexed;
pub use measure::{Measured, of_rows, of_statement};
