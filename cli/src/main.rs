//! kvsplice
fn main() {}
