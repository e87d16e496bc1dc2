// sm90_chunk_prep - gated delta rule, forward, first kernel of row sm90_chunk_fwd: what a chunk needs before its state.
//
// Math      per chunk of 64 tokens and value head, G the running sum of g, rk = 1 or 1 / |k|:
//             L = tril(beta_i rk_i rk_j (k_i . k_j) exp(G_i - G_j), -1)      A = (I + L)^-1 diag(beta)
//           and the gate rows of sm90_chunk.cuh
// Shapes    k [B,T,H,K]  g,beta [B,T,HV]  out: factors [slots,HV] of A [64,64] in E (swizzled) and 6 rows of float
// Takes     K in {64, 128}, bf16 or f16, any strides of tokens and heads
// Grid      one block a slot (chunk) and key head, 128 threads; its value heads in turn, gates of four at once
// Tile      warp w owns rows [16 w, 16 w + 16) of L and A; k k^T once a block
// Order     X = (I + L)^-1 by blocks of 16: X_ww by float32 substitution, a lane a column; then along the row
//             X_wj = -(sum over j < m <= w of X_wm L_mj) X_jj,   j = w-1 ... 0
//           which needs nothing of other warps but L and X_jj
// Numerics  k k^T in float32; merges by tensor cores from operands split into two bf16 (three products), which is
//           within 2^-16: a single tf32 or f16 product is not enough for cos(k,k') = 0.99 and beta = 2.
//           Exponents are differences of G with i > j; masked by selection. A gate below -160 log 2 counts as -160:
//           its power is 0 in float32 either way, and G stays finite.
// Traps     a row past the sequence has k = 0, beta = 0, g = 0. Slots that belong to no chunk are left alone.
#include "thalweg/cuda/launch.h"
#include "thalweg/ops/gated_delta_rule/sm90_chunk.cuh"

namespace thalweg::gated_delta_rule::sm90 {
namespace {

using namespace cuda::sm90;

constexpr int kThreads = 128, kBatch = 4;  // value heads whose gates are made at once, a warp each
constexpr float kLog2e = 1.4426950408889634f;

struct Block16 {  // [16 16] bf16 twice: the rounded value and what it lacks
  uint16_t high[256], low[256];
};

template <int KD>
struct alignas(1024) PrepSmem {
  char k[KD / 64 * kBlockBytes];
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

// c += x b for 16x16 blocks, from split operands.
__device__ inline void multiply(float (&c)[2][4], const uint32_t (&high)[4], const uint32_t (&low)[4], const Block16& b,
                                int lane) {
  uint32_t bh[4], bl[4];
  const int place = at16(lane % 16, lane / 16 * 8);
  ldmatrix_x4_trans(bh, smem_address(&b.high[place]));
  ldmatrix_x4_trans(bl, smem_address(&b.low[place]));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    mma_16x8x16<__nv_bfloat16>(c[h], low, bh[2 * h], bh[2 * h + 1]);
    mma_16x8x16<__nv_bfloat16>(c[h], high, bl[2 * h], bl[2 * h + 1]);
    mma_16x8x16<__nv_bfloat16>(c[h], high, bh[2 * h], bh[2 * h + 1]);
  }
}

// Rows [16 w, 16 w + 16) of k k^T, blocks 0 to w.
template <class E, int KD>
__device__ inline void key_products(const PrepSmem<KD>& s, int w, int lane, float (&kk)[4][2][4]) {
#pragma unroll
  for (int nb = 0; nb < 4; ++nb)
#pragma unroll
    for (int i = 0; i < 8; ++i) kk[nb][i / 4][i % 4] = 0;
#pragma unroll
  for (int step = 0; step < KD / 16; ++step) {
    const uint32_t block = smem_address(s.k) + step / 4 * kBlockBytes;
    const int piece = step % 4 * 2 + lane / 16;
    uint32_t a[4], b[4];
    ldmatrix_x4(a, block + swizzled(16 * w + lane % 16, piece));
#pragma unroll
    for (int nb = 0; nb < 4; ++nb) {
      if (nb > w) break;
      ldmatrix_x4(b, block + swizzled(16 * nb + lane % 16, piece));
      mma_16x8x16<E>(kk[nb][0], a, b[0], b[2]);
      mma_16x8x16<E>(kk[nb][1], a, b[1], b[3]);
    }
  }
}

__device__ inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Gates of one value head by one warp, lane l has tokens 2 l and 2 l + 1: to shared memory and to the factors.
template <int KD>
__device__ inline void make_gates(const ChunkArgs& a, PrepSmem<KD>& s, int place, int64_t row, int valid, int64_t hv,
                                  char* factors, int lane) {
  const int64_t b = row / a.T, t = row % a.T;
  float g[2], beta[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    const bool there = i < valid;
    g[e] = 0, beta[e] = there ? 1 : 0;
    if (there && cuda::is_there(a.g))
      g[e] = cuda::load_at<float>(a.g, b * a.g.stride[0] + (t + i) * a.g.stride[1] + hv * a.g.stride[2]);
    if (there && a.gate) {
      if (cuda::is_there(a.dt_bias)) g[e] += cuda::load_at<float>(a.dt_bias, hv * a.dt_bias.stride[0]);
      g[e] = -expf(cuda::load_at<float>(a.A_log, hv * a.A_log.stride[0])) * softplus(g[e]);
    }
    g[e] *= kLog2e;
    if (g[e] < -160.f) g[e] = -160.f;
    if (there && cuda::is_there(a.beta))
      beta[e] = cuda::load_at<float>(a.beta, b * a.beta.stride[0] + (t + i) * a.beta.stride[1] + hv * a.beta.stride[2]);
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
__device__ inline void make_norms(const ChunkArgs& a, PrepSmem<KD>& s, const float (&kk)[4][2][4], int64_t row,
                                  int valid, int64_t h, int thread) {
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
  if (i < valid) {
    const uint16_t* q = reinterpret_cast<const uint16_t*>(row_at<E>(a.q, a.T, row, h)) + i * a.q.stride[1];
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

// This warp's blocks of L: the diagonal one as float, the others split.
template <int KD>
__device__ inline void make_L(PrepSmem<KD>& s, const float (&kk)[4][2][4], int place, int w, int lane) {
  const float* G = s.G[place];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = 16 * w + 8 * r + lane / 4;
    const float factor = s.beta[place][i] * s.rk[i], Gi = G[i];
#pragma unroll
    for (int nb = 0; nb < 4; ++nb) {
      if (nb > w) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 16 * nb + 8 * h + 2 * (lane % 4);
        const float x = kk[nb][h][2 * r] * factor * s.rk[j] * exp2_fast(Gi - G[j]);
        const float y = kk[nb][h][2 * r + 1] * factor * s.rk[j + 1] * exp2_fast(Gi - G[j + 1]);
        if (nb == w) {
          s.diagonal[w][j % 16][i % 16] = j < i ? x : 0;
          s.diagonal[w][j % 16 + 1][i % 16] = j + 1 < i ? y : 0;
        } else {
          Block16& block = s.L[w * (w - 1) / 2 + nb];
          uint32_t high, low;
          split(x, y, high, low);
          *reinterpret_cast<uint32_t*>(&block.high[at16(i % 16, j % 16)]) = high;
          *reinterpret_cast<uint32_t*>(&block.low[at16(i % 16, j % 16)]) = low;
        }
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

// Row w of the inverse left of its diagonal block, and A of it.
template <class E, int KD, int w>
__device__ inline void make_row(PrepSmem<KD>& s, const float* beta, int lane) {
  uint32_t high[w + 1][4], low[w + 1][4];
  const int place = at16(lane % 16, lane / 16 * 8);
  ldmatrix_x4(high[w], smem_address(&s.X[w].high[place]));
  ldmatrix_x4(low[w], smem_address(&s.X[w].low[place]));
#pragma unroll
  for (int j = w - 1; j >= 0; --j) {
    float sum[2][4] = {}, x[2][4] = {};
#pragma unroll
    for (int m = w; m > j; --m) multiply(sum, high[m], low[m], s.L[m * (m - 1) / 2 + j], lane);
    uint32_t sum_high[4], sum_low[4];
    split_block(sum, sum_high, sum_low);
    multiply(x, sum_high, sum_low, s.X[j], lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = -x[i / 4][i % 4];
    split_block(x, high[j], low[j]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = 16 * j + 8 * h + 2 * (lane % 4);
      const float b0 = beta[column], b1 = beta[column + 1];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        st_shared_32(smem_address(s.A) + swizzled(16 * w + 8 * r + lane / 4, 2 * j + h) + lane % 4 * 4,
                     pack<E>(x[h][2 * r] * b0, x[h][2 * r + 1] * b1));
    }
  }
}

// A of one value head in s.A.
template <class E, int KD>
__device__ inline void make_A(PrepSmem<KD>& s, const float (&kk)[4][2][4], int place, int thread) {
  const int w = thread / 32, lane = thread % 32, c = lane % 16;
  make_L(s, kk, place, w, lane);
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
  if (thread == 0) bulk_wait_read();  // the head before has left s.A
  __syncthreads();
  const float beta = s.beta[place][16 * w + c];
  if (lane < 16)
#pragma unroll
    for (int r = 0; r < 16; ++r)
      *reinterpret_cast<uint16_t*>(s.A + swizzled(16 * w + r, 2 * w + c / 8) + c % 8 * 2) =
          uint16_t(pack<E>(x[r] * beta, 0));
  if (w == 1) make_row<E, KD, 1>(s, s.beta[place], lane);
  if (w == 2) make_row<E, KD, 2>(s, s.beta[place], lane);
  if (w == 3) make_row<E, KD, 3>(s, s.beta[place], lane);
}

// Which chunk the slot is: the last sequence whose first slot is not behind it.
__device__ inline bool find_chunk(const ChunkArgs& a, int64_t slot, int64_t* row, int* valid) {
  int64_t n = -1;
  for (int64_t first = 0; first < a.N; first += kThreads) {
    const int64_t mine = first + threadIdx.x;
    const bool before = mine < a.N && first_slot(span_of(a, mine).begin, mine) <= slot;
    n += __syncthreads_count(before);
  }
  if (n < 0) return false;
  const cuda::Span span = span_of(a, n);
  *row = span.begin + (slot - first_slot(span.begin, n)) * kChunk;
  const int64_t left = span.end - *row;
  *valid = int(left < kChunk ? left : kChunk);
  return left > 0 && span.valid;
}

template <class E, int KD>
__global__ void __launch_bounds__(kThreads, 3) chunk_prep(const __grid_constant__ ChunkArgs a) {
  extern __shared__ __align__(1024) char smem[];
  PrepSmem<KD>& s = *reinterpret_cast<PrepSmem<KD>*>(smem);
  const int thread = threadIdx.x, w = thread / 32, lane = thread % 32;
  const int64_t slot = blockIdx.x / a.H, h = blockIdx.x % a.H, group = a.HV / a.H;
  int64_t row;
  int valid;
  if (!find_chunk(a, slot, &row, &valid)) return;
  load_tile<E, KD, kThreads>(smem_address(s.k), row_at<E>(a.k, a.T, row, h), a.k.stride[1], valid, a.aligned, thread);
  for (int i = thread; i < kBlockBytes / 16; i += kThreads)  // the upper triangle stays zero
    reinterpret_cast<uint4*>(s.A)[i] = uint4{};
  cp_async_wait_all();
  __syncthreads();
  float kk[4][2][4];
  key_products<E, KD>(s, w, lane, kk);
  make_norms<E, KD>(a, s, kk, row, valid, h, thread);
  char* factors = a.factors + (slot * a.HV + h * group) * kFactorBytes;
  for (int64_t head = 0; head < group; ++head) {
    if (head % kBatch == 0) {
      __syncthreads();
      if (head + w < group)
        make_gates(a, s, w, row, valid, h * group + head + w, factors + (head + w) * kFactorBytes, lane);
      __syncthreads();
    }
    make_A<E, KD>(s, kk, int(head % kBatch), thread);
    fence_proxy_async();
    __syncthreads();
    if (thread == 0) {
      bulk_store(factors + head * kFactorBytes, smem_address(s.A), kBlockBytes);
      bulk_commit();
    }
  }
  if (thread == 0) bulk_wait();
}

template <class E>
void launch_dtype(const Problem& p, const ChunkArgs& a, const Exec& exec) {
  if (p.K == 128)
    cuda::launch(exec, "sm90_chunk_prep", chunk_prep<E, 128>, {chunk_slots(p) * p.H}, kThreads, sizeof(PrepSmem<128>),
                 a);
  else
    cuda::launch(exec, "sm90_chunk_prep", chunk_prep<E, 64>, {chunk_slots(p) * p.H}, kThreads, sizeof(PrepSmem<64>), a);
}

}  // namespace

void launch_prep(const Problem& p, const ChunkArgs& a, const Exec& exec) {
  if (p.dtype == THALWEG_F16)
    launch_dtype<__half>(p, a, exec);
  else
    launch_dtype<__nv_bfloat16>(p, a, exec);
}

}  // namespace thalweg::gated_delta_rule::sm90
