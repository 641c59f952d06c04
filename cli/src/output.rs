//! Lines on stdout and notes on stderr. Colors only on a terminal; a closed pipe is an error, not a panic.

use std::fmt::Display;
#[cfg(feature = "client")]
use std::io::IsTerminal;
use std::io::Write;

use serde_json::Value;

/// One line on stdout, flushed.
pub(crate) fn line(text: impl Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// One JSON object on one line of stdout.
pub(crate) fn json(value: &Value) -> anyhow::Result<()> {
    line(value)
}

#[cfg(feature = "client")]
pub(crate) use client::{bytes, note, text};

#[cfg(feature = "client")]
mod client {
    use super::{Display, IsTerminal, Write};

    /// A piece of text on stdout, flushed.
    pub(crate) fn text(text: &str) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        Ok(())
    }

    /// A line for people on stderr, dim on a terminal.
    pub(crate) fn note(text: impl Display) {
        let color = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let (start, end) = if color { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
        // Nobody is left to tell when stderr is closed.
        let _closed = writeln!(std::io::stderr(), "{start}{text}{end}");
    }

    /// A size for people, such as `1.5 MB`.
    pub(crate) fn bytes(bytes: u64) -> String {
        let mut size = bytes as f64;
        for unit in ["B", "kB", "MB", "GB"] {
            if size < 1000.0 {
                return if unit == "B" { format!("{bytes} B") } else { format!("{size:.1} {unit}") };
            }
            size /= 1000.0;
        }
        format!("{size:.1} TB")
    }
}
