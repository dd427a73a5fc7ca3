use pgrx::prelude::*;

/// `polign.version()`: the version of the loaded library, which may be newer than the SQL objects.
#[pg_extern(sql = false)]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
