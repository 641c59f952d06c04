//! Compiles the .proto files without protoc.

use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["common", "cache", "worker", "head"].map(|name| format!("proto/kvsplice/v1/{name}.proto"));
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("kvsplice.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".kvsplice.v1.Frame.data")
        .bytes(".kvsplice.v1.PutChunkRequest.data")
        .bytes(".kvsplice.v1.PrefillEvent.logits")
        .bytes(".kvsplice.v1.ScoreResponse.distributions")
        .bytes(".kvsplice.v1.ScoreAnswerResponse.distributions")
        .compile_fds(descriptors)?;
    Ok(())
}
