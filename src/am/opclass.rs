//! Operator classes: which metric, over which element type.
//!
//! Each operator class carries both as the result of its support function 1, so that nothing is ever
//! looked up by name: the schema of pgvector and the search path do not matter.

use pgrx::{PgSqlErrorCode, pg_sys, prelude::*};
use polign_engine::Metric;
pub use polign_pages::meta::Element;

use super::handler::SUPPORT_OPCLASS;
use crate::error::{Error, Result};

/// What an operator class says about its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpClass {
    pub metric: Metric,
    pub element: Element,
}

impl OpClass {
    fn code(self) -> i32 {
        i32::from(self.element as u8) << 8 | i32::from(self.metric.code())
    }

    fn from_code(code: i32) -> Option<Self> {
        let [metric, element, 0, 0] = code.to_le_bytes() else { return None };
        let element = match element {
            1 => Element::Vector,
            2 => Element::Halfvec,
            _ => return None,
        };
        Some(Self { metric: Metric::from_code(metric)?, element })
    }

    /// The operator class of an open index.
    ///
    /// # Safety
    /// `index` is an open index of this access method.
    pub unsafe fn of(index: pg_sys::Relation) -> Result<Self> {
        // SAFETY: an index of this access method has one column and support function 1 by amvalidate;
        // a missing one is checked for; the function takes no argument.
        let code = unsafe {
            let procedure = pg_sys::index_getprocid(index, 1, SUPPORT_OPCLASS);
            if procedure == pg_sys::InvalidOid {
                None
            } else {
                let result = pg_sys::OidFunctionCall0Coll(procedure, pg_sys::InvalidOid);
                Self::from_code(result.value() as i32)
            }
        };
        code.ok_or_else(|| {
            Error::new(
                PgSqlErrorCode::ERRCODE_INVALID_OBJECT_DEFINITION,
                "operator class of a polign_ivf index does not name a metric that polign knows",
            )
            .hint("Use one of the operator classes that the extension polign installs.")
        })
    }
}

macro_rules! opclass {
    ($name:ident, $element:ident, $metric:ident) => {
        #[pg_extern(sql = false)]
        fn $name() -> i32 {
            OpClass { metric: Metric::$metric, element: Element::$element }.code()
        }
    };
}

opclass!(opclass_vector_l2, Vector, L2);
opclass!(opclass_vector_ip, Vector, InnerProduct);
opclass!(opclass_vector_cosine, Vector, Cosine);
opclass!(opclass_halfvec_l2, Halfvec, L2);
opclass!(opclass_halfvec_ip, Halfvec, InnerProduct);
opclass!(opclass_halfvec_cosine, Halfvec, Cosine);
