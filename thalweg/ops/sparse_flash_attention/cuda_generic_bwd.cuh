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
  Lists lists;
  void* kept;
  bool* alone;

  template <class A>
  __host__ __device__ cuda::Statistic<A>* statistics() const {
    return static_cast<cuda::Statistic<A>*>(kept);
  }
};

// The gradient of a score: of query row b T + t and head h.
template <class A>
__device__ A score_gradient(const Call& call, const cuda::Statistic<A>& statistic, int64_t b, int64_t t, int64_t h, A P,
                            A dP) {
  const thalweg_tensor& d_lse = call.args.d_lse;
  if (!call.alone[b * call.p.T + t]) return P * (dP - statistic.delta);
  return cuda::is_there(d_lse) ? P * cuda::load_at<A>(d_lse, offset_of(d_lse, b, t, h)) : A(0);
}

// d_k, d_k_rope and d_v, from the statistics.
void cuda_generic_keys(const Call& call, const cuda::Inverse& inverse, const Exec& exec);

}  // namespace thalweg::sparse_flash_attention
#endif
