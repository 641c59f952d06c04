//! Erasing a document: the report names every object that is gone, of both models, captures and pins included, and nothing
//! of it is left. Replacing one removes what the old version alone used.
#![allow(missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use kvsplice_proto::v1::head_client::HeadClient;
use kvsplice_proto::{client, v1};
use kvsplice_tests::{Client, Cluster, run_ok};
use serde_json::Value;

const TINY: [&str; 3] = ["--shape", "tiny", "--random-weights"];
const FERRY: &str =
    "The ferry leaves at nine. Its captain keeps bees on the upper deck, and sells the honey on Sundays. ";
const MILL: &str =
    "The mill grinds rye on Mondays and wheat on Tuesdays; its wheel was made by a cooper from the harbor. ";

/// Every object of a store, by its path.
fn objects(store: &Path) -> BTreeSet<String> {
    let (mut found, mut folders) = (BTreeSet::new(), vec![store.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(store).unwrap().display().to_string());
            }
        }
    }
    found
}

fn last(output: &str) -> Value {
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

fn cache(cluster: &Cluster, arguments: &[&str]) -> Value {
    let address = cluster.cache.address();
    last(&run_ok(&[&["cache"], arguments, &["--json", "--server", address]].concat()).unwrap())
}

#[test]
fn an_erased_document_leaves_nothing_and_the_report_names_all_of_it() {
    let cluster = Cluster::start(&TINY).unwrap();
    let server = cluster.server();
    let ingest = |name: &str, text: &str| {
        let file = cluster.folder().join(name);
        fs::write(&file, text).unwrap();
        let file = file.display().to_string();
        run_ok(&[
            "ingest",
            "--server",
            server,
            "--corpus",
            "town",
            "--chunk-tokens",
            "32",
            "--overlap",
            "4",
            file.as_str(),
        ])
        .unwrap();
    };
    ingest("mill.txt", &MILL.repeat(3));
    let without = objects(&cluster.store());
    ingest("ferry.txt", &FERRY.repeat(3));
    let question = "What does the captain keep?";
    let craft = ["ask", "--server", server, "--corpus", "town", "--top-k", "6", "--max-tokens", "4", "--ignore-eos"];
    run_ok(&[&craft[..], &["--strategy", "craft", "--capture", "true", "--json", question]].concat()).unwrap();
    let with = objects(&cluster.store());
    let new: Vec<&String> = with.difference(&without).collect();
    assert!(new.iter().any(|path| path.contains("-ctx")), "a capture is stored: {new:?}");
    // Captures are of the other document's chunks too.
    let clean = |path: &&&String| !path.contains("-ctx");
    let chunk = new.iter().filter(clean).find_map(|path| path.strip_prefix("kv/")?.split('/').next()).unwrap();
    cache(&cluster, &["pin", chunk]);

    let before = objects(&cluster.store());
    let documents: Vec<String> = listed(&cluster).into_iter().filter(|id| id.contains("ferry")).collect();
    let request = v1::DeleteDocumentsRequest { corpus: "town".into(), documents };
    let tester = Client::connect(server).unwrap();
    let removed = tester.run(async {
        let mut head = HeadClient::new(client::channel(server).unwrap());
        head.delete_documents(client::request(request, Duration::from_secs(60))).await.unwrap().into_inner().removed
    });
    let after = objects(&cluster.store());
    let gone: BTreeSet<String> = before.difference(&after).cloned().collect();
    assert_eq!(gone, removed.into_iter().collect::<BTreeSet<String>>(), "the report is what is gone");
    for part in ["records/default/town/documents/", "kv/", "-ctx", "records/craft/", "pins/"] {
        assert!(gone.iter().any(|path| path.contains(part)), "{part} in {gone:?}");
    }
    let left: Vec<&String> = after.difference(&without).filter(|path| !path.contains("-ctx")).collect();
    assert!(left.iter().all(|path| !path.starts_with("kv/") && !path.contains("ferry")), "{left:?}");

    // Another version under the same name: what the old one alone used goes.
    let before = objects(&cluster.store());
    ingest("mill.txt", "The mill is closed.");
    let after = objects(&cluster.store());
    assert!(before.difference(&after).any(|path| path.starts_with("kv/")));
    let orphans = cache(&cluster, &["gc", "--older-than", "0s", "--dry-run"]);
    assert_eq!(orphans["orphans"], 0, "{orphans}");
    assert_eq!(cache(&cluster, &["verify", "--all"])["bad"], 0);
}

/// The ids of the corpus's documents.
fn listed(cluster: &Cluster) -> Vec<String> {
    let records = run_ok(&["cache", "ls", "default/town/documents", "--server", cluster.cache.address()]).unwrap();
    let id = |record: &str| {
        let json = run_ok(&["cache", "get", record, "--server", cluster.cache.address()]).unwrap();
        serde_json::from_str::<Value>(&json).ok()?["id"].as_str().map(str::to_owned)
    };
    records.lines().filter_map(id).collect()
}
