//! The head over its wire, with tiny random models and the smallest peers that the wire allows.
//! Needs the demo models' files for their tokenizers (`kvsplice models pull all`) and fails without them.

mod captures;
mod peers;

use kvsplice_kv::{Receipt, Strategy};
use kvsplice_proto::v1::generate_event::Event;
use kvsplice_proto::v1::ingest_event::Event as IngestEvent;
use kvsplice_proto::v1::{self, prompt};
use peers::{Peers, World};
use tonic::Code;

const TEXT: &str = "The workshop on Alder Street repairs clocks. Its owner, Ines Varga, took over in 2011. \
    The workshop opens at nine and closes at five, except on Thursdays. Ines Varga was born in Szeged. \
    She studied horology in Glashuette and keeps a notebook with the serial number of every clock. \
    The town library holds a tower clock that has not run since the flood. The ferry leaves at nine. ";

fn start(corpus: &str) -> v1::IngestStart {
    v1::IngestStart { corpus: corpus.into(), chunk_tokens: 24, overlap: Some(4), system_prompt: String::new() }
}

fn request(source: prompt::Source, strategy: &str) -> v1::GenerateRequest {
    v1::GenerateRequest {
        prompt: Some(v1::Prompt {
            source: Some(source),
            question: "Who repairs the tower clock?".into(),
            ..Default::default()
        }),
        options: Some(v1::Options {
            strategy: Some(strategy.into()),
            ratio: (strategy == "clip").then_some(0.4),
            ..v1::Options::default()
        }),
        sampling: None,
        dump: true,
    }
}

fn corpus(top_k: u32) -> prompt::Source {
    prompt::Source::Corpus(v1::CorpusSource { corpus: "town".into(), top_k, ..v1::CorpusSource::default() })
}

fn inline(store: bool) -> prompt::Source {
    let chunks = TEXT.split_inclusive(". ").map(str::to_owned).collect();
    prompt::Source::Inline(v1::InlineSource { chunks, store, ..Default::default() })
}

fn receipt(events: &[Event]) -> Receipt {
    let Some(Event::Done(done)) = events.last() else { panic!("done comes last: {events:?}") };
    assert_eq!(done.text, "seven");
    done.receipt.clone().unwrap().try_into().unwrap()
}

fn dump(events: &[Event]) -> &v1::Dump {
    events.iter().find_map(|event| if let Event::Dump(dump) = event { Some(dump) } else { None }).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ingested_corpus_is_answered_from_cache() {
    let world = World::start(Peers::default()).await;
    let done = world.ingest(start("town"), &[("clocks", TEXT)]).await.unwrap();
    assert!(done.chunks_created >= 4, "{done:?}");
    let again = world.ingest(start("town"), &[("clocks", TEXT)]).await.unwrap();
    assert_eq!((again.documents_unchanged, again.chunks_created), (1, 0));

    let events = world.generate(request(corpus(3), "clip")).await.unwrap();
    assert!(matches!(&events[0], Event::Planned(planned) if planned.chunks.len() == 3));
    let receipt = receipt(&events);
    assert_eq!(receipt.effective, Strategy::Clip);
    assert_eq!(receipt.auxiliary_source, "memory");
    assert!(receipt.ratio_charged > 0.0 && receipt.ratio_charged <= 0.4 + 1e-6);
    for stage in ["tokenize", "score", "select", "load"] {
        assert!(receipt.span(stage).is_some(), "{stage}");
    }

    let asked = world.asked.lock().unwrap().last().unwrap().clone();
    let parts = &asked.start.parts;
    assert_eq!(parts.len(), 5);
    assert_eq!(asked.start.lease, "lease-1");
    assert!(parts[..4].iter().all(|part| part.chunk.len() == 64), "prefix and chunks are loaded");
    let exact: Vec<bool> = parts.iter().map(|part| part.exact).collect();
    assert_eq!(exact, [true, true, false, false, false]);
    let mut slot = 0;
    for part in parts {
        assert_eq!((part.first_slot, part.first_position), (slot, slot));
        slot += part.token_ids.len() as u32;
    }
    assert_eq!(asked.rows.complete_below, slot);
    let selectable = parts[2].first_slot..parts[4].first_slot;
    assert!(!asked.rows.ranges.is_empty());
    assert!(asked.rows.ranges.iter().all(|range| selectable.contains(&range.first) && range.end <= selectable.end));

    let dump = dump(&events);
    assert_eq!(dump.token_ids, parts.iter().flat_map(|part| part.token_ids.clone()).collect::<Vec<_>>());
    assert_eq!(dump.chunk_starts, parts[1..].iter().map(|part| part.first_slot).collect::<Vec<_>>());
    assert_eq!(dump.scores.len(), (parts[4].first_slot - parts[1].first_slot) as usize);
    assert!(dump.scores[..parts[1].token_ids.len()].iter().all(|&score| score == -1.0), "chunk 1 is exact");
    assert_eq!(dump.logits, [0.5, -1.0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_head_on_the_same_store_reads_the_auxiliary_kv_and_picks_the_same_rows() {
    let first = World::start(Peers::default()).await;
    first.ingest(start("town"), &[("clocks", TEXT)]).await.unwrap();
    let events = first.generate(request(corpus(3), "clip")).await.unwrap();
    let second = World::start(Peers::default()).await;
    second.cache.chunks.lock().unwrap().clone_from(&first.cache.chunks.lock().unwrap());
    second.cache.records.lock().unwrap().clone_from(&first.cache.records.lock().unwrap());
    let others = second.generate(request(corpus(3), "clip")).await.unwrap();
    assert_eq!(receipt(&others).auxiliary_source, "object");
    assert_eq!(dump(&others).rows, dump(&events).rows);
    assert_eq!(dump(&others).aux_scores, dump(&events).aux_scores);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_cache_service_down_an_answer_is_fresh_and_says_why() {
    let world = World::start(Peers { cache: false, ..Peers::default() }).await;
    let receipt = receipt(&world.generate(request(inline(false), "clip")).await.unwrap());
    assert_eq!(receipt.effective, Strategy::Full);
    assert!(receipt.effective_reason.contains("cache service"), "{}", receipt.effective_reason);
    assert!(receipt.chunks.iter().all(|chunk| chunk.source.name() == "fresh" && !chunk.reason.is_empty()));
    assert_eq!(world.ingest(start("town"), &[("a", TEXT)]).await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_down_or_has_another_model_is_an_error_that_says_so() {
    let world = World::start(Peers { worker: false, ..Peers::default() }).await;
    let status = world.generate(request(inline(false), "clip")).await.unwrap_err();
    assert!(matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded), "{status:?}");

    let world = World::start(Peers { same_model: false, ..Peers::default() }).await;
    let status = world.generate(request(inline(false), "clip")).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains(&"0".repeat(64)), "{}", status.message());
}

#[tokio::test(flavor = "multi_thread")]
async fn inline_chunks_are_fresh_until_they_are_stored() {
    let world = World::start(Peers::default()).await;
    let fresh = receipt(&world.generate(request(inline(false), "clip")).await.unwrap());
    assert_eq!(fresh.effective, Strategy::Full);
    assert!(fresh.chunks[0].reason.contains("--store"));
    let stored = receipt(&world.generate(request(inline(true), "clip")).await.unwrap());
    assert_eq!(stored.effective, Strategy::Clip);
    assert!(stored.span("store").is_some());
    let hit = receipt(&world.generate(request(inline(false), "clip")).await.unwrap());
    assert_eq!(hit.effective, Strategy::Clip);
    assert!(hit.chunks.iter().all(|chunk| chunk.source.name() == "object"));
    let ids = |receipt: &Receipt| receipt.chunks.iter().map(|chunk| chunk.id).collect::<Vec<_>>();
    assert_eq!(ids(&fresh), ids(&hit));
}

#[tokio::test(flavor = "multi_thread")]
async fn full_and_direct_need_no_scores_and_direct_can_keep_its_positions() {
    let world = World::start(Peers::default()).await;
    let full = receipt(&world.generate(request(inline(true), "full")).await.unwrap());
    assert_eq!((full.ratio_charged, full.auxiliary_source.as_str()), (1.0, ""));
    assert!(full.effective_reason.is_empty());
    let mut alone = request(inline(true), "direct");
    let options = alone.options.as_mut().unwrap();
    (options.shared_prefix, options.renumber) = (Some(false), Some(false));
    let direct = receipt(&world.generate(alone).await.unwrap());
    assert_eq!((direct.effective, direct.ratio_charged), (Strategy::Direct, 0.0));
    let parts = world.asked.lock().unwrap().last().unwrap().start.parts.clone();
    let first = &parts[1];
    assert!(first.behind_prefix && first.exact && first.first_position == first.first_slot);
    let chunks = &parts[2..parts.len() - 1];
    assert!(chunks.iter().all(|part| part.first_position == 0 && !part.behind_prefix && !part.exact));
    assert_eq!(parts.last().unwrap().first_position, parts.last().unwrap().first_slot);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_chunk_is_exact_and_nothing_is_selected() {
    let world = World::start(Peers::default()).await;
    for budget in ["charged", "nominal"] {
        let source = v1::InlineSource { chunks: vec![TEXT.into()], store: true, ..Default::default() };
        let mut single = request(prompt::Source::Inline(source), "clip");
        single.options.as_mut().unwrap().budget = Some(budget.into());
        let events = world.generate(single).await.unwrap();
        assert!(dump(&events).rows.is_empty(), "{budget}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_prompt_without_a_prefix_has_no_prefix_part() {
    let world = World::start(Peers::default()).await;
    let chunks = vec!["The mill grinds rye.\n".to_owned(); 2];
    let raw = v1::RawSource { prefix: String::new(), chunks, store: true };
    let receipt = receipt(&world.generate(request(prompt::Source::Raw(raw), "clip")).await.unwrap());
    assert_eq!(receipt.effective, Strategy::Clip);
    assert_eq!(receipt.chunks[0].id, receipt.chunks[1].id);
    let parts = world.asked.lock().unwrap().last().unwrap().start.parts.clone();
    assert_eq!(parts.len(), 3);
    assert!(parts.iter().all(|part| !part.token_ids.is_empty()));
    assert_eq!((parts[0].exact, parts[1].exact), (true, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_or_deleted_document_takes_its_kv_along_unless_another_uses_it() {
    let world = World::start(Peers::default()).await;
    world.ingest(start("town"), &[("a", TEXT), ("b", "The mill grinds rye on Mondays.")]).await.unwrap();
    world.ingest(start("other"), &[("twin", "The mill grinds rye on Mondays.")]).await.unwrap();
    let count = || world.cache.chunks.lock().unwrap().len();
    for (id, variant) in world.cache.chunks.lock().unwrap().keys() {
        let key = format!("craft/{id}/{}", variant.replace("clean", "ctx0123456789abcdef"));
        world.cache.records.lock().unwrap().insert(key, b"{}".to_vec());
    }
    let captures = || world.cache.records.lock().unwrap().keys().filter(|key| key.starts_with("craft/")).count();
    let before = (count(), captures());
    world.ingest(start("town"), &[("a", "The bakery is closed.")]).await.unwrap();
    assert!(count() < before.0);
    assert!(captures() < before.1, "records of captures go with their KV");

    let delete = |corpus: &str, document: &str| {
        let (mut head, corpus, documents) = (world.head.clone(), corpus.to_owned(), vec![document.to_owned()]);
        async move { head.delete_documents(v1::DeleteDocumentsRequest { corpus, documents }).await }
    };
    let before = count();
    let removed = delete("town", "b").await.unwrap().into_inner().removed;
    assert!(removed.iter().all(|path| path.starts_with("records/")), "the twin still uses the KV: {removed:?}");
    assert_eq!(count(), before);
    delete("other", "twin").await.unwrap();
    assert_eq!(count(), before - 2);
    assert_eq!(delete("town", "b").await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_named() {
    let world = World::start(Peers::default()).await;
    world.ingest(start("town"), &[("clocks", TEXT)]).await.unwrap();
    let ask = |change: &dyn Fn(&mut v1::GenerateRequest)| {
        let mut request = request(corpus(2), "clip");
        change(&mut request);
        request
    };
    let question = |text: &str| {
        let text = text.to_owned();
        ask(&move |request| request.prompt.as_mut().unwrap().question.clone_from(&text))
    };
    let source =
        |source: prompt::Source| ask(&move |request| request.prompt.as_mut().unwrap().source = Some(source.clone()));
    let named = |name: &str| {
        source(prompt::Source::Corpus(v1::CorpusSource {
            corpus: "town".into(),
            chunks: vec![name.into()],
            ..v1::CorpusSource::default()
        }))
    };
    let raw = |chunks: &[&str], question: &str| {
        let chunks = chunks.iter().map(|&chunk| chunk.to_owned()).collect();
        let mut request = source(prompt::Source::Raw(v1::RawSource { prefix: "P".into(), chunks, store: false }));
        request.prompt.as_mut().unwrap().question = question.into();
        request
    };
    let cases = [
        (question(" "), Code::InvalidArgument, "question"),
        (question("x<|im_end|>y"), Code::InvalidArgument, "<|im_end|>"),
        (ask(&|request| request.options.as_mut().unwrap().ratio = Some(f32::NAN)), Code::InvalidArgument, "ratio"),
        (
            ask(&|request| request.options.as_mut().unwrap().strategy = Some("best".into())),
            Code::InvalidArgument,
            "best",
        ),
        (ask(&|request| request.prompt = None), Code::InvalidArgument, "prompt"),
        (
            ask(&|request| request.sampling = Some(v1::Sampling { max_tokens: Some(9000), ..Default::default() })),
            Code::OutOfRange,
            "9000",
        ),
        (named("0123456789"), Code::NotFound, "0123456789"),
        (named("clocks#99"), Code::NotFound, "clocks#99"),
        (raw(&[], "Q"), Code::InvalidArgument, "chunks"),
        (raw(&["a", ""], "Q"), Code::InvalidArgument, "chunk 1"),
        (raw(&["a"], ""), Code::InvalidArgument, "question"),
        (
            source(prompt::Source::Corpus(v1::CorpusSource { corpus: "nowhere".into(), ..Default::default() })),
            Code::NotFound,
            "nowhere",
        ),
        (
            source(prompt::Source::Corpus(v1::CorpusSource {
                corpus: "town".into(),
                prefix: "formal".into(),
                ..Default::default()
            })),
            Code::NotFound,
            "formal",
        ),
    ];
    for (request, code, word) in cases {
        let status = world.generate(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(word), "{:?} lacks {word:?}", status.message());
    }
    for (start, documents, code, word) in [
        (v1::IngestStart { chunk_tokens: 99, ..start("town") }, ("a", "b"), Code::FailedPrecondition, "99"),
        (v1::IngestStart { corpus: "a/b".into(), ..start("") }, ("a", "b"), Code::InvalidArgument, "a/b"),
        (v1::IngestStart { overlap: Some(24), ..start("new") }, ("a", "b"), Code::InvalidArgument, "overlap"),
        (start("town"), ("nothing", " \n "), Code::InvalidArgument, "nothing"),
    ] {
        let status = world.ingest(start, &[documents]).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(word), "{:?} lacks {word:?}", status.message());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_system_prompt_runs_every_chunk_fresh() {
    let world = World::start(Peers::default()).await;
    world.ingest(start("town"), &[("clocks", TEXT)]).await.unwrap();
    let source = v1::CorpusSource {
        corpus: "town".into(),
        chunks: vec!["clocks#1".into(), "clocks#0".into()],
        system_prompt: "Answer in rhyme.".into(),
        ..v1::CorpusSource::default()
    };
    let receipt = receipt(&world.generate(request(prompt::Source::Corpus(source), "clip")).await.unwrap());
    assert_eq!(receipt.effective, Strategy::Full);
    assert!(receipt.effective_reason.contains("system prompt"), "{}", receipt.effective_reason);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registered_prefix_is_answered_from_cache() {
    let world = World::start(Peers::default()).await;
    let first = world.ingest(start("town"), &[("clocks", TEXT), ("mill", "The mill grinds rye.")]).await.unwrap();
    let count = || world.cache.chunks.lock().unwrap().len();
    let manifest = || world.cache.records.lock().unwrap()["default/town/manifest"].clone();
    let register = |corpus: &str, name: &str, system_prompt: &str| {
        let (corpus, name, system_prompt) = (corpus.to_owned(), name.to_owned(), system_prompt.to_owned());
        let mut head = world.head.clone();
        async move {
            let request = v1::RegisterPrefixRequest { corpus, name, system_prompt };
            let mut stream = head.register_prefix(request).await?.into_inner();
            let mut events = Vec::new();
            while let Some(event) = stream.message().await? {
                events.extend(event.event);
            }
            Ok::<_, tonic::Status>(events)
        }
    };
    let totals = |events: &[IngestEvent]| {
        assert!(matches!(events.first(), Some(IngestEvent::Sizes(_))));
        let Some(IngestEvent::Done(done)) = events.last() else { panic!("done comes last: {events:?}") };
        *done
    };

    // A run that was broken off before it named the prefix is resumed.
    let (before, unregistered) = (count(), manifest());
    let events = register("town", "rhyme", "Answer in rhyme.").await.unwrap();
    let done = totals(&events);
    assert_eq!((done.documents, done.documents_unchanged), (2, 0));
    assert_eq!((done.chunks_created, done.chunks_present), (first.chunks_created, 0));
    assert!(events.iter().any(|event| matches!(event, IngestEvent::Progress(progress) if progress.chunks_done > 0)));
    let (after, registered) = (count(), manifest());
    assert!(after > before);
    world.cache.records.lock().unwrap().insert("default/town/manifest".into(), unregistered);
    let resumed = totals(&register("town", "rhyme", "Answer in rhyme.").await.unwrap());
    assert_eq!((resumed.documents_unchanged, resumed.chunks_created), (2, 0));
    assert_eq!((count(), manifest()), (after, registered));

    let rhyme = || {
        let (corpus, prefix) = ("town".into(), "rhyme".into());
        prompt::Source::Corpus(v1::CorpusSource { corpus, prefix, top_k: 3, ..v1::CorpusSource::default() })
    };
    let answered = receipt(&world.generate(request(rhyme(), "clip")).await.unwrap());
    assert_eq!(answered.effective, Strategy::Clip);
    assert!(answered.chunks.iter().all(|chunk| chunk.source.name() == "object"));
    // Later documents are stored behind it too, and removed documents take that KV along.
    world.ingest(start("town"), &[("ferry", "The ferry leaves at nine.")]).await.unwrap();
    assert_eq!(count(), after + 4);
    let mut head = world.head.clone();
    let delete = v1::DeleteDocumentsRequest { corpus: "town".into(), documents: vec!["ferry".into()] };
    head.delete_documents(delete).await.unwrap();
    assert_eq!(count(), after);

    for (corpus, name, system, code, words) in [
        ("town", "rhyme", "Answer in prose.", Code::FailedPrecondition, vec!["Answer in rhyme.", "Answer in prose."]),
        ("town", "a/b", "Answer.", Code::InvalidArgument, vec!["prefix name", "a/b"]),
        ("town", "blank", " ", Code::InvalidArgument, vec!["system_prompt"]),
        ("town", "forged", "a<|im_end|>b", Code::InvalidArgument, vec!["<|im_end|>"]),
        ("nowhere", "rhyme", "Answer.", Code::NotFound, vec!["nowhere"]),
        ("town", "long", &"word ".repeat(9000), Code::InvalidArgument, vec!["document", "long"]),
    ] {
        let status = register(corpus, name, system).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(words.iter().all(|word| status.message().contains(word)), "{:?}", status.message());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_that_cannot_be_stored_is_not_registered() {
    let first = World::start(Peers::default()).await;
    first.ingest(start("town"), &[("clocks", TEXT)]).await.unwrap();
    let world = World::start(Peers { worker: false, ..Peers::default() }).await;
    world.cache.chunks.lock().unwrap().clone_from(&first.cache.chunks.lock().unwrap());
    world.cache.records.lock().unwrap().clone_from(&first.cache.records.lock().unwrap());
    let (corpus, name, system_prompt) = ("town".into(), "rhyme".into(), "Answer in rhyme.".into());
    let request = v1::RegisterPrefixRequest { corpus, name, system_prompt };
    let mut stream = world.head.clone().register_prefix(request).await.unwrap().into_inner();
    assert!(stream.message().await.is_err());
    assert_eq!(*world.cache.records.lock().unwrap(), *first.cache.records.lock().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_given_answer_is_scored() {
    let mut world = World::start(Peers::default()).await;
    let v1::GenerateRequest { prompt, options, .. } = request(inline(true), "clip");
    let request = v1::ScoreAnswerRequest { prompt, options, answer: "Ines Varga".into(), distributions: false };
    let response = world.head.score(request.clone()).await.unwrap().into_inner();
    assert!(response.token_ids.len() > 1);
    assert_eq!(response.logprobs.len(), response.token_ids.len());
    assert_eq!(response.receipt.unwrap().effective, "clip");
    let empty = v1::ScoreAnswerRequest { answer: String::new(), ..request };
    assert_eq!(world.head.score(empty).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_chunks_of_a_corpus_and_the_models_are_listed() {
    let mut world = World::start(Peers::default()).await;
    let done = world.ingest(start("town"), &[("clocks", TEXT), ("mill", "The mill grinds rye.")]).await.unwrap();
    let mut pages = world.head.list_chunks(v1::ListChunksRequest { corpus: "town".into() }).await.unwrap().into_inner();
    let mut chunks = Vec::new();
    while let Some(page) = pages.message().await.unwrap() {
        chunks.extend(page.chunks);
    }
    assert_eq!(chunks.len() as u64, done.chunks_created);
    assert_eq!((chunks[0].document.as_str(), chunks[0].index), ("clocks", 0));
    assert!(chunks.iter().all(|chunk| chunk.tokens <= 24 && chunk.id.len() == 64));
    assert!(TEXT.starts_with(&chunks[0].text));
    let models = world.head.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!(models.iter().map(|model| model.role.as_str()).collect::<Vec<_>>(), ["primary", "auxiliary"]);
}
