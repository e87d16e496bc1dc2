// The fast CUDA row of decode for the delta-rule operators. Its contract opens each operator's sm90_decode.cu.
#ifndef THALWEG_DELTA_RULE_SM90_DECODE_CUH
#define THALWEG_DELTA_RULE_SM90_DECODE_CUH

#include <cuda_pipeline.h>

#include "thalweg/delta_rule/cuda_slots.cuh"
#include "thalweg/delta_rule/cuda_tokens.cuh"

namespace thalweg::delta_rule {
namespace {

constexpr int kVectors = 8;  // of 16 bytes of a state, in a thread
constexpr int kGroup = 8;    // neighbouring threads whose vectors make 128 bytes
constexpr int kMostK = 256;
constexpr int64_t kMostSequences = 1024;  // whose slots every block compares itself

// ---- A token in shared memory ----

struct DecodeShape {
  int K, gates, columns;  // gates: 1 or K; columns of a block
  int group;              // value heads of a key head
  int row, tokens;        // floats of a token, T
};
struct DecodeToken {
  const float *q, *k, *v;     // [K] times scale, [K], [columns]
  const Decay<float>* decay;  // [gates]
  const float *beta, *qk;     // qk = q . k
};
__device__ inline DecodeToken decode_token(const float* tokens, const DecodeShape& s, int t) {
  const float* row = tokens + t * s.row;
  const float* end = row + s.row - 4;
  return {row, row + s.K, row + 2 * s.K, reinterpret_cast<const Decay<float>*>(row + 2 * s.K + s.columns),
          end, end + 1};
}

// One warp: q and k of token t. All of it is asked for before any of it is used.
template <class Args>
__device__ void load_decode_keys(const Problem& p, const Args& a, int64_t n, int64_t t, int64_t h, float* q, float* k,
                                 float* qk) {
  constexpr int kMost = kMostK / 32;
  const int lane = threadIdx.x % 32, K = int(p.K);
  const int64_t from_q = token_at(a.q, n, t, h) + lane, from_k = token_at(a.k, n, t, h) + lane;
  float x[kMost], y[kMost], xx = 0, yy = 0, xy = 0;
  with_elements(a.q, [&](const auto* elements) {
    const auto* of_k = static_cast<decltype(elements)>(a.k.data) + from_k;
#pragma unroll
    for (int m = 0; m < kMost; ++m) {
      const bool inside = lane + 32 * m < K;
      x[m] = inside ? float(number(elements[from_q + 32 * m])) : 0.f;
      y[m] = inside ? float(number(of_k[32 * m])) : 0.f;
    }
  });
#pragma unroll
  for (int m = 0; m < kMost; ++m) xx += x[m] * x[m], yy += y[m] * y[m], xy += x[m] * y[m];
  float of_q = float(p.scale), of_k = 1;
  if (a.use_qk_l2norm) of_q *= 1 / sqrtf(warp_sum(xx) + 1e-6f), of_k = 1 / sqrtf(warp_sum(yy) + 1e-6f);
  xy = warp_sum(xy) * of_q * of_k;
#pragma unroll
  for (int m = 0; m < kMost; ++m)
    if (lane + 32 * m < K) q[lane + 32 * m] = x[m] * of_q, k[lane + 32 * m] = y[m] * of_k;
  if (lane == 0) *qk = xy;
}

// One warp: decays, beta and the block's v of token t.
template <class Args>
__device__ void load_decode_gates(const Problem& p, const Args& a, const DecodeShape& s, int64_t n, int64_t t,
                                  int64_t hv, int64_t column, float* v, Decay<float>* decay, float* beta) {
  const int lane = threadIdx.x % 32;
  const int64_t from_v = token_at(a.v, n, t, hv) + column;
  for (int c = lane; c < s.columns; c += 32) v[c] = column + c < p.V ? load_at<float>(a.v, from_v + c) : 0.f;
  for (int c = lane; c < s.gates; c += 32) decay[c] = decay_of(load_gate<float>(p, a, n, t, hv, c).g);
  if (lane == 0) *beta = load_beta<float>(a, n, t, hv).value;
}

template <class Args>
__device__ void load_decode_tokens(const Problem& p, const Args& a, const DecodeShape& s, int64_t n, int64_t hv,
                                   int64_t column, float* tokens) {
  const int64_t h = uint32_t(hv) / uint32_t(s.group);
  for (int job = threadIdx.x / 32; job < 2 * s.tokens; job += blockDim.x / 32) {
    float *row = tokens + job / 2 * s.row, *v = row + 2 * s.K, *end = row + s.row - 4;
    if (job % 2 == 0)
      load_decode_keys(p, a, n, job / 2, h, row, row + s.K, end + 1);
    else
      load_decode_gates(p, a, s, n, job / 2, hv, column, v, reinterpret_cast<Decay<float>*>(v + s.columns), end);
  }
}

// ---- 16 bytes of a state ----

template <class E>
constexpr int kVec = 16 / int(sizeof(E));

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

// ---- V contiguous ----

// A block of K threads has K rows of 128 bytes: thread (g, l) = (threadIdx / 8, threadIdx % 8) vectors l of rows
// g + r K/8. Dots add up 8 rows in a thread, the four g of a warp by halving, the warps in shared memory.
template <class E_>
struct HeldByV {
  using E = E_;
  static constexpr int kWidth = kVec<E>;
  static constexpr int kColumns = kGroup * kWidth;
  static int threads(int64_t K) { return int(K); }
  static int64_t sum_floats(int64_t K) { return 2 * (K / 32) * 2 * kColumns; }

  float s[kVectors][kWidth];
  int64_t step;  // elements from one of the thread's rows to the next
  int64_t at;    // its first vector's offset in the slice
  int g, l, groups;

  __device__ HeldByV(const Problem& p, const thalweg_tensor& state) {
    g = threadIdx.x / kGroup, l = threadIdx.x % kGroup, groups = int(p.K) / kGroup;
    step = groups * state.stride[2], at = g * state.stride[2] + l * kWidth;
  }
  __device__ int64_t slice_offset(const thalweg_tensor&, int64_t column) const { return column; }
  // Asks for the state, which arrives in `raw` [kVectors, threads]; no register waits for it.
  __device__ void ask(const E* slice, int64_t, uint4* raw) const {
    const E* x = slice + at;
#pragma unroll
    for (int r = 0; r < kVectors; ++r, x += step) __pipeline_memcpy_async(raw + r * blockDim.x + threadIdx.x, x, 16);
  }
  __device__ void receive(const uint4* raw, int64_t) {
#pragma unroll
    for (int r = 0; r < kVectors; ++r) unpack(raw[r * blockDim.x + threadIdx.x], s[r]);
  }
  __device__ void store(E* slice, int64_t) const {
    E* x = slice + at;
#pragma unroll
    for (int r = 0; r < kVectors; ++r, x += step) __stcs(reinterpret_cast<uint4*>(x), packed(s[r]));
  }

  // The state takes in a token; o(column, value) gets the outputs. sums: as sum_floats says, one half each token.
  template <class Store>
  __device__ void take(const DecodeToken& token, const DecodeShape& shape, float* sums, const Store& o) {
    float dots[2 * kWidth] = {};  // k . S~, then q . S~
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      const int i = g + r * groups;
      const Decay<float> d = token.decay[shape.gates == 1 ? 0 : i];
      const float k = token.k[i], q = token.q[i];
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        s[r][c] = decayed(s[r][c], d);
        dots[c] = fmaf(k, s[r][c], dots[c]);
        dots[kWidth + c] = fmaf(q, s[r][c], dots[kWidth + c]);
      }
    }
    add_rows(dots, sums);
    __syncthreads();
    const int warps = blockDim.x / 32;
    float x[kWidth] = {}, y[kWidth] = {};
    for (int w = 0; w < warps; ++w)
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        x[c] += sums[w * 2 * kColumns + l * kWidth + c];
        y[c] += sums[w * 2 * kColumns + kColumns + l * kWidth + c];
      }
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      x[c] = *token.beta * (token.v[l * kWidth + c] - x[c]);
      y[c] = fmaf(*token.qk, x[c], y[c]);
      if (g == 0) o(l * kWidth + c, y[c]);
    }
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      const float k = token.k[g + r * groups];
#pragma unroll
      for (int c = 0; c < kWidth; ++c) s[r][c] = fmaf(k, x[c], s[r][c]);
    }
  }

 private:
  // This warp's sums [2, kColumns]: lanes 16 apart share out the two dots, lanes 8 apart the columns.
  __device__ void add_rows(float (&dots)[2 * kWidth], float* sums) {
    constexpr int kHalf = kWidth / 2;
    const int lane = threadIdx.x % 32;
    const bool is_y = lane & 16, is_right = lane & 8;
    float half[kWidth], quarter[kHalf];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const float sent = is_y ? dots[c] : dots[kWidth + c], kept = is_y ? dots[kWidth + c] : dots[c];
      half[c] = kept + __shfl_xor_sync(0xffffffffu, sent, 16);
    }
#pragma unroll
    for (int c = 0; c < kHalf; ++c) {
      const float sent = is_right ? half[c] : half[kHalf + c], kept = is_right ? half[kHalf + c] : half[c];
      quarter[c] = kept + __shfl_xor_sync(0xffffffffu, sent, 8);
    }
    float* to = sums + (threadIdx.x / 32 * 2 + is_y) * kColumns + l * kWidth + is_right * kHalf;
#pragma unroll
    for (int c = 0; c < kHalf; ++c) to[c] = quarter[c];
  }
};

// ---- K contiguous ----

// 128 threads, eight to a column of the state: thread (g, l) has vectors l + 8 m, m < kChunks, of kRows columns. Dots
// add up over the eight by a butterfly.
template <class E_, int kChunks>
struct HeldByK {
  using E = E_;
  static constexpr int kWidth = kVec<E>;
  static constexpr int kRows = kVectors / kChunks;
  static constexpr int kThreads = 128;
  static constexpr int kColumns = kThreads / kGroup * kRows;
  static int threads(int64_t) { return kThreads; }
  static int64_t sum_floats(int64_t) { return 0; }

  float s[kRows][kChunks][kWidth];
  int64_t step, at;
  int g, l;

  __device__ HeldByK(const Problem&, const thalweg_tensor& state) {
    g = threadIdx.x / kGroup, l = threadIdx.x % kGroup;
    step = kThreads / kGroup * state.stride[3], at = g * state.stride[3] + l * kWidth;
  }
  __device__ int64_t slice_offset(const thalweg_tensor& state, int64_t column) const {
    return column * state.stride[3];
  }
  __device__ int column_of(int r) const { return g + r * (kThreads / kGroup); }
  // `left`: columns from the slice's first to V.
  __device__ void ask(const E* slice, int64_t left, uint4* raw) const {
    const E* x = slice + at;
#pragma unroll
    for (int r = 0; r < kRows; ++r, x += step)
#pragma unroll
      for (int m = 0; m < kChunks; ++m)
        if (column_of(r) < left)
          __pipeline_memcpy_async(raw + (r * kChunks + m) * kThreads + threadIdx.x, x + m * kGroup * kWidth, 16);
  }
  __device__ void receive(const uint4* raw, int64_t left) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int m = 0; m < kChunks; ++m) {
        const uint4 nothing{0, 0, 0, 0};
        unpack(column_of(r) < left ? raw[(r * kChunks + m) * kThreads + threadIdx.x] : nothing, s[r][m]);
      }
  }
  __device__ void store(E* slice, int64_t left) const {
    E* x = slice + at;
#pragma unroll
    for (int r = 0; r < kRows; ++r, x += step)
#pragma unroll
      for (int m = 0; m < kChunks; ++m)
        if (column_of(r) < left) __stcs(reinterpret_cast<uint4*>(x + m * kGroup * kWidth), packed(s[r][m]));
  }

  template <class Store>
  __device__ void take(const DecodeToken& token, const DecodeShape& shape, float*, const Store& o) {
    float x[kRows] = {}, y[kRows] = {};
#pragma unroll
    for (int m = 0; m < kChunks; ++m)
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const int i = (l + m * kGroup) * kWidth + c;
        const Decay<float> d = token.decay[shape.gates == 1 ? 0 : i];
        const float k = token.k[i], q = token.q[i];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          s[r][m][c] = decayed(s[r][m][c], d);
          x[r] = fmaf(k, s[r][m][c], x[r]);
          y[r] = fmaf(q, s[r][m][c], y[r]);
        }
      }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int lane = kGroup / 2; lane > 0; lane /= 2) {
        x[r] += __shfl_xor_sync(0xffffffffu, x[r], lane);
        y[r] += __shfl_xor_sync(0xffffffffu, y[r], lane);
      }
      x[r] = *token.beta * (token.v[column_of(r)] - x[r]);
      y[r] = fmaf(*token.qk, x[r], y[r]);
      if (l == 0) o(column_of(r), y[r]);
    }
#pragma unroll
    for (int m = 0; m < kChunks; ++m)
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const float k = token.k[(l + m * kGroup) * kWidth + c];
#pragma unroll
        for (int r = 0; r < kRows; ++r) s[r][m][c] = fmaf(k, x[r], s[r][m][c]);
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
    if (mine < 0 || from < 0) continue;
    for (int u = 0; u < t; ++u)
      if (write_slot(p, a, n, u, from) == mine) found(Fault::kSlotTwice, mine, t);
    for (int64_t m = threadIdx.x; m < p.N; m += blockDim.x) {
      const int64_t its = read_slot(a, m);
      if (m == n || its < 0) continue;
      if (its == mine) found(Fault::kSlotTwice, mine, t);
      for (int u = 0; u < T; ++u)
        if (write_slot(p, a, m, u, its) == mine) found(Fault::kSlotTwice, mine, t);
    }
  }
  for (int64_t m = threadIdx.x; from >= 0 && m < p.N; m += blockDim.x) {
    const int64_t its = read_slot(a, m);
    if (m == n || its < 0) continue;
    for (int u = 0; u < T; ++u)
      if (write_slot(p, a, m, u, its) == from) found(Fault::kSlotTwice, from, -1);
  }
  if (fault != Fault::kNone) {
    const bool written = draft >= 0 && cuda::is_there(a.write_slots);
    cuda::report_fault(report, fault, written ? offsetof(Args, write_slots) : offsetof(Args, read_slots),
                       written ? n * T + draft : n, value);
  }
  return __syncthreads_or(fault != Fault::kNone);
}

template <class Held, class Args>
__global__ void __launch_bounds__(256, sizeof(typename Held::E) == 4 ? 3 : 2)
    sm90_decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ Args a, DecodeShape shape,
                       int64_t first, const SlotUse* uses, int32_t* report) {
  using E = typename Held::E;
  extern __shared__ __align__(16) uint4 smem[];
  uint4* raw = smem;
  float* tokens = reinterpret_cast<float*>(smem + kVectors * blockDim.x);
  float* sums = tokens + shape.tokens * shape.row;
  const int64_t n = first + blockIdx.z, hv = blockIdx.y, column = int64_t(blockIdx.x) * Held::kColumns;
  const int64_t from = read_slot(a, n), left = p.V - column;
  bool wrong = false;
  if (uses)
    wrong = slots_are_wrong(p, a, uses, n, report);
  else if (p.slots)
    wrong = find_slot_fault(p, a, n, from, report);
  if (wrong || from < 0) {
    const float x = wrong ? cuda::nan_of<float>() : 0.f;
    for (int i = threadIdx.x; i < shape.tokens * shape.columns; i += blockDim.x) {
      const int c = i % shape.columns;
      if (c < left) store_at(a.o, token_at(a.o, n, i / shape.columns, hv) + column + c, x);
    }
    return;
  }
  Held held(p, a.state);
  E* slice = static_cast<E*>(a.state.data) + hv * a.state.stride[1] + held.slice_offset(a.state, column);
  held.ask(slice + from * a.state.stride[0], left, raw);
  __pipeline_commit();
  load_decode_tokens(p, a, shape, n, hv, column, tokens);
  __pipeline_wait_prior(0);
  __syncthreads();
  held.receive(raw, left);
  const int half = 2 * Held::kColumns * (blockDim.x / 32);
  for (int t = 0; t < shape.tokens; ++t) {
    const int64_t to_o = token_at(a.o, n, t, hv) + column;
    held.take(decode_token(tokens, shape, t), shape, sums + t % 2 * half, [&](int c, float o) {
      if (c < left) store_at(a.o, to_o + c, o);
    });
    const int64_t to = write_slot(p, a, n, t, from);
    if (to >= 0) held.store(slice + to * a.state.stride[0], left);
  }
}

template <class Held, class Args>
void launch_sm90_decode(const Problem& p, const Args& a, const Exec& exec) {
  DecodeShape shape{int(p.K), p.channels == 1 ? 1 : int(p.K), Held::kColumns, int(p.HV / p.H), 0, int(p.T)};
  shape.row = 2 * shape.K + shape.columns + int(up_to(2 * shape.gates, 4)) + 4;
  SlotUse* uses = nullptr;
  if (p.slots && p.N > kMostSequences) {
    uses = reinterpret_cast<SlotUse*>(exec.workspace);
    count_slot_uses(p, a, exec, uses);
  }
  const int64_t threads = Held::threads(p.K), floats = shape.tokens * shape.row + Held::sum_floats(p.K);
  for (int64_t first = 0; first < p.N; first += cuda::kMaxGridYZ) {
    const int64_t count = p.N - first < cuda::kMaxGridYZ ? p.N - first : cuda::kMaxGridYZ;
    cuda::launch(exec, "sm90_decode", sm90_decode_kernel<Held, Args>, {parts_of(p.V, Held::kColumns), p.HV, count},
                 threads, kVectors * threads * 16 + floats * 4, p, a, shape, first, static_cast<const SlotUse*>(uses),
                 exec.report);
  }
}

template <class E, class Args>
void sm90_decode_by_k(const Problem& p, const Args& a, const Exec& exec) {
  constexpr int kOf64 = 64 / (kGroup * kVec<E>);  // chunks of K = 64
  if (p.K == 64) return launch_sm90_decode<HeldByK<E, kOf64>>(p, a, exec);
  if (p.K == 128) return launch_sm90_decode<HeldByK<E, 2 * kOf64>>(p, a, exec);
  return launch_sm90_decode<HeldByK<E, 4 * kOf64>>(p, a, exec);
}

template <class Args>
void sm90_decode_of(const Problem& p, const Args& a, const Exec& exec) {
  const bool wide = p.state == THALWEG_F32;
  if (p.k_contiguous && wide) return sm90_decode_by_k<float>(p, a, exec);
  if (p.k_contiguous) return sm90_decode_by_k<__nv_bfloat16>(p, a, exec);
  if (wide) return launch_sm90_decode<HeldByV<float>>(p, a, exec);
  return launch_sm90_decode<HeldByV<__nv_bfloat16>>(p, a, exec);
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
