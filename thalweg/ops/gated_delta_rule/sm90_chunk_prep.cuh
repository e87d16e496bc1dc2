// sm90_chunk_prep - gated delta rule, forward, what a chunk needs before its state: a kernel of its own
// (sm90_chunk_prep.cu), or blocks of sm90_chunk_fwd that run ahead of the others.
//
// Math      per chunk of 64 tokens and value head, G the running sum of g, rk, rq = 1 or 1 / |k|, 1 / |q|:
//             L = tril(beta_i rk_i rk_j (k_i . k_j) exp(G_i - G_j), -1)      A = (I + L)^-1 diag(beta)
//             P = tril(scale rq_i rk_j (q_i . k_j) exp(G_i - G_j))
//           and the rows of sm90_chunk.cuh
// Shapes    q,k [B,T,H,K]  g,beta [B,T,HV]
//           out: factors [slots,HV] of A and P [64,64] in E (swizzled), and rows of float
// Takes     K in {64, 128}, bf16 or f16, any strides of tokens and heads
// Grid      a warpgroup a chunk and key head, item after item; its value heads in pairs, gates of four at once
// Tile      q k^T and k k^T by wgmma: warp w has rows [16 w, 16 w + 16) of L and P. Of A it has row block w of a pair's
//           first head and 3 - w of the second, so that all warps have as much to do
// Smem      K = 128: 75 KiB a group. The next item's tiles come while the last pair's inverse is made.
// Order     X = (I + L)^-1 by blocks of 16: X_ww by float32 substitution, a lane a column (two heads a warp); then
//           along the row
//             X_wj = -(sum over j < m <= w of X_wm L_mj) X_jj,   j = w-1 ... 0
//           which needs nothing of other warps but L and X_jj
// Numerics  products of q, k in float32; merges by tensor cores from operands split into two bf16 (three products),
//           which is within 2^-16: a single tf32 or f16 product is not enough for cos(k,k') = 0.99 and beta = 2.
//           Powers: left of the diagonal block exp(G_i - G_a) exp(G_a - G_j), a the last token before row block w, so
//           that a column's is made once; on it, exp(G_i - G_j). With g <= 0 no exponent is positive; masked by
//           selection. A gate below -160 log 2 counts as -160: its power is 0 in float32 either way, and G stays
//           finite.
// Traps     - A row past the sequence has k = 0, beta = 0, g = 0. Slots that belong to no chunk are left alone.
//           - Three groups a multiprocessor run at the rate at which instructions come: code of its own for each warp,
//             102 KiB, was a third slower than one for all, 68 KiB, although warps then wait for the longest.
// Measured  H200, K128 HV32, clocks an item (two heads, P included): one group a multiprocessor 10100, two 12500, three
//           18800 with code for each warp; 16100 with one for all
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_PREP_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_PREP_CUH

#include "thalweg/cuda/sm90/wgmma.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk.cuh"

namespace thalweg::gated_delta_rule::sm90 {
namespace {

using namespace cuda::sm90;

constexpr int kPrepGroups = 3;  // of a block, each with items of its own
constexpr int kBatch = 4;       // value heads whose gates are made at once, a warp each
constexpr int kPrepThreads = kPrepGroups * kGroup;
constexpr float kLog2e = 1.4426950408889634f;

struct Block16 {  // [16 16] bf16 twice: the rounded value and what it lacks
  uint16_t high[256], low[256];
};

struct Place {
  int64_t b, t;  // the chunk's first token
  int valid;     // its rows, 0: no chunk
};

// A chunk and key head; place.valid == 0: there is none.
struct PrepItem {
  Place place;
  int h;
  int64_t slot;
};

template <int KD>
struct alignas(1024) PrepSmem {
  char q[KD / 64 * kBlockBytes], k[KD / 64 * kBlockBytes];
  char rows[kBlockBytes];                      // a quarter for each warp: 16 rows of A or P on their way out
  Block16 L[2][6];                             // of each head of a pair: (1,0) (2,0) (2,1) (3,0) (3,1) (3,2)
  Block16 X[2][4];                             // diagonal blocks of the inverse, transposed
  float diagonal[2][4][16][20];                // column by column
  float g[kChunk][kBatch], b[kChunk][kBatch];  // gates and write strengths as given, of the next item
  float G[kBatch][kChunk], beta[kBatch][kChunk];
  float rk[kChunk], rq[kChunk];
  PrepItem item;
  uint64_t landed;  // the tiles, where TMA loads them
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

__device__ inline void swap(uint32_t& a, uint32_t& b) {
  const uint32_t x = a;
  a = b, b = x;
}

// Sums of products of blocks, in two parts, the products of rounded values and the rest, that do not wait for each
// other.
struct Sum {
  float c[2][2][4] = {};

  // += x b from split operands; b transposed where memory has it so.
  template <bool transposed>
  __device__ void add(const uint32_t (&high)[4], const uint32_t (&low)[4], const Block16& b, int place) {
    uint32_t bh[4], bl[4];  // two registers of each half of the columns
    if constexpr (transposed) {
      ldmatrix_x4(bh, smem_address(&b.high[place])), swap(bh[1], bh[2]);
      ldmatrix_x4(bl, smem_address(&b.low[place])), swap(bl[1], bl[2]);
    } else {
      ldmatrix_x4_trans(bh, smem_address(&b.high[place]));
      ldmatrix_x4_trans(bl, smem_address(&b.low[place]));
    }
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

// Products of a tile's rows with the keys: q k^T or k k^T, in flight afterwards.
template <class E, int KD>
__device__ inline void start_products(float (&d)[32], const char* rows, const char* k) {
  const uint64_t a = descriptor(smem_address(rows)), b = descriptor(smem_address(k));
#pragma unroll
  for (int step = 0; step < KD / 16; ++step) {
    const uint32_t at = step / 4 * kBlockBytes + step % 4 * 32;
    wgmma_ss_n64<E>(d, advanced(a, at), advanced(b, at), step > 0);
  }
  wgmma_commit();
}

__device__ inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Element (b, t, head, 0).
template <class E>
__device__ inline const E* token_at(const thalweg_tensor& x, const Place& p, int64_t head) {
  return static_cast<const E*>(x.data) + p.b * x.stride[0] + p.t * x.stride[1] + head * x.stride[2];
}

// Gates and write strengths of up to kBatch value heads as they are given, to shared memory: g 0 and beta 1 where there
// is none, 0 past the chunk. float32 is in flight afterwards; what lies side by side comes together, as every request
// of a token is a line of its own.
template <int KD>
__device__ inline void load_gates(const ChunkArgs& a, PrepSmem<KD>& s, const Place& p, int hv, int heads, int thread) {
  const int i = thread % kChunk;
  const bool valid = i < p.valid;
  auto load = [&](const thalweg_tensor& t, float(&to)[kBatch], float absent) {
    const int64_t at = p.b * t.stride[0] + (p.t + i) * t.stride[1] + hv * t.stride[2];
    const float* from = static_cast<const float*>(t.data) + (valid ? at : 0);
    const uint32_t dst = smem_address(to);
    if (a.wide_gates && heads >= 4 && hv % 4 == 0) return cp_async<16>(dst, from, valid);
    if (a.wide_gates && heads == 2 && hv % 2 == 0) return cp_async<8>(dst, from, valid);
    for (int head = 0; head < min(heads, kBatch); ++head)
      if (t.dtype == THALWEG_F32)
        cp_async<4>(dst + 4 * head, from + (valid ? head * t.stride[2] : 0), valid);
      else
        to[head] = !valid ? 0 : cuda::is_there(t) ? cuda::load_at<float>(t, at + head * t.stride[2]) : absent;
  };
  if (thread < kChunk)
    load(a.g, s.g[i], 0);
  else
    load(a.beta, s.b[i], 1);
}

// Gates of one value head by one warp: to shared memory and to the factors.
template <int KD>
__device__ inline void make_gates(const ChunkArgs& a, PrepSmem<KD>& s, int place, int64_t hv, int valid, char* factors,
                                  int lane) {
  float g[2], beta[2], rate = 0, bias = 0;
  if (a.gate) rate = -expf(cuda::load_at<float>(a.A_log, hv * a.A_log.stride[0]));
  if (cuda::is_there(a.dt_bias)) bias = cuda::load_at<float>(a.dt_bias, hv * a.dt_bias.stride[0]);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool there = 2 * lane + e < valid;
    g[e] = s.g[2 * lane + e][place], beta[e] = s.b[2 * lane + e][place];
    if (there && a.gate) g[e] = rate * softplus(g[e] + bias);
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
  float* key_rows = reinterpret_cast<float*>(factors + kKeyRowsAt) + 2 * lane;
  float* query_row = reinterpret_cast<float*>(factors + kQueryRowsAt) + 2 * lane;
  float read_k[2], write_k[2], read_q[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    const float G = e == 0 ? before + g[0] : sum;
    s.G[place][i] = G, s.beta[place][i] = beta[e];
    read_k[e] = exp2_fast(G) * s.rk[i];
    write_k[e] = exp2_fast(last - G) * s.rk[i];
    read_q[e] = exp2_fast(G) * s.rq[i] * a.scale;
  }
  *reinterpret_cast<float2*>(key_rows + kReadK * kChunk) = make_float2(read_k[0], read_k[1]);
  *reinterpret_cast<float2*>(key_rows + kWriteK * kChunk) = make_float2(write_k[0], write_k[1]);
  if (lane == 0) key_rows[kDecay * kChunk] = exp2_fast(last);
  *reinterpret_cast<float2*>(query_row) = make_float2(read_q[0], read_q[1]);
}

// 1 / |k| from the diagonal of k k^T, 1 / |q| from the tile; 1 without l2norm.
template <class E, int KD>
__device__ inline void make_norms(const ChunkArgs& a, PrepSmem<KD>& s, const float (&kk)[32], int thread) {
  const int w = thread / 32, lane = thread % 32;
  if (!a.l2norm) {
    if (thread < kChunk) s.rk[thread] = 1, s.rq[thread] = 1;
    return;
  }
#pragma unroll
  for (int b = 0; b < 8; ++b)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (b / 2 == w && lane / 4 == 2 * (lane % 4) + e)
        s.rk[8 * b + lane / 4] = rsqrtf((b % 2 == 0 ? kk[4 * b + e] : kk[4 * b + 2 + e]) + 1e-6f);
  const int i = thread / 2;
  float sum = 0;
#pragma unroll 4
  for (int j = 0; j < KD / 16; ++j) {
    const int piece = thread % 2 * (KD / 16) + j;
    uint32_t x[4];
    ld_shared_128(x, smem_address(s.q) + piece / 8 * kBlockBytes + swizzled(i, piece % 8));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 y = unpack<E>(x[m]);
      sum += y.x * y.x + y.y * y.y;
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (thread % 2 == 0) s.rq[i] = rsqrtf(sum + 1e-6f);
}

// This warp's rows of A or P, row block `rows`, from its quarter of s.rows to memory; blocks right of it are zero.
template <int KD>
__device__ inline void store_rows(const PrepSmem<KD>& s, int w, int rows, char* to, int lane) {
  __syncwarp();
  const uint4* from = reinterpret_cast<const uint4*>(s.rows) + 128 * w;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 32 * i + lane, piece = (at % 8) ^ (at / 8 % 8);
    reinterpret_cast<uint4*>(to)[128 * rows + at] = piece < 2 * (rows + 1) ? from[at] : uint4{};
  }
  __syncwarp();
}

// Where this lane's row of blocks b and b + 1 lies in the warp's quarter.
template <int KD>
__device__ inline uint32_t rows_place(const PrepSmem<KD>& s, int w, int b, int lane) {
  return smem_address(s.rows) + swizzled(16 * w + lane % 16, b + lane / 16);
}

// Row block w of P of a value head into memory, and of L: the diagonal block as float, column by column, the others
// split. One piece of code for all warps: four of their own would not fit where instructions are kept.
template <class E, int KD>
__device__ inline void make_squares(const ChunkArgs& a, PrepSmem<KD>& s, const float (&qk)[32], const float (&kk)[32],
                                    int head, int place, int w, int lane, char* P_to) {
  const float* G = s.G[place];
  const int i = lane / 4, j = 2 * (lane % 4);     // in blocks of 8
  const float start = w > 0 ? G[16 * w - 1] : 0;  // before the row block
  float Gi[2], q[2], k[2], row_q[2], row_k[2];  // rows i and i + 8: q and k with their factors, and with 2^(G - start)
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 16 * w + i + 8 * r;
    Gi[r] = G[row], q[r] = s.rq[row] * a.scale, k[r] = s.beta[place][row] * s.rk[row];
    const float power = exp2_fast(Gi[r] - start);
    row_q[r] = q[r] * power, row_k[r] = k[r] * power;
  }
  auto pair_at = [&](const float* x, int column) { return *reinterpret_cast<const float2*>(x + column); };
  const int place16 = at16(lane % 16, lane / 16 * 8);
  float q_inside[8], k_inside[8];  // products of the diagonal block
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block == w)
#pragma unroll
      for (int x = 0; x < 8; ++x) q_inside[x] = qk[8 * block + x], k_inside[x] = kk[8 * block + x];
    if (block == 3 || block >= w) continue;
    uint32_t P[4], high[4], low[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = 16 * block + 8 * h + j;
      const float2 Gj = pair_at(G, column), rk = pair_at(s.rk, column);
      const float cx = rk.x * exp2_fast(start - Gj.x), cy = rk.y * exp2_fast(start - Gj.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = 8 * block + 4 * h + 2 * r;
        P[2 * h + r] = pack<E>(qk[at] * (row_q[r] * cx), qk[at + 1] * (row_q[r] * cy));
        split(kk[at] * (row_k[r] * cx), kk[at + 1] * (row_k[r] * cy), high[2 * h + r], low[2 * h + r]);
      }
    }
    stmatrix_x4(rows_place(s, w, 2 * block, lane), P[0], P[1], P[2], P[3]);
    Block16& L = s.L[head][w * (w - 1) / 2 + block];
    stmatrix_x4(smem_address(&L.high[place16]), high[0], high[1], high[2], high[3]);
    stmatrix_x4(smem_address(&L.low[place16]), low[0], low[1], low[2], low[3]);
  }
  uint32_t P[4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int column = 8 * h + j;
    const float2 Gj = pair_at(G, 16 * w + column), rk = pair_at(s.rk, 16 * w + column);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = 4 * h + 2 * r, row = i + 8 * r;
      const float px = rk.x * exp2_fast(column <= row ? Gi[r] - Gj.x : -INFINITY),
                  py = rk.y * exp2_fast(column + 1 <= row ? Gi[r] - Gj.y : -INFINITY);
      P[2 * h + r] = pack<E>((column <= row ? q_inside[at] : 0) * (q[r] * px),
                             (column + 1 <= row ? q_inside[at + 1] : 0) * (q[r] * py));
      s.diagonal[head][w][column][row] = (column < row ? k_inside[at] : 0) * (k[r] * px);
      s.diagonal[head][w][column + 1][row] = (column + 1 < row ? k_inside[at + 1] : 0) * (k[r] * py);
    }
  }
  stmatrix_x4(rows_place(s, w, 2 * w, lane), P[0], P[1], P[2], P[3]);
  store_rows(s, w, w, P_to, lane);
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

// A column of a diagonal block's inverse: a row of X as it is kept.
__device__ inline void store_column(Block16& to, int column, const float (&x)[16]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split(x[8 * half + 2 * i], x[8 * half + 2 * i + 1], high[i], low[i]);
    const int at = at16(column, 8 * half);
    st_shared_128(smem_address(&to.high[at]), high[0], high[1], high[2], high[3]);
    st_shared_128(smem_address(&to.low[at]), low[0], low[1], low[2], low[3]);
  }
}

// Block j of a row of the inverse, its columns times beta, as a block of A.
template <class E, int KD>
__device__ inline void keep_A(PrepSmem<KD>& s, const float (&x)[2][4], const float* beta, int w, int j, int lane) {
  uint32_t y[4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 b = *reinterpret_cast<const float2*>(beta + 16 * j + 8 * h + 2 * (lane % 4));
#pragma unroll
    for (int r = 0; r < 2; ++r) y[2 * h + r] = pack<E>(x[h][2 * r] * b.x, x[h][2 * r + 1] * b.y);
  }
  stmatrix_x4(rows_place(s, w, 2 * j, lane), y[0], y[1], y[2], y[3]);
}

// Row `row` of the inverse of a head of the pair, by warp w, from the diagonal to the left, and A's into memory. What
// is known of the sums of all blocks is added as soon as it can be.
template <class E, int KD>
__device__ inline void make_row(PrepSmem<KD>& s, int row, int head, const float* beta, int w, int lane, char* to) {
  const int place = at16(lane % 16, lane / 16 * 8);
  Sum sums[3];  // of blocks 0, 1, 2
  uint32_t high[4], low[4];
  ldmatrix_x4_trans(high, smem_address(&s.X[head][row].high[place])), swap(high[1], high[2]);
  ldmatrix_x4_trans(low, smem_address(&s.X[head][row].low[place])), swap(low[1], low[2]);
  float x[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 h = unpack<__nv_bfloat16>(high[i]), l = unpack<__nv_bfloat16>(low[i]);
    x[i / 2][i % 2 * 2] = h.x + l.x, x[i / 2][i % 2 * 2 + 1] = h.y + l.y;
  }
  keep_A<E>(s, x, beta, w, row, lane);
#pragma unroll
  for (int j = 2; j >= 0; --j)
    if (j < row) sums[j].template add<false>(high, low, s.L[head][row * (row - 1) / 2 + j], place);
#pragma unroll
  for (int j = 2; j >= 0; --j) {
    if (j >= row) continue;
    Sum product;
    sums[j].total(x, 1);
    split_block(x, high, low);
    product.template add<true>(high, low, s.X[head][j], place);
    product.total(x, -1);
    split_block(x, high, low);
#pragma unroll
    for (int left = j - 1; left >= 0; --left)
      sums[left].template add<false>(high, low, s.L[head][j * (j - 1) / 2 + left], place);
    keep_A<E>(s, x, beta, w, j, lane);
  }
  store_rows(s, w, row, to, lane);
}

// Makes the factors of items `find(i)`, i = first, first + step, ... < count, by a warpgroup; `done(factors)` after
// each.
template <class E, int KD, class Find, class Done>
__device__ inline void make_factors(const ChunkArgs& a, const Maps& maps, PrepSmem<KD>& s, int64_t first, int64_t step,
                                    int64_t count, int thread, int barrier, Find find, Done done) {
  const int w = thread / 32, lane = thread % 32, group = int(unsigned(a.HV) / unsigned(a.H));
  const uint32_t landed = smem_address(&s.landed);
  uint32_t parity = 0;
  auto by_tma = [&](const PrepItem& item) { return a.tma && item.place.valid == kChunk; };
  // By one thread: the next item, and its tiles if TMA can load them.
  auto find_next = [&] {
    PrepItem item{};
    for (; first < count && item.place.valid == 0; first += step) item = find(first);
    s.item = item;
    if (!by_tma(item)) return;
    mbarrier_arrive_expect(landed, 2 * KD / 64 * kBlockBytes);
    tensor_load_5d(smem_address(s.q), &maps.q, 0, int(item.place.t), 0, item.h, int(item.place.b), landed);
    tensor_load_5d(smem_address(s.k), &maps.k, 0, int(item.place.t), 0, item.h, int(item.place.b), landed);
  };
  // By all, once the item is known: the rest of what it needs.
  auto load_rest = [&] {
    const PrepItem& item = s.item;
    if (item.place.valid == 0) return;
    if (!by_tma(item)) [[unlikely]] {
      const E *q = token_at<E>(a.q, item.place, item.h), *k = token_at<E>(a.k, item.place, item.h);
#pragma unroll 1
      for (int i = thread; i < kChunk * KD / 8; i += kGroup) {
        const int row = i / (KD / 8), piece = i % (KD / 8);
        const uint32_t at = piece / 8 * kBlockBytes + swizzled(row, piece % 8);
        const bool valid = row < item.place.valid;
        copy_piece(smem_address(s.q) + at, q + row * a.q.stride[1] + piece * 8, valid, a.aligned);
        copy_piece(smem_address(s.k) + at, k + row * a.k.stride[1] + piece * 8, valid, a.aligned);
      }
    }
    load_gates(a, s, item.place, item.h * group, group, thread);
  };
  if (thread == 0) {
    mbarrier_init(landed, 1), mbarrier_init_fence();
    find_next();
  }
  named_barrier(barrier, kGroup);
  load_rest();
  while (s.item.place.valid > 0) {
    char* const factors = a.factors + (s.item.slot * a.HV + s.item.h * group) * kFactorBytes;
    cp_async_wait_all();
    if (by_tma(s.item)) {
      mbarrier_wait(landed, parity);
      parity ^= 1;
    } else {
      fence_proxy_async();
      named_barrier(barrier, kGroup);
    }
#pragma unroll 1
    for (int pair = 0; 2 * pair < group; ++pair) {
      const int heads = min(2, group - 2 * pair), batched = pair % 2 * 2;  // place of the first head
      float qk[32], kk[32];
      wgmma_fence();
      start_products<E, KD>(qk, s.q, s.k);
      start_products<E, KD>(kk, s.k, s.k);
      wgmma_wait<0>();
      if (pair == 0) make_norms<E, KD>(a, s, kk, thread);
      if (pair % 2 == 0) {
        const int hv = 2 * pair + w;
        if (pair > 0) {
          load_gates(a, s, s.item.place, s.item.h * group + 2 * pair, group - 2 * pair, thread);
          cp_async_wait_all();
        }
        named_barrier(barrier, kGroup);  // gates as given and norms are there, gates of the last batch read
        if (hv < group)
          make_gates(a, s, w, s.item.h * group + hv, s.item.place.valid, factors + hv * kFactorBytes, lane);
      }
      named_barrier(barrier, kGroup);  // gates are there, L and X of the last pair read, and the tiles
      char* const to = factors + 2 * pair * kFactorBytes;
      const bool last = 2 * (pair + 1) >= group;
      if (last && thread == 0) find_next();
      __syncwarp();
#pragma unroll 1
      for (int head = 0; head < heads; ++head)
        make_squares<E>(a, s, qk, kk, head, batched + head, w, lane, to + head * kFactorBytes + kPAt);
      __syncwarp();
      float x[16];
      const int half = lane / 16;
      substitute(s.diagonal[half][w], lane, x);
      store_column(s.X[half][w], lane % 16, x);
      named_barrier(barrier, kGroup);  // L and X are there, and the next item
      if (last) load_rest();
#pragma unroll 1
      for (int head = 0; head < heads; ++head)
        make_row<E>(s, head == 0 ? w : 3 - w, head, s.beta[batched + head], w, lane, to + head * kFactorBytes);
    }
    done(factors);
  }
}

}  // namespace
}  // namespace thalweg::gated_delta_rule::sm90
#endif
