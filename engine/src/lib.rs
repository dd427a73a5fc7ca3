//! The polign index without Postgres: SIMD kernels, the RaBitQ quantizer, clustering, the segment and
//! root formats, search, and the client side of the shared segment cache.
//!
//! Dependencies point one way: `search` -> `segment`/`root` -> `quantize` -> `kernel`. `unsafe` is
//! denied outside `kernel` and `cache` (the mapped views).

pub mod build;
pub mod cache;
pub mod cluster;
pub mod gets;
pub mod kernel;
pub mod maintain;
pub mod metric;
pub mod object_id;
pub mod protocol;
pub mod quantize;
pub mod recall;
pub mod reservoir;
pub mod root;
pub mod search;
pub mod segment;
pub mod store_url;

pub use metric::Metric;
pub use object_id::ObjectId;
pub use store_url::StoreUrl;
