// The generic CUDA row of the delta-rule operators, forward and decode. Its contract opens each operator's
// cuda_generic.cu.
#ifndef THALWEG_DELTA_RULE_CUDA_GENERIC_FWD_CUH
#define THALWEG_DELTA_RULE_CUDA_GENERIC_FWD_CUH

#include <cstddef>

#include "thalweg/delta_rule/cuda_columns.cuh"
#include "thalweg/delta_rule/cuda_slots.cuh"

namespace thalweg::delta_rule {
namespace {

constexpr int64_t kFwdThreads = 128;     // that hold columns
constexpr int64_t kFwdLoaders = 128;     // that fill batches of tokens
constexpr int64_t kFwdSmem = 40 * 1024;  // that one batch may fill

inline BatchShape fwd_batch(const Problem& p, const Columns& cut) {
  BatchShape s{int(cut.rows), p.channels == 1 ? 1 : int(cut.rows), int(cut.columns), 0, 0};
  s.row = numbers_of_token(s.rows, s.gates, s.columns);
  const int64_t fit = kFwdSmem / (s.row * arithmetic_bytes(p));
  s.tokens = fit > 16 ? 16 : int(fit);
  return s;
}

// o of tokens [begin, end) of batch entry b: this thread's columns (lane 0 of each writes).
template <class A, class Args>
__device__ void fill_o(const Args& a, int64_t b, int64_t begin, int64_t end, int64_t hv, const Place& at, A x) {
  if (at.lane != 0 || !at.inside) return;
  for (int64_t t = begin; t < end; ++t) store_at(a.o, token_at(a.o, b, t, hv) + at.j, x);
}
template <class A, class Args>
__device__ void fill_chunk_states(const Problem& p, const Args& a, int64_t begin, int64_t end, int64_t hv,
                                  const Place& at, A x) {
  A s[kRowsOfLane];
  fill_column(s, x);
  for (int64_t row = begin; row < end; ++row) store_column(p, a.chunk_states, row, hv, at, s);
}

// Tokens [first, first + count) of a batch in shared memory; `after` gets the index of each token that was taken in.
template <class A, class Args, class After>
__device__ void run_batch(const Problem& p, const Args& a, const BatchShape& shape, A* batch, int64_t b, int64_t first,
                          int count, int64_t hv, const Place& at, A (&s)[kRowsOfLane], const After& after) {
  if (threadIdx.x >= kFwdThreads) return;
  for (int i = 0; i < count; ++i) {
    const TokenRows<A> token = rows_of_token(batch, shape, i);
    take_token(token, p.channels == 1, at, s);
    A q[kRowsOfLane];
    load_lane(token.q, at, q);
    const A o = column_sum(dot_lane(q, s), at.lanes);
    if (at.lane == 0 && at.inside) store_at(a.o, token_at(a.o, b, first + i, hv) + at.j, o);
    after(i);
  }
}

template <class A, class Args>
__device__ void fwd_sequence(const Problem& p, const Args& a, const Columns& cut, const BatchShape& shape,
                             const cuda::Span* spans, int64_t n, int64_t hv, int64_t slice, A* batch) {
  const Place at = place_of(p, cut, slice);
  const bool states = is_there(a.chunk_states);
  if (n == p.N) {  // rows that belong to no sequence
    fill_o(a, 0, first_unused(p, spans), p.T, hv, at, A(0));
    if (p.N == 0) fill_chunk_states(p, a, 0, p.T / p.every, hv, at, A(0));
    return;
  }
  const Sequence q = sequence_of(p, spans, n);
  // Rows of chunk_states up to where the next sequence's start; the last one's end the tensor.
  const int64_t row = q.row / p.every + n;
  const int64_t next = n + 1 < p.N ? sequence_of(p, spans, n + 1).row / p.every + n + 1
                       : states    ? a.chunk_states.shape[0]
                                   : 0;
  A s[kRowsOfLane];
  if (!q.valid) {
    fill_column(s, cuda::nan_of<A>());
    fill_o(a, q.b, q.first, q.first + q.length, hv, at, cuda::nan_of<A>());
    store_column(p, a.final_state, n, hv, at, s);
    if (states) fill_chunk_states(p, a, row, next, hv, at, cuda::nan_of<A>());
    return;
  }
  load_column(p, a.initial_state, n, hv, at, s);
  store_column(p, a.chunk_states, row, hv, at, s);
  int64_t left = p.every, at_row = row + 1;  // tokens to the next checkpoint, and its row
  const Batches<A, Args> batches{p, a, shape, q.b, q.first, hv, slice, int(kFwdThreads), batch};
  batches.run(0, q.length, false, [&](int64_t t, int count, A* tokens) {
    run_batch(p, a, shape, tokens, q.b, q.first + t, count, hv, at, s, [&](int i) {
      if (--left > 0) return;
      left = p.every;
      if (t + i + 1 < q.length) store_column(p, a.chunk_states, at_row++, hv, at, s);
    });
  });
  store_column(p, a.final_state, n, hv, at, s);
  if (states) fill_chunk_states(p, a, at_row, next, hv, at, A(0));
}

template <class A, class Args>
__global__ void __launch_bounds__(kFwdThreads + kFwdLoaders, sizeof(A) == 4 ? 2 : 1)
    generic_fwd_kernel(const __grid_constant__ Problem p, const __grid_constant__ Args a, Columns cut, BatchShape shape,
                       const cuda::Span* spans, int64_t tasks) {
  extern __shared__ __align__(16) char smem[];
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t slice = task % cut.slices, head = task / cut.slices;
    fwd_sequence<A>(p, a, cut, shape, spans, head / p.HV, head % p.HV, slice, reinterpret_cast<A*>(smem));
  }
}

template <class A, class Args>
__device__ void decode_sequence(const Problem& p, const Args& a, const Columns& cut, const BatchShape& shape,
                                const SlotUse* uses, int32_t* report, int64_t n, int64_t hv, int64_t slice, A* batch) {
  const Place at = place_of(p, cut, slice);
  const int64_t from = read_slot(a, n);
  if (uses && slots_are_wrong(p, a, uses, n, report)) return fill_o(a, n, 0, p.T, hv, at, cuda::nan_of<A>());
  if (from < 0) return fill_o(a, n, 0, p.T, hv, at, A(0));
  A s[kRowsOfLane];
  load_column(p, a.state, from, hv, at, s);
  const Batches<A, Args> batches{p, a, shape, n, 0, hv, slice, int(kFwdThreads), batch};
  batches.run(0, p.T, false, [&](int64_t t, int count, A* tokens) {
    run_batch(p, a, shape, tokens, n, t, count, hv, at, s, [&](int i) {
      const int64_t to = write_slot(p, a, n, t + i, from);
      if (to >= 0) store_column(p, a.state, to, hv, at, s);
    });
  });
}

template <class A, class Args>
__global__ void __launch_bounds__(kFwdThreads + kFwdLoaders, sizeof(A) == 4 ? 2 : 1)
    generic_decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ Args a, Columns cut,
                          BatchShape shape, const SlotUse* uses, int32_t* report, int64_t tasks) {
  extern __shared__ __align__(16) char smem[];
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t slice = task % cut.slices, head = task / cut.slices;
    decode_sequence<A>(p, a, cut, shape, uses, report, head / p.HV, head % p.HV, slice, reinterpret_cast<A*>(smem));
  }
}

template <class A, class Args>
void launch_generic_fwd(const Problem& p, const Args& a, const Exec& exec) {
  const Columns cut = columns_of(p, kFwdThreads);
  const BatchShape shape = fwd_batch(p, cut);
  auto* spans = reinterpret_cast<cuda::Span*>(exec.workspace);
  if (p.packed) cuda::check_borders(exec, a.cu_seqlens, p.N, p.T, spans, offsetof(Args, cu_seqlens));
  const int64_t tasks = (p.N + (p.packed ? 1 : 0)) * p.HV * cut.slices;
  cuda::launch(exec, "generic_fwd", generic_fwd_kernel<A, Args>, {cuda::capped_grid(tasks)}, kFwdThreads + kFwdLoaders,
               2 * shape.tokens * shape.row * int64_t(sizeof(A)), p, a, cut, shape, spans, tasks);
}

template <class A, class Args>
void launch_generic_decode(const Problem& p, const Args& a, const Exec& exec) {
  const Columns cut = columns_of(p, kFwdThreads);
  const BatchShape shape = fwd_batch(p, cut);
  auto* uses = p.slots ? reinterpret_cast<SlotUse*>(exec.workspace) : nullptr;
  if (uses) count_slot_uses(p, a, exec, uses);
  const int64_t tasks = p.N * p.HV * cut.slices, loaders = p.T < 2 ? 32 : p.T < 4 ? 64 : kFwdLoaders;
  cuda::launch(exec, "generic_decode", generic_decode_kernel<A, Args>, {cuda::capped_grid(tasks)},
               kFwdThreads + loaders, 2 * shape.tokens * shape.row * int64_t(sizeof(A)), p, a, cut, shape, uses,
               exec.report, tasks);
}

template <class Args>
void cuda_generic_fwd_of(const Problem& p, const Args& a, const Exec& exec) {
  if (p.dtype == THALWEG_F64)
    launch_generic_fwd<double>(p, a, exec);
  else
    launch_generic_fwd<float>(p, a, exec);
}
template <class Args>
void cuda_generic_decode_of(const Problem& p, const Args& a, const Exec& exec) {
  if (p.dtype == THALWEG_F64)
    launch_generic_decode<double>(p, a, exec);
  else
    launch_generic_decode<float>(p, a, exec);
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
