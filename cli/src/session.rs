//! What a command talks to: a running server, or roles that live as long as the command.

use std::time::Duration;

use kvsplice_proto::cache::CacheClient;
use kvsplice_proto::client;
use kvsplice_proto::server::MESSAGE_BYTES;
use kvsplice_proto::v1::head_client::HeadClient;
use tonic::transport::Channel;

use crate::config::Config;
use crate::failure::usage;
use crate::flags::ServerFlags;
use crate::roles::{self, Listen, Role, Running};

/// Loading models is slow on a cold disk.
const READY_TIMEOUT: Duration = Duration::from_secs(600);

/// An open connection, with the roles behind it when they are ours.
pub(crate) struct Session {
    /// Address of the server, for messages.
    pub(crate) server: String,
    channel: Channel,
    running: Option<Running>,
}

/// Connects to `--server`, or starts `roles` on free ports and connects to the first of them.
pub(crate) async fn open(flags: &ServerFlags, config: Config, roles: &[Role]) -> anyhow::Result<Session> {
    if let Some(server) = &flags.server {
        let channel = client::channel(server).map_err(|error| usage(format!("--server: {error}")))?;
        return Ok(Session { server: server.clone(), channel, running: None });
    }
    for role in roles {
        if !is_built(*role) {
            return Err(usage(format!("this build has no {role}; name a running one with --server HOST:PORT")));
        }
    }
    let mut running = roles::start(config, roles, Listen::Free).await?;
    if let Err(error) = running.ready(READY_TIMEOUT).await {
        let _same_cause = running.stop().await;
        return Err(error);
    }
    let server = running.addresses().next().map(|(_, address)| address.to_string()).unwrap_or_default();
    let channel = client::channel(&server)?;
    Ok(Session { server, channel, running: Some(running) })
}

const fn is_built(role: Role) -> bool {
    match role {
        Role::Head => cfg!(feature = "head"),
        Role::Worker => cfg!(feature = "worker"),
        Role::Cache => cfg!(feature = "cache"),
    }
}

impl Session {
    /// A client of the head.
    pub(crate) fn head(&self) -> HeadClient<Channel> {
        HeadClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES)
    }

    /// A client of the cache service, when the session is with one.
    pub(crate) fn cache(&self, deadline: Duration) -> CacheClient {
        CacheClient::new(self.channel.clone(), deadline)
    }

    /// Address of an embedded role.
    #[cfg(all(feature = "head", feature = "worker", feature = "cache"))]
    pub(crate) fn address(&self, role: Role) -> Option<String> {
        let mut addresses = self.running.as_ref()?.addresses();
        addresses.find(|(known, _)| *known == role).map(|(_, address)| address.to_string())
    }

    /// Stops roles that are ours.
    pub(crate) async fn close(self) -> anyhow::Result<()> {
        match self.running {
            Some(running) => running.stop().await,
            None => Ok(()),
        }
    }
}
