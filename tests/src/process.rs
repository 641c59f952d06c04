//! One role as a process of its own. It is killed when its value goes.
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::{program, wait_until};

/// Time until a role has bound its address.
const BIND: Duration = Duration::from_secs(60);

/// A running role, its address and its log.
#[derive(Debug)]
pub struct Process {
    role: &'static str,
    child: Child,
    address: String,
    log: PathBuf,
}

impl Process {
    /// Starts `kvsplice ROLE --listen 127.0.0.1:0 ARGUMENTS` and waits for the address that it prints. The log goes to a
    /// file in `folder`. Fails with the log when the role ends before that.
    pub fn start(role: &'static str, arguments: &[&str], folder: &Path) -> Result<Self> {
        Self::start_at(role, "127.0.0.1:0", arguments, folder)
    }

    /// The same at a given address, such as that of a role which was stopped.
    pub fn start_at(role: &'static str, listen: &str, arguments: &[&str], folder: &Path) -> Result<Self> {
        let log = fresh_log(role, folder)?;
        let file = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = Command::new(program()?);
        command.arg(role).args(["--listen", listen]).args(arguments).stdin(Stdio::null());
        command.stdout(file.try_clone().context("share the log")?).stderr(file);
        let child = command.spawn().with_context(|| format!("start kvsplice {role}"))?;

        let mut process = Self { role, child, address: String::new(), log };
        process.address = wait_until(&format!("the address of {role}"), BIND, || {
            if let Some(address) = address_in(&process.log_text()?, role) {
                return Ok(Some(address));
            }
            if let Some(status) = process.child.try_wait().context("ask for the exit status")? {
                bail!("{role} ended with {status}:\n{}", process.log_text()?);
            }
            Ok(None)
        })?;
        Ok(process)
    }

    /// `head`, `worker`, `cache` or `up`.
    pub fn role(&self) -> &'static str {
        self.role
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What the role has printed and logged so far.
    pub fn log_text(&self) -> Result<String> {
        let bytes = fs::read(&self.log).with_context(|| format!("read {}", self.log.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The address that another role printed into the same log (`kvsplice up` prints three).
    pub fn address_of(&self, role: &str) -> Result<Option<String>> {
        Ok(address_in(&self.log_text()?, role))
    }

    /// Sends a signal such as `TERM` or `INT`.
    pub fn signal(&self, name: &str) -> Result<()> {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.id().to_string()).status();
        ensure!(status.context("run kill")?.success(), "cannot send {name} to {}", self.role);
        Ok(())
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self, deadline: Duration) -> Result<ExitStatus> {
        let child = &mut self.child;
        wait_until(&format!("the end of {}", self.role), deadline, || {
            child.try_wait().context("ask for the exit status")
        })
    }

    /// Ends the process at once, as a crash would.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().with_context(|| format!("kill {}", self.role))?;
        self.child.wait().with_context(|| format!("wait for {}", self.role))?;
        Ok(())
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait().context("ask for the exit status")?.is_none())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already; either way nothing is left to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A log file that does not exist yet: a role may be started several times in one folder.
fn fresh_log(role: &str, folder: &Path) -> Result<PathBuf> {
    for number in 0..1000 {
        let log = folder.join(format!("{role}-{number}.log"));
        if !log.exists() {
            return Ok(log);
        }
    }
    bail!("too many logs of {role} in {}", folder.display())
}

/// Finds `listening role=ROLE address=ADDRESS`. With `up` as the role it is the head's line.
fn address_in(log: &str, role: &str) -> Option<String> {
    let role = if role == "up" { "head" } else { role };
    let marker = format!("listening role={role} address=");
    let line = log.lines().find(|line| line.contains(&marker))?;
    let (_, rest) = line.split_once(&marker)?;
    let end = rest.find(|character: char| character.is_whitespace() || character == '"').unwrap_or(rest.len());
    rest.get(..end).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::address_in;

    #[test]
    fn the_address_is_found_among_other_lines() {
        let log = "config read\nlistening role=worker address=127.0.0.1:4001\nlistening role=head address=[::1]:4000\n";
        assert_eq!(address_in(log, "head").as_deref(), Some("[::1]:4000"));
        assert_eq!(address_in(log, "up").as_deref(), Some("[::1]:4000"));
        assert_eq!(address_in(log, "worker").as_deref(), Some("127.0.0.1:4001"));
        assert_eq!(address_in(log, "cache"), None);
    }
}
