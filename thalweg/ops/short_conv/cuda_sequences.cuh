// Sequences, states, taps and activation of short_conv on the device.
#ifndef THALWEG_OPS_SHORT_CONV_CUDA_SEQUENCES_CUH
#define THALWEG_OPS_SHORT_CONV_CUDA_SEQUENCES_CUH

#include <float.h>

#include "thalweg/cuda/values.cuh"
#include "thalweg/ops/short_conv/problem.h"

namespace thalweg::short_conv {
namespace {

using cuda::is_there;
using cuda::load_at;
using cuda::store_at;

static_assert(sizeof(cuda::Span) == 24);  // cuda_layout_of

// Rows [begin, end) of the flattened [B*T] axis; n is -1 past cu_seqlens[N]. Not valid: its borders are wrong.
struct Sequence {
  int64_t n, begin, end;
  bool valid;
};

__device__ inline Sequence sequence_of(const Problem& p, const cuda::Span* spans, int64_t n) {
  if (!p.packed) return {n, n * p.T, (n + 1) * p.T, true};
  const cuda::Span span = cuda::span_at(spans, n);
  return {n, span.begin, span.end, span.valid != 0};
}

// The sequence, never an empty one, that row belongs to.
__device__ inline Sequence sequence_at(const Problem& p, const cuda::Span* spans, int64_t row) {
  if (!p.packed) return sequence_of(p, spans, row / p.T);
  int64_t low = 0, high = p.N;  // the first n that ends past row is in [low, high]
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cuda::span_at(spans, middle).end > row)
      high = middle;
    else
      low = middle + 1;
  }
  if (low < p.N) return sequence_of(p, spans, low);
  return {-1, p.N == 0 ? 0 : cuda::span_at(spans, p.N - 1).end, p.T, true};
}

// Offset of row r of the flattened token axis of a tensor [B T ...].
__device__ inline int64_t token_at(const thalweg_tensor& t, int64_t T, int64_t r) {
  if (t.shape[0] <= 1) return r * t.stride[1];
  const int64_t b = r / T;
  return b * t.stride[0] + (r - b * T) * t.stride[1];
}

__device__ inline int64_t state_at(const thalweg_tensor& state, int64_t n, int64_t d, int64_t slot) {
  return n * state.stride[0] + d * state.stride[1] + slot * state.stride[2];
}

// Input r of a sequence's channel d; before its start from the state, or 0.
template <class A>
__device__ A input_at(const Problem& p, const thalweg_tensor& x, const thalweg_tensor& state, const Sequence& s,
                      int64_t r, int64_t d) {
  if (r >= s.begin) return load_at<A>(x, token_at(x, p.T, r) + d);
  return is_there(state) ? load_at<A>(state, state_at(state, s.n, d, p.W + r - s.begin)) : A(0);
}

// A channel's taps and its last inputs, each W long at the end of its array: the newest is last.
template <class A>
struct Window {
  A weight[kMaxW], bias, x[kMaxW];

  __device__ Window(const thalweg_tensor& w, const thalweg_tensor& b, int W, int64_t d) {
#pragma unroll
    for (int j = 0; j < kMaxW; ++j) {
      const int tap = j - (int(kMaxW) - W);
      weight[j] = tap >= 0 ? load_at<A>(w, d * w.stride[0] + tap * w.stride[1]) : A(0);
      x[j] = 0;
    }
    bias = is_there(b) ? load_at<A>(b, d * b.stride[0]) : A(0);
  }

  __device__ void push(A next) {
#pragma unroll
    for (int j = 0; j + 1 < kMaxW; ++j) x[j] = x[j + 1];
    x[kMaxW - 1] = next;
  }

  __device__ A convolve(int W) const {
    A pre = bias;
#pragma unroll
    for (int j = 0; j < kMaxW; ++j)
      if (j >= kMaxW - W) pre = fma(weight[j], x[j], pre);
    return pre;
  }
};

template <class A>
__device__ A largest() {
  return sizeof(A) == 8 ? A(DBL_MAX) : A(FLT_MAX);
}

// 0 at minus infinity.
template <class A>
__device__ A silu(A x) {
  return (x < -largest<A>() ? -largest<A>() : x) / (1 + exp(-x));
}

template <class A>
__device__ A silu_slope(A x) {
  const A s = 1 / (1 + exp(-x)), finite = x < -largest<A>() ? -largest<A>() : x > largest<A>() ? largest<A>() : x;
  return s * (1 + finite * (1 - s));
}

// Spans of packed sequences into the workspace; null without cu_seqlens.
inline const cuda::Span* make_spans(const Problem& p, const thalweg_tensor& cu_seqlens, int64_t field,
                                    const Exec& exec) {
  if (!p.packed) return nullptr;
  auto* spans = reinterpret_cast<cuda::Span*>(exec.workspace);
  cuda::check_borders(exec, cu_seqlens, p.N, p.T, spans, field);
  return spans;
}

constexpr int kChannels = 128;  // of a thread block, one a thread
inline int64_t strips_of(const Problem& p) { return (p.D + kChannels - 1) / kChannels; }

}  // namespace
}  // namespace thalweg::short_conv
#endif
