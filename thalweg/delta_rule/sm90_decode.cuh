// The fast CUDA row of decode for the delta-rule operators. Its contract opens each operator's sm90_decode.cu.
#ifndef THALWEG_DELTA_RULE_SM90_DECODE_CUH
#define THALWEG_DELTA_RULE_SM90_DECODE_CUH

#include <cuda_pipeline.h>

#include "thalweg/delta_rule/cuda_slots.cuh"
#include "thalweg/delta_rule/cuda_tokens.cuh"

namespace thalweg::delta_rule {
namespace {

constexpr int kGroup = 8;  // neighbouring lanes whose vectors of 16 bytes make 128
constexpr int kMostK = 256, kMostColumns = 256;
constexpr int64_t kMostSequences = 1024;  // whose slots every block compares itself

// A tensor [N T heads ..] whose last axis is contiguous (g: see DecodeCall).
struct TokenTensor {
  void* data;
  int64_t n, t, head;  // strides
};
// What every block reads of the arguments, close together: each line of parameters costs a miss.
struct DecodeCall {
  TokenTensor q, k, v, o, g, beta;
  void* state;
  int64_t slot, head, row;  // strides; row: of the axis of K or V that is not contiguous
  int64_t first;            // sequence of blockIdx.z = 0
  int64_t g_channel;        // stride
  thalweg_dtype type, g_type, beta_type;
  float scale;
  int32_t K, V, T, group;  // group: value heads of a key head
  int32_t columns, split;  // of V that a block takes; warps that share 128 bytes of V (ByV)
  int32_t steps, vectors;  // of a warp (ByV, ByK); 16 bytes of the state in a thread
  int32_t token;           // floats of a token in shared memory
  int32_t use_qk_l2norm, use_gate, use_beta_sigmoid, allow_neg_eigval, slots;
};
__device__ inline int64_t token_at(const TokenTensor& x, int64_t n, int64_t t, int64_t head) {
  return n * x.n + t * x.t + head * x.head;
}

// ---- A token in shared memory ----

struct DecodeToken {
  float *k, *dk, *q;     // [K] each; q times scale; with a decay per channel exp(g) is in dk and q, else dk is k
  float *factor, *near;  // [K] Decay of each channel, with a decay per channel only
  float* v;              // [columns]
  float* rest;           // see Rest
};
enum Rest { kDot, kFactor, kNear, kBeta, kQk, kRest = 8 };  // kDot: exp(g) of the head, or 1; kQk: scale q . k

template <bool kChannel>
int decode_token_floats(int K, int columns) {
  return (kChannel ? 5 : 2) * K + columns + kRest;
}
template <bool kChannel>
__device__ DecodeToken decode_token(const DecodeCall& c, float* tokens, int t) {
  DecodeToken r;
  r.k = tokens + t * c.token, r.dk = kChannel ? r.k + c.K : r.k, r.q = r.dk + c.K;
  r.factor = r.q + c.K, r.near = r.factor + c.K;
  r.v = kChannel ? r.near + c.K : r.factor, r.rest = r.v + c.columns;
  return r;
}

// A warp's share of the tokens is asked for, then `ask` is called, which asks for the state, and then used.
//
// q and k of token t.
template <class Ask>
__device__ void load_decode_keys(const DecodeCall& c, int64_t n, int t, int hv, const DecodeToken& to, const Ask& ask) {
  constexpr int kMost = kMostK / 32;
  const int lane = threadIdx.x % 32, h = int(unsigned(hv) / unsigned(c.group));
  float q[kMost], k[kMost], qq = 0, kk = 0, qk = 0;
  with_elements(c.type, c.q.data, [&](const auto* of_q) {
    const auto* of_k = static_cast<decltype(of_q)>(c.k.data) + token_at(c.k, n, t, h) + lane;
    of_q += token_at(c.q, n, t, h) + lane;
#pragma unroll
    for (int m = 0; m < kMost; ++m) {
      q[m] = k[m] = 0;
      if (32 * m < c.K) q[m] = number(of_q[32 * m]), k[m] = number(of_k[32 * m]);
    }
  });
  ask();
#pragma unroll
  for (int m = 0; m < kMost; ++m) qq += q[m] * q[m], kk += k[m] * k[m], qk += q[m] * k[m];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    qq += __shfl_xor_sync(0xffffffffu, qq, step);
    kk += __shfl_xor_sync(0xffffffffu, kk, step);
    qk += __shfl_xor_sync(0xffffffffu, qk, step);
  }
  float of_q = c.scale, of_k = 1;
  if (c.use_qk_l2norm) of_q *= 1 / sqrtf(qq + 1e-6f), of_k = 1 / sqrtf(kk + 1e-6f);
#pragma unroll
  for (int m = 0; m < kMost; ++m)
    if (32 * m < c.K) to.q[lane + 32 * m] = q[m] * of_q, to.k[lane + 32 * m] = k[m] * of_k;
  if (lane == 0) to.rest[kQk] = qk * of_q * of_k;
}

// The decays, beta and v of token t.
template <bool kChannel, class Args, class Ask>
__device__ void load_decode_gates(const DecodeCall& c, const Problem& p, const Args& a, int64_t n, int t, int hv,
                                  int column, const DecodeToken& to, const Ask& ask) {
  constexpr int kMost = kChannel ? kMostK / 32 : 1;
  const int lane = threadIdx.x % 32;
  const int64_t at_g = token_at(c.g, n, t, hv);
  float g[kMost], v[kMostColumns / 32], beta = 1;
  with_elements(c.type, c.v.data, [&](const auto* x) {
    x += token_at(c.v, n, t, hv) + column + lane;
#pragma unroll
    for (int m = 0; m < kMostColumns / 32; ++m) v[m] = 32 * m < c.columns ? float(number(x[32 * m])) : 0.f;
  });
  if (c.beta.data)
    with_elements(c.beta_type, c.beta.data, [&](const auto* x) { beta = number(x[token_at(c.beta, n, t, hv)]); });
#pragma unroll
  for (int m = 0; m < kMost; ++m) {
    g[m] = 0;
    const int channel = kChannel ? lane + 32 * m : 0;
    if (!c.g.data || (kChannel && 32 * m >= c.K)) continue;
    if (c.use_gate)
      g[m] = load_gate<float>(p, a, n, t, hv, channel).g;
    else
      with_elements(c.g_type, c.g.data, [&](const auto* x) { g[m] = number(x[at_g + channel * c.g_channel]); });
  }
  ask();
  if (c.use_beta_sigmoid) beta = (c.allow_neg_eigval ? 2.f : 1.f) * sigmoid(beta);
#pragma unroll
  for (int m = 0; m < kMostColumns / 32; ++m)
    if (32 * m < c.columns) to.v[lane + 32 * m] = v[m];
#pragma unroll
  for (int m = 0; m < kMost; ++m) {
    if (kChannel && 32 * m >= c.K) continue;
    const Decay<float> d = decay_of(g[m]);
    if (kChannel) to.factor[lane + 32 * m] = d.factor, to.near[lane + 32 * m] = d.near;
    if (kChannel || lane != 0) continue;
    to.rest[kFactor] = d.factor, to.rest[kNear] = d.near, to.rest[kDot] = d.factor + d.near;
  }
  if (lane == 0) {
    to.rest[kBeta] = beta;
    if (kChannel) to.rest[kDot] = 1;
  }
}

// All warps: the tokens and, on the way, the state.
template <bool kChannel, class Args, class Ask>
__device__ void load_decode_tokens(const DecodeCall& c, const Problem& p, const Args& a, int64_t n, int hv, int column,
                                   float* tokens, const Ask& ask) {
  const int warps = blockDim.x / 32;
  bool asked = false;
  const auto ask_once = [&] {
    if (!asked) ask();
    asked = true;
  };
  for (int job = threadIdx.x / 32; job < 2 * c.T; job += warps) {
    const DecodeToken to = decode_token<kChannel>(c, tokens, job / 2);
    if (job % 2 == 0)
      load_decode_keys(c, n, job / 2, hv, to, ask_once);
    else
      load_decode_gates<kChannel>(c, p, a, n, job / 2, hv, column, to, ask_once);
  }
  ask_once();
  __syncthreads();
  if constexpr (kChannel) {
    for (int t = 0; t < c.T; ++t) {
      const DecodeToken to = decode_token<kChannel>(c, tokens, t);
      for (int i = threadIdx.x; i < c.K; i += blockDim.x) {
        const float dot = to.factor[i] + to.near[i];
        to.dk[i] = dot * to.k[i], to.q[i] *= dot;
      }
    }
    __syncthreads();
  }
}

// ---- 16 bytes of a state as stored, E, and what a thread works on: as many floats ----

template <class E>
constexpr int kWidth = 16 / int(sizeof(E));

__device__ inline void unpack(uint4 raw, float (&x)[4]) {
  x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
  x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
}
__device__ inline void unpack(uint4 raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ inline uint4 packed(const float (&x)[4]) {
  return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
}
__device__ inline uint4 packed(const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&two);
  }
  return {words[0], words[1], words[2], words[3]};
}

// A thread's vectors in shared memory: as they came, or with several tokens (kWide) as floats, since a state of bf16 is
// not rounded between the tokens of a call. Every thread reads only what it wrote or asked for.
template <class E, bool kWide>
struct Held {
  uint4 *raw, *wide;  // vector i of this thread is raw[i * blockDim.x], wide[(i * quads + quad) * blockDim.x]
  static constexpr int kQuads = kWidth<E> / 4;

  __device__ Held(uint4* smem, int vectors) : raw(smem + threadIdx.x), wide(raw + vectors * blockDim.x) {}
  __device__ uint4* end(int vectors) const {
    return (kWide ? wide + kQuads * vectors * blockDim.x : wide) - threadIdx.x;
  }
  __device__ void ask(int i, const E* x) const { __pipeline_memcpy_async(raw + i * blockDim.x, x, 16); }
  __device__ void widen(int vectors) const {
    for (int i = 0; kWide && i < vectors; ++i) {
      float x[kWidth<E>];
      unpack(raw[i * blockDim.x], x);
      keep(i, x);
    }
  }
  __device__ void load(int i, float (&x)[kWidth<E>]) const {
    if constexpr (kWide) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        float four[4];
        unpack(wide[(i * kQuads + quad) * blockDim.x], four);
#pragma unroll
        for (int c = 0; c < 4; ++c) x[4 * quad + c] = four[c];
      }
    } else {
      unpack(raw[i * blockDim.x], x);
    }
  }
  __device__ void keep(int i, const float (&x)[kWidth<E>]) const {
    if constexpr (kWide) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float four[4] = {x[4 * quad], x[4 * quad + 1], x[4 * quad + 2], x[4 * quad + 3]};
        wide[(i * kQuads + quad) * blockDim.x] = packed(four);
      }
    } else {
      raw[i * blockDim.x] = packed(x);
    }
  }
};

// n floats from shared memory at 16 bytes.
template <int n>
__device__ void load_floats(const float* from, float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n / 4; ++i) {
    const float4 four = reinterpret_cast<const float4*>(from)[i];
    x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
  }
}

// Where the states after a token go.
template <class E>
struct Target {
  E* slice;   // in the pool; null: not kept
  bool next;  // another token of the call needs it
};

// ---- V contiguous ----

// c.split warps share 128 bytes of V. Step s of warp w of them covers rows 16 (w + split s) + 4 g + [0, 4) of K, with
// g = lane / 8, and vector l = lane % 8 of each: vectors 4 s + [0, 4) of the thread.
template <class E, bool kChannel, bool kWide>
struct ByV {
  static constexpr int n = kWidth<E>;
  static constexpr int kColumns = kGroup * n;
  static constexpr bool kPerChannelDecay = kChannel, kFloats = kWide;

  Held<E, kWide> held;
  int g, warp, warps, steps;  // warps: that share the columns; warp: of them
  int column;                 // of the thread's vectors, in the block's

  // Steps of a warp and 16-byte vectors of a thread, where `warps` warps of a block share `columns` columns.
  static int steps_of(int64_t K, int64_t columns, int64_t warps) {
    return int(K / (16 * (warps * kColumns / columns)));
  }
  static int vectors_of(int64_t K, int64_t columns, int64_t warps) { return 4 * steps_of(K, columns, warps); }
  __device__ ByV(const DecodeCall& c, uint4* smem) : held(smem, c.vectors) {
    g = threadIdx.x % 32 / kGroup, warps = c.split, steps = c.steps;
    const int share = threadIdx.x / 32 / warps;
    warp = threadIdx.x / 32 - share * warps, column = share * kColumns + threadIdx.x % kGroup * n;
  }
  __device__ int row(int s) const { return 16 * (warp + warps * s) + 4 * g; }
  __device__ static int64_t slice(const DecodeCall&, int column) { return column; }

  __device__ void ask(const DecodeCall& c, const E* slice) const {
    for (int s = 0; s < steps; ++s) {
      const E* x = slice + row(s) * c.row + column;
#pragma unroll
      for (int i = 0; i < 4; ++i, x += c.row) held.ask(4 * s + i, x);
    }
  }

  // store(column, o) gets the outputs; sums [warps, 2, kColumns] is another one for the next token.
  template <class Store>
  __device__ void take(const DecodeCall& c, const DecodeToken& token, float* sums, Target<E> to,
                       const Store& store) const {
    float x[n] = {}, y[n] = {};
#pragma unroll 2
    for (int s = 0; s < steps; ++s) {
      float k[4], q[4];
      load_floats(token.dk + row(s), k), load_floats(token.q + row(s), q);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float S[n];
        held.load(4 * s + i, S);
#pragma unroll
        for (int j = 0; j < n; ++j) x[j] = fmaf(k[i], S[j], x[j]), y[j] = fmaf(q[i], S[j], y[j]);
      }
    }
    add_rows(x), add_rows(y);
    if (warps > 1) add_warps(x, y, sums);
    const float dot = token.rest[kDot], beta = token.rest[kBeta], qk = token.rest[kQk];
    float v[n];
    load_floats(token.v + column, v);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      x[j] = beta * (v[j] - dot * x[j]);
      if (warp == 0 && g == 0) store(column + j, fmaf(qk, x[j], dot * y[j]));
    }
    if (to.slice || to.next) write(c, token, x, to);
  }

 private:
  // Over the lanes 8 and 16 apart; each gets the sum.
  __device__ static void add_rows(float (&x)[n]) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      x[j] += __shfl_xor_sync(0xffffffffu, x[j], 8);
      x[j] += __shfl_xor_sync(0xffffffffu, x[j], 16);
    }
  }
  __device__ void add_warps(float (&x)[n], float (&y)[n], float* sums) const {
    const int l = threadIdx.x % kGroup;
    sums += (int(threadIdx.x) / 32 - warp) * 2 * kColumns;  // of the warps that share the columns
    float* mine = sums + warp * 2 * kColumns + l * n;
    if (g == 0)
#pragma unroll
      for (int j = 0; j < n; ++j) mine[j] = x[j], mine[kColumns + j] = y[j];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < n; ++j) x[j] = y[j] = 0;
    for (int w = 0; w < warps; ++w) {
      float more_x[n], more_y[n];
      load_floats(sums + w * 2 * kColumns + l * n, more_x);
      load_floats(sums + w * 2 * kColumns + kColumns + l * n, more_y);
#pragma unroll
      for (int j = 0; j < n; ++j) x[j] += more_x[j], y[j] += more_y[j];
    }
  }
  __device__ void write(const DecodeCall& c, const DecodeToken& token, const float (&u)[n], Target<E> to) const {
    const float one_factor = token.rest[kFactor];
    const bool one_near = token.rest[kNear] != 0;
#pragma unroll 2
    for (int s = 0; s < steps; ++s) {
      float k[4], factor[4], near[4];
      load_floats(token.k + row(s), k);
      if constexpr (kChannel) load_floats(token.factor + row(s), factor), load_floats(token.near + row(s), near);
      E* out = to.slice + row(s) * c.row + column;
#pragma unroll
      for (int i = 0; i < 4; ++i, out += c.row) {
        float S[n];
        held.load(4 * s + i, S);
        const float f = kChannel ? factor[i] : one_factor;
        const bool is_near = kChannel ? near[i] != 0 : one_near;
#pragma unroll
        for (int j = 0; j < n; ++j) S[j] = fmaf(k[i], u[j], fmaf(S[j], f, is_near ? S[j] : 0.f));
        if (to.next) held.keep(4 * s + i, S);
        if (to.slice) __stcs(reinterpret_cast<uint4*>(out), packed(S));
      }
    }
  }
};

// ---- K contiguous ----

// Step s of warp w covers columns 4 (w + warps s) + g, with vectors l + 8 m of each:
// vector s chunks + m of the thread.
template <class E, bool kChannel, bool kWide>
struct ByK {
  static constexpr int n = kWidth<E>;
  static constexpr int kColumns = 32;  // a block takes a multiple of them
  static constexpr bool kPerChannelDecay = kChannel, kFloats = kWide;

  Held<E, kWide> held;
  int g, l, warp, warps, steps, chunks;

  static int steps_of(int64_t, int64_t columns, int64_t warps) { return int(columns / (4 * warps)); }
  static int vectors_of(int64_t K, int64_t columns, int64_t warps) {
    return steps_of(K, columns, warps) * int(K / (kGroup * n));
  }
  __device__ ByK(const DecodeCall& c, uint4* smem) : held(smem, c.vectors) {
    g = threadIdx.x % 32 / kGroup, l = threadIdx.x % kGroup;
    warp = threadIdx.x / 32, warps = blockDim.x / 32, steps = c.steps, chunks = c.K / (kGroup * n);
  }
  __device__ int column(int s) const { return 4 * (warp + warps * s) + g; }
  __device__ static int64_t slice(const DecodeCall& c, int column) { return column * c.row; }

  __device__ void ask(const DecodeCall& c, const E* slice) const {
    for (int s = 0; s < steps; ++s)
      for (int m = 0; m < chunks; ++m) held.ask(s * chunks + m, slice + column(s) * c.row + (l + kGroup * m) * n);
  }

  template <class Store>
  __device__ void take(const DecodeCall& c, const DecodeToken& token, float*, Target<E> to, const Store& store) const {
    const float dot = token.rest[kDot], beta = token.rest[kBeta], qk = token.rest[kQk];
#pragma unroll 2
    for (int s = 0; s < steps; ++s) {
      float x = 0, y = 0;
      for (int m = 0; m < chunks; ++m) {
        float S[n], k[n], q[n];
        held.load(s * chunks + m, S);
        load_floats(token.dk + (l + kGroup * m) * n, k), load_floats(token.q + (l + kGroup * m) * n, q);
#pragma unroll
        for (int i = 0; i < n; ++i) x = fmaf(k[i], S[i], x), y = fmaf(q[i], S[i], y);
      }
#pragma unroll
      for (int lane = kGroup / 2; lane > 0; lane /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, lane);
        y += __shfl_xor_sync(0xffffffffu, y, lane);
      }
      const float u = beta * (token.v[column(s)] - dot * x);
      if (l == 0) store(column(s), fmaf(qk, u, dot * y));
      if (to.slice || to.next) write(c, token, s, u, to);
    }
  }

 private:
  __device__ void write(const DecodeCall& c, const DecodeToken& token, int s, float u, Target<E> to) const {
    const float one_factor = token.rest[kFactor];
    const bool one_near = token.rest[kNear] != 0;
    for (int m = 0; m < chunks; ++m) {
      const int from = (l + kGroup * m) * n;
      float S[n], k[n], factor[n], near[n];
      held.load(s * chunks + m, S);
      load_floats(token.k + from, k);
      if constexpr (kChannel) load_floats(token.factor + from, factor), load_floats(token.near + from, near);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float f = kChannel ? factor[i] : one_factor;
        const bool is_near = kChannel ? near[i] != 0 : one_near;
        S[i] = fmaf(k[i], u, fmaf(S[i], f, is_near ? S[i] : 0.f));
      }
      if (to.next) held.keep(s * chunks + m, S);
      if (to.slice) __stcs(reinterpret_cast<uint4*>(to.slice + column(s) * c.row + from), packed(S));
    }
  }
};

// ---- The kernel ----

// Whether sequence n must be left alone: the block compares its slots with those of all others. Out of line, and before
// anything is held in registers.
template <class Args>
__device__ __noinline__ bool find_slot_fault(const Problem& p, const Args& a, int64_t n, int64_t from,
                                             int32_t* report) {
  const int T = int(p.T);
  Fault fault = from < -1 || from >= p.M ? Fault::kSlot : Fault::kNone;
  int64_t value = from;
  int draft = -1;  // whose slot is wrong; -1: the one read
  auto found = [&](Fault what, int64_t slot, int t) { fault = what, value = slot, draft = t; };
  for (int t = 0; t < T; ++t) {
    const int64_t mine = write_slot(p, a, n, t, from);
    if (mine < -1 || mine >= p.M) found(Fault::kSlot, mine, t);
    for (int u = 0; u < t && mine >= 0 && from >= 0; ++u)
      if (write_slot(p, a, n, u, from) == mine) found(Fault::kSlotTwice, mine, t);
  }
  for (int64_t m = threadIdx.x; from >= 0 && m < p.N; m += blockDim.x) {
    const int64_t its_read = read_slot(a, m);
    if (m == n || its_read < 0) continue;
    for (int u = -1; u < T; ++u) {  // what it reads, then what it writes
      const int64_t its = u < 0 ? its_read : write_slot(p, a, m, u, its_read);
      if (its < 0) continue;
      if (u >= 0 && its == from) found(Fault::kSlotTwice, from, -1);
      for (int t = 0; t < T; ++t)
        if (write_slot(p, a, n, t, from) == its) found(Fault::kSlotTwice, its, t);
    }
  }
  if (fault != Fault::kNone) {
    const bool written = draft >= 0 && cuda::is_there(a.write_slots);
    cuda::report_fault(report, fault, written ? offsetof(Args, write_slots) : offsetof(Args, read_slots),
                       written ? n * T + draft : n, value);
  }
  return __syncthreads_or(fault != Fault::kNone);
}

template <class State, class E, class Args>
__global__ void __launch_bounds__(256, 2)
    sm90_decode_kernel(const __grid_constant__ DecodeCall c, const __grid_constant__ Problem p,
                       const __grid_constant__ Args a, const SlotUse* uses, int32_t* report) {
  extern __shared__ __align__(16) uint4 smem[];
  const int64_t n = c.first + blockIdx.z;
  const int hv = blockIdx.y, column = blockIdx.x * c.columns;
  int64_t from = n;
  bool wrong = false;
  if (c.slots) {
    from = read_slot(a, n);
    wrong = uses ? slots_are_wrong(p, a, uses, n, report) : find_slot_fault(p, a, n, from, report);
  }
  const auto store = [&](int t, int j, float o) {
    with_elements(c.type, c.o.data, [&](auto* x) { put(x + token_at(c.o, n, t, hv) + column + j, o); });
  };
  if (wrong || from < 0) {
    for (int t = 0; t < c.T; ++t)
      for (int j = threadIdx.x; j < c.columns; j += blockDim.x) store(t, j, wrong ? cuda::nan_of<float>() : 0.f);
    return;
  }
  const State state(c, smem);
  float* tokens = reinterpret_cast<float*>(state.held.end(c.vectors));
  float* sums = tokens + c.T * c.token;
  E* slice = static_cast<E*>(c.state) + hv * c.head + State::slice(c, column);
  load_decode_tokens<State::kPerChannelDecay>(c, p, a, n, hv, column, tokens, [&] {
    state.ask(c, slice + from * c.slot);
    __pipeline_commit();
  });
  __pipeline_wait_prior(0);
  state.held.widen(c.vectors);
  for (int t = 0; t < c.T; ++t) {
    int64_t slot = t + 1 == c.T ? from : -1;
    if (c.slots) slot = write_slot(p, a, n, t, from);
    const Target<E> to{slot < 0 ? nullptr : slice + slot * c.slot, t + 1 < c.T};
    state.take(c, decode_token<State::kPerChannelDecay>(c, tokens, t),
               sums + t % 2 * (blockDim.x / 32) * 2 * State::kColumns, to, [&](int j, float o) { store(t, j, o); });
  }
}

inline TokenTensor token_tensor(const thalweg_tensor& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }

template <class State, class E, class Args>
void launch_sm90_decode(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  constexpr bool kChannel = State::kPerChannelDecay;
  DecodeCall c{};
  c.q = token_tensor(a.q), c.k = token_tensor(a.k), c.v = token_tensor(a.v), c.o = token_tensor(a.o);
  if (is_there(a.g)) c.g = token_tensor(a.g), c.g_channel = kChannel ? a.g.stride[3] : 0;
  if (is_there(a.beta)) c.beta = token_tensor(a.beta);
  c.state = a.state.data, c.slot = a.state.stride[0], c.head = a.state.stride[1];
  c.row = a.state.stride[p.k_contiguous ? 3 : 2];
  c.type = p.dtype, c.g_type = a.g.dtype, c.beta_type = a.beta.dtype, c.scale = float(p.scale);
  c.K = int32_t(p.K), c.V = int32_t(p.V), c.T = int32_t(p.T), c.group = int32_t(p.HV / p.H);
  const int64_t warps = plan.values[0];
  c.columns = int32_t(plan.values[1]), c.split = int32_t(warps * State::kColumns / c.columns);
  c.steps = State::steps_of(p.K, c.columns, warps), c.vectors = State::vectors_of(p.K, c.columns, warps);
  c.token = decode_token_floats<kChannel>(c.K, c.columns);
  c.use_qk_l2norm = a.use_qk_l2norm, c.use_gate = a.use_gate, c.slots = p.slots;
  c.use_beta_sigmoid = a.use_beta_sigmoid, c.allow_neg_eigval = a.allow_neg_eigval;
  SlotUse* uses = nullptr;
  if (p.slots && p.N > kMostSequences) {
    uses = reinterpret_cast<SlotUse*>(exec.workspace);
    count_slot_uses(p, a, exec, uses);
  }
  const int64_t state_bytes = p.K * c.columns * int64_t(sizeof(E) + (State::kFloats ? sizeof(float) : 0));
  const int64_t bytes = state_bytes + 4 * (c.T * c.token + 2 * warps * 2 * State::kColumns);
  const auto kernel = sm90_decode_kernel<State, E, Args>;
  cuda::prefer_shared_memory("sm90_decode", kernel);
  for (; c.first < p.N; c.first += cuda::kMaxGridYZ) {
    const int64_t count = p.N - c.first < cuda::kMaxGridYZ ? p.N - c.first : cuda::kMaxGridYZ;
    cuda::launch(exec, "sm90_decode", kernel, {p.V / c.columns, p.HV, count}, 32 * warps, bytes, c, p, a,
                 static_cast<const SlotUse*>(uses), exec.report);
  }
}

template <class E, bool kWide, class Args>
void sm90_decode_layout(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  constexpr bool kChannel = requires { a.lower_bound; };
  if (p.k_contiguous)
    launch_sm90_decode<ByK<E, kChannel, kWide>, E>(p, plan, a, exec);
  else
    launch_sm90_decode<ByV<E, kChannel, kWide>, E>(p, plan, a, exec);
}

template <class Args>
void sm90_decode_of(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  if (p.state == THALWEG_F32)
    sm90_decode_layout<float, false>(p, plan, a, exec);
  else if (p.T <= 1)
    sm90_decode_layout<__nv_bfloat16, false>(p, plan, a, exec);
  else
    sm90_decode_layout<__nv_bfloat16, true>(p, plan, a, exec);
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
