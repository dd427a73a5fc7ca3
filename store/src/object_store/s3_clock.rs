//! The store's clock, from the `Date` of its answers.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use aws_sdk_s3::{
    config::{
        ConfigBag, Intercept, RuntimeComponents,
        interceptors::BeforeDeserializationInterceptorContextRef,
    },
    error::BoxError,
    primitives::{DateTime, DateTimeFormat},
};

/// Takes the time from the answer to the request that it is given to.
#[derive(Debug, Clone, Default)]
pub(super) struct Clock(Arc<AtomicI64>);

impl Clock {
    /// Milliseconds since 1970, if the answer told.
    pub fn now_ms(&self) -> Option<i64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|now| *now != 0)
    }
}

impl Intercept for Clock {
    fn name(&self) -> &'static str {
        "Clock"
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = context.response().headers().get("date");
        let date = date.and_then(|date| DateTime::from_str(date, DateTimeFormat::HttpDate).ok());
        if let Some(ms) = date.and_then(|date| date.to_millis().ok()) {
            self.0.store(ms, Ordering::Relaxed);
        }
        Ok(())
    }
}
