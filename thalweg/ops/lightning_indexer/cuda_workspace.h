// The workspace of the CUDA rows, for their plans and their runs; plain C++.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_CUDA_WORKSPACE_H
#define THALWEG_OPS_LIGHTNING_INDEXER_CUDA_WORKSPACE_H

#include "thalweg/cuda/inverse.h"
#include "thalweg/cuda/sequences.h"
#include "thalweg/ops/lightning_indexer/problem.h"

namespace thalweg::lightning_indexer {

// A key that may be among the best: a number that orders as its score does, and its position.
template <class A>
struct Candidate;
template <>
struct Candidate<float> {
  uint32_t order;
  int32_t position;
};
template <>
struct Candidate<double> {
  uint64_t order;
  int32_t position;
};

// fwd and loss work on a limited number of rows at a time.
struct CudaWorkspace {
  cuda::Sequences sequences;
  int64_t slots;
  void* scores;           // fwd [slots S], loss [slots E]; bwd dI [B T E]
  void* candidates;       // fwd: [slots min(S, E)]
  cuda::Inverse inverse;  // bwd with a list: of the keys b S + s, the slots (b T + t) E + e
  int64_t bytes;
};

enum class CudaPass { kFwd, kLoss, kBwd };

// Rows at a time: what keeps `most` blocks busy, within 1 GiB.
inline int64_t cuda_slots(const Problem& p, int64_t row_bytes, int64_t most) {
  constexpr int64_t kBytes = int64_t(1) << 30;
  const int64_t rows = p.B * p.T < most ? p.B * p.T : most, room = kBytes / (row_bytes + 1);
  return rows < room ? rows : room > 0 ? room : 1;
}

inline CudaWorkspace lay_out_cuda(const Problem& p, CudaPass pass, int64_t most_slots, char* base) {
  cuda::Cutter memory(base);
  CudaWorkspace w{};
  const bool wide = p.dtype == THALWEG_F64;
  const int64_t number = wide ? 8 : 4, kept = p.S < p.E ? p.S : p.E;
  w.sequences = cuda::lay_out_sequences(p.N, p.T, p.S, p.packed, &memory);
  if (pass == CudaPass::kBwd) {
    w.scores = memory.take<char>(p.B * p.T * p.E * number);
    if (p.wants_d_k && !p.dense) w.inverse = cuda::lay_out_inverse(p.B * p.S, p.B * p.T * p.E, &memory);
  } else {
    const bool forward = pass == CudaPass::kFwd;
    const int64_t candidate = wide ? sizeof(Candidate<double>) : sizeof(Candidate<float>);
    const int64_t row = (forward ? p.S : p.E) * number, list = forward ? kept * candidate : 0;
    w.slots = cuda_slots(p, row + list, most_slots);
    w.scores = memory.take<char>(w.slots * row);
    w.candidates = memory.take<char>(w.slots * list);
  }
  w.bytes = memory.used();
  return w;
}

}  // namespace thalweg::lightning_indexer
#endif
