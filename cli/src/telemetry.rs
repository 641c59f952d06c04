//! Logs to stderr (readable on a terminal, JSON otherwise) and, with an endpoint, traces over OTLP.
//!
//! Spans always carry a trace context, so `traceparent` travels through all roles even when nothing is exported.

use std::io::IsTerminal;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::failure::usage;

/// Sends what is left when dropped.
pub(crate) struct Telemetry {
    provider: SdkTracerProvider,
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::debug!(%error, "traces were not all exported");
        }
    }
}

/// Sets up logs and traces for the process. Must be called within the tokio runtime when `otlp` is set.
pub(crate) fn start(filter: &str, otlp: Option<&str>) -> anyhow::Result<Telemetry> {
    let filter =
        EnvFilter::try_new(filter).map_err(|error| usage(format!("log filter {filter:?}: {error}; try info")))?;
    let mut provider =
        SdkTracerProvider::builder().with_resource(Resource::builder().with_service_name("kvsplice").build());
    if let Some(endpoint) = otlp {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .build()
            .map_err(|error| usage(format!("otlp endpoint {endpoint:?}: {error}")))?;
        provider = provider.with_batch_exporter(exporter);
    }
    let provider = provider.build();
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs = if std::io::stderr().is_terminal() {
        logs.with_ansi(std::env::var_os("NO_COLOR").is_none()).boxed()
    } else {
        logs.json().boxed()
    };
    let traces = tracing_opentelemetry::layer().with_tracer(provider.tracer("kvsplice"));
    tracing_subscriber::registry().with(filter).with(logs).with(traces).try_init()?;
    Ok(Telemetry { provider })
}
