// The workspace of the CUDA rows, for their plans and their runs; plain C++.
#ifndef THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CUDA_WORKSPACE_H
#define THALWEG_OPS_BLOCK_SPARSE_ATTENTION_CUDA_WORKSPACE_H

#include "thalweg/cuda/sequences.h"
#include "thalweg/ops/block_sparse_attention/problem.h"

namespace thalweg::block_sparse_attention {

struct CudaWorkspace {
  cuda::Sequences sequences;
  void* statistics;  // bwd: cuda::Statistic [B T H]
  int64_t bytes;
};

inline CudaWorkspace lay_out_cuda(const Problem& p, bool backward, char* base) {
  cuda::Cutter memory(base);
  CudaWorkspace w{};
  w.sequences = cuda::lay_out_sequences(p.N, p.T, p.S, p.packed, &memory);
  if (backward) w.statistics = memory.take<char>(2 * (p.dtype == THALWEG_F64 ? 8 : 4) * p.B * p.T * p.H);
  w.bytes = memory.used();
  return w;
}

}  // namespace thalweg::block_sparse_attention
#endif
