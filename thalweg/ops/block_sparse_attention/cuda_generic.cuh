// What the two passes of cuda_generic share: where rows lie, and which keys a query sees.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CUDA_GENERIC_CUH
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CUDA_GENERIC_CUH

#include <stddef.h>

#include "thalweg/cuda/attention.cuh"
#include "thalweg/cuda/sequences.cuh"
#include "thalweg/ops/block_sparse_attention/cuda_workspace.h"

namespace thalweg::block_sparse_attention {
namespace {

using namespace cuda;

__device__ inline int64_t offset_of(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head) {
  return b * t.stride[0] + token * t.stride[1] + head * t.stride[2];
}

// Which pairs of one head of one sequence are kept. A sequence with more tokens than the mask has blocks for is not
// valid and never comes here.
struct HeadMask {
  const uint8_t* data;
  int64_t row, col, block_q, block_k, offset;  // causal: key j <= query i + offset
  bool causal;

  __device__ bool sees(int64_t i, int64_t j) const {
    return (!causal || j <= i + offset) && data[i / block_q * row + j / block_k * col] != 0;
  }
};
__device__ inline HeadMask head_mask(const Problem& p, const thalweg_tensor& mask, const Pair& pair, int64_t n,
                                     int64_t h) {
  const int64_t head = p.HM == p.H ? h : p.HM == 1 ? 0 : h / (p.H / p.HK);
  const uint8_t* data = static_cast<const uint8_t*>(mask.data) + n * mask.stride[0] + head * mask.stride[1];
  return {data, mask.stride[2], mask.stride[3], p.block_q, p.block_k, pair.k_len - pair.q_len, p.causal};
}

// Writes to every head of rows that no sequence uses: `rest` where that is right, NaN where a sequence is invalid.
__device__ inline void fill_row(const thalweg_tensor& t, int64_t b, int64_t token, bool valid, double rest) {
  if (!is_there(t)) return;
  const int64_t width = t.rank > 3 ? t.shape[3] : 1;
  for (int64_t i = threadIdx.x; i < t.shape[2] * width; i += blockDim.x)
    store_at(t, offset_of(t, b, token, i / width) + i % width, valid ? rest : nan_of<double>());
}

template <class Args>
void prepare(const Problem& p, const Args& args, const Exec& exec, const Sequences& sequences) {
  SequenceLimits limits;
  limits.q_len = p.NQ * p.block_q, limits.k_len = p.NK * p.block_k, limits.field = offsetof(Args, block_mask);
  prepare_sequences(exec, sequences,
                    {args.cu_seqlens, args.cu_seqlens_k, args.q_lens, args.k_lens, offsetof(Args, cu_seqlens),
                     offsetof(Args, cu_seqlens_k), offsetof(Args, q_lens), offsetof(Args, k_lens)},
                    limits);
}

}  // namespace
}  // namespace thalweg::block_sparse_attention
#endif
