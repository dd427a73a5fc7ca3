//! polign: an approximate nearest neighbour index for Postgres whose bulk lives in object storage.
//!
//! This crate is everything that touches Postgres and nothing else: the algorithms are in
//! `polign-engine`, all object-store traffic is in the program `polign-store`.

mod am;
mod clock;
mod error;
mod failpoint;
mod gc;
mod guc;
mod maintain;
// Lists of pending and retired objects are part of the page format; flushing will use them.
#[allow(dead_code)]
mod pages;
mod places;
mod recall;
mod session;
mod sql_api;
mod threads;
mod vector;
mod verify;
mod worker;

pgrx::pg_module_magic!(name, version);

/// Called once when a process loads the library.
#[allow(non_snake_case)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    error::no_backtraces_in_messages();
    guc::register();
    failpoint::register();
    am::options::register();
    worker::register::at_server_start();
}
