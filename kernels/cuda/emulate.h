// The functions of device.h on the CPU, for tests only: every thread of a block is a fiber, one block runs after another.
//
// It is stricter than a GPU where it can be: shared memory starts as NaN, a copy arrives as late as it may (or, by choice,
// as early), each warp runs as far ahead of the others as barriers let it, in ascending or descending order, and addresses in shared memory are checked. It knows nothing of
// time, and a read of global memory beyond a tensor is found only by what it brings in.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define DEVICE static inline
#define KERNEL(threads, blocks) extern "C" void
#define ARGUMENTS(Type) const Type &arguments
#define UNROLL
#define UNROLL_BY(count)

// Saves the callee's registers and the stack pointer at `from`, goes on at `to`.
extern "C" void kvsplice_emulate_switch(void **from, void *to);
asm(R"(
.text
.globl kvsplice_emulate_switch
kvsplice_emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulate {

constexpr int STACK_BYTES = 64 << 10;
constexpr int REVERSED = 1, EAGER = 2;

[[noreturn]] inline void fail(const char *what) {
  std::fprintf(stderr, "emulated kernel: %s\n", what);
  std::abort();
}

struct Copy {
  unsigned shared;
  const void *global;
  bool valid;
};

struct Thread {
  int index;
  void *stack_pointer;
  std::unique_ptr<char[]> stack;
  std::vector<Copy> copies;
  bool done = false;
};

// What the lanes of a warp hand in to an operation that they do together, and what each gets back.
struct Warp {
  int arrived = 0;
  unsigned phase = 0;
  unsigned in[32][10];
  unsigned out[32][4];
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;
  int waiting = 0;
  unsigned barrier_phase = 0;
  int index[3];
  bool eager = false;
  unsigned long progress = 0;
  void *scheduler = nullptr;
  Thread *current = nullptr;
  void (*kernel)(const void *) = nullptr;
  const void *arguments = nullptr;
};

inline thread_local Block *block = nullptr;

inline void yield() { kvsplice_emulate_switch(&block->current->stack_pointer, block->scheduler); }

inline unsigned char *shared_at(unsigned address, unsigned size) {
  if (address % size != 0 || address + size > block->shared.size()) fail("an address beyond shared memory");
  return block->shared.data() + address;
}

inline void arrive(const Copy &copy) {
  unsigned char *to = shared_at(copy.shared, 16);
  if (copy.valid) std::memcpy(to, copy.global, 16);
  else std::memset(to, 0, 16);
}

// Runs `operation` on the warp once all its lanes are here.
template <typename Operation>
inline Warp &together(Operation operation) {
  Warp &warp = block->warps[block->current->index / 32];
  const unsigned phase = warp.phase;
  if (++warp.arrived == 32) {
    operation(warp);
    warp.arrived = 0;
    ++warp.phase;
    ++block->progress;
  }
  while (warp.phase == phase) yield();
  return warp;
}

inline void enter() {
  block->kernel(block->arguments);
  if (!block->current->copies.empty()) fail("a thread ends with copies on their way");
  block->current->done = true;
  ++block->progress;
  yield();
  fail("a thread goes on after its end");
}

// Resumes every thread of a warp that has not ended; returns whether one had not.
inline bool run_warp(int first, bool reversed) {
  bool left = false;
  for (int place = 0; place < 32; ++place) {
    Thread &fiber = block->threads[first + (reversed ? 31 - place : place)];
    if (fiber.done) continue;
    left = true;
    block->current = &fiber;
    kvsplice_emulate_switch(&block->scheduler, fiber.stack_pointer);
  }
  return left;
}

inline void run_block(const int (&index)[3], int threads, int shared_bytes, int mode, void (*kernel)(const void *), const void *arguments) {
  static thread_local Block state;
  block = &state;
  std::memcpy(state.index, index, sizeof(index));
  state.eager = mode & EAGER;
  state.kernel = kernel;
  state.arguments = arguments;
  state.shared.assign(shared_bytes, 0xff);
  if (threads % 32 != 0) fail("a thread block of broken warps");
  state.warps.assign(threads / 32, Warp());
  state.threads.resize(threads);
  state.waiting = 0;
  for (int thread = 0; thread < threads; ++thread) {
    Thread &fiber = state.threads[thread];
    fiber.index = thread;
    fiber.done = false;
    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
    auto top = (reinterpret_cast<std::uintptr_t>(fiber.stack.get()) + STACK_BYTES) & ~std::uintptr_t(15);
    void **frame = reinterpret_cast<void **>(top) - 8;
    std::memset(frame, 0, 8 * sizeof(void *));
    frame[6] = reinterpret_cast<void *>(&enter);  // six registers below the place to go to
    fiber.stack_pointer = frame;
  }
  // A warp runs until it can go no further: one that does not wait for the others is far ahead of them.
  for (;;) {
    const unsigned long before = state.progress;
    int left = 0;
    for (int first = 0; first < threads; first += 32) {
      unsigned long since;
      do {
        since = state.progress;
        left = run_warp(mode & REVERSED ? threads - 32 - first : first, mode & REVERSED) ? left + 1 : left;
      } while (state.progress != since);
    }
    if (left == 0) return;
    if (state.progress == before) fail("threads wait for others that do not come");
  }
}

inline float half_to_float(unsigned bits) {
  const std::uint16_t half = static_cast<std::uint16_t>(bits);
  _Float16 number;
  std::memcpy(&number, &half, 2);
  return static_cast<float>(number);
}

inline unsigned float_to_half(float number) {
  const _Float16 half = static_cast<_Float16>(number);
  std::uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

inline unsigned bits(float number) {
  unsigned result;
  std::memcpy(&result, &number, 4);
  return result;
}

inline float number(unsigned bits) {
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline unsigned float_to_bfloat(float value) {
  const unsigned whole = bits(value);
  if (std::isnan(value)) return (whole >> 16) | 0x40;
  return (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
}

// sum += a · b of a warp, m16n8k16; in: a0..a3, b0, b1, and the four sums.
template <typename T>
inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Warp &mine = block->warps[block->current->index / 32];
  const int lane = block->current->index % 32;
  const unsigned in[10] = {a[0], a[1], a[2], a[3], b0, b1, bits(sum[0]), bits(sum[1]), bits(sum[2]), bits(sum[3])};
  std::memcpy(mine.in[lane], in, sizeof(in));
  Warp &warp = together([](Warp &warp) {
    float left[16][16], right[8][16];
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      for (int part = 0; part < 4; ++part) {
        float *to = &left[row + part % 2 * 8][column + part / 2 * 8];
        to[0] = T::low(warp.in[lane][part]), to[1] = T::high(warp.in[lane][part]);
      }
      for (int part = 0; part < 2; ++part) {
        float *to = &right[row][column + part * 8];
        to[0] = T::low(warp.in[lane][4 + part]), to[1] = T::high(warp.in[lane][4 + part]);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int part = 0; part < 4; ++part) {
        const float *row = left[lane / 4 + part / 2 * 8], *column = right[lane % 4 * 2 + part % 2];
        float products = 0.0f;
        for (int k = 0; k < 16; ++k) products += row[k] * column[k];
        warp.out[lane][part] = bits(number(warp.in[lane][6 + part]) + products);
      }
    }
  });
  for (int part = 0; part < 4; ++part) sum[part] = number(warp.out[lane][part]);
}

inline void load_matrices(unsigned (&to)[4], unsigned shared_row, bool transposed) {
  Warp &mine = block->warps[block->current->index / 32];
  const int lane = block->current->index % 32;
  mine.in[lane][0] = shared_row;
  Warp &warp = together([transposed](Warp &warp) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::uint16_t pair[2];
        for (int i = 0; i < 2; ++i) {
          const int row = transposed ? lane % 4 * 2 + i : lane / 4;
          const int column = transposed ? lane / 4 : lane % 4 * 2 + i;
          std::memcpy(&pair[i], shared_at(warp.in[matrix * 8 + row][0], 16) + column * 2, 2);
        }
        warp.out[lane][matrix] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
      }
    }
  });
  std::memcpy(to, warp.out[lane], 16);
}

}  // namespace emulate

DEVICE int thread_index() { return emulate::block->current->index; }
DEVICE int block_x() { return emulate::block->index[0]; }
DEVICE int block_y() { return emulate::block->index[1]; }
DEVICE int block_z() { return emulate::block->index[2]; }
DEVICE unsigned char *shared_memory() { return emulate::block->shared.data(); }
DEVICE unsigned shared_start() { return 0; }

DEVICE void barrier() {
  emulate::Block &block = *emulate::block;
  const unsigned phase = block.barrier_phase;
  if (++block.waiting == static_cast<int>(block.threads.size())) {
    block.waiting = 0;
    ++block.barrier_phase;
    ++block.progress;
  }
  while (block.barrier_phase == phase) emulate::yield();
}

DEVICE void copy16_async(unsigned shared, const void *global, bool valid) {
  const emulate::Copy copy = {shared, global, valid};
  if (emulate::block->eager) emulate::arrive(copy);
  else emulate::block->current->copies.push_back(copy);
}

DEVICE void wait_copies() {
  for (const emulate::Copy &copy : emulate::block->current->copies) emulate::arrive(copy);
  emulate::block->current->copies.clear();
}

DEVICE void load_matrices(unsigned (&to)[4], unsigned shared_row) { emulate::load_matrices(to, shared_row, false); }
DEVICE void load_matrices_transposed(unsigned (&to)[4], unsigned shared_row) { emulate::load_matrices(to, shared_row, true); }

DEVICE float shuffle_xor(float value, int mask) {
  const int lane = thread_index() % 32;
  emulate::block->warps[thread_index() / 32].in[lane][0] = emulate::bits(value);
  emulate::Warp &warp = emulate::together([](emulate::Warp &warp) {
    for (int lane = 0; lane < 32; ++lane) warp.out[lane][0] = warp.in[lane][0];
  });
  return emulate::number(warp.out[lane ^ mask][0]);
}

DEVICE float power_of_2(float x) { return std::exp2(x); }
DEVICE float log_2(float x) { return std::log2(x); }
DEVICE float inverse_root(float x) { return 1.0f / std::sqrt(x); }
DEVICE float bits_to_float(unsigned bits) { return emulate::number(bits); }

struct F16 {
  DEVICE unsigned pack(float low, float high) { return emulate::float_to_half(low) | emulate::float_to_half(high) << 16; }
  DEVICE float low(unsigned pair) { return emulate::half_to_float(pair & 0xffff); }
  DEVICE float high(unsigned pair) { return emulate::half_to_float(pair >> 16); }
  DEVICE void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulate::multiply_add<F16>(sum, a, b0, b1);
  }
};

struct Bf16 {
  DEVICE unsigned pack(float low, float high) { return emulate::float_to_bfloat(low) | emulate::float_to_bfloat(high) << 16; }
  DEVICE float low(unsigned pair) { return emulate::number(pair << 16); }
  DEVICE float high(unsigned pair) { return emulate::number(pair & 0xffff0000u); }
  DEVICE void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulate::multiply_add<Bf16>(sum, a, b0, b1);
  }
};
