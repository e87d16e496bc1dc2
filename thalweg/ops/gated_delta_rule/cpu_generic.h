// What the parts of cpu_generic share: rows in and out of any dtype and stride, and their workspace.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_CPU_GENERIC_H
#define THALWEG_OPS_GATED_DELTA_RULE_CPU_GENERIC_H

#include <algorithm>
#include <cmath>
#include <limits>

#include "thalweg/core/tensor.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

// Workspace that the generic rows want, per running task and shared.
int64_t cpu_generic_fwd_slot_bytes(const Problem& problem);
int64_t cpu_generic_bwd_slot_bytes(const Problem& problem);
int64_t cpu_generic_bwd_shared_bytes(const Problem& problem);

namespace generic {

// Elements offset, offset + stride, … of `t`, converted to A (float or double).
template <class A>
void load_row(const thalweg_tensor& t, int64_t offset, int64_t stride, int64_t n, A* out) {
  switch (t.dtype) {
    case THALWEG_F64:
      for (int64_t i = 0; i < n; ++i) out[i] = A(static_cast<const double*>(t.data)[offset + i * stride]);
      break;
    case THALWEG_F32:
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<const float*>(t.data)[offset + i * stride];
      break;
    case THALWEG_BF16:
      for (int64_t i = 0; i < n; ++i) out[i] = to_float(static_cast<const bf16*>(t.data)[offset + i * stride]);
      break;
    default:
      for (int64_t i = 0; i < n; ++i) out[i] = to_float(static_cast<const f16*>(t.data)[offset + i * stride]);
  }
}

template <class A>
void store_row(const thalweg_tensor& t, int64_t offset, int64_t stride, int64_t n, const A* in) {
  switch (t.dtype) {
    case THALWEG_F64:
      for (int64_t i = 0; i < n; ++i) static_cast<double*>(t.data)[offset + i * stride] = in[i];
      break;
    case THALWEG_F32:
      for (int64_t i = 0; i < n; ++i) static_cast<float*>(t.data)[offset + i * stride] = float(in[i]);
      break;
    case THALWEG_BF16:
      for (int64_t i = 0; i < n; ++i) static_cast<bf16*>(t.data)[offset + i * stride] = to_bf16(float(in[i]));
      break;
    default:
      for (int64_t i = 0; i < n; ++i) static_cast<f16*>(t.data)[offset + i * stride] = to_f16(float(in[i]));
  }
}

template <class A>
A load_at(const thalweg_tensor& t, int64_t offset) {
  A x;
  load_row(t, offset, 0, 1, &x);
  return x;
}
template <class A>
void store_at(const thalweg_tensor& t, int64_t offset, A x) {
  store_row(t, offset, 0, 1, &x);
}

inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }

// A row of [B T heads dim], or an element of [B T heads].
template <class A>
void load_token(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, int64_t n, A* out) {
  load_row(t, b * t.stride[0] + token * t.stride[1] + head * t.stride[2], t.stride[3], n, out);
}
template <class A>
void store_token(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, int64_t n, const A* in) {
  store_row(t, b * t.stride[0] + token * t.stride[1] + head * t.stride[2], t.stride[3], n, in);
}
template <class A>
A load_scalar(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head) {
  return load_at<A>(t, b * t.stride[0] + token * t.stride[1] + head * t.stride[2]);
}
template <class A>
void store_scalar(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, A x) {
  store_at(t, b * t.stride[0] + token * t.stride[1] + head * t.stride[2], x);
}

// State (n, hv) of [N HV K V] as [K V]; zeros when absent.
template <class A>
void load_state(const thalweg_tensor& t, int64_t n, int64_t hv, int64_t K, int64_t V, A* S) {
  for (int64_t i = 0; i < K; ++i) {
    if (is_there(t))
      load_row(t, n * t.stride[0] + hv * t.stride[1] + i * t.stride[2], t.stride[3], V, S + i * V);
    else
      for (int64_t j = 0; j < V; ++j) S[i * V + j] = 0;
  }
}
template <class A>
void store_state(const thalweg_tensor& t, int64_t n, int64_t hv, int64_t K, int64_t V, const A* S) {
  if (!is_there(t)) return;
  for (int64_t i = 0; i < K; ++i)
    store_row(t, n * t.stride[0] + hv * t.stride[1] + i * t.stride[2], t.stride[3], V, S + i * V);
}

// Four partial sums in a fixed order.
template <class A>
A dot(const A* a, const A* b, int64_t n) {
  A part[4] = {};
  int64_t j = 0;
  for (; j + 4 <= n; j += 4)
    for (int l = 0; l < 4; ++l) part[l] += a[j + l] * b[j + l];
  for (; j < n; ++j) part[0] += a[j] * b[j];
  return (part[0] + part[1]) + (part[2] + part[3]);
}

template <class A>
A sigmoid(A x) {
  if (x >= 0) return 1 / (1 + std::exp(-x));
  A e = std::exp(x);
  return e / (1 + e);
}

// The scalars of one token and value head, after the fused gate and sigmoid.
template <class A>
struct Scalars {
  A g, beta;
  A decay;       // exp(g)
  A loss;        // exp(g) - 1
  A g_slope;     // dg / d(raw gate), or 1
  A beta_slope;  // dbeta / d(logit), or 1
};

template <class A, class Args>
Scalars<A> load_scalars(const Args& a, int64_t b, int64_t token, int64_t hv) {
  Scalars<A> s{0, 1, 1, 0, 1, 1};
  if (is_there(a.g)) s.g = load_scalar<A>(a.g, b, token, hv);
  if (a.use_gate) {
    A x = s.g;
    if (is_there(a.dt_bias)) x += load_at<A>(a.dt_bias, hv * a.dt_bias.stride[0]);
    // Kept finite: infinity times a softplus of 0 would be NaN.
    A rate = std::min(std::exp(load_at<A>(a.A_log, hv * a.A_log.stride[0])), std::numeric_limits<A>::max());
    s.g = -rate * (x > 20 ? x : std::log1p(std::exp(x)));
    s.g_slope = -rate * (x > 20 ? A(1) : sigmoid(x));
  }
  if (is_there(a.g)) s.decay = std::exp(s.g), s.loss = std::expm1(s.g);
  if (is_there(a.beta)) s.beta = load_scalar<A>(a.beta, b, token, hv);
  if (a.use_beta_sigmoid) {
    A c = a.allow_neg_eigval ? 2 : 1, p = sigmoid(s.beta), not_p = sigmoid(-s.beta);
    s.beta = c * p;
    s.beta_slope = c * p * not_p;
  }
  return s;
}

// x [n] <- x / sqrt(sum x^2 + 1e-6); returns the factor.
template <class A>
A l2norm(A* x, int64_t n) {
  A rstd = 1 / std::sqrt(dot(x, x, n) + A(1e-6));
  for (int64_t i = 0; i < n; ++i) x[i] *= rstd;
  return rstd;
}

// row [n] <- exp(g) row. A gate near 0 takes away a loss instead of multiplying by a rounded exp(g), whose
// error would be the same at every token of a constant gate, and add up.
template <class A>
void decay_row(A* row, const Scalars<A>& s, int64_t n) {
  if (s.loss > A(-0.25))
    for (int64_t j = 0; j < n; ++j) row[j] += row[j] * s.loss;
  else
    for (int64_t j = 0; j < n; ++j) row[j] *= s.decay;
}

// S [K V] takes in one token; r [V] holds v before and the delta v - S~^T k after.
template <class A>
void step(A* S, const A* k, const Scalars<A>& s, A* r, int64_t K, int64_t V) {
  for (int64_t i = 0; i < K; ++i) {
    A* row = S + i * V;
    decay_row(row, s, V);
    for (int64_t j = 0; j < V; ++j) r[j] -= k[i] * row[j];
  }
  for (int64_t i = 0; i < K; ++i) {
    A* row = S + i * V;
    A write = k[i] * s.beta;
    for (int64_t j = 0; j < V; ++j) row[j] += write * r[j];
  }
}

}  // namespace generic
}  // namespace thalweg::gated_delta_rule
#endif
