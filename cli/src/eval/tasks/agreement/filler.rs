//! Sentences of everyday topics that state no fact a question could ask for: no name, no town, no number.
//!
//! Invariant: a passage has no form of sentence twice before it has had all, and a sample no sentence before it has had
//! thousands.

use std::collections::HashSet;

use rand_chacha::ChaCha8Rng;

use super::super::random::{distinct, pick};

/// Sentences with the slots `{a}` and `{b}`, and what may stand in them.
struct Topic {
    a: &'static [&'static str],
    b: &'static [&'static str],
    sentences: &'static [&'static str],
}

const TOPICS: &[Topic] = &[
    Topic {
        a: &["drizzle", "fog", "frost", "sunshine", "sleet", "thunder", "haze", "a warm wind"],
        b: &[
            "the hills",
            "the meadows",
            "the coast",
            "the valley",
            "the orchards",
            "the moor",
            "the river",
            "the rooftops",
        ],
        sentences: &[
            "The forecast spoke of {a} over {b} until late in the afternoon.",
            "By noon {a} had settled on {b}, and nobody seemed surprised.",
            "Old people say that {a} over {b} means a mild winter.",
            "There was {a} beyond {b}, and the light turned gray.",
            "Travelers were told to expect {a} near {b}.",
            "After a week of {a}, {b} looked freshly washed.",
            "Someone had painted {b} under {a}, rather badly.",
            "In the evening {a} moved away from {b} toward the sea.",
        ],
    },
    Topic {
        a: &["plums", "leeks", "smoked fish", "honey", "goat cheese", "walnuts", "red cabbage", "fresh bread"],
        b: &[
            "the corner stall",
            "the fountain",
            "the covered hall",
            "the east gate",
            "a green cart",
            "the pump",
            "the chapel wall",
            "the old scales",
        ],
        sentences: &[
            "At the market, {a} sold quickly beside {b}.",
            "The best {a} could be found near {b}, if one came early.",
            "A boy carried a basket of {a} past {b}.",
            "The price of {a} was argued over at {b} all morning.",
            "Behind {b} the crates of {a} were already empty.",
            "It is said that one should buy {a} at {b} and nowhere else.",
            "Two dogs slept by {b}, close to the {a}.",
            "When the rain came, they moved the {a} under a cloth by {b}.",
        ],
    },
    Topic {
        a: &["roses", "beans", "poppies", "tulips", "tomatoes", "sweet peas", "gooseberries", "young apple trees"],
        b: &[
            "the south wall",
            "the compost heap",
            "the greenhouse",
            "the gravel path",
            "the shed",
            "the hedge",
            "the pond",
            "the gate",
        ],
        sentences: &[
            "In the garden the {a} by {b} needed more water than usual.",
            "Slugs had found the {a} next to {b}.",
            "The {a} were moved to {b} in spring and did well there.",
            "Nothing but {a} would grow close to {b}.",
            "A bench stood between the {a} and {b}.",
            "The soil near {b} is too heavy for {a}.",
            "Bees preferred the {a} to everything else around {b}.",
            "Last year's {a} still leaned against {b}.",
        ],
    },
    Topic {
        a: &[
            "the night train",
            "the slow train",
            "the freight train",
            "the morning express",
            "the branch line",
            "the last tram",
            "the mail coach",
            "the local bus",
        ],
        b: &[
            "a signal fault",
            "leaves on the line",
            "a herd of cows",
            "a missing conductor",
            "a late connection",
            "heavy snow",
            "a flat tire",
            "repairs to the track",
        ],
        sentences: &[
            "Because of {b}, {a} waited outside the station.",
            "Passengers on {a} had grown used to {b}.",
            "The timetable for {a} makes no allowance for {b}.",
            "It was {b} again that kept {a} from leaving.",
            "On most days {a} is punctual in spite of {b}.",
            "A poster excused {a} and blamed {b}.",
            "Nobody aboard {a} had heard about {b}.",
            "The driver of {a} told a long story about {b}.",
        ],
    },
    Topic {
        a: &["onions", "barley", "mushrooms", "dried peas", "chestnuts", "parsnips", "rye flour", "salted butter"],
        b: &[
            "a heavy pot",
            "the oven",
            "a clay dish",
            "a copper pan",
            "the cold pantry",
            "a wide bowl",
            "the wood stove",
            "a linen cloth",
        ],
        sentences: &[
            "The recipe asks for {a} and the patience to watch {b}.",
            "Put the {a} in {b} and leave everything there for an hour.",
            "With enough {a}, even {b} of poor make gives a good soup.",
            "The cook kept {a} next to {b} at all times.",
            "Too much salt spoils {a}, whatever is done with {b}.",
            "Some prefer {a} warmed slowly in {b}.",
            "The smell of {a} from {b} filled the stairs.",
            "They had run out of {a}, and {b} stayed unused.",
        ],
    },
    Topic {
        a: &[
            "the choir",
            "the brass band",
            "the string quartet",
            "the organist",
            "the drummers",
            "the piano teacher",
            "the young soloists",
            "the dance orchestra",
        ],
        b: &[
            "a slow waltz",
            "an old hymn",
            "a march",
            "a difficult fugue",
            "a lullaby",
            "the second movement",
            "a folk song",
            "the overture",
        ],
        sentences: &[
            "On rehearsal nights {a} went over {b} again and again.",
            "Listeners agreed that {a} took {b} too fast.",
            "For once {a} played {b} without a mistake.",
            "The hall was cold, yet {a} finished {b}.",
            "Someone hummed {b} while {a} tuned up.",
            "A torn page made {a} leave out half of {b}.",
            "Of all pieces, {a} liked {b} least.",
            "The applause for {a} began before {b} had ended.",
        ],
    },
    Topic {
        a: &[
            "a rusty hinge",
            "the leaking tap",
            "a loose floorboard",
            "the cracked window",
            "a blocked gutter",
            "the crooked shelf",
            "a worn carpet",
            "the squeaking door",
        ],
        b: &[
            "a dab of oil",
            "some putty",
            "a longer screw",
            "two coats of paint",
            "an afternoon's work",
            "a borrowed ladder",
            "a new washer",
            "a bit of string",
        ],
        sentences: &[
            "It took {b} to deal with {a} in the end.",
            "The landlord promised {b} for {a} and forgot it.",
            "Against {a} the manual recommends {b}.",
            "Whoever repaired {a} had used {b}.",
            "For weeks {a} was the talk of the house, until {b} settled it.",
            "There is hardly anything like {b} when {a} keeps one awake.",
            "They tried {b}, but {a} was no better for it.",
            "In the cellar {a} still waits for {b}.",
        ],
    },
    Topic {
        a: &[
            "herring gulls",
            "swallows",
            "the herons",
            "wild geese",
            "jackdaws",
            "tawny owls",
            "the starlings",
            "some lapwings",
        ],
        b: &[
            "the reed bed",
            "the mud flats",
            "the chimney",
            "a bare poplar",
            "the plowed field",
            "the breakwater",
            "the barn roof",
            "the flooded meadow",
        ],
        sentences: &[
            "From the path one could see {a} above {b}.",
            "Every autumn {a} return to {b} for a few days.",
            "The noise of {a} from {b} carried far.",
            "A notebook mentions {a} at {b} and says no more.",
            "With good glasses {a} can be told apart even at {b}.",
            "Visitors often mistake {a} near {b} for something rarer.",
            "Since the reeds were cut, {a} avoid {b}.",
            "At dusk {a} left {b} all at once.",
        ],
    },
    Topic {
        a: &[
            "the evening class",
            "the reading circle",
            "the sewing group",
            "the chess club",
            "the language course",
            "the history society",
            "the pottery workshop",
            "the debating club",
        ],
        b: &[
            "a drafty room",
            "tea and biscuits",
            "a long silence",
            "a lively quarrel",
            "borrowed chairs",
            "a broken heater",
            "poor lighting",
            "a shared joke",
        ],
        sentences: &[
            "As so often, {a} began with {b}.",
            "Members of {a} remember {b} above all.",
            "What kept {a} together was {b}.",
            "New people came to {a} and were met by {b}.",
            "Without {b}, {a} would not be the same.",
            "In summer {a} takes a rest from {b}.",
            "The minutes of {a} record {b}.",
            "Somebody left {a} early because of {b}.",
        ],
    },
    Topic {
        a: &[
            "the fishing boats",
            "the pilot cutter",
            "a timber ship",
            "the dredger",
            "the rowing club",
            "a small yacht",
            "the tugs",
            "the ferry crew",
        ],
        b: &[
            "the ebb",
            "high water",
            "a change of wind",
            "the harbor lamps",
            "the evening tide",
            "a tow rope",
            "fresh paint",
            "clear orders",
        ],
        sentences: &[
            "In the harbor {a} waited for {b}.",
            "It was thanks to {b} that {a} came in safely.",
            "Without {b}, {a} could do very little.",
            "People on the quay watched {a} and spoke of {b}.",
            "The log says only that {a} had {b}.",
            "Before breakfast {a} made use of {b}.",
            "Nothing troubles {a} more than a lack of {b}.",
            "From the window one sees {a} and, with luck, {b}.",
        ],
    },
];

/// How often the slots of a sentence are filled anew before a repeat is taken after all.
const TRIES: usize = 64;

/// Gives the filler of one sample, passage after passage.
#[derive(Default)]
pub(super) struct Filler {
    used: HashSet<String>,
    /// What the passage has not told yet, the next one last.
    deck: Vec<(&'static Topic, &'static str)>,
}

impl Filler {
    /// Begins a passage: a new order of topics, which it takes one after the other.
    pub(super) fn begin(&mut self, rng: &mut ChaCha8Rng) {
        self.deck.clear();
        for topic in distinct(rng, TOPICS.len(), TOPICS.len()) {
            let topic = &TOPICS[topic];
            let order = distinct(rng, topic.sentences.len(), topic.sentences.len());
            self.deck.extend(order.into_iter().map(|index| (topic, topic.sentences[index])));
        }
    }

    /// The next sentence of the passage, one that this sample does not have yet if there is one.
    pub(super) fn sentence(&mut self, rng: &mut ChaCha8Rng) -> String {
        if self.deck.is_empty() {
            self.begin(rng);
        }
        let Some((topic, form)) = self.deck.pop() else { return String::new() };
        let mut sentence = fill(rng, topic, form);
        for _ in 0..TRIES {
            if self.used.insert(sentence.clone()) {
                break;
            }
            sentence = fill(rng, topic, form);
        }
        sentence
    }
}

fn fill(rng: &mut ChaCha8Rng, topic: &Topic, form: &str) -> String {
    capitalized(&form.replace("{a}", pick(rng, topic.a)).replace("{b}", pick(rng, topic.b)))
}

/// The text with a large first letter.
pub(super) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::tasks::random::generator;

    #[test]
    fn a_thousand_sentences_are_distinct_and_state_no_number() {
        let mut rng = generator(3, "filler");
        let mut filler = Filler::default();
        let mut all = HashSet::new();
        for number in 0..1000 {
            if number % 15 == 0 {
                filler.begin(&mut rng);
            }
            let sentence = filler.sentence(&mut rng);
            assert!(sentence.ends_with('.') && !sentence.contains(['{', '}']), "{sentence}");
            assert!(!sentence.contains(|char: char| char.is_ascii_digit()), "{sentence}");
            assert!(sentence.starts_with(char::is_uppercase), "{sentence}");
            assert!(all.insert(sentence.clone()), "{sentence} twice");
        }
    }
}
