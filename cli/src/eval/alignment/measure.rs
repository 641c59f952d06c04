//! One prompt: asks both models for their attention and compares every layer with every layer of the primary model.

use kvsplice_proto::{client as wire, v1};
use rand_chacha::ChaCha8Rng;

use super::overlap::Distribution;
use super::prompts::Prompt;
use super::report::{Layer, Measured, Pair};
use crate::eval::client::Client;
use crate::failure::{interrupted, refused};

/// Asks for one prompt. `layers` are names as the head takes them; `rng` gives the random orders.
///
/// # Errors
/// What the server says, or that its answer does not fit the prompt.
pub(super) async fn measure(
    client: &Client,
    layers: &[String],
    prompt: Prompt,
    mut rng: ChaCha8Rng,
) -> anyhow::Result<Measured> {
    let inline = v1::InlineSource { chunks: prompt.chunks.clone(), ..Default::default() };
    let request = v1::AttentionRequest {
        prompt: Some(v1::Prompt {
            source: Some(v1::prompt::Source::Inline(inline)),
            question: prompt.question.clone(),
            ..Default::default()
        }),
        layers: layers.to_vec(),
    };
    let (server, mut head) = (&client.session.server, client.session.head());
    let response = tokio::select! {
        response = head.attention(wire::request(request, client.timeout)) => response,
        () = client.stop.cancelled() => return Err(interrupted()),
    };
    let response = response.map_err(|status| refused(status, server))?.into_inner();
    let compared = tokio::task::spawn_blocking(move || {
        let compared = compare(&response.layers, &prompt, &mut rng);
        compared.map_err(|detail| anyhow::anyhow!("the server's attention for {}: {detail}", prompt.id))
    });
    compared.await?
}

/// Every layer against every layer of the primary model but itself.
fn compare(layers: &[v1::LayerAttention], prompt: &Prompt, rng: &mut ChaCha8Rng) -> Result<Measured, String> {
    let mut seen = Vec::with_capacity(layers.len());
    for layer in layers {
        seen.push((layer, Distribution::of(layer, &prompt.chunks)?));
    }
    let tokens = |role: &str| layers.iter().find(|layer| layer.role == role).map(|layer| layer.weights.len());
    let (Some(primary_tokens), Some(auxiliary_tokens)) = (tokens("primary"), tokens("auxiliary")) else {
        return Err("it is not of both models".to_owned());
    };
    let (primary, auxiliary): (Vec<_>, Vec<_>) = seen.iter().partition(|(layer, _)| layer.role == "primary");
    let mut pairs = Vec::new();
    for (guess, guessed) in auxiliary.iter().chain(&primary) {
        for (reference, referred) in &primary {
            if std::ptr::eq(*guess, *reference) {
                continue;
            }
            pairs.push(Pair {
                guess: name(guess),
                reference: name(reference),
                jaccard: referred.jaccard(guessed),
                kl: referred.divergence(guessed),
                chance: referred.chance(guessed, rng),
            });
        }
    }
    Ok(Measured {
        sample: prompt.id.clone(),
        length: prompt.length,
        primary_tokens,
        auxiliary_tokens,
        characters: seen.first().map_or(0, |(_, distribution)| distribution.characters()),
        pairs,
    })
}

fn name(layer: &v1::LayerAttention) -> Layer {
    Layer { role: layer.role.clone(), name: layer.layer.clone(), index: layer.index }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn layer(role: &str, name: &str, weights: &[f32]) -> v1::LayerAttention {
        let ends: Vec<u32> = (1..=weights.len() as u32).collect();
        let starts = ends.iter().map(|end| end - 1).collect();
        v1::LayerAttention {
            role: role.to_owned(),
            layer: name.to_owned(),
            index: 0,
            weights: weights.to_vec(),
            chunks: vec![v1::TokenSpans { starts, ends }],
        }
    }

    fn prompt() -> Prompt {
        let (id, chunks, question) = ("hop-0@5".to_owned(), vec!["abcde".to_owned()], "?".to_owned());
        Prompt { id, length: 5, number: 0, chunks, question }
    }

    #[test]
    fn every_layer_is_held_against_every_other_one_of_the_primary_model() {
        let layers = [
            layer("primary", "first", &[0.1, 0.5, 0.1, 0.1, 0.1]),
            layer("primary", "last", &[0.5, 0.1, 0.1, 0.1, 0.1]),
            layer("auxiliary", "first", &[0.1, 0.1, 0.1, 0.1, 0.5]),
            layer("auxiliary", "last", &[1.0, 0.2, 0.2, 0.2, 0.2]),
        ];
        let measured = compare(&layers, &prompt(), &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
        let pairs: Vec<String> = measured
            .pairs
            .iter()
            .map(|pair| {
                let (guess, reference) = (&pair.guess, &pair.reference);
                format!("{} {} of {} {}: {}", guess.role, guess.name, reference.role, reference.name, pair.jaccard)
            })
            .collect();
        assert_eq!(
            pairs,
            [
                "auxiliary first of primary first: 0",
                "auxiliary first of primary last: 0",
                "auxiliary last of primary first: 0",
                "auxiliary last of primary last: 1",
                "primary first of primary last: 0",
                "primary last of primary first: 0",
            ]
        );
        assert!(measured.pairs[3].kl < 0.1 && measured.pairs.iter().all(|pair| pair.kl >= 0.0));
        assert_eq!((measured.characters, measured.primary_tokens, measured.auxiliary_tokens), (5, 5, 5));
    }

    #[test]
    fn an_answer_without_a_model_is_refused() {
        let layers = [layer("primary", "last", &[1.0, 0.0, 0.0, 0.0, 0.0])];
        assert!(compare(&layers, &prompt(), &mut ChaCha8Rng::seed_from_u64(1)).is_err());
    }
}
