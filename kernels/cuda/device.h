// What the kernels need of the machine, each as one small function: places of a thread, barriers, asynchronous copies,
// matrix loads and products of the tensor cores (PTX of sm_80). emulate.h has the same functions for the CPU, so that
// tests run the very same kernels without a GPU. No header of CUDA is needed, at build time or at run time.
#pragma once

#ifdef KVSPLICE_EMULATE
#include "emulate.h"
#else

#define DEVICE static __device__ __forceinline__
// `blocks`: thread blocks that must fit one multiprocessor, which bounds the registers of a thread.
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define ARGUMENTS(Type) const __grid_constant__ Type arguments
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(count) PRAGMA(unroll count)
#define PRAGMA(text) _Pragma(#text)

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE void barrier() { __syncthreads(); }

// The dynamic shared memory of the block.
DEVICE unsigned char *shared_memory() {
  extern __shared__ __align__(128) unsigned char bytes[];
  return bytes;
}

// Where the dynamic shared memory begins, as the instructions below count it.
DEVICE unsigned shared_start() { return static_cast<unsigned>(__cvta_generic_to_shared(shared_memory())); }

// Starts a copy of 16 bytes from global to shared memory; writes zeros if not `valid` (and reads nothing).
DEVICE void copy16_async(unsigned shared, const void *global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Waits for all copies that this thread has started.
DEVICE void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8 × 8 matrices of 16-bit numbers; lane l names row l mod 8 of matrix l / 8.
DEVICE void load_matrices(unsigned (&to)[4], unsigned shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_row) : "memory");
}

// As load_matrices, each matrix transposed.
DEVICE void load_matrices_transposed(unsigned (&to)[4], unsigned shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_row) : "memory");
}

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

DEVICE float power_of_2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

DEVICE float log_2(float x) {
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE float bits_to_float(unsigned bits) { return __uint_as_float(bits); }

// Half a float's exponent range, all of its speed. Two numbers share a register, the first in the low half.
struct F16 {
  DEVICE unsigned pack(float low, float high) {
    unsigned result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
  }
  DEVICE float low(unsigned pair) {
    float result;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(result) : "r"(pair));
    return result;
  }
  DEVICE float high(unsigned pair) { return low(pair >> 16); }
  // sum += a · b, m16n8k16.
  DEVICE void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct Bf16 {
  DEVICE unsigned pack(float low, float high) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
  }
  DEVICE float low(unsigned pair) { return bits_to_float(pair << 16); }
  DEVICE float high(unsigned pair) { return bits_to_float(pair & 0xffff0000u); }
  DEVICE void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

#endif
