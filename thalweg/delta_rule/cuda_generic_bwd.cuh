// The generic CUDA row of the delta-rule operators, backward. Its contract opens each operator's cuda_generic_bwd.cu.
#ifndef THALWEG_DELTA_RULE_CUDA_GENERIC_BWD_CUH
#define THALWEG_DELTA_RULE_CUDA_GENERIC_BWD_CUH

#include "thalweg/delta_rule/cuda_bwd_sums.cuh"
#include "thalweg/delta_rule/cuda_columns.cuh"

namespace thalweg::delta_rule {
namespace {

constexpr int64_t kBwdLoaders = 128;     // threads that fill batches of tokens
constexpr int64_t kBwdSmem = 96 * 1024;  // that two batches of tokens and the warps' sums may fill
constexpr int kBwdWarps = int(kBwdThreads / 32);

inline BatchShape bwd_batch(const Problem& p, const BwdLayout& l) {
  BatchShape s{int(l.cut.rows), int(l.gates), int(l.cut.columns), 0, 0};
  s.row = numbers_of_token(s.rows, s.gates, s.columns);
  const int64_t fit = kBwdSmem / ((2 * s.row + kBwdWarps * l.entry) * bwd_arithmetic_bytes(p));
  s.tokens = fit > 8 ? 8 : fit < 1 ? 1 : int(fit);
  return s;
}
template <class A>
int64_t bwd_smem(const BwdLayout& l, const BatchShape& s) {
  return s.tokens * (2 * s.row + kBwdWarps * l.entry) * int64_t(sizeof(A));
}

// What a task works on.
template <class A>
struct BwdTask {
  int64_t b, first, length, row;  // as in Sequence
  int64_t n, hv, group;
  A* checkpoints;  // of the sequence's piece 0, this task's; a piece further: checkpoint_step
  int64_t checkpoint_step;
  A* states;   // of the piece, token by token: [kBwdPiece, state]
  A* partial;  // of the sequence's token 0; a token further: partial_step
  int64_t partial_step;
  A *buffers, *warps;  // shared memory: two batches; sums of each warp [tokens, warps, entry]
};

// A thread's 16 numbers of a state in the workspace, neighbours beside each other.
template <class A>
__device__ void keep_state(A* state, const A* s) {
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) state[r * kBwdThreads + threadIdx.x] = s[r];
}
template <class A>
__device__ void recall_state(const A* state, A* s) {
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) s[r] = state[r * kBwdThreads + threadIdx.x];
}

// v [16]: sums over the columns of the warp. A step halves the numbers and the columns: a lane keeps the upper half if
// its bit is set. What is left of row r lies where `scatter` says.
template <int n, class A>
__device__ void add_columns(A* v, int lanes, int step) {
  if (step < lanes) return;
  const bool upper = threadIdx.x & step;
  if constexpr (n == 1) {
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], step);
  } else {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const A sent = upper ? v[i] : v[i + n / 2], kept = upper ? v[i + n / 2] : v[i];
      v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, step);
    }
    add_columns<n / 2>(v, lanes, step / 2);
  }
}
// sums [rows] of this warp from v after add_columns.
template <class A>
__device__ void scatter(const A (&v)[kRowsOfLane], int lanes, int lane, A* sums) {
  int left = kRowsOfLane, from = 0;
  for (int step = 16; step >= lanes; step /= 2)
    if (left > 1) left /= 2, from += threadIdx.x & step ? left : 0;
  if (left >= 4) {  // whole quads of neighbouring rows
#pragma unroll
    for (int i = 0; i < kRowsOfLane; i += 4)
      if (i < left) store_four(sums + row_of(lanes, lane, from + i), v[i], v[i + 1], v[i + 2], v[i + 3]);
    return;
  }
  if (lanes == 1 && threadIdx.x % 2) return;  // holds what its neighbour holds
  sums[row_of(lanes, lane, from)] = v[0];
  if (left == 2) sums[row_of(lanes, lane, from + 1)] = v[1];
}

// One token going back: dS, the gradient of the state after it, becomes that of the state before it. `before` is the
// state before the token. The warp's sums for d_q, d_k, d_g, d_beta go to `sums` [entry].
template <class A, class Args>
__device__ void token_back(const Problem& p, const Args& a, const BatchShape& shape, const BwdTask<A>& task,
                           const TokenRows<A>& token, int64_t t, const Place& at, A (&before)[kRowsOfLane],
                           A (&dS)[kRowsOfLane], A* sums) {
  const bool one_gate = p.channels == 1;
  const int column = threadIdx.x / at.lanes;
  const A beta = token.beta->value, d_o = token.d_o[column];
  A k[kRowsOfLane], v[kRowsOfLane];
  load_lane(token.q, at, v), load_lane(token.k, at, k);
  decay_lane(token, one_gate, at, before);
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) dS[r] = fma(v[r], d_o, dS[r]);
  const A delta = token.v[column] - column_sum(dot_lane(k, before), at.lanes);
  const A du = column_sum(dot_lane(k, dS), at.lanes);
  const A dv = beta * du, u = beta * delta, scaled = A(p.scale) * d_o;
  if (at.lane == 0 && at.inside && is_there(a.d_v))
    store_at(a.d_v, token_at(a.d_v, task.b, task.first + t, task.hv) + at.j, dv);
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) v[r] = fma(k[r], u, before[r]) * scaled;
  add_columns<kRowsOfLane>(v, at.lanes, 16);
  scatter(v, at.lanes, at.lane, sums);
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) v[r] = dS[r] * u - before[r] * dv;
  add_columns<kRowsOfLane>(v, at.lanes, 16);
  scatter(v, at.lanes, at.lane, sums + shape.rows);
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) dS[r] = fma(-k[r], dv, dS[r]), v[r] = dS[r] * before[r];
  A* gates = sums + 2 * shape.rows;
  A all = 0;
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) all += v[r];
  if (!one_gate) {
    add_columns<kRowsOfLane>(v, at.lanes, 16);
    scatter(v, at.lanes, at.lane, gates);
  }
  decay_lane(token, one_gate, at, dS);
  // The halves of the warp share out the two sums, of d_g and d_beta.
  const bool upper = threadIdx.x & 16;
  const A d_beta = at.lane == 0 ? du * delta : A(0);
  A two = (upper ? d_beta : all) + __shfl_xor_sync(0xffffffffu, upper ? all : d_beta, 16);
  for (int step = 8; step > 0; step /= 2) two += __shfl_xor_sync(0xffffffffu, two, step);
  if (threadIdx.x % 16 == 0 && (upper || one_gate)) gates[upper ? shape.gates : 0] = two;
}

// The warps' sums of `count` tokens from token t on, added up in order; the group's first slice starts the sums.
template <class A>
__device__ void add_warps(const BwdTask<A>& task, int entry, int64_t t, int count, bool start) {
  for (int i = threadIdx.x; i < count * entry; i += blockDim.x) {
    const int token = i / entry, e = i % entry;
    const A* from = task.warps + int64_t(token) * kBwdWarps * entry + e;
    A sum = 0;
    for (int w = 0; w < kBwdWarps; ++w) sum += from[w * entry];
    A* to = task.partial + (t + token) * task.partial_step + e;
    *to = start ? sum : *to + sum;
  }
}

// Tokens [begin, begin + count) from the state before them; `keep`: the states before each are kept.
template <class A, class Args>
__device__ void piece_forward(const Problem& p, const BatchShape& shape, const BwdTask<A>& task,
                              const Batches<A, Args>& batches, int64_t begin, int64_t count, bool keep, const Place& at,
                              A (&s)[kRowsOfLane]) {
  batches.run(begin, count, false, [&](int64_t first, int tokens, A* batch) {
    for (int m = 0; m < tokens && threadIdx.x < kBwdThreads; ++m) {
      if (keep) keep_state(task.states + (first - begin + m) * kBwdThreads * kLaneRows, s);
      take_token(rows_of_token(batch, shape, m), p.channels == 1, at, s);
    }
  });
}

template <class A, class Args>
__device__ void piece_back(const Problem& p, const Args& a, const BatchShape& shape, const BwdTask<A>& task,
                           const Batches<A, Args>& batches, int entry, int64_t begin, int64_t count, bool start,
                           const Place& at, A (&dS)[kRowsOfLane]) {
  const A* states = task.states;
  constexpr int64_t kState = kBwdThreads * kLaneRows;
  A next[kRowsOfLane];  // the state before the token that follows, asked for one token ahead
  if (threadIdx.x < kBwdThreads) recall_state(states + (count - 1) * kState, next);
  batches.run(begin, count, true, [&](int64_t first, int tokens, A* batch) {
    for (int m = tokens - 1; m >= 0 && threadIdx.x < kBwdThreads; --m) {
      A before[kRowsOfLane];
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) before[r] = next[r];
      if (first + m > begin) recall_state(states + (first - begin + m - 1) * kState, next);
      token_back(p, a, shape, task, rows_of_token(batch, shape, m), first + m, at, before, dS,
                 task.warps + (m * kBwdWarps + int(threadIdx.x) / 32) * entry);
    }
    __syncthreads();
    add_warps(task, entry, first, tokens, start);
  });
}

template <class A, class Args>
__device__ void slice_back(const Problem& p, const Args& a, const BatchShape& shape, const BwdTask<A>& task, int entry,
                           const Columns& cut, int64_t slice, bool start) {
  const Place at = place_of(p, cut, slice);
  const bool holds = threadIdx.x < kBwdThreads;
  const Batches<A, Args> batches{p, a, shape, task.b, task.first, task.hv, slice, int(kBwdThreads), task.buffers};
  A s[kRowsOfLane];
  load_column(p, a.initial_state, task.n, task.hv, at, s);
  for (int64_t begin = 0; begin < task.length; begin += kBwdPiece) {
    const int64_t left = task.length - begin;
    if (holds) keep_state(task.checkpoints + begin / kBwdPiece * task.checkpoint_step, s);
    if (left > kBwdPiece) piece_forward(p, shape, task, batches, begin, kBwdPiece, false, at, s);
  }
  A dS[kRowsOfLane];
  load_column(p, a.d_final_state, task.n, task.hv, at, dS);
  for (int64_t begin = (task.length - 1) / kBwdPiece * kBwdPiece; begin >= 0 && task.length > 0; begin -= kBwdPiece) {
    const int64_t count = task.length - begin < kBwdPiece ? task.length - begin : kBwdPiece;
    if (holds) recall_state(task.checkpoints + begin / kBwdPiece * task.checkpoint_step, s);
    piece_forward(p, shape, task, batches, begin, count, true, at, s);
    piece_back(p, a, shape, task, batches, entry, begin, count, start, at, dS);
  }
  store_column(p, a.d_initial_state, task.n, task.hv, at, dS);
}

// Rows that belong to no sequence, or to one whose borders are wrong: d_v (d_q, d_k, d_g, d_beta: cuda_bwd_sums.cuh).
template <class A, class Args>
__device__ void fill_d_v(const Args& a, int64_t begin, int64_t end, int64_t hv, const Place& at, A x) {
  if (at.lane != 0 || !at.inside || !is_there(a.d_v)) return;
  for (int64_t t = begin; t < end; ++t) store_at(a.d_v, token_at(a.d_v, 0, t, hv) + at.j, x);
}
template <class A, class Args>
__device__ void slice_of_nan(const Problem& p, const Args& a, const BwdTask<A>& task, const Place& at) {
  A s[kRowsOfLane];
  fill_column(s, cuda::nan_of<A>());
  store_column(p, a.d_initial_state, task.n, task.hv, at, s);
  fill_d_v(a, task.first, task.first + task.length, task.hv, at, cuda::nan_of<A>());
}

template <class A, class Args>
__global__ void __launch_bounds__(kBwdThreads + kBwdLoaders)
    generic_bwd_kernel(const __grid_constant__ Problem p, const __grid_constant__ Args a,
                       const __grid_constant__ BwdLayout l, BatchShape shape, char* workspace) {
  extern __shared__ __align__(16) char smem[];
  BwdTask<A> task;
  task.buffers = reinterpret_cast<A*>(smem), task.warps = task.buffers + 2 * shape.tokens * shape.row;
  task.states = reinterpret_cast<A*>(workspace + l.states_at) + int64_t(blockIdx.x) * kBwdPiece * l.state;
  task.checkpoint_step = p.HV * l.groups * l.state;
  task.partial_step = p.HV * l.groups * l.entry;
  const auto* spans = reinterpret_cast<const cuda::Span*>(workspace);
  for (int64_t i = blockIdx.x; i < l.tasks; i += gridDim.x) {
    task.group = i % l.groups, task.hv = i / l.groups % p.HV, task.n = i / l.groups / p.HV;
    if (task.n == p.N) {
      for (int64_t slice = task.group; slice < l.cut.slices; slice += l.groups)
        fill_d_v(a, first_unused(p, spans), p.T, task.hv, place_of(p, l.cut, slice), A(0));
      continue;
    }
    const Sequence q = sequence_of(p, spans, task.n);
    task.b = q.b, task.first = q.first, task.length = q.length, task.row = q.row;
    const int64_t mine = task.hv * l.groups + task.group;
    task.checkpoints = reinterpret_cast<A*>(workspace + l.checkpoints_at) +
                       (q.row / kBwdPiece + task.n) * task.checkpoint_step + mine * l.state;
    task.partial = reinterpret_cast<A*>(workspace + l.partial_at) + q.row * task.partial_step + mine * l.entry;
    for (int64_t slice = task.group; slice < l.cut.slices; slice += l.groups) {
      if (q.valid)
        slice_back(p, a, shape, task, int(l.entry), l.cut, slice, slice == task.group);
      else
        slice_of_nan(p, a, task, place_of(p, l.cut, slice));
    }
  }
}

template <class A, class Args>
void launch_generic_bwd(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  const BwdLayout l = bwd_layout(p, plan.values[0]);
  const BatchShape shape = bwd_batch(p, l);
  auto* spans = reinterpret_cast<cuda::Span*>(exec.workspace);
  if (p.packed) {
    cuda::check_borders(exec, a.cu_seqlens, p.N, p.T, spans, offsetof(Args, cu_seqlens));
    mark_rows(p, l, exec);
  }
  cuda::launch(exec, "generic_bwd", generic_bwd_kernel<A, Args>, {l.blocks}, kBwdThreads + kBwdLoaders,
               bwd_smem<A>(l, shape), p, a, l, shape, exec.workspace);
  add_gradients<A>(p, l, a, exec);
}

template <class Args>
void cuda_generic_bwd_of(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  if (bwd_in_float64(p))
    launch_generic_bwd<double>(p, plan, a, exec);
  else
    launch_generic_bwd<float>(p, plan, a, exec);
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
