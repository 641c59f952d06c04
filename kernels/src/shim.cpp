// The one piece of C++: work on libtorch's own thread pool, so that our kernels and the library's never compete, and its
// current CUDA stream, through the guard that needs no header of CUDA.
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cstdint>

extern "C" void kvsplice_parallel_for(int64_t end, void (*run)(void *, int64_t, int64_t), void *context) {
  at::parallel_for(0, end, 1, [&](int64_t first, int64_t last) { run(context, first, last); });
}

extern "C" int32_t kvsplice_threads() { return at::get_num_threads(); }

// False if libtorch's CUDA library is not loaded or has no such device.
extern "C" bool kvsplice_cuda_stream(int32_t device, void **stream) {
  try {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    *stream = guard.getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))).native_handle();
    return true;
  } catch (...) {
    return false;
  }
}
