// Launches of kernels that may start while the kernel before them in the stream still runs.
#ifndef THALWEG_CUDA_SM90_LAUNCH_BEHIND_H
#define THALWEG_CUDA_SM90_LAUNCH_BEHIND_H

#include "thalweg/cuda/launch.h"

namespace thalweg::cuda::sm90 {

// As cuda::launch, behind a kernel that may say grid_let_next_start(). Every block of this kernel must pass grid_wait()
// (ptx.cuh) before it reads what kernels before it write, before it writes, and before it ends.
template <class... Params, class... Args>
void launch_behind(const Exec& exec, const char* name, void (*kernel)(Params...), Grid grid, int64_t threads,
                   int64_t smem_bytes, const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (grid.x < 0 || grid.x > kMaxGridX || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ)
    fail(THALWEG_INTERNAL, "cuda: %s: grid, got %lld x %lld x %lld blocks, expected what a launch takes", name,
         static_cast<long long>(grid.x), static_cast<long long>(grid.y), static_cast<long long>(grid.z));
  if (smem_bytes > kStaticSmemBytes)
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem_bytes)), name);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(smem_bytes), config.stream = static_cast<cudaStream_t>(exec.stream);
  config.attrs = &overlap, config.numAttrs = 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, Params(args)...), name);
}

}  // namespace thalweg::cuda::sm90
#endif
