//! What computing KV takes is told to the cache service by whoever computes it, so that eviction by value goes by it: at
//! ingest for both models, with a repair, and with a capture.
#![allow(missing_docs)]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kvsplice_cache_service::Config;
use kvsplice_kv::ModelDigest;
use kvsplice_tests::{
    CacheService, Client, EXACT, FaultyStore, Pair, cache_stats, inline, request, strategy, wait_until, words,
    worker_status,
};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

const QUESTION: &str = "Who built it, and when?";
const SOON: Duration = Duration::from_secs(10);

struct System {
    store: Arc<FaultyStore>,
    cache: CacheService,
    pair: Pair,
    client: Client,
}

impl System {
    /// On a store that has the chunk KV of `from`, and does not know what it cost.
    fn start(from: Option<&System>) -> Self {
        let store = Arc::new(FaultyStore::default());
        // Without tiers each request reads the store.
        let config = Config { memory_bytes: 0, ..Config::default() };
        let cache = CacheService::start_with(store.clone(), config, "127.0.0.1:0").unwrap();
        let pair = Pair::start(cache.address(), &EXACT).unwrap();
        let client = Client::connect(pair.head.address()).unwrap();
        if let Some(from) = from {
            client.run(async {
                let mut objects = from.store.list(Some(&Path::from("kv")));
                while let Some(meta) = objects.next().await {
                    let path = meta.unwrap().location;
                    let object = from.store.get(&path).await.unwrap().bytes().await.unwrap();
                    store.put(&path, object.into()).await.unwrap();
                }
            });
        }
        Self { store, cache, pair, client }
    }

    /// Microseconds a token, by model: what `value` goes by.
    fn costs(&self) -> HashMap<String, f64> {
        cache_stats(self.cache.address()).unwrap().encode_us_per_token
    }

    fn primary(&self) -> String {
        worker_status(self.pair.worker.address()).unwrap().model.unwrap().digest
    }

    /// Waits for the cost of the primary model, and makes sure that no other is known.
    fn assert_primary_alone(&self, what: &str) {
        let costs = wait_until(what, SOON, || Ok(Some(self.costs()).filter(|costs| !costs.is_empty()))).unwrap();
        assert_eq!(costs.keys().collect::<Vec<_>>(), [&self.primary()], "{what}");
        assert!(costs.values().all(|cost| cost.is_finite() && *cost > 0.0), "{what}: {costs:?}");
    }
}

#[test]
fn whoever_computes_kv_says_what_it_took() {
    let chunks: Vec<String> = (0..4).map(|place| words(place * 60, 40)).collect();
    let ask = |system: &System, spec: &str, store: bool| {
        system.client.generate(request(inline(&chunks, QUESTION, store), strategy(spec), 2)).unwrap()
    };

    let ingested = System::start(None);
    let planned = ask(&ingested, "clip:0.3", true).planned;
    let costs = ingested.costs();
    assert!(costs.contains_key(&ingested.primary()), "{costs:?}");
    assert_eq!(costs.len(), 2, "the auxiliary model's too: {costs:?}");
    assert!(costs.iter().all(|(model, cost)| model.parse::<ModelDigest>().is_ok() && *cost > 0.0), "{costs:?}");

    let repairing = System::start(Some(&ingested));
    assert!(repairing.costs().is_empty());
    // The plan reads the header, then the load does and finds it gone.
    repairing.store.remove_while_read(&planned.chunks[2], 0, 1);
    let answer = ask(&repairing, "direct", false);
    assert_eq!(answer.sources().iter().filter(|source| **source == "repaired").count(), 1, "{:?}", answer.receipt);
    repairing.assert_primary_alone("a repair");

    let capturing = System::start(Some(&ingested));
    let answer = ask(&capturing, "craft:capture=true", false);
    assert_eq!(answer.sources(), ["fresh"; 4]);
    capturing.assert_primary_alone("a capture");
}
