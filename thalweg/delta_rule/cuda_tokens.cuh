// What one token of a value head brings, on the device: q and k with their norms, the decay, beta. The device's
// twin of generic.h; A is the arithmetic, float or double.
#ifndef THALWEG_DELTA_RULE_CUDA_TOKENS_CUH
#define THALWEG_DELTA_RULE_CUDA_TOKENS_CUH

#include "thalweg/cuda/tensor.cuh"
#include "thalweg/cuda/values.cuh"
#include "thalweg/delta_rule/cuda_plan.h"

namespace thalweg::delta_rule {
namespace {

using cuda::is_there;
using cuda::load_at;
using cuda::store_at;
using cuda::warp_sum;

__device__ inline double number(double x) { return x; }
__device__ inline float number(float x) { return x; }
__device__ inline float number(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float number(__half x) { return __half2float(x); }
__device__ inline void put(double* to, double x) { *to = x; }
__device__ inline void put(float* to, double x) { *to = float(x); }
__device__ inline void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ inline void put(__half* to, float x) { *to = __float2half_rn(x); }

// body(elements), with elements of a dtype as what they are.
template <class Body>
__device__ void with_elements(thalweg_dtype dtype, void* data, const Body& body) {
  switch (dtype) {
    case THALWEG_F64:
      return body(static_cast<double*>(data));
    case THALWEG_F32:
      return body(static_cast<float*>(data));
    case THALWEG_BF16:
      return body(static_cast<__nv_bfloat16*>(data));
    default:
      return body(static_cast<__half*>(data));
  }
}
// Where a task's sequence lies.
struct Sequence {
  int64_t b, first, length;  // batch entry, token of it, tokens
  int64_t row;               // of the flattened token axis
  bool valid;                // its borders can be trusted
};
__device__ inline Sequence sequence_of(const Problem& p, const cuda::Span* spans, int64_t n) {
  if (!p.packed) return {n, 0, p.T, n * p.T, true};
  const cuda::Span span = cuda::span_at(spans, n);
  return {0, span.begin, span.end - span.begin, span.begin, span.valid != 0};
}
// The first token that belongs to no packed sequence.
__device__ inline int64_t first_unused(const Problem& p, const cuda::Span* spans) {
  return p.N > 0 ? cuda::span_at(spans, p.N - 1).end : 0;
}

// Where element 0 of (b, t, head) of a [B T heads ..] tensor lies.
__device__ inline int64_t token_at(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head) {
  return b * t.stride[0] + token * t.stride[1] + head * t.stride[2];
}

template <class A>
__device__ A sigmoid(A x) {
  if (x >= 0) return 1 / (1 + exp(-x));
  const A e = exp(x);
  return e / (1 + e);
}

// exp(g) applied to a row: where g is near 0, x + loss x, whose error does not add up over a constant gate.
template <class A>
struct Decay {
  A factor;  // loss = exp(g) - 1 if `near`, else exp(g)
  A near;    // 1 or 0
};
template <class A>
__device__ A decayed(A x, Decay<A> d) {
  return fma(x, d.factor, d.near != 0 ? x : A(0));
}

// The gate of one channel.
template <class A>
struct Gate {
  A x;      // as given, with its bias
  A g;      // effective
  A slope;  // dg / dx
};

// Of A_log. Kept finite: infinity times a softplus of 0 would be NaN.
template <class A>
__device__ A gate_rate(A A_log) {
  constexpr A kMost = sizeof(A) == 8 ? A(1.7976931348623157e308) : A(3.40282347e38f);
  return fmin(exp(A_log), kMost);
}
template <class A>
__device__ Gate<A> gate_of(A x, A rate, A lower_bound) {
  constexpr A kMost = sizeof(A) == 8 ? A(1.7976931348623157e308) : A(3.40282347e38f);
  const A bound = fmax(lower_bound, -kMost);
  if (bound == 0) return {x, -rate * (x > 20 ? x : log1p(exp(x))), -rate * (x > 20 ? A(1) : sigmoid(x))};
  const A s = sigmoid(rate * x);
  return {x, bound * s, bound * (s * sigmoid(-rate * x)) * rate};
}

template <class A, class Args>
__device__ Gate<A> load_gate(const Problem& p, const Args& a, int64_t b, int64_t t, int64_t hv, int64_t c) {
  if (!is_there(a.g)) return {0, 0, 1};
  A x = load_at<A>(a.g, token_at(a.g, b, t, hv) + (p.channels > 1 ? c * a.g.stride[3] : 0));
  if (!a.use_gate) return {x, x, 1};
  if (is_there(a.dt_bias))
    x += load_at<A>(a.dt_bias, hv * a.dt_bias.stride[0] + (p.channels > 1 ? c * a.dt_bias.stride[1] : 0));
  const A rate = is_there(a.A_log) ? gate_rate(load_at<A>(a.A_log, hv * a.A_log.stride[0])) : A(1);
  return gate_of(x, rate, A(p.lower_bound));
}

template <class A>
__device__ Decay<A> decay_of(A g) {
  const A loss = expm1(g);
  if (loss > A(-0.25)) return {loss, 1};
  return {exp(g), 0};
}

template <class A>
struct Beta {
  A value, slope;  // effective; its derivative by beta as given
};
template <class A, class Args>
__device__ Beta<A> load_beta(const Args& a, int64_t b, int64_t t, int64_t hv) {
  A x = 1;
  if (is_there(a.beta)) x = load_at<A>(a.beta, token_at(a.beta, b, t, hv));
  if (!a.use_beta_sigmoid) return {x, 1};
  const A most = a.allow_neg_eigval ? 2 : 1, s = sigmoid(x);
  return {most * s, most * s * sigmoid(-x)};
}

// One warp: q (times scale) and k of a token, normed, into q and k [rows], zero from K on. 128 numbers of each are
// asked for at a time.
template <class A, class Args>
__device__ void load_keys(const Problem& p, const Args& a, int64_t b, int64_t t, int64_t h, int rows, A* q, A* k) {
  constexpr int kTogether = 4;
  const int lane = threadIdx.x % 32;
  A qq = 0, kk = 0;
  with_elements(a.q.dtype, a.q.data, [&](const auto* of_q) {
    const auto* of_k = static_cast<decltype(of_q)>(a.k.data) + token_at(a.k, b, t, h);
    of_q += token_at(a.q, b, t, h);
#pragma unroll 1
    for (int first = lane; first < rows; first += 32 * kTogether) {
      A x[kTogether], y[kTogether];
#pragma unroll
      for (int m = 0; m < kTogether; ++m) {
        x[m] = y[m] = 0;
        const int i = first + 32 * m;
        if (i < p.K) x[m] = A(number(of_q[i])), y[m] = A(number(of_k[i]));
      }
#pragma unroll
      for (int m = 0; m < kTogether; ++m) {
        qq += x[m] * x[m], kk += y[m] * y[m];
        if (first + 32 * m < rows) q[first + 32 * m] = x[m], k[first + 32 * m] = y[m];
      }
    }
  });
  A factor_q = A(p.scale), factor_k = 1;
  if (a.use_qk_l2norm) {
    factor_q *= 1 / sqrt(warp_sum(qq) + A(1e-6));
    factor_k = 1 / sqrt(warp_sum(kk) + A(1e-6));
  }
  for (int i = lane; i < rows; i += 32) q[i] *= factor_q, k[i] *= factor_k;
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
