//! In which region requests are signed.

use std::time::Duration;

use aws_config::{
    Region,
    environment::EnvironmentVariableRegionProvider,
    imds::{self, region::ImdsRegionProvider},
    meta::region::RegionProviderChain,
    profile::ProfileFileRegionProvider,
};
use tokio::sync::OnceCell;

use super::S3Settings;

/// What stores that have no regions take, and AWS where nobody names another.
const DEFAULT: &str = "us-east-1";
/// A machine that reaches a store by an endpoint is often none of AWS, and has no metadata service.
const METADATA_PATIENCE: Duration = Duration::from_millis(500);

/// The setting, else what the SDK finds (environment, profile, metadata service of the machine), else a
/// default.
pub(super) async fn region(settings: &S3Settings) -> Region {
    if let Some(region) = &settings.region {
        return Region::new(region.clone());
    }
    let found = match settings.endpoint {
        None => RegionProviderChain::default_provider().region().await,
        Some(_) => {
            let chain = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new())
                .or_else(ProfileFileRegionProvider::new());
            match chain.region().await {
                None => region_of_machine().await,
                found => found,
            }
        }
    };
    found.unwrap_or_else(|| Region::from_static(DEFAULT))
}

/// What the metadata service says, asked once: most often nobody answers, and that takes time.
async fn region_of_machine() -> Option<Region> {
    static FOUND: OnceCell<Option<Region>> = OnceCell::const_new();
    let ask = || async {
        let client = imds::Client::builder()
            .connect_timeout(METADATA_PATIENCE)
            .read_timeout(METADATA_PATIENCE)
            .max_attempts(1);
        let provider = ImdsRegionProvider::builder().imds_client(client.build());
        provider.build().region().await
    };
    FOUND.get_or_init(ask).await.clone()
}
