//! Rows of one request, and where its blocks of 64 tokens are.

use crate::{BLOCK, Error, argument};

/// The rows of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    /// The last slot that each row sees, not descending.
    pub(crate) last: &'a [u32],
    /// Where the request's blocks are: slot s is token s mod 64 of block `table[s / 64]`. `None`: block i is at i.
    pub(crate) table: Option<&'a [u32]>,
}

impl Rows<'_> {
    /// Fails on slots that descend or have no block, and on blocks beyond `capacity` (slots of all blocks).
    pub(crate) fn check(&self, op: &'static str, capacity: usize) -> Result<(), Error> {
        if !self.last.is_sorted() {
            return Err(argument(op, "slots descend"));
        }
        let slots = match self.table {
            None => capacity,
            Some(table) => {
                let blocks = capacity / BLOCK as usize;
                if let Some(&block) = table.iter().find(|&&block| block as usize >= blocks) {
                    return Err(argument(op, format!("block {block} is beyond the {blocks} blocks")));
                }
                table.len().saturating_mul(BLOCK as usize)
            }
        };
        match self.last.last() {
            Some(&slot) if slot as usize >= slots => {
                Err(argument(op, format!("slot {slot} is beyond the request's {slots}")))
            }
            _ => Ok(()),
        }
    }
}
