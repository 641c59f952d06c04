//! Run-time dispatch: which instruction set a loop is compiled for.
//!
//! A [`Work`] is written once, as plain loops that the compiler vectorizes; [`Isa::run`] picks the copy of it that was
//! compiled for the widest registers of this CPU. Kernels with intrinsics of their own match on [`Isa`] themselves.

/// An instruction set that this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512F.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Whatever the compiler assumes.
    Portable,
}

/// A loop over slices. `run` must be `#[inline(always)]`, and so must all that it calls in its inner loops: only then
/// is it compiled for the instruction set.
pub(crate) trait Work {
    /// Does all of it.
    fn run(self);
}

impl Isa {
    /// Every instruction set that this CPU has, the widest first.
    pub fn available() -> Vec<Self> {
        let mut available = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            // The library remembers the answers.
            if is_x86_feature_detected!("avx512f") {
                available.push(Isa::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                available.push(Isa::Avx2);
            }
        }
        available.push(Isa::Portable);
        available
    }

    /// The widest instruction set that this CPU has.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Isa::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }

    /// Itself, or the best one where this CPU lacks it.
    pub(crate) fn or_best(self) -> Self {
        if Self::available().contains(&self) { self } else { Self::best() }
    }

    /// Does `work` with this instruction set, or with the best one where this CPU lacks it.
    #[inline]
    pub(crate) fn run(self, work: impl Work) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if is_x86_feature_detected!("avx512f") => {
                // SAFETY: the CPU has AVX-512F, which includes AVX2 and FMA.
                unsafe { avx512(work) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") => {
                // SAFETY: the CPU has AVX2 and FMA.
                unsafe { avx2(work) }
            }
            _ => work.run(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512(work: impl Work) {
    work.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(work: impl Work) {
    work.run();
}
