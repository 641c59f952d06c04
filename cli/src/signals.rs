//! SIGINT and SIGTERM: the first asks for an orderly end, the second ends the process at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that the first signal cancels.
pub(crate) fn stop_token() -> anyhow::Result<CancellationToken> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let token = CancellationToken::new();
    let stop = token.clone();
    tokio::spawn(async move {
        loop {
            let code = tokio::select! {
                _ = interrupt.recv() => 130,
                _ = terminate.recv() => 143,
            };
            if stop.is_cancelled() {
                std::process::exit(code);
            }
            stop.cancel();
        }
    });
    Ok(token)
}
