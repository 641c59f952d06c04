// Eight numbers at a time: 16-byte loads and stores, rotation, places in blocks.
#pragma once
#include "arguments.h"
#include "device.h"

struct alignas(16) Bytes16 {
  unsigned words[4];
};

DEVICE Bytes16 load16(const void *from) { return *static_cast<const Bytes16 *>(from); }
DEVICE void store16(void *to, const Bytes16 &bytes) { *static_cast<Bytes16 *>(to) = bytes; }

template <typename T>
DEVICE void unpack(float (&to)[8], const Bytes16 &from) {
  UNROLL
  for (int i = 0; i < 4; ++i) to[i * 2] = T::low(from.words[i]), to[i * 2 + 1] = T::high(from.words[i]);
}

template <typename T>
DEVICE Bytes16 pack(const float (&from)[8]) {
  Bytes16 to;
  UNROLL
  for (int i = 0; i < 4; ++i) to.words[i] = T::pack(from[i * 2], from[i * 2 + 1]);
  return to;
}

// Halves convention: number i of a head pairs with number i + head_dim / 2.
DEVICE void rotate(float (&first)[8], float (&second)[8], const float *cosines, const float *sines) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    const float old = first[i];
    first[i] = old * cosines[i] - second[i] * sines[i];
    second[i] = second[i] * cosines[i] + old * sines[i];
  }
}

// Where the numbers of a slot and KV head begin in blocks `[blocks, 64, kv_heads, head_dim]`.
DEVICE long long block_offset(const int *table, int slot, int kv_heads, int head, int head_dim) {
  const int block = table ? table[slot / BLOCK_TOKENS] : slot / BLOCK_TOKENS;
  return ((static_cast<long long>(block) * BLOCK_TOKENS + slot % BLOCK_TOKENS) * kv_heads + head) * head_dim;
}
