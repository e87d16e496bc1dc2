// Descriptions of tensors for TMA tile loads (CUtensorMap), made on the host. The driver's function is found through
// the runtime, so nothing links against the driver.
#ifndef THALWEG_CUDA_SM90_TENSOR_MAP_H
#define THALWEG_CUDA_SM90_TENSOR_MAP_H

#include <cuda.h>
#include <cudaTypedefs.h>

#include "thalweg/cuda/check.h"

namespace thalweg::cuda::sm90 {

// Of a [B T heads D] tensor of bf16 or f16: boxes of 64 tokens of one head and `blocks` times 64 of D, which arrive as
// so many swizzled blocks (smem.cuh); tokens past T read as 0. Coordinates of a box: 0, token, D / 64, head, batch
// entry. Returns false where TMA cannot read the tensor: rows that do not start at 16 bytes, strides of 0, negative or
// too large.
inline bool make_token_map(const thalweg_tensor& t, int blocks, CUtensorMap* map) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "looking for cuTensorMapEncodeTiled");
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)
                                                : nullptr;
  }();
  if (!encode || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  const int axes[4] = {1, 3, 2, 0};        // of the boxes' tokens, blocks of D, heads, batch entries
  cuuint64_t sizes[5] = {64}, strides[4];  // strides in bytes
  for (int i = 0; i < 4; ++i) {
    const bool columns = axes[i] == 3;
    const int64_t size = columns ? t.shape[3] / 64 : t.shape[axes[i]];
    const int64_t stride = columns ? 128 : size > 1 ? t.stride[axes[i]] * 2 : 128;
    if (stride <= 0 || stride % 16 != 0 || stride >= int64_t(1) << 40 || size > INT32_MAX) return false;
    sizes[i + 1] = cuuint64_t(size), strides[i] = cuuint64_t(stride);
  }
  const cuuint32_t box[5] = {64, 64, cuuint32_t(blocks), 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      t.dtype == THALWEG_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, 5, t.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace thalweg::cuda::sm90
#endif
