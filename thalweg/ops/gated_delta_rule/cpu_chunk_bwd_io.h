// Pieces of cpu_chunk_bwd.cpp: tensors of any dtype and stride in, float32 scratch, and back.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_CPU_CHUNK_BWD_IO_H
#define THALWEG_OPS_GATED_DELTA_RULE_CPU_CHUNK_BWD_IO_H

#include "thalweg/ops/gated_delta_rule/cpu_chunk_bwd_tiles.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {
namespace {

inline bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }

inline int64_t bytes_of(thalweg_dtype dtype) { return dtype == THALWEG_F64 ? 8 : dtype == THALWEG_F32 ? 4 : 2; }

// Element 0 of a token of one head in a [B T heads dim] or [B T heads] tensor, and the step to the next token.
struct Tokens {
  char* data;
  int64_t step;  // bytes
  thalweg_dtype dtype;
};
inline Tokens tokens_at(const thalweg_tensor& t, int64_t T, int64_t row, int64_t head) {
  if (!is_there(t)) return {nullptr, 0, THALWEG_NONE};
  const int64_t at = row / T * t.stride[0] + row % T * t.stride[1] + head * t.stride[2];
  return {static_cast<char*>(t.data) + at * bytes_of(t.dtype), t.stride[1] * bytes_of(t.dtype), t.dtype};
}

// ---- scalars: any dtype -----------------------------------------------------------------------------

inline float load_scalar(const void* p, thalweg_dtype dtype) {
  switch (dtype) {
    case THALWEG_F64: {
      double x;
      memcpy(&x, p, 8);
      return float(x);
    }
    case THALWEG_F32: {
      float x;
      memcpy(&x, p, 4);
      return x;
    }
    case THALWEG_BF16: return float_of_bf16(*static_cast<const uint16_t*>(p));
    default: return float_of_f16(*static_cast<const uint16_t*>(p));
  }
}
inline void store_scalar(void* p, thalweg_dtype dtype, double x) {
  const float y = float(x);
  switch (dtype) {
    case THALWEG_F64: memcpy(p, &x, 8); break;
    case THALWEG_F32: memcpy(p, &y, 4); break;
    case THALWEG_BF16: *static_cast<uint16_t*>(p) = bf16_of_float(y); break;
    default: *static_cast<uint16_t*>(p) = f16_of_float(y);
  }
}
inline float load_element(const thalweg_tensor& t, int64_t at) {
  return load_scalar(static_cast<const char*>(t.data) + at * bytes_of(t.dtype), t.dtype);
}
inline void store_element(const thalweg_tensor& t, int64_t at, double x) {
  store_scalar(static_cast<char*>(t.data) + at * bytes_of(t.dtype), t.dtype, x);
}

// ---- contiguous rows: f32, bf16, f16 ----------------------------------------------------------------

template <thalweg_dtype dtype>
[[gnu::always_inline]] inline vf load_part(const char* row, int64_t at, int64_t n) {
  if constexpr (dtype == THALWEG_F32) {
    const float* p = reinterpret_cast<const float*>(row) + at;
    return n >= kLanes ? load(p) : load_n(p, n);
  } else if constexpr (dtype == THALWEG_BF16) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(row) + at;
    return n >= kLanes ? load_bf16(p) : load_bf16_n(p, n);
  } else {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(row) + at;
    return n >= kLanes ? load_f16(p) : load_f16_n(p, n);
  }
}
template <thalweg_dtype dtype>
[[gnu::always_inline]] inline void store_part(char* row, int64_t at, vf x, int64_t n) {
  if constexpr (dtype == THALWEG_F32) {
    float* p = reinterpret_cast<float*>(row) + at;
    n >= kLanes ? store(p, x) : store_n(p, x, n);
  } else if constexpr (dtype == THALWEG_BF16) {
    uint16_t* p = reinterpret_cast<uint16_t*>(row) + at;
    n >= kLanes ? store_bf16(p, x) : store_bf16_n(p, x, n);
  } else {
    uint16_t* p = reinterpret_cast<uint16_t*>(row) + at;
    n >= kLanes ? store_f16(p, x) : store_f16_n(p, x, n);
  }
}

// Where element `at` of a row of scratch is: rows of [C width] lie flat, or as panels [width/panel][C][panel].
inline int64_t flat(int64_t row, int64_t at, int64_t width) { return row * width + at; }
inline int64_t paneled(int64_t row, int64_t at, int64_t) { return (at / kPanel * kC + row) * kPanel + at % kPanel; }

// `count` rows of n elements into `to`, [C width] in either layout; the rest of the C rows and of the width is 0.
template <thalweg_dtype dtype, int64_t (*place)(int64_t, int64_t, int64_t)>
void load_rows_as(const Tokens& from, int64_t count, int64_t n, int64_t width, float* to) {
  for (int64_t i = 0; i < kC; ++i)
    for (int64_t at = 0; at < width; at += kLanes) {
      vf x = zero();
      if (i < count && at < n) x = load_part<dtype>(from.data + i * from.step, at, n - at);
      store(to + place(i, at, width), x);
    }
}
template <int64_t (*place)(int64_t, int64_t, int64_t)>
void load_rows(const Tokens& from, int64_t count, int64_t n, int64_t width, float* to) {
  switch (from.dtype) {
    case THALWEG_NONE: load_rows_as<THALWEG_F32, place>(from, 0, n, width, to); break;
    case THALWEG_F32: load_rows_as<THALWEG_F32, place>(from, count, n, width, to); break;
    case THALWEG_BF16: load_rows_as<THALWEG_BF16, place>(from, count, n, width, to); break;
    default: load_rows_as<THALWEG_F16, place>(from, count, n, width, to);
  }
}

template <thalweg_dtype dtype, int64_t (*place)(int64_t, int64_t, int64_t)>
void store_rows_as(const Tokens& to, int64_t count, int64_t n, int64_t width, const float* from) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = 0; at < n; at += kLanes)
      store_part<dtype>(to.data + i * to.step, at, load(from + place(i, at, width)), n - at);
}
template <int64_t (*place)(int64_t, int64_t, int64_t)>
void store_rows(const Tokens& to, int64_t count, int64_t n, int64_t width, const float* from) {
  switch (to.dtype) {
    case THALWEG_NONE: break;
    case THALWEG_F32: store_rows_as<THALWEG_F32, place>(to, count, n, width, from); break;
    case THALWEG_BF16: store_rows_as<THALWEG_BF16, place>(to, count, n, width, from); break;
    default: store_rows_as<THALWEG_F16, place>(to, count, n, width, from);
  }
}

// Rows that are wanted later. The token rows of a head lie pages apart, so nothing else fetches them.
// Always inlined: GCC 12 takes a function that only prefetches for one without effect and drops the call.
[[gnu::always_inline]] inline void prefetch_rows(const Tokens& rows, int64_t count, int64_t n, bool to_write) {
  const int64_t bytes = n * bytes_of(rows.dtype);
  for (int64_t i = 0; rows.data && i < count; ++i)
    for (int64_t at = 0; at < bytes; at += 64) {
      if (to_write) prefetch_write(rows.data + i * rows.step + at);
      else prefetch(rows.data + i * rows.step + at);
    }
}

// Rows [begin, end) of a [B T heads (dim)] gradient: zeros, for tokens that belong to no sequence.
inline void zero_rows(const thalweg_tensor& t, int64_t T, int64_t begin, int64_t end, int64_t head) {
  if (!is_there(t)) return;
  const int64_t n = t.rank == 4 ? t.shape[3] : 1, step = t.rank == 4 ? t.stride[3] : 0;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t i = 0; i < n; ++i) {
      const Tokens to = tokens_at(t, T, row, head);
      store_scalar(to.data + i * step * bytes_of(t.dtype), t.dtype, 0);
    }
}

// ---- states: [N HV K V], K or V contiguous, any float dtype; in scratch as panels [Vp/panel][Kp][panel] ----

inline int64_t state_place(int64_t i, int64_t j, int64_t Kp) { return (j / kPanel * Kp + i) * kPanel + j % kPanel; }

// body(offset in the tensor, offset in the scratch) for each element, along the contiguous axis.
template <class Body>
inline void for_state(const thalweg_tensor& t, int64_t n, int64_t hv, int64_t K, int64_t V, int64_t Kp, Body body) {
  const int64_t at = n * t.stride[0] + hv * t.stride[1], by_k = t.stride[2], by_v = t.stride[3];
  if (by_k == 1 && by_v != 1) {
    for (int64_t j = 0; j < V; ++j)
      for (int64_t i = 0; i < K; ++i) body(at + i + j * by_v, state_place(i, j, Kp));
  } else {
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) body(at + i * by_k + j * by_v, state_place(i, j, Kp));
  }
}
inline void load_state(const thalweg_tensor& t, int64_t n, int64_t hv, int64_t K, int64_t V, int64_t Kp, int64_t Vp,
                       float* S) {
  if (!is_there(t) || K < Kp || V < Vp) memset(S, 0, size_t(Kp * Vp) * sizeof(float));
  if (!is_there(t)) return;
  if (t.dtype == THALWEG_F32) {
    const float* data = static_cast<const float*>(t.data);
    for_state(t, n, hv, K, V, Kp, [&](int64_t from, int64_t to) { S[to] = data[from]; });
  } else {
    for_state(t, n, hv, K, V, Kp, [&](int64_t from, int64_t to) { S[to] = load_element(t, from); });
  }
}
inline void store_state(const thalweg_tensor& t, int64_t n, int64_t hv, int64_t K, int64_t V, int64_t Kp,
                        const float* S) {
  if (!is_there(t)) return;
  if (t.dtype == THALWEG_F32) {
    float* data = static_cast<float*>(t.data);
    for_state(t, n, hv, K, V, Kp, [&](int64_t to, int64_t from) { data[to] = S[from]; });
  } else {
    for_state(t, n, hv, K, V, Kp, [&](int64_t to, int64_t from) { store_element(t, to, S[from]); });
  }
}

// ---- gate and write strength ------------------------------------------------------------------------

// What a value head multiplies its raw gate with.
struct HeadGate {
  float rate;     // exp(A_log), kept finite: infinity times a softplus of 0 would be NaN
  float dt_bias;
};

// The scalars of a chunk's tokens for one value head, effective; 0 past the last token.
struct alignas(64) Scalars {
  float g[kC], g_slope[kC];        // g_slope: d g / d(raw gate)
  float beta[kC], beta_slope[kC];  // beta_slope: d beta / d(logit)
};

inline HeadGate head_gate(const thalweg_gated_delta_rule_bwd_args& a, int64_t hv) {
  HeadGate gate{1.f, 0.f};
  if (!a.use_gate) return gate;
  gate.rate = min(exp(set1(load_element(a.A_log, hv * a.A_log.stride[0]))), set1(3.402823466e38f))[0];
  if (is_there(a.dt_bias)) gate.dt_bias = load_element(a.dt_bias, hv * a.dt_bias.stride[0]);
  return gate;
}

inline void load_scalars(const thalweg_gated_delta_rule_bwd_args& a, const HeadGate& gate, const Tokens& g,
                         const Tokens& beta, int64_t count, Scalars* s) {
  const vf one = set1(1.f);
  for (int64_t i = 0; i < kC; ++i) {
    s->g[i] = i < count && g.data ? load_scalar(g.data + i * g.step, g.dtype) : 0.f;
    s->beta[i] = i >= count ? 0.f : beta.data ? load_scalar(beta.data + i * beta.step, beta.dtype) : 1.f;
  }
  for (int64_t i = 0; i < kC; i += kLanes) {
    const int64_t left = count - i < 0 ? 0 : count - i > kLanes ? kLanes : count - i;
    vf x = load(s->g + i), g_slope = one;
    if (a.use_gate) {
      x = x + set1(gate.dt_bias);
      vf slope = where_greater(x, set1(20.f), one, sigmoid(x));
      g_slope = set1(-gate.rate) * slope;
      x = first_n(left, set1(-gate.rate) * softplus(x), zero());
    }
    store(s->g + i, x);
    store(s->g_slope + i, g_slope);
    vf b = load(s->beta + i), beta_slope = one;
    if (a.use_beta_sigmoid) {
      vf c = set1(a.allow_neg_eigval ? 2.f : 1.f), p = sigmoid(b);
      beta_slope = c * p * sigmoid(zero() - b);
      b = first_n(left, c * p, zero());
    }
    store(s->beta + i, b);
    store(s->beta_slope + i, beta_slope);
  }
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
