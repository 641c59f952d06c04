// The one piece of C++: work on libtorch's own thread pool, so that our kernels and the library's never compete.
#include <ATen/Parallel.h>
#include <cstdint>

extern "C" void kvsplice_parallel_for(int64_t end, void (*run)(void *, int64_t, int64_t), void *context) {
  at::parallel_for(0, end, 1, [&](int64_t first, int64_t last) { run(context, first, last); });
}

extern "C" int32_t kvsplice_threads() { return at::get_num_threads(); }
