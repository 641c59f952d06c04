// Causal attention of scattered rows over blocks of keys and values, in the manner of FlashAttention-2 (arXiv
// 2307.08691, algorithm 1): tensor cores for both products, softmax online in f32.
//
// A row sees slots up to its own last one; a tile stops at the largest of its rows. Keys load while the tile before them
// is weighed, values while their keys are multiplied. Nothing beyond a tile's last slot is read.
#include "arguments.h"
#include "device.h"

DEVICE float lowest() { return bits_to_float(0xff800000u); }  // −∞: nothing seen
constexpr float LN_2 = 0.693147180559945f;

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE float greatest(float a, float b) { return a > b ? a : b; }
DEVICE float quad_greatest(float x) {
  x = greatest(x, shuffle_xor(x, 1));
  return greatest(x, shuffle_xor(x, 2));
}
DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
// Keeps −∞ − −∞ out: nothing seen yet, so every weight is 0 whatever is subtracted.
DEVICE float bounded(float x) { return x == lowest() ? 0.0f : x; }
DEVICE float logarithm(float greatest, float sum) { return sum > 0.0f ? greatest + log_2(sum) : lowest(); }

// Where 16-byte piece `piece` of row `row` lies. Pieces of eight rows at the same place fall on different banks. Piece
// p + 2 · i is at the place of piece p (p below 2), exclusive or 32 · i: rows are aligned to their length.
template <int D>
DEVICE unsigned swizzled(int row, int piece) {
  return (row * (D / 8) + (piece ^ (row & 7))) * 16;
}

// WARPS · M · 16 lanes a thread block, KEYS keys a step.
template <typename T, int D, int WARPS, int M, int KEYS, bool SUMS>
struct Attention {
  static constexpr int LANES = WARPS * M * 16;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int PIECES = D / 8;
  static constexpr int COLUMNS = KEYS / 8;  // tiles of 8 keys

  // Starts loading keys (or values) first..first + KEYS into `to`. They are of one block: KEYS divides its tokens.
  DEVICE void load(unsigned to, const unsigned short *from, const Attend &arguments, const int *table, int first, int stop) {
    constexpr int ROWS = THREADS / PIECES;
    const int block = table ? table[first / BLOCK_TOKENS] : first / BLOCK_TOKENS;
    const int stride = arguments.kv_heads * D;
    const int row = thread_index() / PIECES, piece = thread_index() % PIECES;
    from += (static_cast<long long>(block) * BLOCK_TOKENS + first % BLOCK_TOKENS + row) * stride + block_y() * D + piece * 8;
    UNROLL_BY(4)
    for (int key = row; key < KEYS; key += ROWS) {
      copy16_async(to + swizzled<D>(key, piece), from, first + key < stop);
      from += ROWS * stride;
    }
  }

  DEVICE void run(const Attend &arguments) {
    const Tile tile = arguments.tiles[block_x()];
    const int lanes = lanes_of(arguments, tile);
    const int *table = arguments.tables ? arguments.tables + tile.table : nullptr;
    const int lane_end = least(tile.first_lane + LANES, lanes);
    const int stop = arguments.last[tile.first_row + row_of(arguments, lane_end - 1)] + 1;
    const int seen_by_all = arguments.last[tile.first_row + row_of(arguments, tile.first_lane)] + 1;
    const int steps = (stop + KEYS - 1) / KEYS;
    const int steps_each = (steps + arguments.splits - 1) / arguments.splits;
    const int step_begin = steps_each * block_z();
    const int step_end = least(steps, step_begin + steps_each);

    const unsigned queries = shared_start();
    const unsigned keys = queries + LANES * D * 2;
    const unsigned values = keys + KEYS * D * 2;
    const int warp = thread_index() / 32, lane = thread_index() % 32;

    UNROLL_BY(2)
    for (int step = 0; step < LANES * PIECES / THREADS; ++step) {
      const int index = step * THREADS + thread_index();
      const int my_lane = index / PIECES, piece = index % PIECES;
      const int wanted = tile.first_lane + my_lane;
      const bool valid = wanted < lanes;
      const long long from = place(arguments, tile, valid ? wanted : 0) * D + piece * 8;
      copy16_async(queries + swizzled<D>(my_lane, piece), arguments.query + from, valid);
    }
    if (step_begin < step_end) load(keys, arguments.keys, arguments, table, step_begin * KEYS, stop);

    const unsigned my_query = queries + swizzled<D>(warp * M * 16 + lane % 16, lane / 16);
    const unsigned my_key = keys + swizzled<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const unsigned my_value = values + swizzled<D>(lane % 16, lane / 16);
    float output[M][D / 8][4] = {};
    float most[M][2], total[M][2];
    UNROLL
    for (int m = 0; m < M; ++m) {
      UNROLL
      for (int half = 0; half < 2; ++half) most[m][half] = lowest(), total[m][half] = 0.0f;
    }
    int next_end = 0;

    for (int step = step_begin; step < step_end; ++step) {
      const int first = step * KEYS;
      wait_copies();
      barrier();
      load(values, arguments.values, arguments, table, first, stop);

      float scores[M][COLUMNS][4] = {};
      UNROLL
      for (int part = 0; part < D / 16; ++part) {
        unsigned a[M][4];
        UNROLL
        for (int m = 0; m < M; ++m) {
          load_matrices(a[m], (my_query ^ part * 32) + m * 16 * D * 2);
        }
        UNROLL
        for (int pair = 0; pair < COLUMNS / 2; ++pair) {
          unsigned b[4];
          load_matrices(b, (my_key ^ part * 32) + pair * 16 * D * 2);
          UNROLL
          for (int m = 0; m < M; ++m) {
            T::multiply_add(scores[m][pair * 2], a[m], b[0], b[1]);
            T::multiply_add(scores[m][pair * 2 + 1], a[m], b[2], b[3]);
          }
        }
      }
      wait_copies();
      barrier();
      if (step + 1 < step_end) load(keys, arguments.keys, arguments, table, first + KEYS, stop);

      if (first + KEYS > seen_by_all) {
        UNROLL
        for (int m = 0; m < M; ++m) {
          UNROLL
          for (int half = 0; half < 2; ++half) {
            // Read anew, as in the end: kept in registers, they would push others out, and few steps are masked.
            const Tile tile = arguments.tiles[block_x()];
            const int wanted = lane_of(tile, m, half);
            const int last = wanted < lanes_of(arguments, tile) ? arguments.last[tile.first_row + row_of(arguments, wanted)] : -1;
            UNROLL
            for (int column = 0; column < COLUMNS; ++column) {
              UNROLL
              for (int i = 0; i < 2; ++i) {
                if (first + column * 8 + lane % 4 * 2 + i > last) scores[m][column][half * 2 + i] = lowest();
              }
            }
          }
        }
      }
      if (SUMS) {
        while (next_end < arguments.end_count && arguments.ends[next_end] < first + KEYS) {
          record(arguments, next_end, arguments.ends[next_end] - first, scores, most, total);
          ++next_end;
        }
      }
      UNROLL
      for (int m = 0; m < M; ++m) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
          float now = most[m][half];
          UNROLL
          for (int column = 0; column < COLUMNS; ++column) {
            now = greatest(now, greatest(scores[m][column][half * 2], scores[m][column][half * 2 + 1]));
          }
          now = quad_greatest(now);
          const float shift = bounded(now) * arguments.scale;
          const float correction = power_of_2(most[m][half] * arguments.scale - shift);
          float sum = total[m][half] * correction;
          UNROLL
          for (int column = 0; column < COLUMNS; ++column) {
            UNROLL
            for (int i = half * 2; i < half * 2 + 2; ++i) {
              scores[m][column][i] = power_of_2(scores[m][column][i] * arguments.scale - shift);
              sum += scores[m][column][i];
            }
          }
          total[m][half] = sum;
          most[m][half] = now;
          UNROLL
          for (int column = 0; column < D / 8; ++column) {
            output[m][column][half * 2] *= correction;
            output[m][column][half * 2 + 1] *= correction;
          }
        }
      }
      UNROLL
      for (int part = 0; part < KEYS / 16; ++part) {
        unsigned a[M][4];
        UNROLL
        for (int m = 0; m < M; ++m) {
          UNROLL
          for (int i = 0; i < 4; ++i) {
            const float(&from)[4] = scores[m][part * 2 + i / 2];
            a[m][i] = T::pack(from[i % 2 * 2], from[i % 2 * 2 + 1]);
          }
        }
        UNROLL
        for (int pair = 0; pair < D / 16; ++pair) {
          unsigned b[4];
          load_matrices_transposed(b, (my_value ^ pair * 32) + part * 16 * D * 2);
          UNROLL
          for (int m = 0; m < M; ++m) {
            T::multiply_add(output[m][pair * 2], a[m], b[0], b[1]);
            T::multiply_add(output[m][pair * 2 + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
    if (SUMS) {
      const float nothing[M][COLUMNS][4] = {};
      for (; next_end < arguments.end_count; ++next_end) {
        record(arguments, next_end, 0, nothing, most, total);
      }
    }
    UNROLL
    for (int m = 0; m < M; ++m) {
      UNROLL
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(total[m][half]);
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        const Tile tile = arguments.tiles[block_x()];
        const int wanted = lane_of(tile, m, half);
        if (wanted >= lanes_of(arguments, tile)) continue;
        const long long pair = place(arguments, tile, wanted);
        if (arguments.splits == 1) {
          unsigned *to = reinterpret_cast<unsigned *>(arguments.output + pair * D) + lane % 4;
          UNROLL
          for (int column = 0; column < D / 8; ++column) {
            to[column * 4] = T::pack(output[m][column][half * 2] * inverse, output[m][column][half * 2 + 1] * inverse);
          }
          continue;
        }
        const long long part = static_cast<long long>(block_z()) * arguments.rows * arguments.heads + pair;
        float *to = arguments.parts + part * D + lane % 4 * 2;
        UNROLL
        for (int column = 0; column < D / 8; ++column) {
          to[column * 8] = output[m][column][half * 2] * inverse;
          to[column * 8 + 1] = output[m][column][half * 2 + 1] * inverse;
        }
        if (lane % 4 == 0) arguments.part_sums[part] = logarithm(most[m][half] * arguments.scale, sum);
      }
    }
    wait_copies();
  }

  // Lanes of the tile's request.
  DEVICE int lanes_of(const Attend &arguments, const Tile &tile) {
    return (tile.end_row - tile.first_row) * arguments.group;
  }

  // wanted / group: exact below 2^31 / group, with fewer registers than a division.
  DEVICE int row_of(const Attend &arguments, int wanted) {
    return static_cast<int>(static_cast<unsigned long long>(wanted) * arguments.inverse_group >> 31);
  }

  // The lane of this thread in half `half` of its 16-row product m.
  DEVICE int lane_of(const Tile &tile, int m, int half) {
    return tile.first_lane + (thread_index() / 32 * M + m) * 16 + half * 8 + thread_index() % 32 / 4;
  }

  // Which row and head a lane is: row · heads + head.
  DEVICE long long place(const Attend &arguments, const Tile &tile, int wanted) {
    const int row = row_of(arguments, wanted), head = wanted - row * arguments.group;
    return static_cast<long long>(tile.first_row + row) * arguments.heads + block_y() * arguments.group + head;
  }

  // Writes the log-sum-exp over what was seen before this step and over the step's first `columns` keys. An end inside a
  // step has a maximum of its own: the rest of the step may be far above it.
  DEVICE void record(const Attend &arguments, int end, int columns,
                     const float (&scores)[M][COLUMNS][4], const float (&most)[M][2], const float (&total)[M][2]) {
    const int lane = thread_index() % 32;
    UNROLL
    for (int m = 0; m < M; ++m) {
      UNROLL
      for (int half = 0; half < 2; ++half) {
        float now = most[m][half];
        UNROLL
        for (int column = 0; column < COLUMNS; ++column) {
          UNROLL
          for (int i = 0; i < 2; ++i) {
            if (column * 8 + lane % 4 * 2 + i < columns) now = greatest(now, scores[m][column][half * 2 + i]);
          }
        }
        now = quad_greatest(now);
        const float shift = bounded(now) * arguments.scale;
        float sum = total[m][half] * power_of_2(most[m][half] * arguments.scale - shift);
        UNROLL
        for (int column = 0; column < COLUMNS; ++column) {
          UNROLL
          for (int i = 0; i < 2; ++i) {
            if (column * 8 + lane % 4 * 2 + i < columns) {
              sum += power_of_2(scores[m][column][half * 2 + i] * arguments.scale - shift);
            }
          }
        }
        sum = quad_sum(sum);
        const Tile tile = arguments.tiles[block_x()];
        const int wanted = lane_of(tile, m, half);
        if (lane % 4 == 0 && wanted < lanes_of(arguments, tile)) {
          const long long pair = place(arguments, tile, wanted);
          arguments.sums[pair * arguments.end_count + end] = logarithm(now * arguments.scale, sum) * LN_2;
        }
      }
    }
  }
};

// Parts of several splits → the output: each weighs what its sum of exponentials is of all. One warp a row and head.
template <typename T>
DEVICE void merge(const Merge &arguments) {
  const int pair = block_x() * 4 + thread_index() / 32;
  if (pair >= arguments.pairs) return;
  float most = lowest();
  for (int split = 0; split < arguments.splits; ++split) {
    most = greatest(most, arguments.part_sums[static_cast<long long>(split) * arguments.pairs + pair]);
  }
  for (int number = thread_index() % 32 * 2; number < arguments.head_dim; number += 64) {
    float low = 0.0f, high = 0.0f, total = 0.0f;
    for (int split = 0; split < arguments.splits; ++split) {
      const long long part = static_cast<long long>(split) * arguments.pairs + pair;
      const float weight = power_of_2(arguments.part_sums[part] - bounded(most));
      if (weight == 0.0f) continue;
      const float *from = arguments.parts + part * arguments.head_dim + number;
      low += weight * from[0];
      high += weight * from[1];
      total += weight;
    }
    const long long to = static_cast<long long>(pair) * arguments.head_dim + number;
    *reinterpret_cast<unsigned *>(arguments.output + to) = T::pack(low / total, high / total);
  }
}

// 128 lanes a thread block, for prefill; two thread blocks a multiprocessor. With head_dim 128, 64 keys a step spill a few
// registers on every architecture; 32 do not, and leave room for two thread blocks in 100 KiB of shared memory too.
#define WIDE(name, T, D) \
  KERNEL(128, 2) name(ARGUMENTS(Attend)) { Attention<T, D, 4, 2, D == 128 ? 32 : 64, false>::run(arguments); }
// 64 lanes: the sums need registers of their own.
#define SUMS(name, T, D) \
  KERNEL(128, 2) name(ARGUMENTS(Attend)) { Attention<T, D, 4, 1, 64, true>::run(arguments); }
// 16 lanes and one warp, for a few rows: many small thread blocks keep many loads on their way.
#define NARROW(name, T, D) \
  KERNEL(32, 4) name(ARGUMENTS(Attend)) { Attention<T, D, 1, 1, 64, false>::run(arguments); }

WIDE(attend_bf16_64, Bf16, 64)
WIDE(attend_bf16_128, Bf16, 128)
WIDE(attend_f16_64, F16, 64)
WIDE(attend_f16_128, F16, 128)
SUMS(attend_sums_bf16_64, Bf16, 64)
SUMS(attend_sums_bf16_128, Bf16, 128)
SUMS(attend_sums_f16_64, F16, 64)
SUMS(attend_sums_f16_128, F16, 128)
NARROW(attend_narrow_bf16_64, Bf16, 64)
NARROW(attend_narrow_bf16_128, Bf16, 128)
NARROW(attend_narrow_f16_64, F16, 64)
NARROW(attend_narrow_f16_128, F16, 128)
KERNEL(128, 1) merge_bf16(ARGUMENTS(Merge)) { merge<Bf16>(arguments); }
KERNEL(128, 1) merge_f16(ARGUMENTS(Merge)) { merge<F16>(arguments); }
