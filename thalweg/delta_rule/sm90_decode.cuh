// The fast CUDA row of decode for the delta-rule operators. Its contract opens each operator's sm90_decode.cu.
#ifndef THALWEG_DELTA_RULE_SM90_DECODE_CUH
#define THALWEG_DELTA_RULE_SM90_DECODE_CUH

#include "thalweg/cuda/sm90/launch_behind.h"
#include "thalweg/cuda/sm90/ptx.cuh"
#include "thalweg/delta_rule/cuda_slots.cuh"
#include "thalweg/delta_rule/cuda_tokens.cuh"

namespace thalweg::delta_rule {
namespace {

constexpr int kMostK = 256, kMostColumns = 128;
constexpr int64_t kMostSequences = 1024;  // whose slots every block compares itself

// A tensor [N T heads ..] whose last axis is contiguous (g: see DecodeCall).
struct TokenTensor {
  void* data;
  int64_t n, t, head;  // strides
};
// What every block reads of the arguments, close together: each line of parameters costs a miss.
struct DecodeCall {
  void* state;
  int64_t slot, head, row;  // strides; row: of the axis of K or V that is not contiguous
  int64_t first;            // sequence of blockIdx.z = 0
  uint64_t group_inverse;   // 2^32 / value heads of a key head, rounded up
  int32_t K, T;
  int32_t columns, steps, warps, helpers;                       // see DecodeCut
  int32_t token;                                                // floats of a token in shared memory
  thalweg_dtype type, g_type, beta_type, rate_type, bias_type;  // THALWEG_NONE: not there
  float scale, bound;                                           // bound: lower_bound
  int32_t use_qk_l2norm, use_gate, use_beta_sigmoid, allow_neg_eigval, slots;
  TokenTensor q, k, v, o, g, beta;
  int64_t g_channel, bias_head;  // strides
  void *A_log, *dt_bias;
};
__device__ inline int64_t token_at(const TokenTensor& x, int64_t n, int64_t t, int64_t head) {
  return n * x.n + t * x.t + head * x.head;
}

// ---- A token in shared memory ----

struct DecodeToken {
  float *k, *q;          // [K] each; q times scale
  float *factor, *near;  // [K] Decay of each channel, with a decay per channel only
  float* v;              // [columns], those of the block
  float* rest;           // see Rest
};
enum Rest { kFactor, kNear, kBeta, kQk, kRest };  // Decay of the head; kQk: scale q . k

template <bool kChannel>
int decode_token_floats(int K, int columns) {
  return (kChannel ? 4 : 2) * K + columns + kRest;
}
template <bool kChannel>
__device__ DecodeToken decode_token(const DecodeCall& c, float* tokens, int t) {
  DecodeToken r;
  r.k = tokens + t * c.token, r.q = r.k + c.K;
  r.factor = r.q + c.K, r.near = r.factor + c.K;
  r.v = kChannel ? r.near + c.K : r.factor, r.rest = r.v + c.columns * c.steps;
  return r;
}

// Numbers of any dtype are asked for as they lie in memory and turned into floats later: a conversion beside the load
// would wait for it before the next one is asked for.
__device__ inline uint32_t bits_of(uint16_t x) { return x; }
__device__ inline uint32_t bits_of(uint32_t x) { return x; }
__device__ inline uint32_t bits_of(double x) { return __float_as_uint(float(x)); }
template <bool kDouble, int n>
__device__ void load_bits(thalweg_dtype type, const void* data, int64_t at, int64_t step, int count,
                          uint32_t (&bits)[n]) {
  const auto load = [&](const auto* x) {
#pragma unroll
    for (int m = 0; m < n; ++m)
      if (m < count) bits[m] = bits_of(x[at + m * step]);
  };
  if (kDouble && type == THALWEG_F64)
    load(static_cast<const double*>(data));
  else if (type == THALWEG_F32)
    load(static_cast<const uint32_t*>(data));
  else
    load(static_cast<const uint16_t*>(data));
}
__device__ inline float number_of(thalweg_dtype type, uint32_t bits) {
  const float half = __half2float(__ushort_as_half(uint16_t(bits)));
  const float other = __uint_as_float(bits << (type == THALWEG_BF16 ? 16 : 0));
  return type == THALWEG_F16 ? half : other;
}

// A warp's share of the tokens is asked for, then `ask` is called, which asks for the state, and then used.
//
// q, k and beta of token t.
template <class Ask>
__device__ void load_decode_keys(const DecodeCall& c, int64_t n, int t, int hv, const DecodeToken& to, const Ask& ask) {
  constexpr int kMost = kMostK / 32;
  const int lane = threadIdx.x % 32, h = int(uint64_t(hv) * c.group_inverse >> 32), count = c.K / 32;
  uint32_t of_q[kMost] = {}, of_k[kMost] = {}, of_beta[1] = {};
  load_bits<false>(c.type, c.q.data, token_at(c.q, n, t, h) + lane, 32, count, of_q);
  load_bits<false>(c.type, c.k.data, token_at(c.k, n, t, h) + lane, 32, count, of_k);
  if (c.beta_type != THALWEG_NONE) load_bits<true>(c.beta_type, c.beta.data, token_at(c.beta, n, t, hv), 0, 1, of_beta);
  ask();
  float q[kMost], k[kMost], qq = 0, kk = 0, qk = 0;
#pragma unroll
  for (int m = 0; m < kMost; ++m) {
    q[m] = number_of(c.type, of_q[m]), k[m] = number_of(c.type, of_k[m]);
    qq += q[m] * q[m], kk += k[m] * k[m], qk += q[m] * k[m];
  }
  float by_q = c.scale, by_k = 1;
  if (c.use_qk_l2norm) by_q *= 1 / sqrtf(warp_sum(qq) + 1e-6f), by_k = 1 / sqrtf(warp_sum(kk) + 1e-6f);
#pragma unroll
  for (int m = 0; m < kMost; ++m)
    if (m < count) to.q[lane + 32 * m] = q[m] * by_q, to.k[lane + 32 * m] = k[m] * by_k;
  float beta = c.beta_type == THALWEG_NONE ? 1.f : number_of(c.beta_type, of_beta[0]);
  if (c.use_beta_sigmoid) beta = __fdividef(c.allow_neg_eigval ? 2.f : 1.f, 1 + expf(-beta));
  qk = warp_sum(qk);
  if (lane == 0) to.rest[kQk] = qk * by_q * by_k, to.rest[kBeta] = beta;
}

// The decays and v of token t.
template <bool kChannel, class Ask>
__device__ void load_decode_gates(const DecodeCall& c, int64_t n, int t, int hv, int column, const DecodeToken& to,
                                  const Ask& ask) {
  constexpr int kMost = kChannel ? kMostK / 32 : 1;
  const int lane = threadIdx.x % 32, count = kChannel ? c.K / 32 : 1, channel = kChannel ? lane : 0;
  uint32_t of_g[kMost] = {}, of_bias[kMost] = {}, of_v[kMostColumns / 32] = {}, of_rate[1] = {};
  if (c.g_type != THALWEG_NONE)
    load_bits<true>(c.g_type, c.g.data, token_at(c.g, n, t, hv) + channel * c.g_channel, 32 * c.g_channel, count, of_g);
  if (c.bias_type != THALWEG_NONE)
    load_bits<true>(c.bias_type, c.dt_bias, hv * c.bias_head + channel, 32, count, of_bias);
  if (c.rate_type != THALWEG_NONE) load_bits<true>(c.rate_type, c.A_log, hv, 0, 1, of_rate);
  const int columns = c.columns * c.steps;
  load_bits<false>(c.type, c.v.data, token_at(c.v, n, t, hv) + column + lane, 32, (columns - lane + 31) / 32, of_v);
  ask();
  const float rate = c.rate_type == THALWEG_NONE ? 1.f : gate_rate(number_of(c.rate_type, of_rate[0]));
#pragma unroll
  for (int m = 0; m < kMost; ++m) {
    if (m >= count) continue;
    float g = number_of(c.g_type, of_g[m]);
    if (c.use_gate) g = gate_of(g + number_of(c.bias_type, of_bias[m]), rate, kChannel ? c.bound : 0.f).g;
    const Decay<float> d = decay_of(g);
    if (kChannel)
      to.factor[lane + 32 * m] = d.factor, to.near[lane + 32 * m] = d.near;
    else if (lane == 0)
      to.rest[kFactor] = d.factor, to.rest[kNear] = d.near;
  }
#pragma unroll
  for (int m = 0; m < kMostColumns / 32; ++m)
    if (lane + 32 * m < columns) to.v[lane + 32 * m] = number_of(c.type, of_v[m]);
}

// The tokens and, on the way, the state. With helpers, two warps that have no part of the state, these load the tokens;
// else all warps do.
template <bool kChannel, class Ask>
__device__ void load_decode_tokens(const DecodeCall& c, int64_t n, int hv, int column, float* tokens, const Ask& ask) {
  const int warp = threadIdx.x / 32;
  bool asked = false;
  const auto ask_once = [&] {
    if (!asked && warp < c.warps) ask();
    asked = true;
  };
  for (int job = c.helpers ? warp - c.warps : warp; job < 2 * c.T && job >= 0; job += c.helpers ? 2 : c.warps) {
    const DecodeToken to = decode_token<kChannel>(c, tokens, job / 2);
    if (job % 2 == 0)
      load_decode_keys(c, n, job / 2, hv, to, ask_once);
    else
      load_decode_gates<kChannel>(c, n, job / 2, hv, column, to, ask_once);
  }
  ask_once();
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

__device__ inline void load_four(const float* from, float (&x)[4]) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// ---- A thread's part of a step's columns: kA numbers along K of kB columns of V, in registers ----
//
// A part says where its numbers lie: row(a), for a multiple of 4, is the row of K of a to a + 3; column(b) is of the
// step's columns. each(c, at, body) calls body(i, x) for the thread's vectors i at x, where the step's columns start at
// `at`. add_up adds over the threads that have the same columns.

constexpr int kPart = 32;

// A barrier beside that of all threads. Its number is a constant: for one in a register the compiler takes all 16 of
// a block, and of such blocks only four run at once.
template <int id>
__device__ void barrier_of(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(id), "r"(threads) : "memory");
}

// V contiguous: kLanes lanes have a row, and all warps rows of the same columns.
template <class E_, int kLanes>
struct ByV {
  using E = E_;
  static constexpr int kA = kPart / kWidth<E>, kB = kWidth<E>, kVectors = kA;
  static constexpr int kColumns = kLanes * kB;  // of a step
  static constexpr int kGroups = 32 / kLanes;

  int from, first, warp, warps;  // from: the first of the thread's rows, which lie in fours; first: of its columns

  static constexpr int sums_floats(int warps) { return 2 * warps * kColumns; }
  __device__ explicit ByV(const DecodeCall& c) {
    const int lane = threadIdx.x % 32;
    warp = threadIdx.x / 32, warps = c.warps;
    from = kA * kGroups * warp + lane / kLanes * 4, first = lane % kLanes * kB;
  }
  __device__ int row(int a) const { return from + kGroups * a; }
  __device__ int column(int b) const { return first + b; }
  __device__ bool stores() const { return threadIdx.x < kLanes; }
  __device__ static int64_t offset(const DecodeCall&, int column) { return column; }

  template <class Body>
  __device__ void each(const DecodeCall& c, E* at, const Body& body) const {
    E* x = at + from * c.row + first;
#pragma unroll
    for (int a = 0; a < kA; ++a) {
      body(a, x);
      x += a % 4 == 3 ? (4 * kGroups - 3) * c.row : c.row;
    }
  }
  __device__ static void unpack_all(const uint4 (&raw)[kVectors], float (&S)[kA][kB]) {
#pragma unroll
    for (int a = 0; a < kA; ++a) unpack(raw[a], S[a]);
  }
  __device__ static uint4 vector(const float (&S)[kA][kB], int i) { return packed(S[i]); }

  // sums [warps, 2, kColumns] is another one the next time.
  __device__ void add_up(float (&x)[kB], float (&y)[kB], float* sums) const {
#pragma unroll
    for (int lane = 16; lane >= kLanes; lane /= 2)
#pragma unroll
      for (int b = 0; b < kB; ++b) {
        x[b] += __shfl_xor_sync(0xffffffffu, x[b], lane);
        y[b] += __shfl_xor_sync(0xffffffffu, y[b], lane);
      }
    float* mine = sums + warp * 2 * kColumns + first;
    if (threadIdx.x % 32 < kLanes)
#pragma unroll
      for (int b = 0; b < kB; ++b) mine[b] = x[b], mine[kColumns + b] = y[b];
    barrier_of<1>(32 * warps);
    add_warps(sums + first, x);
    if (warp == 0) add_warps(sums + kColumns + first, y);
  }

 private:
  __device__ void add_warps(const float* sums, float (&x)[kB]) const {
#pragma unroll
    for (int b = 0; b < kB; ++b) x[b] = 0;
#pragma unroll 8
    for (int w = 0; w < warps; ++w)
#pragma unroll
      for (int b = 0; b < kB; b += 4) {
        float more[4];
        load_four(sums + w * 2 * kColumns + b, more);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[b + i] += more[i];
      }
  }
};

// K contiguous: kLanes = K / 16 lanes have a column.
template <class E_, int kLanes>
struct ByK {
  using E = E_;
  static constexpr int n = kWidth<E>, kA = 16, kB = kPart / kA, kVectors = kPart / n;
  static constexpr int kGroups = 32 / kLanes;

  int from, first;  // of the thread's rows and columns

  static constexpr int sums_floats(int) { return 0; }
  __device__ explicit ByK(const DecodeCall&) {
    from = threadIdx.x % kLanes * n, first = threadIdx.x / 32 * kGroups * kB + threadIdx.x % 32 / kLanes;
  }
  __device__ int row(int a) const { return from + a / n * (kLanes * n) + a % n; }
  __device__ int column(int b) const { return first + kGroups * b; }
  __device__ bool stores() const { return from == 0; }
  __device__ static int64_t offset(const DecodeCall& c, int column) { return column * c.row; }

  template <class Body>
  __device__ void each(const DecodeCall& c, E* at, const Body& body) const {
    E* x = at + first * c.row + from;
#pragma unroll
    for (int b = 0; b < kB; ++b, x += kGroups * c.row)
#pragma unroll
      for (int m = 0; m < kA / n; ++m) body(kA / n * b + m, x + kLanes * n * m);
  }
  __device__ static void unpack_all(const uint4 (&raw)[kVectors], float (&S)[kA][kB]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[n];
      unpack(raw[i], x);
#pragma unroll
      for (int j = 0; j < n; ++j) S[i % (kA / n) * n + j][i / (kA / n)] = x[j];
    }
  }
  __device__ static uint4 vector(const float (&S)[kA][kB], int i) {
    float x[n];
#pragma unroll
    for (int j = 0; j < n; ++j) x[j] = S[i % (kA / n) * n + j][i / (kA / n)];
    return packed(x);
  }

  __device__ void add_up(float (&x)[kB], float (&y)[kB], float*) const {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2)
#pragma unroll
      for (int b = 0; b < kB; ++b) {
        x[b] += __shfl_xor_sync(0xffffffffu, x[b], lane);
        y[b] += __shfl_xor_sync(0xffffffffu, y[b], lane);
      }
  }
};

// One token: o, and S after it.
template <bool kChannel, class Part, int kA, int kB, class Store>
__device__ void take_token(const Part& part, const DecodeToken& token, float (&S)[kA][kB], float* sums, bool keep,
                           int column, const Store& store) {
  float x[kB] = {}, y[kB] = {};
#pragma unroll
  for (int a = 0; a < kA; a += 4) {
    float k[4], q[4], factor[4], near[4];
    load_four(token.k + part.row(a), k), load_four(token.q + part.row(a), q);
    if constexpr (kChannel) load_four(token.factor + part.row(a), factor), load_four(token.near + part.row(a), near);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int b = 0; b < kB; ++b) {
        float& s = S[a + i][b];
        if constexpr (kChannel) s = decayed(s, Decay<float>{factor[i], near[i]});
        x[b] = fmaf(k[i], s, x[b]), y[b] = fmaf(q[i], s, y[b]);
      }
  }
  part.add_up(x, y, sums);
  const Decay<float> decay{token.rest[kFactor], token.rest[kNear]};
  const float dot = kChannel ? 1.f : decay.factor + decay.near, beta = token.rest[kBeta], qk = token.rest[kQk];
#pragma unroll
  for (int b = 0; b < kB; ++b) {
    x[b] = beta * (token.v[column + part.column(b)] - dot * x[b]);
    if (part.stores()) store(column + part.column(b), fmaf(qk, x[b], dot * y[b]));
  }
  if (!keep) return;
#pragma unroll
  for (int a = 0; a < kA; a += 4) {
    float k[4];
    load_four(token.k + part.row(a), k);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int b = 0; b < kB; ++b) {
        float& s = S[a + i][b];
        s = fmaf(k[i], x[b], kChannel ? s : decayed(s, decay));
      }
  }
}

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

// The warp that loads the first token's keys brings a word of every line of the parameters to where it will put them,
// so that the misses are over when the block may begin.
__device__ inline void touch_parameters(const DecodeCall& c, float* shared) {
  const unsigned i = threadIdx.x - 32 * (c.helpers ? c.warps : 0);
  if (i < sizeof(c) / 64) shared[i] = reinterpret_cast<const float*>(&c)[16 * i];
}

template <class Part, bool kChannel, class Args>
__global__ void __launch_bounds__(32 * kDecodeWarps, 2)
    sm90_decode_kernel(const __grid_constant__ DecodeCall c, const __grid_constant__ Problem p,
                       const __grid_constant__ Args a, const SlotUse* uses, int32_t* report) {
  extern __shared__ __align__(16) float tokens[];
  cuda::sm90::grid_let_next_start();
  touch_parameters(c, tokens);
  const Part part(c);
  using E = typename Part::E;
  const int64_t n = c.first + blockIdx.z;
  const int hv = blockIdx.y, warp = threadIdx.x / 32, column = blockIdx.x * c.steps * c.columns;
  E* heads = static_cast<E*>(c.state) + hv * c.head + Part::offset(c, column);  // of slot 0
  float* sums = tokens + c.T * c.token;
  cuda::sm90::grid_wait();
  int64_t from = n;
  bool wrong = false;
  if (c.slots) {
    from = read_slot(a, n);
    wrong = uses ? slots_are_wrong(p, a, uses, n, report) : find_slot_fault(p, a, n, from, report);
  }
  const auto store = [&](int t, int j, float o) {
    const int64_t at = token_at(c.o, n, t, hv) + column + j;
    if (c.type == THALWEG_F32)
      static_cast<float*>(c.o.data)[at] = o;
    else
      static_cast<uint16_t*>(c.o.data)[at] =
          c.type == THALWEG_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(o)) : __half_as_ushort(__float2half_rn(o));
  };
  if (wrong || from < 0) {
    for (int t = 0; t < c.T; ++t)
      for (int j = threadIdx.x; j < c.steps * c.columns; j += blockDim.x)
        store(t, j, wrong ? cuda::nan_of<float>() : 0.f);
    return;
  }
  uint4 raw[Part::kVectors];
  const auto ask = [&](int s) {
    part.each(c, heads + from * c.slot + Part::offset(c, s * c.columns),
              [&](int i, const E* x) { raw[i] = __ldcs(reinterpret_cast<const uint4*>(x)); });
  };
  load_decode_tokens<kChannel>(c, n, hv, column, tokens, [&] { ask(0); });
  __syncthreads();
  if (warp >= c.warps) return;
  for (int s = 0; s < c.steps; ++s) {
    float S[Part::kA][Part::kB];
    Part::unpack_all(raw, S);
    if (s + 1 < c.steps) ask(s + 1);
    for (int t = 0; t < c.T; ++t) {
      int64_t slot = t + 1 == c.T ? from : -1;
      if (c.slots) slot = write_slot(p, a, n, t, from);
      take_token<kChannel>(part, decode_token<kChannel>(c, tokens, t), S,
                           sums + (s * c.T + t) % 2 * Part::sums_floats(c.warps), slot >= 0 || t + 1 < c.T,
                           s * c.columns, [&](int j, float o) { store(t, j, o); });
      if (slot < 0) continue;
      part.each(c, heads + slot * c.slot + Part::offset(c, s * c.columns),
                [&](int i, E* x) { __stcs(reinterpret_cast<uint4*>(x), Part::vector(S, i)); });
    }
  }
}

inline TokenTensor token_tensor(const thalweg_tensor& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }

template <class Part, class Args>
void launch_sm90_decode(const Problem& p, const DecodeCut& cut, const Args& a, const Exec& exec) {
  constexpr bool kChannel = requires { a.lower_bound; };
  DecodeCall c{};
  c.q = token_tensor(a.q), c.k = token_tensor(a.k), c.v = token_tensor(a.v), c.o = token_tensor(a.o);
  if (is_there(a.g)) c.g = token_tensor(a.g), c.g_channel = kChannel ? a.g.stride[3] : 0;
  if (is_there(a.beta)) c.beta = token_tensor(a.beta);
  c.A_log = a.A_log.data, c.dt_bias = a.dt_bias.data, c.bias_head = is_there(a.dt_bias) ? a.dt_bias.stride[0] : 0;
  c.state = a.state.data, c.slot = a.state.stride[0], c.head = a.state.stride[1];
  c.row = a.state.stride[p.k_contiguous ? 3 : 2];
  c.group_inverse = cuda::ceil_div(int64_t(1) << 32, p.HV / p.H);
  c.K = int32_t(p.K), c.T = int32_t(p.T);
  c.columns = int32_t(cut.columns), c.steps = int32_t(cut.steps);
  c.warps = int32_t(cut.warps), c.helpers = int32_t(cut.helpers);
  c.token = decode_token_floats<kChannel>(c.K, c.columns * c.steps);
  c.type = p.dtype, c.g_type = a.g.dtype, c.beta_type = a.beta.dtype;
  c.rate_type = a.A_log.dtype, c.bias_type = a.dt_bias.dtype;
  c.scale = float(p.scale), c.bound = float(p.lower_bound);
  c.use_qk_l2norm = a.use_qk_l2norm, c.use_gate = a.use_gate, c.slots = p.slots;
  c.use_beta_sigmoid = a.use_beta_sigmoid, c.allow_neg_eigval = a.allow_neg_eigval;
  SlotUse* uses = nullptr;
  if (p.slots && p.N > kMostSequences) {
    uses = reinterpret_cast<SlotUse*>(exec.workspace);
    count_slot_uses(p, a, exec, uses);
  }
  const int64_t bytes = 4 * ((c.T > 1 ? c.T : 1) * c.token + 2 * Part::sums_floats(c.warps));
  const auto kernel = sm90_decode_kernel<Part, kChannel, Args>;
  for (; c.first < p.N; c.first += cuda::kMaxGridYZ) {
    const int64_t count = p.N - c.first < cuda::kMaxGridYZ ? p.N - c.first : cuda::kMaxGridYZ;
    cuda::sm90::launch_behind(exec, "sm90_decode", kernel, cuda::Grid{p.V / (c.columns * c.steps), p.HV, count},
                              32 * (cut.warps + cut.helpers), bytes, c, p, a, static_cast<const SlotUse*>(uses),
                              exec.report);
  }
}

template <class E, class Args>
void sm90_decode_layout(const Problem& p, const DecodeCut& cut, const Args& a, const Exec& exec) {
  if (!p.k_contiguous && cut.columns == 64)
    launch_sm90_decode<ByV<E, 64 / kWidth<E>>>(p, cut, a, exec);
  else if (!p.k_contiguous)
    launch_sm90_decode<ByV<E, 32 / kWidth<E>>>(p, cut, a, exec);
  else if (p.K == 64)
    launch_sm90_decode<ByK<E, 4>>(p, cut, a, exec);
  else if (p.K == 128)
    launch_sm90_decode<ByK<E, 8>>(p, cut, a, exec);
  else
    launch_sm90_decode<ByK<E, 16>>(p, cut, a, exec);
}

template <class Args>
void sm90_decode_of(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  const DecodeCut cut{plan.values[0], plan.values[1], plan.values[2], plan.values[3]};
  if (p.state == THALWEG_F32)
    sm90_decode_layout<float>(p, cut, a, exec);
  else
    sm90_decode_layout<__nv_bfloat16>(p, cut, a, exec);
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
