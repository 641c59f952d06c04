//! The nodes of a tree by slot, and each owner's first blocks. Only links are kept here: who is held, and who has to
//! go, is the tree's business. A child lives no longer than its parent.

use std::collections::HashMap;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use super::worth::Worth;

/// Place of a node; given anew once the node is removed.
pub(super) type Slot = usize;

/// Nodes by the token ids of their block. Ids come from callers, hence the standard library's keyed hash.
pub(super) type Children = HashMap<Arc<[u32]>, Slot>;

#[derive(Clone, Debug)]
pub(super) enum Parent {
    /// The block is a first one of this owner.
    Owner(Arc<str>),
    Node(Slot),
}

#[derive(Debug)]
pub(super) struct Node<B> {
    pub(super) block: Arc<[u32]>,
    pub(super) payload: B,
    pub(super) bytes: u64,
    pub(super) parent: Parent,
    pub(super) children: Children,
    pub(super) holders: u32,
    pub(super) worth: Worth,
    /// Not negative.
    pub(super) priority: f64,
    /// When it was last touched.
    pub(super) tick: u64,
    /// Hash of owner and all ids down to this block. Statistics are kept under it, so a collision does no harm.
    pub(super) key: u64,
}

#[derive(Debug)]
pub(super) struct Nodes<B> {
    slots: Vec<Option<Node<B>>>,
    free: Vec<Slot>,
    owners: HashMap<Arc<str>, Children>,
}

impl<B> Nodes<B> {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), owners: HashMap::new() }
    }

    /// First blocks of an owner; none for an unknown one.
    pub(super) fn first_blocks(&self, owner: &str) -> Option<&Children> {
        self.owners.get(owner)
    }

    /// Adds a node and links it to its parent.
    pub(super) fn add(&mut self, node: Node<B>) -> Slot {
        let slot = self.free.pop().unwrap_or(self.slots.len());
        let siblings = match &node.parent {
            Parent::Owner(owner) => self.owners.entry(owner.clone()).or_default(),
            Parent::Node(parent) => &mut self[*parent].children,
        };
        siblings.insert(node.block.clone(), slot);
        if slot == self.slots.len() {
            self.slots.push(Some(node));
        } else {
            self.slots[slot] = Some(node);
        }
        slot
    }

    /// Removes a node without children and its link; an owner goes with its last block.
    pub(super) fn remove(&mut self, slot: Slot) -> Node<B> {
        let node = self.slots[slot].take().expect("the tree removes a node once");
        self.free.push(slot);
        match &node.parent {
            Parent::Owner(owner) => {
                let first = self.owners.get_mut(owner).expect("an owner stays as long as its blocks");
                first.remove(&node.block);
                if first.is_empty() {
                    self.owners.remove(owner);
                }
            }
            Parent::Node(parent) => drop(self[*parent].children.remove(&node.block)),
        }
        node
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Node<B>)> {
        self.slots.iter().enumerate().filter_map(|(slot, node)| Some((slot, node.as_ref()?)))
    }

    #[cfg(test)]
    pub(super) fn owners(&self) -> usize {
        self.owners.len()
    }
}

impl<B> Index<Slot> for Nodes<B> {
    type Output = Node<B>;

    fn index(&self, slot: Slot) -> &Node<B> {
        self.slots[slot].as_ref().expect("slots come from links and holds, which end before their node")
    }
}

impl<B> IndexMut<Slot> for Nodes<B> {
    fn index_mut(&mut self, slot: Slot) -> &mut Node<B> {
        self.slots[slot].as_mut().expect("slots come from links and holds, which end before their node")
    }
}
