//! The words of keys such as `nimble-otter`: an adjective and a noun.

/// First halves.
#[rustfmt::skip] // one word a line would be pages
pub(super) const ADJECTIVES: &[&str] = &[
    "able", "aged", "agile", "airy", "amused", "ancient", "angular", "ardent", "autumnal", "awkward", "bashful",
    "bitter", "blunt", "bold", "boundless", "brave", "breezy", "brief", "bright", "brisk", "broad", "bumpy", "busy",
    "calm", "candid", "careful", "cautious", "chilly", "civil", "clammy", "clever", "cloudy", "clumsy", "coastal",
    "cold", "comical", "cordial", "cozy", "crafty", "creaky", "crimson", "crisp", "curious", "daring", "deft",
    "dense", "diligent", "dim", "distant", "docile", "dreamy", "drowsy", "dusky", "dusty", "eager", "earnest",
    "eastern", "elastic", "elegant", "elusive", "endless", "exact", "faded", "faint", "famous", "fancy", "fearless",
    "feathery", "fertile", "fierce", "flat", "fluent", "foggy", "fond", "formal", "fragile", "frank", "fresh",
    "frosty", "frugal", "fuzzy", "gallant", "gaudy", "gentle", "giant", "gifted", "glossy", "graceful", "grand",
    "grateful", "gritty", "grumpy", "hardy", "hasty", "hazy", "hearty", "hidden", "hoarse", "hollow", "homely",
    "honest", "humble", "hungry", "icy", "idle", "immense", "jolly", "jovial", "keen", "kindly", "lanky", "lavish",
    "lazy", "lively", "lofty", "loyal", "lucid", "lunar", "mellow", "merry", "mighty", "mild", "misty", "modest",
    "mossy", "muddy", "narrow", "neat", "nimble", "noble", "northern", "obedient", "odd", "orderly", "pale",
    "patient", "pensive", "placid", "plain", "plucky", "polite", "prickly", "proud", "quaint", "quick", "quiet",
    "ragged", "rapid", "rare", "restless", "robust", "rosy", "rough", "rugged", "rustic", "scarlet", "serene",
    "shady", "sharp", "shiny", "shy", "silent", "sincere", "sleek", "slender", "sly", "smoky", "snug", "sober",
    "solemn", "sour", "spare", "sparkling", "speedy", "stately", "steady", "stern", "sturdy", "subtle", "sunny",
    "supple", "swift", "tame", "tangy", "tawny", "tender", "thirsty", "thrifty", "tidy", "timid", "tranquil",
    "upright", "vast", "velvety", "vivid", "wary", "weary", "whimsical", "wild", "windy", "wise", "witty", "wooden",
    "woolly", "young", "zealous", "zesty",
];

/// Second halves.
#[rustfmt::skip] // one word a line would be pages
pub(super) const NOUNS: &[&str] = &[
    "acorn", "alcove", "almond", "anchovy", "antler", "anvil", "apricot", "archway", "aspen", "attic", "awning",
    "badger", "balcony", "ballad", "banner", "barge", "barley", "barrel", "basin", "basket", "beacon", "beaver",
    "beetle", "bellows", "bench", "birch", "biscuit", "blanket", "bonnet", "bottle", "boulder", "bracket",
    "bramble", "bridge", "brook", "broom", "bucket", "buckle", "burrow", "butter", "cabin", "cactus", "camel",
    "canal", "candle", "canoe", "canvas", "caravan", "carpet", "castle", "cavern", "cellar", "cherry", "chimney",
    "chisel", "cider", "cinder", "clover", "cobbler", "comet", "compass", "copper", "coral", "cottage", "cradle",
    "crater", "cricket", "crocus", "curtain", "cushion", "cymbal", "daisy", "dolphin", "donkey", "dragonfly",
    "drawer", "dune", "eagle", "ember", "engine", "falcon", "fennel", "ferry", "fiddle", "finch", "flagstone",
    "flannel", "forge", "fountain", "fox", "fungus", "gable", "garland", "garnet", "gazelle", "geyser", "ginger",
    "glacier", "goblet", "goose", "granary", "gravel", "hammer", "hamster", "harbor", "harness", "harvest",
    "hatchet", "hazel", "hedgehog", "helmet", "heron", "hinge", "hornet", "island", "ivy", "jackal", "jasmine",
    "jetty", "jigsaw", "juniper", "kennel", "kettle", "kitten", "ladder", "lagoon", "lantern", "lemon", "lentil",
    "lichen", "lilac", "lizard", "llama", "lobster", "locket", "magnet", "magpie", "mallet", "mantle", "maple",
    "marigold", "meadow", "melon", "minnow", "mitten", "moth", "mulberry", "mustard", "napkin", "nettle", "nutmeg",
    "oboe", "olive", "orchid", "osprey", "otter", "oyster", "paddle", "parsley", "peacock", "pebble", "pelican",
    "pepper", "pigeon", "pillow", "pine", "plateau", "plum", "pocket", "pony", "poppy", "puddle", "pumpkin",
    "quail", "quarry", "quilt", "rabbit", "raccoon", "radish", "raft", "rainbow", "raven", "ribbon", "robin",
    "rooster", "saddle", "saffron", "salmon", "sandal", "sapling", "satchel", "shovel", "sparrow", "spindle",
    "spruce", "squirrel", "stable", "sunflower", "swallow", "tapestry", "teacup", "thicket", "thistle", "timber",
    "toad", "trellis", "trumpet", "tulip", "tunnel", "turnip", "turtle", "valley", "velvet", "violin", "walnut",
    "walrus", "whistle", "willow", "windmill", "wombat", "yarrow", "zebra",
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_lists_are_long_and_have_no_word_twice() {
        for list in [ADJECTIVES, NOUNS] {
            assert!(list.len() >= 150, "{} words", list.len());
            assert_eq!(list.iter().collect::<HashSet<_>>().len(), list.len());
            assert!(list.iter().all(|word| word.chars().all(|char| char.is_ascii_lowercase())));
        }
    }
}
