// The argument of each kernel, one struct passed by value. src/cuda/arguments.rs has the same fields in the same order.
#pragma once

// Tokens of a block of keys and values.
constexpr int BLOCK_TOKENS = 64;

// A run of lanes that one thread block computes. Lane i of a request and KV head is query head i mod group of row
// i / group, so all query heads of a KV head share its keys and values.
struct Tile {
  int table;       // Where the request's block table begins in `tables`.
  int first_row;   // The request's first row.
  int end_row;     // Behind its last.
  int first_lane;  // The tile's first lane.
};

struct Attend {
  const unsigned short *query;   // [rows, heads, head_dim]
  const unsigned short *keys;    // [blocks, 64, kv_heads, head_dim]
  const unsigned short *values;  // As keys.
  unsigned short *output;        // [rows, heads, head_dim]; unused with several splits
  float *parts;                  // [splits, rows, heads, head_dim] with several splits
  float *part_sums;              // [splits, rows, heads], log2 of the sum of exponentials
  float *sums;                   // [rows, heads, ends], natural logarithm; only of the kernels with sums
  const int *last;               // [rows]: the last slot that a row sees; ascending in a request
  const Tile *tiles;             // [grid.x]
  const int *tables;             // Block ids of all requests; null: block i is at i
  const int *ends;               // [ends], ascending slots
  int end_count;
  int rows;
  int heads;
  int kv_heads;
  int group;    // heads / kv_heads
  unsigned inverse_group;  // 2^31 / group, rounded up
  int splits;   // grid.z
  float scale;  // log2(e) / sqrt(head_dim)
};

struct Merge {
  const float *parts;       // [splits, rows · heads, head_dim]
  const float *part_sums;   // [splits, rows · heads]
  unsigned short *output;   // [rows · heads, head_dim]
  int splits;
  int pairs;  // rows · heads
  int head_dim;
};

// How stored numbers are encoded. Integers and fp8 are symmetric: number = scale · code.
enum Encoding { F32 = 0, BF16 = 1, INT8 = 2, FP8 = 3, INT4 = 4 };
// Tokens that share a scale of K.
constexpr int SCALE_TOKENS = 64;

struct Place {
  const unsigned char *stored_keys;    // [rows, kv_heads, head_dim] before rotation
  const unsigned char *stored_values;  // As stored_keys.
  const float *key_scales;             // [groups of 64 tokens, kv_heads, head_dim]; unused by floats
  const float *value_scales;           // [rows, kv_heads]; unused by floats
  unsigned short *keys;                // [blocks, 64, kv_heads, head_dim]
  unsigned short *values;              // As keys.
  const float *cosines;                // [rows, head_dim / 2]
  const float *sines;                  // As cosines.
  const int *slots;                    // [rows]
  const int *table;                    // Block ids; null: block i is at i
  int first_token;                     // Where row 0 stands in the first group of scales.
  int rows;
  int kv_heads;
  int head_dim;
  int encoding;
};

struct Scatter {
  const unsigned short *projected;  // [rows, heads + 2 · kv_heads, head_dim]
  const unsigned short *bias;       // [heads + 2 · kv_heads, head_dim] or null
  const float *cosines;             // [rows, head_dim / 2]
  const float *sines;               // As cosines.
  const int *slots;                 // [rows]
  const int *table;                 // Block ids; null: block i is at i
  unsigned short *query;            // [rows, heads, head_dim], rotated
  unsigned short *keys;             // [blocks, 64, kv_heads, head_dim], rotated
  unsigned short *values;           // [blocks, 64, kv_heads, head_dim]
  int rows;
  int heads;
  int kv_heads;
  int head_dim;
};

struct Norm {
  const unsigned short *input;   // [rows, width]
  const unsigned short *weight;  // [width]
  unsigned short *output;        // [rows, width]
  int width;                     // A multiple of 8.
  float epsilon;
};

struct Gate {
  const unsigned short *gate_up;  // [rows, 2 · width]: gate, then up
  unsigned short *output;         // [rows, width]: silu(gate) · up
  int rows;
  int width;  // A multiple of 8.
};
