// The workspace of the CUDA rows, for their plans and their runs; plain C++.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_CUDA_WORKSPACE_H
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_CUDA_WORKSPACE_H

#include "thalweg/cuda/inverse.h"
#include "thalweg/cuda/sequences.h"
#include "thalweg/ops/sparse_flash_attention/problem.h"

namespace thalweg::sparse_flash_attention {

// What the queries see, row b T + t: `lengths` entries in ascending order, each once, and how often it is listed.
struct Lists {
  int32_t *entries, *counts;  // [B T E]
  int64_t* lengths;           // [B T]
};

struct CudaWorkspace {
  cuda::Sequences sequences;
  Lists lists;
  void* statistics;       // two numbers [B T H]: fwd, where p is wanted, maximum and sum; bwd cuda::Statistic
  bool* alone;            // bwd [B T]: the query sees one key and no sink, so that P = 1 and dS = d_lse
  cuda::Inverse inverse;  // bwd: of the keys, in blocks as entries name them, places (b T + t) E + i in lists
  int64_t bytes;
};

// Blocks of positions as entries of lists name them, each of one sequence. A packed sequence's are counted from
// k_begin / block + n: room enough wherever it starts, and the next one's are behind them.
inline int64_t num_key_blocks(const Problem& p) {
  return p.packed ? p.S / p.block + p.N : p.N * ((p.S + p.block - 1) / p.block);
}

inline CudaWorkspace lay_out_cuda(const Problem& p, bool backward, char* base) {
  cuda::Cutter memory(base);
  CudaWorkspace w{};
  w.sequences = cuda::lay_out_sequences(p.N, p.T, p.S, p.packed, &memory);
  w.lists = {memory.take<int32_t>(p.B * p.T * p.E), memory.take<int32_t>(p.B * p.T * p.E),
             memory.take<int64_t>(p.B * p.T)};
  if (backward || p.wants_p) w.statistics = memory.take<char>(2 * (p.dtype == THALWEG_F64 ? 8 : 4) * p.B * p.T * p.H);
  if (backward) w.alone = memory.take<bool>(p.B * p.T);
  if (backward && p.wants_d_kv)
    w.inverse = cuda::lay_out_inverse(num_key_blocks(p), p.B * p.T * p.E, &memory);
  w.bytes = memory.used();
  return w;
}

}  // namespace thalweg::sparse_flash_attention
#endif
