// What the generic rows of the delta-rule operators share: tokens and states in and out of any dtype and stride,
// one token of the recurrence. A is the arithmetic, float or double. Not for files compiled per ISA.
#ifndef THALWEG_DELTA_RULE_GENERIC_H
#define THALWEG_DELTA_RULE_GENERIC_H

#include <algorithm>
#include <cmath>
#include <limits>

#include "thalweg/cpu/rows.h"
#include "thalweg/delta_rule/problem.h"

namespace thalweg::delta_rule {

inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }

// A row of [B T heads n], or with n = 1 an element of [B T heads].
template <class A>
void load_token(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, int64_t n, A* out) {
  load_row(t, b * t.stride[0] + token * t.stride[1] + head * t.stride[2], t.stride[3], n, out);
}
template <class A>
void store_token(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head, int64_t n, const A* in) {
  if (is_there(t)) store_row(t, b * t.stride[0] + token * t.stride[1] + head * t.stride[2], t.stride[3], n, in);
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

// ---- One token of a value head, after the fused steps ----

template <class A>
struct Token {
  A* x;      // [channels] the gate as given, with its bias
  A* g;      // [channels] effective
  A* decay;  // [channels] exp(g)
  A* loss;   // [channels] exp(g) - 1
  A* slope;  // [channels] dg / dx
  A beta;
  A beta_slope;  // dbeta / d(beta as given)

  static int64_t elements(const Problem& p) { return 5 * p.channels; }
  void place(const Problem& p, A* rows) {
    x = rows, g = x + p.channels, decay = g + p.channels, loss = decay + p.channels, slope = loss + p.channels;
  }
};

// g and slope of every channel's x.
template <class A>
void activate_gate(const Problem& p, A rate, Token<A>& token) {
  const A bound = std::max(A(p.lower_bound), std::numeric_limits<A>::lowest());
  for (int64_t c = 0; c < p.channels; ++c) {
    const A x = token.x[c];
    if (bound == 0) {
      token.g[c] = -rate * (x > 20 ? x : std::log1p(std::exp(x)));
      token.slope[c] = -rate * (x > 20 ? A(1) : sigmoid(x));
    } else {
      token.g[c] = bound * sigmoid(rate * x);
      token.slope[c] = bound * (sigmoid(rate * x) * sigmoid(-rate * x)) * rate;
    }
  }
}

template <class A, class Args>
void load_gates(const Problem& p, const Args& a, int64_t b, int64_t t, int64_t hv, Token<A>& token) {
  const int64_t n = p.channels;
  std::fill_n(token.x, n, A(0)), std::fill_n(token.slope, n, A(1));
  std::fill_n(token.decay, n, A(1)), std::fill_n(token.loss, n, A(0));
  if (is_there(a.g)) load_token(a.g, b, t, hv, n, token.x);
  std::copy_n(token.x, n, token.g);
  if (a.use_gate) {
    if (is_there(a.dt_bias)) {
      load_row(a.dt_bias, hv * a.dt_bias.stride[0], a.dt_bias.stride[1], n, token.g);
      for (int64_t c = 0; c < n; ++c) token.x[c] += token.g[c];
    }
    A rate = 1;
    if (is_there(a.A_log)) {
      // Kept finite: infinity times a softplus of 0 would be NaN.
      rate = std::min(std::exp(load_at<A>(a.A_log, hv * a.A_log.stride[0])), std::numeric_limits<A>::max());
    }
    activate_gate(p, rate, token);
  }
  if (is_there(a.g))
    for (int64_t c = 0; c < n; ++c) token.decay[c] = std::exp(token.g[c]), token.loss[c] = std::expm1(token.g[c]);
  token.beta = token.beta_slope = 1;
  if (is_there(a.beta)) load_token(a.beta, b, t, hv, 1, &token.beta);
  if (a.use_beta_sigmoid) {
    A most = a.allow_neg_eigval ? 2 : 1, s = sigmoid(token.beta), not_s = sigmoid(-token.beta);
    token.beta = most * s;
    token.beta_slope = most * s * not_s;
  }
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
void decay_row(A* row, A decay, A loss, int64_t n) {
  if (loss > A(-0.25))
    for (int64_t j = 0; j < n; ++j) row[j] += row[j] * loss;
  else
    for (int64_t j = 0; j < n; ++j) row[j] *= decay;
}

// S [K V] takes in one token; r [V] holds v before and the delta v - S~^T k after.
template <class A>
void step(const Problem& p, A* S, const A* k, const Token<A>& token, A* r) {
  for (int64_t i = 0; i < p.K; ++i) {
    A* row = S + i * p.V;
    const int64_t c = p.channels == 1 ? 0 : i;
    decay_row(row, token.decay[c], token.loss[c], p.V);
    for (int64_t j = 0; j < p.V; ++j) r[j] -= k[i] * row[j];
  }
  for (int64_t i = 0; i < p.K; ++i) {
    A* row = S + i * p.V;
    const A write = k[i] * token.beta;
    for (int64_t j = 0; j < p.V; ++j) row[j] += write * r[j];
  }
}

}  // namespace thalweg::delta_rule
#endif
