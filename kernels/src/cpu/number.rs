//! The types of number that kernels read and write; between, everything is f32.

use half::bf16;

/// A number in memory. Conversions have no branch, so that loops over them are vectorized.
pub(crate) trait Number: Copy + Send + Sync + Default + 'static {
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// How many of them a product takes in one step: as many as an f32 has room for.
    const STEP: usize;
    /// The same numbers, with their type.
    fn typed(numbers: &[Self]) -> Typed<'_>;
}

/// Numbers of a type that vectors are loaded from.
#[derive(Clone, Copy)]
pub(crate) enum Typed<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl Number for f32 {
    const STEP: usize = 1;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn typed(numbers: &[Self]) -> Typed<'_> {
        Typed::F32(numbers)
    }
}

impl Number for bf16 {
    const STEP: usize = 2;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits((if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded }) as u16)
    }

    #[inline(always)]
    fn typed(numbers: &[Self]) -> Typed<'_> {
        Typed::Bf16(numbers)
    }
}

/// The first number of a buffer that threads write, each its own part.
pub(crate) struct Target<T>(*mut T);

// SAFETY: `part` demands that no two threads write the same numbers.
unsafe impl<T: Send> Sync for Target<T> {}

impl<T> Target<T> {
    pub(crate) fn new(numbers: &mut [T]) -> Self {
        Self(numbers.as_mut_ptr())
    }

    /// `count` numbers from `first` on.
    ///
    /// # Safety
    /// They must lie inside of the buffer, which must outlive them, and nobody else may use them meanwhile.
    #[expect(clippy::mut_from_ref, reason = "parts of one buffer for several threads are what this is for")]
    pub(crate) unsafe fn part(&self, first: usize, count: usize) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(first), count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_the_library_of_halves() {
        for step in 0..200_000u32 {
            let value = f32::from_bits(step.wrapping_mul(0x9e37_79b9));
            let expected = bf16::from_f32(value);
            assert_eq!(<bf16 as Number>::from_f32(value).to_bits(), expected.to_bits(), "{value}");
            assert_eq!(Number::to_f32(expected).to_bits(), expected.to_f32().to_bits(), "{value}");
        }
    }
}
