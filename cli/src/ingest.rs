//! `kvsplice ingest`: sends documents to the head, which cuts, encodes and stores them; or has it store what is there
//! behind another named prefix.
//!
//! Every file is checked before the first is sent, so bad input loses nothing. Running it again resumes.

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use futures::StreamExt;
use indicatif::{ProgressBar, ProgressStyle};
use kvsplice_proto::v1::ingest_event::Event;
use kvsplice_proto::{client, v1};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Response, Status, Streaming};

use crate::documents::{self, Source};
use crate::failure::{interrupted, refused, usage};
use crate::flags::{ConfigFlags, ServerFlags};
use crate::roles::Role;
use crate::session::Session;
use crate::{output, session, signals, telemetry};

/// Documents on their way to the head.
const IN_FLIGHT: usize = 4;

/// Flags of `ingest`.
#[derive(Args, Clone, Debug)]
pub(crate) struct IngestFlags {
    /// Files or folders: .txt, .md, and .jsonl with {"id","text"[,"chunk":true]} a line
    #[arg(required_unless_present = "register_prefix", value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Corpus to add to; made if it is new
    #[arg(long, value_name = "NAME")]
    corpus: String,
    /// Tokens a chunk, at most [default: 1000, or what the corpus has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunk_tokens: Option<u32>,
    /// Tokens that neighboring chunks share [default: 50, or what the corpus has]
    #[arg(long, value_name = "N")]
    overlap: Option<u32>,
    /// System prompt that stands before every chunk
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Instead of adding documents: store the corpus behind --system-prompt too, for ask --prefix NAME
    #[arg(long, value_name = "NAME", requires = "system_prompt",
          conflicts_with_all = ["paths", "chunk_tokens", "overlap"])]
    register_prefix: Option<String>,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerFlags,
    #[command(flatten)]
    config: ConfigFlags,
}

#[cfg(any(feature = "head", feature = "worker"))]
impl IngestFlags {
    /// Whether models run in this process.
    pub(crate) fn is_embedded(&self) -> bool {
        self.server.server.is_none()
    }
}

/// Checks every document, then sends them and shows the head's progress.
pub(crate) async fn run(flags: IngestFlags) -> anyhow::Result<()> {
    let config = flags.config.load(Vec::new())?;
    if flags.config.print_config {
        return output::line(config.to_toml()?.trim_end());
    }
    if let (Some(overlap), Some(tokens)) = (flags.overlap, flags.chunk_tokens)
        && overlap >= tokens
    {
        return Err(usage(format!("--overlap must be less than --chunk-tokens, got {overlap} and {tokens}")));
    }
    let sources = documents::sources(&flags.paths)?;
    let (mut count, mut text_bytes) = (0u64, 0u64);
    documents::each(&sources, |document| {
        count += 1;
        text_bytes += document.text.len() as u64;
        Ok(())
    })?;
    let _telemetry = telemetry::start(config.log.as_deref().unwrap_or("warn"), config.otlp.as_deref())?;
    let stop = signals::stop_token()?;
    let session = tokio::select! {
        session = session::open(&flags.server, config, &Role::ALL) => session?,
        () = stop.cancelled() => return Err(interrupted()),
    };
    let result = match &flags.register_prefix {
        None => send(&session, &flags, sources, &stop, &mut Progress::new(flags.json, Some((count, text_bytes)))).await,
        Some(name) => register(&session, &flags, name, &stop, &mut Progress::new(flags.json, None)).await,
    };
    let closed = session.close().await;
    result.and(closed)
}

async fn send(
    session: &Session,
    flags: &IngestFlags,
    sources: Vec<Source>,
    stop: &CancellationToken,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    let (sender, receiver) = mpsc::channel(IN_FLIGHT);
    let start = v1::IngestStart {
        corpus: flags.corpus.clone(),
        chunk_tokens: flags.chunk_tokens.unwrap_or(0),
        overlap: flags.overlap,
        system_prompt: flags.system_prompt.clone().unwrap_or_default(),
    };
    let reading = tokio::task::spawn_blocking(move || read(&sources, start, &sender));
    let call = async {
        let requests = client::request(ReceiverStream::new(receiver), flags.server.timeout());
        let response = session.head().ingest_documents(requests).await;
        show_all(response, session, progress).await
    };
    let result = in_time(session, flags, stop, call).await;
    // The receiver is gone by now, so the reader has ended or ends at its next document. A file that changed since it
    // was checked is the true cause of a stream that broke off.
    match reading.await? {
        Err(error) => Err(error),
        Ok(()) => result,
    }
}

async fn register(
    session: &Session,
    flags: &IngestFlags,
    name: &str,
    stop: &CancellationToken,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    let message = v1::RegisterPrefixRequest {
        corpus: flags.corpus.clone(),
        name: name.to_owned(),
        system_prompt: flags.system_prompt.clone().unwrap_or_default(),
    };
    let call = async {
        let response = session.head().register_prefix(client::request(message, flags.server.timeout())).await;
        show_all(response, session, progress).await
    };
    in_time(session, flags, stop, call).await
}

/// Shows the head's events up to the last.
async fn show_all(
    response: Result<Response<Streaming<v1::IngestEvent>>, Status>,
    session: &Session,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    let mut events = response.map_err(|status| refused(status, &session.server))?.into_inner();
    let mut done = false;
    while let Some(event) = events.next().await {
        let event = event.map_err(|status| refused(status, &session.server))?;
        if let Some(event) = event.event {
            done = matches!(event, Event::Done(_));
            progress.show(event)?;
        }
    }
    anyhow::ensure!(done, "the server ended before every document was stored; run the command again to resume");
    Ok(())
}

/// Runs a call until it ends, the deadline passes, or the user stops it.
async fn in_time(
    session: &Session,
    flags: &IngestFlags,
    stop: &CancellationToken,
    call: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    tokio::select! {
        () = stop.cancelled() => Err(interrupted()),
        result = tokio::time::timeout(flags.server.timeout(), call) => result.unwrap_or_else(|_| {
            let late = Status::deadline_exceeded("ingest took too long; what is stored is kept, run it again");
            Err(refused(late, &session.server))
        }),
    }
}

fn read(sources: &[Source], start: v1::IngestStart, sender: &mpsc::Sender<v1::IngestRequest>) -> anyhow::Result<()> {
    use v1::ingest_request::Message;
    let send = |message| sender.blocking_send(v1::IngestRequest { message: Some(message) });
    if send(Message::Start(start)).is_err() {
        return Ok(());
    }
    documents::each(sources, |document| {
        let document = v1::DocumentText { id: document.id, text: document.text, chunk: document.chunk };
        // A call that has ended takes no more documents; its own error says why.
        let _ended = send(Message::Document(document));
        Ok(())
    })
}

/// Progress for people (a bar on a terminal, lines otherwise) or as JSON.
struct Progress {
    json: bool,
    /// How many documents are sent, and the bytes of their text; none when none are sent.
    sent: Option<(u64, u64)>,
    bar: Option<ProgressBar>,
    last_percent: u64,
}

impl Progress {
    fn new(json: bool, sent: Option<(u64, u64)>) -> Self {
        let bar = (!json && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} chunks, {msg}, {eta} left");
            ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self { json, sent, bar, last_percent: 0 }
    }

    fn show(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Sizes(sizes) => self.sizes(sizes),
            Event::Progress(progress) => self.progress(progress),
            Event::Done(done) => self.done(done),
        }
    }

    fn sizes(&self, sizes: v1::IngestSizes) -> anyhow::Result<()> {
        let (primary, auxiliary) = (sizes.primary_bytes_per_token, sizes.auxiliary_bytes_per_token);
        let Some((documents, text_bytes)) = self.sent else {
            if self.json {
                return output::json(&json!({
                    "event": "sizes",
                    "primary_bytes_per_token": primary,
                    "auxiliary_bytes_per_token": auxiliary,
                }));
            }
            output::note(format_args!(
                "KV takes {} a token for the primary model and {} for the auxiliary",
                output::bytes(primary),
                output::bytes(auxiliary),
            ));
            return Ok(());
        };
        // Real text has about four bytes a token; the true totals come with the end.
        let total = |per_token: u64| (text_bytes / 4).saturating_mul(per_token);
        if self.json {
            return output::json(&json!({
                "event": "sizes",
                "documents": documents,
                "text_bytes": text_bytes,
                "primary_bytes_per_token": primary,
                "auxiliary_bytes_per_token": auxiliary,
                "estimated_primary_bytes": total(primary),
                "estimated_auxiliary_bytes": total(auxiliary),
            }));
        }
        output::note(format_args!(
            "{} documents, {} of text; KV takes {} a token for the primary model and {} for the auxiliary, about {} \
             and {} in total",
            documents,
            output::bytes(text_bytes),
            output::bytes(primary),
            output::bytes(auxiliary),
            output::bytes(total(primary)),
            output::bytes(total(auxiliary)),
        ));
        Ok(())
    }

    fn progress(&mut self, progress: v1::IngestProgress) -> anyhow::Result<()> {
        if self.json {
            return output::json(&json!({
                "event": "progress",
                "documents": progress.documents,
                "chunks_done": progress.chunks_done,
                "chunks_known": progress.chunks_known,
                "tokens_done": progress.tokens_done,
            }));
        }
        let documents = match self.sent {
            Some((sent, _)) => format!("{} of {sent} documents", progress.documents),
            None => format!("{} documents", progress.documents),
        };
        let message = format!("{documents}, {} tokens", progress.tokens_done);
        if let Some(bar) = &self.bar {
            bar.set_length(progress.chunks_known);
            bar.set_position(progress.chunks_done);
            bar.set_message(message);
            return Ok(());
        }
        // While documents are sent, not all of their chunks are known.
        let (done, all) = match self.sent {
            Some((sent, _)) => (progress.documents, sent),
            None => (progress.chunks_done, progress.chunks_known),
        };
        let percent = done.saturating_mul(100) / all.max(1);
        if percent >= self.last_percent + 10 {
            self.last_percent = percent;
            output::note(format_args!("{message}, {} of {} chunks", progress.chunks_done, progress.chunks_known));
        }
        Ok(())
    }

    fn done(&self, done: v1::IngestDone) -> anyhow::Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if self.json {
            return output::json(&json!({
                "event": "done",
                "documents": done.documents,
                "documents_unchanged": done.documents_unchanged,
                "chunks_created": done.chunks_created,
                "chunks_present": done.chunks_present,
                "primary_tokens": done.primary_tokens,
                "auxiliary_tokens": done.auxiliary_tokens,
                "primary_bytes": done.primary_bytes,
                "auxiliary_bytes": done.auxiliary_bytes,
            }));
        }
        output::line(format_args!(
            "{} documents ({} unchanged), {} chunks encoded and {} already there, {} tokens; KV: {} primary, {} \
             auxiliary",
            done.documents,
            done.documents_unchanged,
            done.chunks_created,
            done.chunks_present,
            done.primary_tokens,
            output::bytes(done.primary_bytes),
            output::bytes(done.auxiliary_bytes),
        ))
    }
}
