// The table of sequences on the device (sequences.h): filled and checked by prepare_sequences(), read by every kernel.
#ifndef THALWEG_CUDA_SEQUENCES_CUH
#define THALWEG_CUDA_SEQUENCES_CUH

#include "thalweg/cuda/sequences.h"
#include "thalweg/cuda/values.cuh"

namespace thalweg::cuda {

// The tensors that say where sequences lie, and their offsets in the args struct, for reports.
struct SequenceTensors {
  thalweg_tensor cu_seqlens, cu_seqlens_k, q_lens, k_lens;
  int64_t cu_field, cu_k_field, q_lens_field, k_lens_field;
};
// Tokens that another tensor has room for; longer sequences are faults of that tensor.
struct SequenceLimits {
  int64_t q_len = INT64_MAX, k_len = INT64_MAX, k_room = INT64_MAX;
  int64_t field = 0;
};

static __global__ void fill_sequences_kernel(Sequences s, SequenceTensors t, SequenceLimits limits, const Span* q_spans,
                                             const Span* k_spans, int32_t* report) {
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < s.N; n += int64_t(gridDim.x) * blockDim.x) {
    Span q{0, s.T, 1}, k{0, s.S, 1};
    if (s.packed) q = span_at(q_spans, n), k = span_at(k_spans, n);
    Pair p{q.begin,         q.end - q.begin, q.end - q.begin,      k.begin,
           k.end - k.begin, k.end - k.begin, q.valid && k.valid};
    p.q_ends = !s.packed || q_spans[n].end >= 0, p.k_ends = !s.packed || k_spans[n].end >= 0;
    auto cut = [&](const thalweg_tensor& lens, int64_t field, int64_t room, int64_t* len) {
      if (!is_there(lens)) return;
      const int64_t got = int_at(lens, n);
      if (got < 0 || got > room) {
        if (p.valid) report_fault(report, Fault::kLength, field, n, got);
        p.valid = 0;
      } else {
        *len = got;
      }
    };
    cut(t.q_lens, t.q_lens_field, p.q_room, &p.q_len);
    cut(t.k_lens, t.k_lens_field, p.k_room, &p.k_len);
    auto limit = [&](int64_t got, int64_t most) {
      if (!p.valid || got <= most) return;
      report_fault(report, Fault::kLength, limits.field, n, got);
      p.valid = 0;
    };
    limit(p.q_len, limits.q_len), limit(p.k_len, limits.k_len), limit(p.k_room, limits.k_room);
    if (!p.valid) p.q_len = p.k_len = 0;
    s.pairs[n] = p;
  }
}

inline void prepare_sequences(const Exec& exec, const Sequences& s, const SequenceTensors& t,
                              const SequenceLimits& limits) {
  Span *q = nullptr, *k = nullptr;
  if (s.packed) {
    q = reinterpret_cast<Span*>(s.spans);
    k = reinterpret_cast<Span*>(s.spans + spans_bytes(s.N));
    check_borders(exec, t.cu_seqlens, s.N, s.T, q, t.cu_field);
    check_borders(exec, t.cu_seqlens_k, s.N, s.S, k, t.cu_k_field);
  }
  launch(exec, "fill_sequences", fill_sequences_kernel, {capped_grid(ceil_div(s.N, 128))}, 128, 0, s, t, limits, q, k,
         exec.report);
}

// The sequence whose rows a token is among (N: of none), and how it is to be treated there.
struct RowPlace {
  int64_t n;
  bool used, valid;
};
__device__ inline RowPlace place_of(const Sequences& s, int64_t b, int64_t token, int64_t Pair::*begin,
                                    int64_t Pair::*len, int64_t Pair::*room, bool Pair::*ends) {
  int64_t n = b;
  if (s.packed) {
    int64_t high = s.N;  // the first sequence that ends behind the token
    for (n = 0; n < high;) {
      const int64_t middle = (n + high) / 2;
      if (s.pairs[middle].*begin + s.pairs[middle].*room > token)
        high = middle;
      else
        n = middle + 1;
    }
    if (n == s.N) return {n, false, n == 0 || s.pairs[n - 1].*ends};
  }
  const Pair& p = s.pairs[n];
  return {n, p.valid && token - p.*begin < p.*len, p.valid != 0};
}
__device__ inline RowPlace place_of_query(const Sequences& s, int64_t b, int64_t t) {
  return place_of(s, b, t, &Pair::q_begin, &Pair::q_len, &Pair::q_room, &Pair::q_ends);
}
__device__ inline RowPlace place_of_key(const Sequences& s, int64_t b, int64_t j) {
  return place_of(s, b, j, &Pair::k_begin, &Pair::k_len, &Pair::k_room, &Pair::k_ends);
}

// Tile `i` of num_tiles(): rows [first, first + rows) of sequence n, as far as it has them (first may pass its length).
struct Tile {
  int64_t n, first;
};
__device__ inline Tile tile_at(const Sequences& s, int64_t i, int64_t tokens, int64_t rows, int64_t Pair::*begin) {
  if (!s.packed) {
    const int64_t each = (tokens + rows - 1) / rows;
    return {i / each, i % each * rows};
  }
  // Sequence n owns the tiles from begin / rows + n: enough for any borders, and the next one's start behind them.
  int64_t low = 0, high = s.N;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (s.pairs[middle].*begin / rows + middle <= i)
      low = middle;
    else
      high = middle;
  }
  return {low, (i - s.pairs[low].*begin / rows - low) * rows};
}

// A row's batch item: packed ones have one.
__device__ inline int64_t batch_of(const Sequences& s, int64_t n) { return s.packed ? 0 : n; }

}  // namespace thalweg::cuda
#endif
