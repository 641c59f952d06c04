//! Single numbers and their codes, without branches, so that loops over them are vectorized.

/// Added to a number of at most 2^22, it rounds it to the nearest whole number, ties to even, and leaves that number in
/// the low bits: 1.5 · 2^23.
const ROUND: f32 = 12_582_912.0;
/// The greatest fp8 code, 448.
const FP8_GREATEST: u32 = 0x7e;

/// The code of a number in −127..=127, in two's complement.
#[inline(always)]
pub(super) fn integer(value: f32) -> u8 {
    (value + ROUND).to_bits() as u8
}

/// E4M3, rounded to nearest even, saturating at ±448. `value` is finite.
#[inline(always)]
pub(super) fn fp8(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let sign = (bits >> 24) & 0x80;
    // 20 mantissa bits go; the exponent's bias falls from 127 to 7.
    let rounded = (magnitude + 0x7_ffff + ((magnitude >> 20) & 1)) >> 20;
    let normal = rounded.wrapping_sub(120 << 3);
    // Below 2^-6 codes are multiples of 2^-9; the sum's low bits are the code, 8 of them being 2^-6.
    let small = (f32::from_bits(magnitude).min(1.0) * 512.0 + ROUND).to_bits() & 0xff;
    let code = if magnitude < (121 << 23) { small } else { normal };
    (code.min(FP8_GREATEST) | sign) as u8
}

/// The number of an E4M3 code; the two codes of NaN give ±480.
#[inline(always)]
pub(super) fn fp8_value(code: u8) -> f32 {
    let code = u32::from(code);
    let magnitude = code & 0x7f;
    let normal = (magnitude << 20) + (120 << 23);
    let small = ((magnitude & 7) as f32 * (1.0 / 512.0)).to_bits();
    let bits = if magnitude < 8 { small } else { normal };
    f32::from_bits(bits | ((code & 0x80) << 24))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// E4M3 as its definition says, in double precision.
    fn defined(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from((code >> 3) & 15), f64::from(code & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_fp8_code_is_the_number_of_the_definition_and_survives() {
        for code in 0..=255u8 {
            assert_eq!(f64::from(fp8_value(code)), defined(code), "{code:#x}");
            if code & 0x7f != 0x7f {
                assert_eq!(fp8(fp8_value(code)), code, "{code:#x}");
            }
        }
        assert_eq!([fp8(1e30), fp8(-1e30), fp8(449.0)], [0x7e, 0xfe, 0x7e]);
    }

    #[test]
    fn fp8_rounds_to_the_nearest_and_ties_to_even() {
        for code in 0..0x7eu8 {
            let (below, above) = (defined(code), defined(code + 1));
            let middle = (below + above) / 2.0;
            let even = if code.is_multiple_of(2) { code } else { code + 1 };
            assert_eq!(fp8(middle as f32), even, "between {below} and {above}");
            assert_eq!(fp8((middle * (1.0 - 1e-6)) as f32), code);
            assert_eq!(fp8((middle * (1.0 + 1e-6)) as f32), code + 1);
        }
    }
}
