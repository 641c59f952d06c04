// RMS norm, and the gate of the MLP: one pass over memory each, in f32 with one rounding.
#include "rotate.h"

// output = input / sqrt(mean(input²) + epsilon) · weight. One thread block a row.
template <typename T>
DEVICE void norm(const Norm &arguments) {
  const unsigned short *input = arguments.input + static_cast<long long>(block_x()) * arguments.width;
  unsigned short *output = arguments.output + static_cast<long long>(block_x()) * arguments.width;
  float squares = 0.0f;
  for (int at = thread_index() * 8; at < arguments.width; at += 256 * 8) {
    float numbers[8];
    unpack<T>(numbers, load16(input + at));
    UNROLL
    for (int i = 0; i < 8; ++i) squares += numbers[i] * numbers[i];
  }
  UNROLL
  for (int mask = 16; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
  float *sums = reinterpret_cast<float *>(shared_memory());
  if (thread_index() % 32 == 0) sums[thread_index() / 32] = squares;
  barrier();
  float sum = 0.0f;
  UNROLL
  for (int warp = 0; warp < 8; ++warp) sum += sums[warp];
  const float scale = inverse_root(sum / static_cast<float>(arguments.width) + arguments.epsilon);
  for (int at = thread_index() * 8; at < arguments.width; at += 256 * 8) {
    float numbers[8], weights[8];
    unpack<T>(numbers, load16(input + at));
    unpack<T>(weights, load16(arguments.weight + at));
    UNROLL
    for (int i = 0; i < 8; ++i) numbers[i] *= scale * weights[i];
    store16(output + at, pack<T>(numbers));
  }
}

// output = gate / (1 + e^−gate) · up
template <typename T>
DEVICE void gate(const Gate &arguments) {
  constexpr float LOG2_E = 1.44269504088896f;
  const int pieces = arguments.width / 8;
  const long long index = static_cast<long long>(block_x()) * 256 + thread_index();
  const long long row = index / pieces;
  const int at = index % pieces * 8;
  if (row >= arguments.rows) return;
  const unsigned short *from = arguments.gate_up + row * 2 * arguments.width + at;
  float gates[8], ups[8];
  unpack<T>(gates, load16(from));
  unpack<T>(ups, load16(from + arguments.width));
  UNROLL
  for (int i = 0; i < 8; ++i) gates[i] = gates[i] / (1.0f + power_of_2(-gates[i] * LOG2_E)) * ups[i];
  store16(arguments.output + row * arguments.width + at, pack<T>(gates));
}

KERNEL(256, 2) norm_bf16(ARGUMENTS(Norm)) { norm<Bf16>(arguments); }
KERNEL(256, 2) norm_f16(ARGUMENTS(Norm)) { norm<F16>(arguments); }
KERNEL(256, 2) gate_bf16(ARGUMENTS(Gate)) { gate<Bf16>(arguments); }
KERNEL(256, 2) gate_f16(ARGUMENTS(Gate)) { gate<F16>(arguments); }
