// The generic rows' hold on a state: a column (fixed j of V) lies in cut.lanes neighbouring lanes, kLaneRows rows of
// K in the registers of each. Columns never meet in the recurrence, so blocks take slices of V and share nothing.
#ifndef THALWEG_DELTA_RULE_CUDA_COLUMNS_CUH
#define THALWEG_DELTA_RULE_CUDA_COLUMNS_CUH

#include "thalweg/delta_rule/cuda_tokens.cuh"

namespace thalweg::delta_rule {
namespace {

constexpr int kRowsOfLane = int(kLaneRows);

// Four neighbouring rows at a time, so that shared memory is read in 16 bytes and without conflicts.
__device__ inline int row_of(int lanes, int lane, int r) { return 4 * (lane + lanes * (r / 4)) + r % 4; }

// The part of a column that a thread holds.
struct Place {
  int lanes, lane;  // of the column, in [0, lanes)
  int64_t j;        // the column
  bool inside;      // j < V
};
__device__ inline Place place_of(const Problem& p, const Columns& cut, int64_t slice) {
  const int lanes = int(cut.lanes);
  const int64_t j = slice * cut.columns + threadIdx.x / lanes;
  return {lanes, int(threadIdx.x) % lanes, j, j < p.V};
}

// Over the lanes of a column; each gets the sum.
template <class A>
__device__ A column_sum(A x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Of state `at` = (n, hv) of [N HV K V], or 0 when the tensor is absent.
__device__ inline int64_t state_at(const thalweg_tensor& t, int64_t n, int64_t hv) {
  return n * t.stride[0] + hv * t.stride[1];
}
template <class A>
__device__ void fill_column(A* s, A x) {
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) s[r] = x;
}

template <class A>
__device__ void load_column(const Problem& p, const thalweg_tensor& t, int64_t n, int64_t hv, const Place& at, A* s) {
  fill_column(s, A(0));
  if (!is_there(t) || !at.inside) return;
  with_elements(t, [&](const auto* x) {
    // One address that walks: sixteen of them would be kept in registers from call to call.
    const int64_t row = t.stride[2], jump = (4 * at.lanes - 3) * row;
    x += state_at(t, n, hv) + 4 * at.lane * row + at.j * t.stride[3];
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      if (row_of(at.lanes, at.lane, r) < p.K) s[r] = number(*x);
      x += r % 4 < 3 ? row : jump;
    }
  });
}
template <class A>
__device__ void store_column(const Problem& p, const thalweg_tensor& t, int64_t n, int64_t hv, const Place& at,
                             const A* s) {
  if (!is_there(t) || !at.inside) return;
  with_elements(t, [&](auto* x) {
    // One address that walks: sixteen of them would be kept in registers from call to call.
    const int64_t row = t.stride[2], jump = (4 * at.lanes - 3) * row;
    x += state_at(t, n, hv) + 4 * at.lane * row + at.j * t.stride[3];
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      if (row_of(at.lanes, at.lane, r) < p.K) put(x, s[r]);
      x += r % 4 < 3 ? row : jump;
    }
  });
}
// ---- Tokens in shared memory ----

// A batch of tokens of a value head: q (scaled) and k [rows], decays [gates], v and, backward, d_o [columns], beta.
template <class A>
struct TokenRows {
  A *q, *k, *v, *d_o;
  Decay<A>* decay;
  Beta<A>* beta;
};

struct BatchShape {
  int rows, gates, columns, tokens;
  int row;  // numbers per token
};
__host__ __device__ inline int numbers_of_token(int rows, int gates, int columns) {
  return (2 * rows + 2 * gates + 2 * columns + 2 + 3) / 4 * 4;
}

template <class A>
__device__ TokenRows<A> rows_of_token(A* batch, const BatchShape& s, int i) {
  TokenRows<A> t;
  t.q = batch + i * s.row, t.k = t.q + s.rows;
  t.decay = reinterpret_cast<Decay<A>*>(t.k + s.rows);
  t.beta = reinterpret_cast<Beta<A>*>(t.decay + s.gates);
  t.v = reinterpret_cast<A*>(t.beta + 1), t.d_o = t.v + s.columns;
  return t;
}

// All threads, between barriers: tokens [first, first + count) of batch entry b.
template <class A, class Args>
__device__ void load_batch(const Problem& p, const Args& a, const BatchShape& shape, int64_t b, int64_t first,
                           int count, int64_t hv, int64_t slice, A* batch) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int64_t h = hv / (p.HV / p.H);
  for (int job = threadIdx.x / 32; job < 2 * count; job += warps) {
    const TokenRows<A> rows = rows_of_token(batch, shape, job / 2);
    const int64_t t = first + job / 2;
    if (job % 2 == 0) {
      load_keys(p, a, b, t, h, shape.rows, rows.q, rows.k);
      continue;
    }
    for (int c = lane; c < shape.gates; c += 32)
      rows.decay[c] = decay_of(c < p.channels ? load_gate<A>(p, a, b, t, hv, c).g : A(0));
    if (lane == 0) *rows.beta = load_beta<A>(a, b, t, hv);
    for (int c = lane; c < shape.columns; c += 32) {
      const int64_t j = slice * shape.columns + c;
      rows.v[c] = j < p.V ? load_at<A>(a.v, token_at(a.v, b, t, hv) + j) : A(0);
      if constexpr (requires { a.d_o; })
        rows.d_o[c] = j < p.V && is_there(a.d_o) ? load_at<A>(a.d_o, token_at(a.d_o, b, t, hv) + j) : A(0);
    }
  }
}

// The column takes in a token, and after it is S; returns r = v - S~^T k.
template <class A>
__device__ A take_token(const TokenRows<A>& token, bool one_gate, const Place& at, A v, A* s) {
  A x = 0;
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) {
    const int i = row_of(at.lanes, at.lane, r);
    s[r] = decayed(s[r], token.decay[one_gate ? 0 : i]);
    x = fma(token.k[i], s[r], x);
  }
  const A delta = v - column_sum(x, at.lanes), write = token.beta->value * delta;
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) s[r] = fma(token.k[row_of(at.lanes, at.lane, r)], write, s[r]);
  return delta;
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
