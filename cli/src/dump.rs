//! `--dump DIR`: what a request computed, as `request.safetensors` for any Python user.
//!
//! `token_ids i64[T]`, `chunk_starts i64[n+1]`, `rows i64[R]`, `scores f32[N]`, `aux_scores f32[N_aux]`, `logits f32[V]`.

use std::path::Path;

use anyhow::Context;
use kvsplice_proto::v1;
use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::failure::{Failure, Kind};

/// Writes the file; the folder is made if it is missing. A reader never sees half a file.
pub(crate) fn write(folder: &Path, dump: &v1::Dump) -> anyhow::Result<()> {
    let integers = |values: &[u32]| -> Vec<u8> { values.iter().flat_map(|&v| i64::from(v).to_le_bytes()).collect() };
    let floats = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
    let tensors = [
        ("token_ids", Dtype::I64, dump.token_ids.len(), integers(&dump.token_ids)),
        ("chunk_starts", Dtype::I64, dump.chunk_starts.len(), integers(&dump.chunk_starts)),
        ("rows", Dtype::I64, dump.rows.len(), integers(&dump.rows)),
        ("scores", Dtype::F32, dump.scores.len(), floats(&dump.scores)),
        ("aux_scores", Dtype::F32, dump.aux_scores.len(), floats(&dump.aux_scores)),
        ("logits", Dtype::F32, dump.logits.len(), floats(&dump.logits)),
    ];
    let mut views = Vec::with_capacity(tensors.len());
    for (name, dtype, length, bytes) in &tensors {
        let view = TensorView::new(*dtype, vec![*length], bytes).with_context(|| format!("write tensor {name}"))?;
        views.push((*name, view));
    }
    let bytes = serialize(views, None).context("write request.safetensors")?;
    let path = folder.join("request.safetensors");
    let partial = folder.join(".request.safetensors.part");
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&partial, bytes))
        .and_then(|()| std::fs::rename(&partial, &path));
    written.map_err(|error| Failure::new(Kind::Usage, format!("--dump: write {}: {error}", path.display())).into())
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    #[test]
    fn a_dump_is_read_back_with_its_types_and_lengths() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("new");
        let dump = v1::Dump {
            token_ids: vec![1, 2, 3],
            chunk_starts: vec![1, 3],
            rows: vec![],
            scores: vec![-1.0, 0.5],
            aux_scores: vec![0.25],
            logits: vec![1.5; 5],
        };
        write(&target, &dump).unwrap();
        let bytes = std::fs::read(target.join("request.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let ids = tensors.tensor("token_ids").unwrap();
        assert_eq!((ids.dtype(), ids.shape()), (Dtype::I64, &[3][..]));
        assert_eq!(&ids.data()[8..16], 2i64.to_le_bytes());
        assert_eq!(tensors.tensor("rows").unwrap().shape(), [0]);
        assert_eq!(tensors.tensor("scores").unwrap().data()[..4], (-1.0f32).to_le_bytes());
        assert_eq!(tensors.names().len(), 6);
        assert_eq!(std::fs::read_dir(&target).unwrap().count(), 1);
    }
}
