// Stored keys and values → blocks, in one pass: decode, rotate the keys by their positions in f32, round once. Bound by
// memory: a thread moves eight pairs of numbers with wide loads and stores.
#include "rotate.h"

// Eight numbers from place `index` on, without their scales.
DEVICE void decode(float (&to)[8], const unsigned char *from, long long index, int encoding) {
  if (encoding == F32) {
    const float *numbers = reinterpret_cast<const float *>(from) + index;
    UNROLL
    for (int i = 0; i < 8; ++i) to[i] = numbers[i];
  } else if (encoding == BF16) {
    Bytes16 pairs = load16(from + index * 2);
    unpack<Bf16>(to, pairs);
  } else if (encoding == INT8 || encoding == FP8) {
    const unsigned *words = reinterpret_cast<const unsigned *>(from + index);
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const unsigned byte = words[i / 4] >> (i % 4 * 8) & 0xff;
      // An e4m3 number shifted into a 16-bit float is too small by the difference of the exponents' biases, 2^8.
      const float fp8 = (byte & 0x7f) == 0x7f ? bits_to_float(0x7fc00000u)
                                              : F16::low((byte & 0x80) << 8 | (byte & 0x7f) << 7) * 256.0f;
      to[i] = encoding == FP8 ? fp8 : static_cast<float>(static_cast<signed char>(byte));
    }
  } else {
    const unsigned word = *reinterpret_cast<const unsigned *>(from + index / 2);
    UNROLL
    for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(static_cast<int>((word >> (i * 4) & 0xf) ^ 8) - 8);
  }
}

template <typename T>
DEVICE void place(const Place &arguments) {
  const int half = arguments.head_dim / 2, pieces = half / 8;
  const long long index = static_cast<long long>(block_x()) * 256 + thread_index();
  const int piece = index % pieces;
  const long long head_row = index / pieces;
  const int head = head_row % arguments.kv_heads;
  const long long row = head_row / arguments.kv_heads;
  if (row >= arguments.rows) return;
  const long long from = head_row * arguments.head_dim + piece * 8;
  float first[8], second[8], value_first[8], value_second[8];
  decode(first, arguments.stored_keys, from, arguments.encoding);
  decode(second, arguments.stored_keys, from + half, arguments.encoding);
  decode(value_first, arguments.stored_values, from, arguments.encoding);
  decode(value_second, arguments.stored_values, from + half, arguments.encoding);
  if (arguments.encoding >= INT8) {
    const long long group = (arguments.first_token + row) / SCALE_TOKENS;
    const float *scales = arguments.key_scales + (group * arguments.kv_heads + head) * arguments.head_dim + piece * 8;
    const float value_scale = arguments.value_scales[head_row];
    UNROLL
    for (int i = 0; i < 8; ++i) {
      first[i] *= scales[i];
      second[i] *= scales[half + i];
      value_first[i] *= value_scale;
      value_second[i] *= value_scale;
    }
  }
  rotate(first, second, arguments.cosines + row * half + piece * 8, arguments.sines + row * half + piece * 8);
  const int slot = arguments.slots[row];
  const long long to = block_offset(arguments.table, slot, arguments.kv_heads, head, arguments.head_dim) + piece * 8;
  store16(arguments.keys + to, pack<T>(first));
  store16(arguments.keys + to + half, pack<T>(second));
  store16(arguments.values + to, pack<T>(value_first));
  store16(arguments.values + to + half, pack<T>(value_second));
}

// Projected rows → rotated queries, and rotated keys and values in their blocks.
template <typename T>
DEVICE void scatter(const Scatter &arguments) {
  const int half = arguments.head_dim / 2, pieces = half / 8;
  const int all_heads = arguments.heads + 2 * arguments.kv_heads;
  const long long index = static_cast<long long>(block_x()) * 256 + thread_index();
  const int piece = index % pieces;
  const int head = index / pieces % all_heads;
  const long long row = index / pieces / all_heads;
  if (row >= arguments.rows) return;
  const long long from = (row * all_heads + head) * arguments.head_dim + piece * 8;
  float first[8], second[8];
  unpack<T>(first, load16(arguments.projected + from));
  unpack<T>(second, load16(arguments.projected + from + half));
  if (arguments.bias) {
    float bias_first[8], bias_second[8];
    const int at = head * arguments.head_dim + piece * 8;
    unpack<T>(bias_first, load16(arguments.bias + at));
    unpack<T>(bias_second, load16(arguments.bias + at + half));
    UNROLL
    for (int i = 0; i < 8; ++i) first[i] += bias_first[i], second[i] += bias_second[i];
  }
  const int kv_head = head < arguments.heads ? 0 : (head - arguments.heads) % arguments.kv_heads;
  const bool is_value = head >= arguments.heads + arguments.kv_heads;
  if (!is_value) {
    rotate(first, second, arguments.cosines + row * half + piece * 8, arguments.sines + row * half + piece * 8);
  }
  unsigned short *to = arguments.query + (row * arguments.heads + head) * arguments.head_dim + piece * 8;
  if (head >= arguments.heads) {
    const int slot = arguments.slots[row];
    to = (is_value ? arguments.values : arguments.keys) +
         block_offset(arguments.table, slot, arguments.kv_heads, kv_head, arguments.head_dim) + piece * 8;
  }
  store16(to, pack<T>(first));
  store16(to + half, pack<T>(second));
}

KERNEL(256, 2) place_bf16(ARGUMENTS(Place)) { place<Bf16>(arguments); }
KERNEL(256, 2) place_f16(ARGUMENTS(Place)) { place<F16>(arguments); }
KERNEL(256, 2) scatter_bf16(ARGUMENTS(Scatter)) { scatter<Bf16>(arguments); }
KERNEL(256, 2) scatter_f16(ARGUMENTS(Scatter)) { scatter<F16>(arguments); }
