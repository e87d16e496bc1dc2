// What the two files of cuda_generic's backward share.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_CUDA_GENERIC_BWD_CUH
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_CUDA_GENERIC_BWD_CUH

#include "thalweg/ops/sparse_flash_attention/cuda_generic.cuh"

namespace thalweg::sparse_flash_attention {

using Args = thalweg_sparse_flash_attention_bwd_args;

struct Call {
  Problem p;
  Args args;
  cuda::Sequences sequences;
  void* kept;

  template <class A>
  __host__ __device__ cuda::Statistic<A>* statistics() const {
    return static_cast<cuda::Statistic<A>*>(kept);
  }
};

// d_k, d_k_rope and d_v, from the statistics.
void cuda_generic_keys(const Call& call, const cuda::Inverse& inverse, const Exec& exec);

}  // namespace thalweg::sparse_flash_attention
#endif
