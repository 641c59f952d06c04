//! Some KV heads of a layer, cut out of its rows: what a worker needs that holds a part of the model.

use bytes::{Bytes, BytesMut};
use kvsplice_kv::KvLayout;

use crate::fetch::Miss;

/// The layout of an object that has `heads` alone. Fails where they are not heads of it, or no whole bytes.
pub(crate) fn layout(of: &KvLayout, heads: &[u32]) -> Result<KvLayout, Miss> {
    if heads.is_empty() {
        return Ok(*of);
    }
    if let Some(head) = heads.iter().find(|head| **head >= of.kv_heads) {
        return Err(Miss::Foreign(format!("KV head {head} asked for, the object has {}", of.kv_heads)));
    }
    let whole = |part: &&kvsplice_kv::Part| of.row_bytes(**part).is_multiple_of(of.kv_heads as usize);
    if of.parts().iter().filter(whole).count() != of.parts().len() {
        return Err(Miss::Foreign(format!("single heads of {of} are not whole bytes")));
    }
    Ok(KvLayout { kv_heads: heads.len() as u32, ..*of })
}

/// The bytes of `heads` of a layer of `of` with `tokens` tokens. `heads` ascend and are heads of it.
pub(crate) fn pick(layer: &Bytes, of: &KvLayout, tokens: u32, heads: &[u32]) -> Bytes {
    let mut picked = BytesMut::with_capacity(layer.len() / of.kv_heads.max(1) as usize * heads.len());
    for &part in of.parts() {
        let row_bytes = of.row_bytes(part);
        let head_bytes = row_bytes / of.kv_heads.max(1) as usize;
        let rows = layer.get(of.part_range(part, tokens)).unwrap_or(&[]);
        for row in rows.chunks_exact(row_bytes.max(1)) {
            for &head in heads {
                let start = head as usize * head_bytes;
                picked.extend_from_slice(row.get(start..start + head_bytes).unwrap_or(&[]));
            }
        }
    }
    picked.freeze()
}

#[cfg(test)]
mod tests {
    use kvsplice_kv::Encoding;

    use super::*;

    #[test]
    fn picked_heads_make_the_layer_of_an_object_that_has_no_others() {
        for encoding in Encoding::ALL {
            for (heads, tokens) in [(vec![0], 1), (vec![1, 3], 65), (vec![0, 1, 2, 3], 130)] {
                let of = KvLayout { layers: 1, kv_heads: 4, head_dim: 32, encoding };
                let layer: Bytes = (0..of.layer_bytes(tokens)).map(|i| (i * 7 % 253) as u8).collect();
                let small = layout(&of, &heads).unwrap();
                let picked = pick(&layer, &of, tokens, &heads);
                assert_eq!(picked.len(), small.layer_bytes(tokens));
                for &part in of.parts() {
                    let (from, to) = (of.part_range(part, tokens), small.part_range(part, tokens));
                    let head_bytes = small.row_bytes(part) / heads.len();
                    for row in 0..part.rows(tokens) as usize {
                        for (place, head) in heads.iter().enumerate() {
                            let start = from.start + row * of.row_bytes(part) + *head as usize * head_bytes;
                            let there = to.start + row * small.row_bytes(part) + place * head_bytes;
                            assert_eq!(picked[there..there + head_bytes], layer[start..start + head_bytes]);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn heads_that_are_not_there_are_named() {
        let of = KvLayout { layers: 1, kv_heads: 4, head_dim: 32, encoding: Encoding::Bf16 };
        assert_eq!(layout(&of, &[]), Ok(of));
        assert!(layout(&of, &[1, 4]).unwrap_err().to_string().contains("KV head 4 asked for, the object has 4"));
    }
}
