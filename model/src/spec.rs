//! Which model to use, and how: from configuration to an opened source of weights.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use kvsplice_kernels::cuda;
use serde::{Deserialize, Serialize};
use tch::Device;
use tracing::info;

use crate::weights::Weights;
use crate::{Config, Description, Error, digest, gguf, hub, random};

/// The number type that a process computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// bf16 where the CPU multiplies bf16 matrices (AMX-BF16 or AVX-512-BF16), else f32: without such units bf16 is
    /// hundreds of times slower.
    pub fn best_for_this_cpu() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx512bf16") {
            return Dtype::Bf16;
        }
        Dtype::F32
    }

    /// The library's name for it.
    pub fn kind(self) -> tch::Kind {
        match self {
            Dtype::F32 => tch::Kind::Float,
            Dtype::Bf16 => tch::Kind::BFloat16,
        }
    }

    /// Bytes of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        })
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "f32" => Ok(Dtype::F32),
            "bf16" => Ok(Dtype::Bf16),
            _ => Err(Error::Option(format!("unknown dtype {name:?}; known: f32, bf16"))),
        }
    }
}

/// Which model, and how to run it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Spec {
    /// The name of a pulled model, the path of a .gguf file, or the path of a Hugging Face folder.
    pub model: String,
    /// Replaces the model's shape: `tiny` (2 layers) or `qwen2.5-14b`. Needs `random_weights`.
    pub shape: Option<String>,
    /// Weights from `seed` instead of the file; tokenizer and template are still the file's.
    pub random_weights: bool,
    /// Seeds random weights.
    pub seed: u64,
    /// What to compute in; unset: bf16 on a GPU, else the best for this CPU.
    pub dtype: Option<Dtype>,
    /// `cpu`, `cuda` (the first device) or `cuda:N`.
    pub device: String,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            model: String::new(),
            shape: None,
            random_weights: false,
            seed: 0,
            dtype: None,
            device: "cpu".to_owned(),
        }
    }
}

/// A model that is described, with its weights still to be read.
pub(crate) struct Source {
    pub(crate) description: Description,
    pub(crate) weights: Box<dyn Weights>,
}

impl Spec {
    /// What the model computes in.
    pub fn dtype(&self) -> Dtype {
        match self.dtype {
            Some(dtype) => dtype,
            None if matches!(self.device(), Ok(Device::Cuda(_))) => Dtype::Bf16,
            None => Dtype::best_for_this_cpu(),
        }
    }

    /// Where it computes: `cpu`, `cuda` (the first device) or `cuda:N`. Asks no device.
    pub fn device(&self) -> Result<Device, Error> {
        let unknown = || Error::Option(format!("unknown device {:?}; known: cpu, cuda, cuda:N", self.device));
        match self.device.split_once(':') {
            None if self.device == "cpu" => Ok(Device::Cpu),
            None if self.device == "cuda" => Ok(Device::Cuda(0)),
            Some(("cuda", index)) => index.parse().map(Device::Cuda).map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }

    /// The device in words, for people; opens it. `None` for the CPU.
    pub fn describe_device(&self) -> Result<Option<String>, Error> {
        let Device::Cuda(index) = self.open_device()? else { return Ok(None) };
        let described = |source| Error::Device { device: self.device.clone(), source };
        let opened = cuda::open(index).map_err(described)?;
        let (free, all) = cuda::memory(index).map_err(described)?;
        let (major, minor) = opened.capability;
        let embedded = cuda::embedded();
        let kernels = if embedded.is_empty() { "none embedded".to_owned() } else { embedded.join(", ") };
        Ok(Some(format!(
            "{}, compute capability {major}.{minor}, {free} of {all} bytes free; kernels for {kernels}",
            opened.name
        )))
    }

    /// Which GPU; `None` for the CPU.
    pub fn cuda_index(&self) -> Result<Option<usize>, Error> {
        match self.device()? {
            Device::Cuda(index) => Ok(Some(index)),
            _ => Ok(None),
        }
    }

    /// Opens the device for this process. On the compute thread, before any other call of the library.
    pub fn open_device(&self) -> Result<Device, Error> {
        let device = self.device()?;
        if let Device::Cuda(index) = device {
            let opened = cuda::open(index).map_err(|source| Error::Device { device: self.device.clone(), source })?;
            let (major, minor) = opened.capability;
            info!(device = %self.device, name = opened.name, capability = %format!("{major}.{minor}"), "device opened");
        }
        Ok(device)
    }

    /// Checks everything that can be checked without reading the model.
    pub fn validate(&self) -> Result<(), Error> {
        self.device()?;
        let Some(name) = self.shape.as_deref() else { return Ok(()) };
        match Config::shape(name, 1) {
            None => Err(Error::Option(format!("unknown shape {name:?}; known: {}", Config::SHAPES.join(", ")))),
            Some(_) if !self.random_weights => Err(Error::Option(format!("shape {name} needs random_weights"))),
            Some(_) => Ok(()),
        }
    }

    /// Refuses random weights that main memory cannot hold: a shape may be made for a GPU.
    pub(crate) fn check_memory(&self, config: &Config) -> Result<(), Error> {
        if !self.random_weights || self.device()? != Device::Cpu {
            return Ok(());
        }
        let needed = config.weights() * self.dtype().bytes() as u64;
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
        let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        match kibibytes.map(|count| count.saturating_mul(1024)) {
            Some(available) if available < needed => Err(Error::Option(format!(
                "random weights of {needed} bytes do not fit the {available} bytes of free memory; use --device cuda or \
                 a smaller --shape"
            ))),
            _ => Ok(()),
        }
    }

    /// Where the model lies: the path itself when it exists, else a pulled model of that name.
    pub fn path(&self) -> Result<PathBuf, Error> {
        let given = Path::new(&self.model);
        if !self.model.is_empty() && given.exists() {
            return Ok(given.to_owned());
        }
        let models = home().join("models");
        let name = self.model.strip_prefix("hf:").unwrap_or(&self.model);
        for candidate in [models.join(format!("{name}.gguf")), models.join(name)] {
            if !name.is_empty() && candidate.exists() {
                return Ok(candidate);
            }
        }
        Err(Error::NotFound {
            name: self.model.clone(),
            path: models.join(format!("{name}.gguf")).display().to_string(),
        })
    }

    pub(crate) fn open(&self) -> Result<Source, Error> {
        self.validate()?;
        let path = self.path()?;
        let file_digest = digest::of_path(&path)?;
        let opened = if path.is_dir() { hub::open(&path)? } else { gguf::open(&path)? };
        let mut config = opened.config;
        let mut weights = opened.weights;
        let mut model_digest = file_digest;
        if self.random_weights {
            if let Some(shape) = self.shape.as_deref().and_then(|name| Config::shape(name, config.vocabulary)) {
                config = shape;
            }
            let device = self.device()?;
            model_digest = random::digest(&config, self.seed, file_digest, device);
            weights = Box::new(random::Random::new(self.seed, device));
        }
        Ok(Source {
            description: Description {
                name: self.model.clone(),
                digest: model_digest,
                config,
                tokenizer: Arc::new(opened.tokenizer),
                template: Arc::new(opened.template),
            },
            weights,
        })
    }
}

/// What a model file or folder holds.
pub(crate) struct Opened {
    pub(crate) config: Config,
    pub(crate) tokenizer: crate::Tokenizer,
    pub(crate) template: crate::ChatTemplate,
    pub(crate) weights: Box<dyn Weights>,
}

/// Where models and the default store live: `$KVSPLICE_HOME`, else `~/.cache/kvsplice`.
pub fn home() -> PathBuf {
    match std::env::var_os("KVSPLICE_HOME") {
        Some(home) if !home.is_empty() => PathBuf::from(home),
        _ => std::env::home_dir().unwrap_or_else(|| PathBuf::from(".")).join(".cache").join("kvsplice"),
    }
}
