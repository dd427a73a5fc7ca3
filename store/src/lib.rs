//! polign-store: the object-store traffic and the on-disk segment cache of one Postgres cluster.
//!
//! One program a cluster, started by the extension's supervisor. It knows nothing of Postgres: backends
//! ask for parts of objects over a Unix-domain socket, and find them in the mapped cache.

pub mod config;
pub mod fetch;
pub mod hedge;
pub mod limiter;
pub mod log;
pub mod object_store;
pub mod region_cache;
pub mod remote;
pub mod retry;
pub mod service;
pub mod stores;
