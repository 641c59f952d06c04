//! Which rows of stored KV need not be loaded: those that computation replaces in every layer before anything looks at them.

use kvsplice_kv::RowRanges;
use kvsplice_kv::options::{Mask, Strategy};
use kvsplice_proto::load::Skips;

use crate::request::Request;

/// By place in the load, the rows that are computed in every layer, or held in the exact beginning. `rows`: all slots to
/// compute; `beginning`: slots whose KV is there already; `users`: by place, the parts that use the chunk, one at least.
///
/// Nothing where selectors compare stored KV, or rows may be given up on the way and fall back on it.
pub(crate) fn skippable(request: &Request, rows: &RowRanges, beginning: u32, users: &[Vec<usize>]) -> Skips {
    let options = &request.options;
    let stays = matches!(options.strategy, Strategy::Clip | Strategy::Lego | Strategy::Craft)
        && options.early_stop.window == 0
        && options.mask == Mask::Right;
    if !stays {
        return Skips::new();
    }
    let rows = rows.union(&RowRanges::from_range(0..beginning));
    let in_part = |part: &usize| {
        let slots = request.parts[*part].slots.clone();
        let inside = rows.intersection(&RowRanges::from_range(slots.clone()));
        RowRanges::from_ranges(inside.ranges().iter().map(|rows| rows.start - slots.start..rows.end - slots.start))
    };
    let mut skips = Skips::new();
    for (place, users) in users.iter().enumerate() {
        // A chunk that stands in several places is needed where any of them needs it.
        let common = users.iter().map(in_part).reduce(|one, other| one.intersection(&other));
        // One row always comes: with it comes the word where the chunk is stored, which the receipt passes on.
        let last = users.first().map_or(0, |&part| request.parts[part].slots.len() as u32).saturating_sub(1);
        let common = common.map(|rows| rows.intersection(&RowRanges::from_range(0..last)));
        if let Some(rows) = common.filter(|rows| !rows.is_empty()) {
            skips.insert(place, rows);
        }
    }
    skips
}
