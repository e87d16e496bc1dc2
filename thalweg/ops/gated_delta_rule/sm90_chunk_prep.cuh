// sm90_chunk_prep - gated delta rule, forward, what a chunk needs before its state: a kernel of its own
// (sm90_chunk_prep.cu), or blocks of sm90_chunk_fwd that run ahead of the others.
//
// Math      per chunk of 64 tokens and value head, G the running sum of g, rk = 1 or 1 / |k|:
//             L = tril(beta_i rk_i rk_j (k_i . k_j) exp(G_i - G_j), -1)      A = (I + L)^-1 diag(beta)
//           and the gate rows of sm90_chunk.cuh
// Shapes    k [B,T,H,K]  g,beta [B,T,HV]  out: factors [slots,HV] of A [64,64] in E (swizzled) and 6 rows of float
// Takes     K in {64, 128}, bf16 or f16, any strides of tokens and heads
// Grid      128 threads a chunk and key head; its value heads in turn, gates of four at once
// Tile      warp w owns rows [16 w, 16 w + 16) of L and A; k k^T once a block
// Order     X = (I + L)^-1 by blocks of 16: X_ww by float32 substitution, a lane a column; then along the row
//             X_wj = -(sum over j < m <= w of X_wm L_mj) X_jj,   j = w-1 ... 0
//           which needs nothing of other warps but L and X_jj
// Numerics  k k^T in float32; merges by tensor cores from operands split into two bf16 (three products), which is
//           within 2^-16: a single tf32 or f16 product is not enough for cos(k,k') = 0.99 and beta = 2.
//           Exponents are differences of G with i > j; masked by selection. A gate below -160 log 2 counts as -160:
//           its power is 0 in float32 either way, and G stays finite.
// Traps     a row past the sequence has k = 0, beta = 0, g = 0. Slots that belong to no chunk are left alone.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_PREP_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_PREP_CUH

#include "thalweg/ops/gated_delta_rule/sm90_chunk.cuh"

namespace thalweg::gated_delta_rule::sm90 {
namespace {

using namespace cuda::sm90;

constexpr int kPrepThreads = 128, kBatch = 4;  // value heads whose gates are made at once, a warp each
constexpr float kLog2e = 1.4426950408889634f;

struct Block16 {  // [16 16] bf16 twice: the rounded value and what it lacks
  uint16_t high[256], low[256];
};

template <int KD>
struct alignas(1024) PrepSmem {
  union {
    char k[KD / 64 * kBlockBytes];
    float4 kk[4][2][kPrepThreads];  // then k k^T, as each thread has it: block and half of the columns
  };
  char A[kBlockBytes];
  Block16 L[6];               // (1,0) (2,0) (2,1) (3,0) (3,1) (3,2)
  Block16 X[4];               // diagonal blocks of the inverse
  float diagonal[4][16][20];  // column by column
  float G[kBatch][kChunk], beta[kBatch][kChunk];
  float rk[kChunk], rq[kChunk];
};

// Element (row, column) of a Block16 half: the 16-byte pieces of rows 4-7 and 12-15 are exchanged.
__device__ inline int at16(int row, int column) { return row * 16 + ((column / 8) ^ (row / 4 & 1)) * 8 + column % 8; }

__device__ inline void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack<__nv_bfloat16>(x, y);
  const float2 h = unpack<__nv_bfloat16>(high);
  low = pack<__nv_bfloat16>(x - h.x, y - h.y);
}

// A block as mma operand a, from accumulators [2][4] of two 8-column halves.
__device__ inline void split_block(const float (&c)[2][4], uint32_t (&high)[4], uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) split(c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1], high[i], low[i]);
}

// Sums of products of blocks, in two parts, the products of rounded values and the rest, that do not wait for each
// other.
struct Sum {
  float c[2][2][4] = {};

  // += x b from split operands.
  __device__ void add(const uint32_t (&high)[4], const uint32_t (&low)[4], const Block16& b, int place) {
    uint32_t bh[4], bl[4];
    ldmatrix_x4_trans(bh, smem_address(&b.high[place]));
    ldmatrix_x4_trans(bl, smem_address(&b.low[place]));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mma_16x8x16<__nv_bfloat16>(c[0][h], high, bh[2 * h], bh[2 * h + 1]);
      mma_16x8x16<__nv_bfloat16>(c[1][h], high, bl[2 * h], bl[2 * h + 1]);
      mma_16x8x16<__nv_bfloat16>(c[1][h], low, bh[2 * h], bh[2 * h + 1]);
    }
  }
  __device__ void total(float (&sum)[2][4], float sign) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = sign * (c[0][i / 4][i % 4] + c[1][i / 4][i % 4]);
  }
};

// Rows [16 w, 16 w + 16) of k k^T. Blocks right of w are not needed, but branches would cost more.
template <class E, int KD>
__device__ inline void key_products(const PrepSmem<KD>& s, int w, int lane, float (&kk)[4][2][4]) {
#pragma unroll
  for (int nb = 0; nb < 4; ++nb)
#pragma unroll
    for (int i = 0; i < 8; ++i) kk[nb][i / 4][i % 4] = 0;
  const int row = lane % 16;
#pragma unroll 4
  for (int step = 0; step < KD / 16; ++step) {
    const uint32_t place = smem_address(s.k) + step / 4 * kBlockBytes + swizzled(row, step % 4 * 2 + lane / 16);
    uint32_t a[4], b[4][4];
    ldmatrix_x4(a, place + w * 16 * kRowBytes);
#pragma unroll
    for (int nb = 0; nb < 4; ++nb) ldmatrix_x4(b[nb], place + nb * 16 * kRowBytes);
#pragma unroll
    for (int nb = 0; nb < 4; ++nb) {
      mma_16x8x16<E>(kk[nb][0], a, b[nb][0], b[nb][2]);
      mma_16x8x16<E>(kk[nb][1], a, b[nb][1], b[nb][3]);
    }
  }
}

__device__ inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

struct Place {
  int64_t b, t;  // the chunk's first token
  int valid;     // its rows, 0: no chunk
};

// Element (b, t, head, 0).
template <class E>
__device__ inline const E* token_at(const thalweg_tensor& x, const Place& p, int64_t head) {
  return static_cast<const E*>(x.data) + p.b * x.stride[0] + p.t * x.stride[1] + head * x.stride[2];
}

// Gate and write strength of tokens 2 lane and 2 lane + 1 of a value head as they are stored.
struct RawGates {
  float g[2], beta[2], A_log, dt_bias;

  __device__ void load(const ChunkArgs& a, const Place& p, int64_t hv, int lane) {
    A_log = dt_bias = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      const bool there = i < p.valid;
      g[e] = 0, beta[e] = there ? 1 : 0;
      if (there && cuda::is_there(a.g))
        g[e] = cuda::load_at<float>(a.g, p.b * a.g.stride[0] + (p.t + i) * a.g.stride[1] + hv * a.g.stride[2]);
      if (there && cuda::is_there(a.beta))
        beta[e] =
            cuda::load_at<float>(a.beta, p.b * a.beta.stride[0] + (p.t + i) * a.beta.stride[1] + hv * a.beta.stride[2]);
    }
    if (a.gate) A_log = cuda::load_at<float>(a.A_log, hv * a.A_log.stride[0]);
    if (cuda::is_there(a.dt_bias)) dt_bias = cuda::load_at<float>(a.dt_bias, hv * a.dt_bias.stride[0]);
  }
};

// Gates of one value head by one warp: to shared memory and to the factors.
template <int KD>
__device__ inline void make_gates(const ChunkArgs& a, PrepSmem<KD>& s, const RawGates& raw, int place, int valid,
                                  char* factors, int lane) {
  float g[2], beta[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool there = 2 * lane + e < valid;
    g[e] = raw.g[e], beta[e] = raw.beta[e];
    if (there && a.gate) g[e] = -expf(raw.A_log) * softplus(g[e] + raw.dt_bias);
    g[e] *= kLog2e;
    if (g[e] < -160.f) g[e] = -160.f;
    if (there && a.sigmoid) beta[e] = (a.neg_eigval ? 2.f : 1.f) / (1 + expf(-beta[e]));
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  float before = __shfl_up_sync(0xffffffffu, sum, 1);
  if (lane == 0) before = 0;
  const float last = __shfl_sync(0xffffffffu, sum, 31);
  float* rows = reinterpret_cast<float*>(factors + kBlockBytes) + 2 * lane;
  float out[kGateRows][2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    const float G = e == 0 ? before + g[0] : sum;
    s.G[place][i] = G, s.beta[place][i] = beta[e];
    out[kG][e] = G;
    out[kReadK][e] = exp2_fast(G) * s.rk[i];
    out[kWriteK][e] = exp2_fast(last - G) * s.rk[i];
    out[kReadQ][e] = exp2_fast(G) * s.rq[i] * a.scale;
    out[kNormQ][e] = s.rq[i] * a.scale;
    out[kNormK][e] = s.rk[i];
  }
#pragma unroll
  for (int r = 0; r < kGateRows; ++r) *reinterpret_cast<float2*>(rows + r * kChunk) = make_float2(out[r][0], out[r][1]);
}

// 1 / |k| from the diagonal of k k^T, 1 / |q| from memory; 1 without l2norm.
template <class E, int KD>
__device__ inline void make_norms(const ChunkArgs& a, PrepSmem<KD>& s, const float (&kk)[4][2][4], const Place& p,
                                  int64_t h, int thread) {
  const int w = thread / 32, lane = thread % 32;
  if (!a.l2norm) {
    if (thread < kChunk) s.rk[thread] = 1, s.rq[thread] = 1;
    return;
  }
#pragma unroll
  for (int nb = 0; nb < 4; ++nb)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (nb == w && lane / 4 == 2 * (lane % 4) + e) {
        s.rk[16 * w + lane / 4] = rsqrtf(kk[nb][0][e] + 1e-6f);
        s.rk[16 * w + 8 + lane / 4] = rsqrtf(kk[nb][1][2 + e] + 1e-6f);
      }
  const int i = thread / 2;
  float sum = 0;
  if (i < p.valid) {
    const uint16_t* q = reinterpret_cast<const uint16_t*>(token_at<E>(a.q, p, h)) + i * a.q.stride[1];
    for (int j = 0; j < KD / 2; j += 8) {
      const int at = thread % 2 * (KD / 2) + j;
      uint32_t x[4];
      if (a.aligned) {
        const uint4 u = *reinterpret_cast<const uint4*>(q + at);
        x[0] = u.x, x[1] = u.y, x[2] = u.z, x[3] = u.w;
      } else {
        for (int m = 0; m < 4; ++m) x[m] = uint32_t(q[at + 2 * m]) | uint32_t(q[at + 2 * m + 1]) << 16;
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 y = unpack<E>(x[m]);
        sum += y.x * y.x + y.y * y.y;
      }
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (thread % 2 == 0) s.rq[i] = rsqrtf(sum + 1e-6f);
}

// This warp's blocks of L: the diagonal one as float, column by column, the others split.
template <int KD>
__device__ inline void make_L(PrepSmem<KD>& s, int place, int w, int lane) {
  const float* G = s.G[place];
  const int row = lane / 4, column = 2 * (lane % 4);
  float factor[2], Gi[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = 16 * w + 8 * r + row;
    factor[r] = s.beta[place][i] * s.rk[i], Gi[r] = G[i];
  }
#pragma unroll
  for (int nb = 0; nb < 4; ++nb) {
    if (nb > w) break;
    float x[2][2][2];  // half h of the columns, half r of the rows, column e
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = 16 * nb + 8 * h + column;
      const float2 Gj = *reinterpret_cast<const float2*>(G + j), rk = *reinterpret_cast<const float2*>(s.rk + j);
      const float4 kk = s.kk[nb][h][32 * w + lane];
      x[h][0][0] = kk.x * factor[0] * rk.x * exp2_fast(Gi[0] - Gj.x);
      x[h][0][1] = kk.y * factor[0] * rk.y * exp2_fast(Gi[0] - Gj.y);
      x[h][1][0] = kk.z * factor[1] * rk.x * exp2_fast(Gi[1] - Gj.x);
      x[h][1][1] = kk.w * factor[1] * rk.y * exp2_fast(Gi[1] - Gj.y);
    }
    Block16& block = s.L[nb < w ? w * (w - 1) / 2 + nb : 0];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 8 * r + row, j = 8 * h + column;
        if (nb == w) {
          s.diagonal[w][j][i] = j < i ? x[h][r][0] : 0;
          s.diagonal[w][j + 1][i] = j + 1 < i ? x[h][r][1] : 0;
        } else {
          uint32_t high, low;
          split(x[h][r][0], x[h][r][1], high, low);
          *reinterpret_cast<uint32_t*>(&block.high[at16(i, j)]) = high;
          *reinterpret_cast<uint32_t*>(&block.low[at16(i, j)]) = low;
        }
      }
  }
}

// Column lane % 16 of the inverse of I + diagonal block.
__device__ inline void substitute(const float (&diagonal)[16][20], int lane, float (&x)[16]) {
#pragma unroll
  for (int r = 0; r < 16; ++r) x[r] = r == lane % 16 ? 1 : 0;
#pragma unroll
  for (int j = 0; j < 15; ++j) {
    float column[16];
#pragma unroll
    for (int r = (j + 1) / 4; r < 4; ++r) {
      const float4 four = *reinterpret_cast<const float4*>(&diagonal[j][4 * r]);
      column[4 * r] = four.x, column[4 * r + 1] = four.y, column[4 * r + 2] = four.z, column[4 * r + 3] = four.w;
    }
#pragma unroll
    for (int r = j + 1; r < 16; ++r) x[r] -= column[r] * x[j];
  }
}

// Block (w, j) of the inverse into A, its columns times beta.
template <class E, int KD>
__device__ inline void store_A(PrepSmem<KD>& s, const float (&x)[2][4], const float* beta, int w, int j, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 b = *reinterpret_cast<const float2*>(beta + 16 * j + 8 * h + 2 * (lane % 4));
#pragma unroll
    for (int r = 0; r < 2; ++r)
      st_shared_32(smem_address(s.A) + swizzled(16 * w + 8 * r + lane / 4, 2 * j + h) + lane % 4 * 4,
                   pack<E>(x[h][2 * r] * b.x, x[h][2 * r + 1] * b.y));
  }
}

// Row w of the inverse, and A of it.
template <class E, int KD, int w>
__device__ inline void make_row(PrepSmem<KD>& s, const float* beta, int lane) {
  uint32_t high[w + 1][4], low[w + 1][4];
  const int place = at16(lane % 16, lane / 16 * 8);
  ldmatrix_x4(high[w], smem_address(&s.X[w].high[place]));
  ldmatrix_x4(low[w], smem_address(&s.X[w].low[place]));
  float x[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 h = unpack<__nv_bfloat16>(high[w][i]), l = unpack<__nv_bfloat16>(low[w][i]);
    x[i / 2][i % 2 * 2] = h.x + l.x, x[i / 2][i % 2 * 2 + 1] = h.y + l.y;
  }
  store_A<E>(s, x, beta, w, w, lane);
#pragma unroll
  for (int j = w - 1; j >= 0; --j) {
    uint32_t sum_high[4], sum_low[4];
    Sum sum, product;
#pragma unroll
    for (int m = w; m > j; --m) sum.add(high[m], low[m], s.L[m * (m - 1) / 2 + j], place);
    sum.total(x, 1);
    split_block(x, sum_high, sum_low);
    product.add(sum_high, sum_low, s.X[j], place);
    product.total(x, -1);
    split_block(x, high[j], low[j]);
    store_A<E>(s, x, beta, w, j, lane);
  }
}

// A of one value head in s.A.
template <class E, int KD>
__device__ inline void make_A(PrepSmem<KD>& s, int place, int thread, int barrier) {
  const int w = thread / 32, lane = thread % 32, c = lane % 16;
  make_L(s, place, w, lane);
  __syncwarp();
  float x[16];
  substitute(s.diagonal[w], lane, x);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const __nv_bfloat16 high = __float2bfloat16_rn(x[r]);
    if (lane < 16)
      s.X[w].high[at16(r, c)] = __bfloat16_as_ushort(high);
    else
      s.X[w].low[at16(r, c)] = __bfloat16_as_ushort(__float2bfloat16_rn(x[r] - __bfloat162float(high)));
  }
  named_barrier(barrier, kPrepThreads);
  if (w == 0) make_row<E, KD, 0>(s, s.beta[place], lane);
  if (w == 1) make_row<E, KD, 1>(s, s.beta[place], lane);
  if (w == 2) make_row<E, KD, 2>(s, s.beta[place], lane);
  if (w == 3) make_row<E, KD, 3>(s, s.beta[place], lane);
}

// Factors of one chunk and the value heads of key head h, the first of them at `to`, by 128 threads that share
// `barrier`. The upper triangle of s.A is zero already.
template <class E, int KD>
__device__ inline void make_factors(const ChunkArgs& a, PrepSmem<KD>& s, const Place& p, int h, char* to, int thread,
                                    int barrier) {
  const int w = thread / 32, lane = thread % 32, group = int(unsigned(a.HV) / unsigned(a.H));
  load_tile<E, KD, kPrepThreads>(smem_address(s.k), token_at<E>(a.k, p, h), a.k.stride[1], p.valid, a.aligned, thread);
  const char* const from = s.A + 16 * thread;
#pragma unroll 1
  for (int first = 0; first < group; first += kBatch) {
    RawGates raw;
    if (first + w < group) raw.load(a, p, h * group + first + w, lane);
    if (first == 0) {
      cp_async_wait_all();
      named_barrier(barrier, kPrepThreads);
      float kk[4][2][4];
      key_products<E, KD>(s, w, lane, kk);
      make_norms<E, KD>(a, s, kk, p, h, thread);
      named_barrier(barrier, kPrepThreads);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        s.kk[i / 2][i % 2][thread] =
            make_float4(kk[i / 2][i % 2][0], kk[i / 2][i % 2][1], kk[i / 2][i % 2][2], kk[i / 2][i % 2][3]);
    }
    named_barrier(barrier, kPrepThreads);
    if (first + w < group) make_gates(a, s, raw, w, p.valid, to + w * kFactorBytes, lane);
    named_barrier(barrier, kPrepThreads);
#pragma unroll 1
    for (int place = 0; place < kBatch && first + place < group; ++place) {
      make_A<E, KD>(s, place, thread, barrier);
      named_barrier(barrier, kPrepThreads);
#pragma unroll
      for (int i = 0; i < int(kBlockBytes) / 16 / kPrepThreads; ++i)
        reinterpret_cast<uint4*>(to)[i * kPrepThreads + thread] =
            reinterpret_cast<const uint4*>(from)[i * kPrepThreads];
      to += kFactorBytes;
    }
  }
}

// Warps with more rows to the left of their block have more to do: which warp has which rows differs from group to
// group, so that a scheduler, which gets the same warp of each, is not left with the longest ones.
__device__ inline int rotated(int thread, unsigned group) { return (thread + 32 * (group % 4)) % kPrepThreads; }

template <int KD>
__device__ inline void zero_A(PrepSmem<KD>& s, int thread) {
  for (int i = thread; i < int(kBlockBytes) / 16; i += kPrepThreads) reinterpret_cast<uint4*>(s.A)[i] = uint4{};
}

}  // namespace
}  // namespace thalweg::gated_delta_rule::sm90
#endif
