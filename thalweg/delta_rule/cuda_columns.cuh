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
  bool inside;      // j < V, and the thread holds a column at all
};
__device__ inline Place place_of(const Problem& p, const Columns& cut, int64_t slice) {
  const int lanes = int(cut.lanes);
  const int64_t j = slice * cut.columns + threadIdx.x / lanes;
  return {lanes, int(threadIdx.x) % lanes, j, j < p.V && threadIdx.x < cut.columns * lanes};
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
  with_elements(t.dtype, t.data, [&](const auto* x) {
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
  with_elements(t.dtype, t.data, [&](auto* x) {
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

// A token of a value head: q (scaled) and k [rows], Decay as two rows [gates], v and, backward, d_o [columns].
template <class A>
struct TokenRows {
  A *q, *k, *factor, *near, *v, *d_o;
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
  t.q = batch + i * s.row, t.k = t.q + s.rows, t.factor = t.k + s.rows, t.near = t.factor + s.gates;
  t.beta = reinterpret_cast<Beta<A>*>(t.near + s.gates);
  t.v = reinterpret_cast<A*>(t.beta + 1), t.d_o = t.v + s.columns;
  return t;
}

// Warp `warp` of `warps`: its share of tokens [first, first + count) of batch entry b. Out of line: what it keeps in
// registers would be kept in those of the threads that hold columns too.
template <class A, class Args>
__device__ __noinline__ void load_batch(const Problem& p, const Args& a, const BatchShape& shape, int64_t b,
                                        int64_t first, int count, int64_t hv, int64_t slice, int warp, int warps,
                                        A* batch) {
  const int lane = threadIdx.x % 32;
  const int64_t h = hv / (p.HV / p.H);
  for (int i = warp; i < count; i += warps) {
    const TokenRows<A> rows = rows_of_token(batch, shape, i);
    const int64_t t = first + i;
    for (int c = lane; c < shape.columns; c += 32) {
      const int64_t j = slice * shape.columns + c;
      rows.v[c] = j < p.V ? load_at<A>(a.v, token_at(a.v, b, t, hv) + j) : A(0);
      if constexpr (requires { a.d_o; })
        rows.d_o[c] = j < p.V && is_there(a.d_o) ? load_at<A>(a.d_o, token_at(a.d_o, b, t, hv) + j) : A(0);
    }
    for (int c = lane; c < shape.gates; c += 32) {
      const Decay<A> d = decay_of(c < p.channels ? load_gate<A>(p, a, b, t, hv, c).g : A(0));
      rows.factor[c] = d.factor, rows.near[c] = d.near;
    }
    if (lane == 0) *rows.beta = load_beta<A>(a, b, t, hv);
    load_keys(p, a, b, t, h, shape.rows, rows.q, rows.k);
  }
}

// Batches of tokens through two buffers: while the threads that hold columns work on one, the warps above them fill the
// other. All threads of the block call work(first, count, batch) for the batches of [begin, begin + count) in order, or
// from the last to the first; it may hold barriers.
template <class A, class Args>
struct Batches {
  const Problem& p;
  const Args& a;
  const BatchShape& shape;
  int64_t b, first, hv, slice;  // first: token of the batch entry that `begin` counts from
  int threads;                  // that hold columns
  A* buffers;

  template <class Work>
  __device__ void run(int64_t begin, int64_t count, bool down, const Work& work) const {
    const int64_t tokens = shape.tokens, batches = (count + tokens - 1) / tokens;
    const bool loads = int(threadIdx.x) >= threads;
    auto start_of = [&](int64_t i) { return (down ? batches - 1 - i : i) * tokens; };
    auto load = [&](int64_t i) {
      const int64_t at = start_of(i), left = count - at;
      load_batch(p, a, shape, b, first + begin + at, int(left < tokens ? left : tokens), hv, slice,
                 int(threadIdx.x) / 32 - threads / 32, (int(blockDim.x) - threads) / 32,
                 buffers + i % 2 * tokens * shape.row);
    };
    __syncthreads();
    if (loads && batches > 0) load(0);
    __syncthreads();
    for (int64_t i = 0; i < batches; ++i) {
      const int64_t at = start_of(i), left = count - at;
      if (loads && i + 1 < batches) load(i + 1);
      work(begin + at, int(left < tokens ? left : tokens), buffers + i % 2 * tokens * shape.row);
      __syncthreads();
    }
  }
};

// Four neighbouring numbers of shared memory.
__device__ inline void load_four(const float* from, float (&x)[4]) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ inline void load_four(const double* from, double (&x)[4]) {
  const double2 v = reinterpret_cast<const double2*>(from)[0], w = reinterpret_cast<const double2*>(from)[1];
  x[0] = v.x, x[1] = v.y, x[2] = w.x, x[3] = w.y;
}
__device__ inline void store_four(float* to, float x, float y, float z, float w) {
  *reinterpret_cast<float4*>(to) = {x, y, z, w};
}
__device__ inline void store_four(double* to, double x, double y, double z, double w) {
  reinterpret_cast<double2*>(to)[0] = {x, y}, reinterpret_cast<double2*>(to)[1] = {z, w};
}
// A thread's 16 of [rows].
template <class A>
__device__ void load_lane(const A* rows, const Place& at, A (&x)[kRowsOfLane]) {
#pragma unroll
  for (int quad = 0; quad < kRowsOfLane / 4; ++quad) {
    A four[4];
    load_four(rows + row_of(at.lanes, at.lane, 4 * quad), four);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * quad + i] = four[i];
  }
}
// s <- exp(g) s
template <class A>
__device__ void decay_lane(const TokenRows<A>& token, bool one_gate, const Place& at, A (&s)[kRowsOfLane]) {
  if (one_gate) {
    const Decay<A> d{*token.factor, *token.near};
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) s[r] = decayed(s[r], d);
    return;
  }
#pragma unroll
  for (int quad = 0; quad < kRowsOfLane / 4; ++quad) {
    A factor[4], near[4];
    load_four(token.factor + row_of(at.lanes, at.lane, 4 * quad), factor);
    load_four(token.near + row_of(at.lanes, at.lane, 4 * quad), near);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[4 * quad + i] = decayed(s[4 * quad + i], Decay<A>{factor[i], near[i]});
  }
}
// Four partial sums in a fixed order.
template <class A>
__device__ A dot_lane(const A (&x)[kRowsOfLane], const A (&y)[kRowsOfLane]) {
  A part[4] = {};
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) part[r % 4] = fma(x[r], y[r], part[r % 4]);
  return (part[0] + part[1]) + (part[2] + part[3]);
}

// The column takes in a token, and after it is S.
template <class A>
__device__ void take_token(const TokenRows<A>& token, bool one_gate, const Place& at, A (&s)[kRowsOfLane]) {
  A k[kRowsOfLane];
  load_lane(token.k, at, k);
  decay_lane(token, one_gate, at, s);
  const A delta = token.v[threadIdx.x / at.lanes] - column_sum(dot_lane(k, s), at.lanes);
  const A write = token.beta->value * delta;
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) s[r] = fma(k[r], write, s[r]);
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
