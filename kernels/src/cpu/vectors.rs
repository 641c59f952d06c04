//! Vectors of f32 of three instruction sets, with the same operations; and the same for products of pairs of bf16, each in the
//! place of an f32.

/// Coefficients of 2^x on ±1/2, of the powers 1 to 5; that of 0 is 1. Fitted for the least relative error (Remez), which is 2⁻²² with the
/// rounding of every step.
const POWERS: [f32; 5] = [0.693_146_94, 0.240_221_2, 0.055_507_13, 0.009_675_541, 0.001_327_647_2];

/// Asks for the memory of number `at`, which may lie behind the last one.
#[inline(always)]
pub(super) fn fetch<T>(numbers: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which gives nothing and cannot fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(numbers.as_ptr().wrapping_add(at).cast()) };
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    use super::POWERS;
    use half::bf16;
    use std::arch::x86_64::*;
    pub(crate) type V = __m512;
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn load(from: &[f32]) -> V {
        let from = &from[..16];
        // SAFETY: the slice has 16 numbers; the load needs no alignment.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn widen(from: &[bf16]) -> V {
        let from = &from[..16];
        // SAFETY: the slice has 16 numbers of two bytes; the load needs no alignment.
        let halves = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn store(to: &mut [f32], value: V) {
        let to = &mut to[..16];
        // SAFETY: the slice has 16 numbers; the store needs no alignment.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn sum(value: V) -> f32 {
        _mm512_reduce_add_ps(value)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn zero() -> V {
        _mm512_setzero_ps()
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn splat(value: f32) -> V {
        _mm512_set1_ps(value)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn splat_at(value: &f32) -> V {
        splat(*value)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn fma(a: V, b: V, c: V) -> V {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn add(a: V, b: V) -> V {
        _mm512_add_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn sub(a: V, b: V) -> V {
        _mm512_sub_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn mul(a: V, b: V) -> V {
        _mm512_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn max(a: V, b: V) -> V {
        _mm512_max_ps(a, b)
    }
    /// 2^x for finite x ≤ 0.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn exp2(x: V) -> V {
        let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        let rest = _mm512_sub_ps(x, whole);
        let mut sum = _mm512_set1_ps(POWERS[4]);
        for power in [POWERS[3], POWERS[2], POWERS[1], POWERS[0], 1.0] {
            sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(power));
        }
        _mm512_scalef_ps(sum, whole)
    }
    /// Number r of vector c is number c of vector r.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn transpose(rows: [V; 16]) -> [V; 16] {
        // Of rows 4g to 4g + 3: part L of 4 numbers of `quads[g][c]` is column 4L + c.
        let mut quads = [[zero(); 4]; 4];
        for (quad, rows) in quads.iter_mut().zip(rows.chunks_exact(4)) {
            let low = [_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpacklo_ps(rows[2], rows[3])];
            let high = [_mm512_unpackhi_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[2], rows[3])];
            for (pair, [first, second]) in
                [low, high].map(|pair| pair.map(|half| _mm512_castps_pd(half))).into_iter().enumerate()
            {
                quad[2 * pair] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second));
                quad[2 * pair + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
            }
        }
        let mut columns = [zero(); 16];
        for column in 0..4 {
            let [a, b, c, d] = [quads[0][column], quads[1][column], quads[2][column], quads[3][column]];
            // Parts 0 and 2, and parts 1 and 3.
            let even = [_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d)];
            let odd = [_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(c, d)];
            columns[column] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
            columns[8 + column] = _mm512_shuffle_f32x4::<0xdd>(even[0], even[1]);
            columns[4 + column] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
            columns[12 + column] = _mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]);
        }
        columns
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2 {
    use super::POWERS;
    use half::bf16;
    use std::arch::asm;
    use std::arch::x86_64::*;
    pub(crate) type V = __m256;
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn load(from: &[f32]) -> V {
        let from = &from[..8];
        // SAFETY: the slice has 8 numbers; the load needs no alignment.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn widen(from: &[bf16]) -> V {
        let from = &from[..8];
        // SAFETY: the slice has 8 numbers of two bytes; the load needs no alignment.
        let halves = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn store(to: &mut [f32], value: V) {
        let to = &mut to[..8];
        // SAFETY: the slice has 8 numbers; the store needs no alignment.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn sum(value: V) -> f32 {
        let mut lanes = [0f32; 8];
        store(&mut lanes, value);
        lanes.iter().sum()
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn zero() -> V {
        _mm256_setzero_ps()
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn splat(value: f32) -> V {
        _mm256_set1_ps(value)
    }
    /// As [`splat`]. The compiler, left alone, reads several numbers ahead of their use; where sums fill the registers, one
    /// sum then lives in memory, which takes half of the speed.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn splat_at(value: &f32) -> V {
        let vector;
        // SAFETY: reads the number that the reference is to, and does nothing else.
        unsafe {
            asm!(
                "vbroadcastss {vector}, dword ptr [{value}]",
                vector = out(ymm_reg) vector,
                value = in(reg) value,
                options(nostack, readonly, preserves_flags),
            );
        }
        vector
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn fma(a: V, b: V, c: V) -> V {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn add(a: V, b: V) -> V {
        _mm256_add_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn sub(a: V, b: V) -> V {
        _mm256_sub_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn mul(a: V, b: V) -> V {
        _mm256_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn max(a: V, b: V) -> V {
        _mm256_max_ps(a, b)
    }
    /// 2^x for x ≤ 0; 0 below −125.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn exp2(x: V) -> V {
        let bound = _mm256_set1_ps(-125.0);
        let visible = _mm256_cmp_ps::<_CMP_GE_OQ>(x, bound);
        let x = _mm256_max_ps(x, bound);
        let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        let rest = _mm256_sub_ps(x, whole);
        let mut sum = _mm256_set1_ps(POWERS[4]);
        for power in [POWERS[3], POWERS[2], POWERS[1], POWERS[0], 1.0] {
            sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(power));
        }
        let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(whole));
        let scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), exponent));
        _mm256_and_ps(scaled, visible)
    }
    /// Number r of vector c is number c of vector r.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn transpose(rows: [V; 8]) -> [V; 8] {
        // Of rows 4g to 4g + 3: part L of 4 numbers of `quads[g][c]` is column 4L + c.
        let mut quads = [[zero(); 4]; 2];
        for (quad, rows) in quads.iter_mut().zip(rows.chunks_exact(4)) {
            let low = [_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpacklo_ps(rows[2], rows[3])];
            let high = [_mm256_unpackhi_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[2], rows[3])];
            for (pair, [first, second]) in
                [low, high].map(|pair| pair.map(|half| _mm256_castps_pd(half))).into_iter().enumerate()
            {
                quad[2 * pair] = _mm256_castpd_ps(_mm256_unpacklo_pd(first, second));
                quad[2 * pair + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(first, second));
            }
        }
        let mut columns = [zero(); 8];
        for column in 0..4 {
            columns[column] = _mm256_permute2f128_ps::<0x20>(quads[0][column], quads[1][column]);
            columns[4 + column] = _mm256_permute2f128_ps::<0x31>(quads[0][column], quads[1][column]);
        }
        columns
    }
}

pub(super) mod portable {
    use half::bf16;
    pub(crate) type V = [f32; 4];
    #[inline(always)]
    pub(crate) fn load(from: &[f32]) -> V {
        [from[0], from[1], from[2], from[3]]
    }
    #[inline(always)]
    pub(crate) fn widen(from: &[bf16]) -> V {
        [from[0], from[1], from[2], from[3]].map(bf16::to_f32)
    }
    #[inline(always)]
    pub(crate) fn store(to: &mut [f32], value: V) {
        to[..4].copy_from_slice(&value)
    }
    #[inline(always)]
    pub(crate) fn sum(value: V) -> f32 {
        value.iter().sum()
    }
    #[inline(always)]
    pub(crate) fn zero() -> V {
        [0.0; 4]
    }
    #[inline(always)]
    pub(crate) fn splat(value: f32) -> V {
        [value; 4]
    }
    #[inline(always)]
    pub(crate) fn splat_at(value: &f32) -> V {
        splat(*value)
    }
    #[inline(always)]
    pub(crate) fn map(a: V, b: V, with: impl Fn(f32, f32) -> f32) -> V {
        std::array::from_fn(|lane| with(a[lane], b[lane]))
    }
    #[inline(always)]
    pub(crate) fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }
    #[inline(always)]
    pub(crate) fn add(a: V, b: V) -> V {
        map(a, b, |a, b| a + b)
    }
    #[inline(always)]
    pub(crate) fn sub(a: V, b: V) -> V {
        map(a, b, |a, b| a - b)
    }
    #[inline(always)]
    pub(crate) fn mul(a: V, b: V) -> V {
        map(a, b, |a, b| a * b)
    }
    #[inline(always)]
    pub(crate) fn max(a: V, b: V) -> V {
        map(a, b, f32::max)
    }
    #[inline(always)]
    pub(crate) fn exp2(x: V) -> V {
        x.map(f32::exp2)
    }
    /// Number r of vector c is number c of vector r.
    #[inline(always)]
    pub(crate) fn transpose(rows: [V; 4]) -> [V; 4] {
        std::array::from_fn(|column| rows.map(|row| row[column]))
    }
}

/// Pairs of bf16: `fma` adds both products of a pair, the second one first, as AVX-512-BF16 does.
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512_pairs {
    pub(crate) use super::avx512::{V, load, splat, store, transpose, zero};
    use std::arch::x86_64::*;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(crate) fn fma(a: V, b: V, c: V) -> V {
        let pairs = |vector| {
            // SAFETY: both are 64 bytes, and every pattern of bits is one of either.
            unsafe { std::mem::transmute::<__m512, __m512bh>(vector) }
        };
        _mm512_dpbf16_ps(c, pairs(a), pairs(b))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2_pairs {
    pub(crate) use super::avx2::{V, load, splat, store, transpose, zero};
    use std::arch::x86_64::*;
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn fma(a: V, b: V, c: V) -> V {
        let mask = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000_u32 as i32));
        let first = |pairs| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(pairs)));
        let second = _mm256_fmadd_ps(_mm256_and_ps(a, mask), _mm256_and_ps(b, mask), c);
        _mm256_fmadd_ps(first(a), first(b), second)
    }
}

pub(super) mod portable_pairs {
    pub(crate) use super::portable::{V, load, splat, store, transpose, zero};
    #[inline(always)]
    pub(crate) fn fma(a: V, b: V, c: V) -> V {
        let halves = |pair: f32| {
            let bits = pair.to_bits();
            [f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000)]
        };
        std::array::from_fn(|lane| {
            let ([first, second], [other_first, other_second]) = (halves(a[lane]), halves(b[lane]));
            first * other_first + (second * other_second + c[lane])
        })
    }
}
