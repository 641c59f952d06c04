// All kernels for the CPU, as one library that tests load.
#define KVSPLICE_EMULATE
#include "attention.cu"
#include "elementwise.cu"
#include "place.cu"

// Runs a kernel of this library; `mode` is a sum of emulate::REVERSED and emulate::EAGER.
extern "C" void kvsplice_emulate(void (*kernel)(const void *), const void *arguments, const int *grid, int threads, int shared_bytes, int mode) {
  for (int z = 0; z < grid[2]; ++z) {
    for (int y = 0; y < grid[1]; ++y) {
      for (int x = 0; x < grid[0]; ++x) emulate::run_block({x, y, z}, threads, shared_bytes, mode, kernel, arguments);
    }
  }
}
