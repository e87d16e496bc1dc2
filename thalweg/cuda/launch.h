// Launches kernels: limits and errors are looked at here, once for all. Those that may start while the kernel before
// them ends: sm90/launch_behind.h.
#ifndef THALWEG_CUDA_LAUNCH_H
#define THALWEG_CUDA_LAUNCH_H

#include <stdint.h>

#include "thalweg/core/exec.h"
#include "thalweg/cuda/check.h"

namespace thalweg::cuda {

// Every file that launches kernels puts one of its own on the list by which thalweg_prepare() finds and loads all of
// them: those of one file are one library to the driver.
bool list_file(const void* kernel);  // returns true
namespace {
__global__ void kernel_of_this_file() {}
[[maybe_unused]] const bool file_listed = list_file(reinterpret_cast<const void*>(kernel_of_this_file));
}  // namespace

struct Grid {
  int64_t x, y = 1, z = 1;
};

constexpr int64_t kMaxGridX = 2147483647, kMaxGridYZ = 65535;
constexpr int64_t kStaticSmemBytes = 48 * 1024;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs kernel<<<grid, threads, smem_bytes, exec.stream>>>(args...). A grid with a zero runs nothing. Kernels for
// counts that may pass kMaxGridX blocks walk with a stride of gridDim.x, and their launchers cap the grid.
template <class... Params, class... Args>
void launch(const Exec& exec, const char* name, void (*kernel)(Params...), Grid grid, int64_t threads,
            int64_t smem_bytes, const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (grid.x < 0 || grid.x > kMaxGridX || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ || threads < 1 || threads > 1024)
    fail(THALWEG_INTERNAL,
         "cuda: %s: grid, got %lld x %lld x %lld blocks of %lld threads, expected what a launch takes", name,
         static_cast<long long>(grid.x), static_cast<long long>(grid.y), static_cast<long long>(grid.z),
         static_cast<long long>(threads));
  if (smem_bytes > kStaticSmemBytes)
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem_bytes)), name);
  kernel<<<dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z)), unsigned(threads), size_t(smem_bytes),
           static_cast<cudaStream_t>(exec.stream)>>>(Params(args)...);
  cuda_check(cudaGetLastError(), name);
}

// All that a multiprocessor has goes to shared memory, nothing of it to L1, where this kernel runs: for kernels whose
// shared memory says how many blocks run at once. No work of a stream, so a call that is captured may ask too.
template <class... Params>
void prefer_shared_memory(const char* name, void (*kernel)(Params...)) {
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      name);
}

// Blocks for `count` items of one block each, in a kernel that walks with a stride.
inline int64_t capped_grid(int64_t count) { return count < 1048576 ? count : 1048576; }

}  // namespace thalweg::cuda
#endif
