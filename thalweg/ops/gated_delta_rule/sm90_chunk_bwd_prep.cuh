// Pieces of sm90_chunk_bwd.cu: what the scans and the gradients need of every chunk, from q, k, g, beta alone.
//
// For each value head: G (sum of the gates, log2), E_i = 2^G_i, D_ni = 2^(G_n - G_i), beta; the strictly lower X with
// (I + diag(beta) M)^-1 = I + diag(beta) X, where M_ij = D_ij k_i.k_j, i > j; and P_ij = scale D_ij q_i.k_j, i >= j.
// X = -M (I + diag(beta) M)^-1, in float32: substitution on the 16x16 blocks of the diagonal, then two rounds of
// X_21 = -(I + X_22 diag(beta)) M_21 (I + diag(beta) X_11) with products of three tf32 terms.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_PREP_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_PREP_CUH

#include "thalweg/cuda/sm90/smem.cuh"
#include "thalweg/cuda/sm90/wgmma.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd.cuh"

namespace thalweg::gated_delta_rule {
namespace {

constexpr int kPrepThreads = 128;
constexpr int kPrepHeads = 2;  // value heads that are worked on together
constexpr int kPitch = 68;     // floats of a row of M: rows stay 16-byte aligned, fragments free of bank conflicts

struct PrepHead {
  float M[kC][kPitch];  // becomes X, block by block
};
struct PrepHalves {
  float Y[32][36];  // half of a merge
};
struct PrepScalars {
  float G[kC], beta[kC];
};
template <int D>
struct alignas(1024) PrepSmem {
  union {
    struct {
      char q[D / 64 * kTile], k[D / 64 * kTile];
    } keys;
    struct {
      union {
        char image[kPrepHeads][kTile];  // of P, until it is stored
        PrepHalves half[kPrepHeads];
      };
      PrepHead head[kPrepHeads];
    } work;
  };
  PrepScalars scalars[kPrepHeads];
  uint64_t landed;
};

// ---- Scalars ----

// By one warp: lane l holds tokens 2l and 2l+1.
__device__ inline void load_scalars(const Call& call, const Chunk& chunk, int64_t hv, int lane, PrepScalars& s,
                                    float* to) {
  constexpr float kLog2e = 1.4426950408889634f;
  float g[2], b[2];
  // Both tensors are asked for before either is looked at; other types than float32 wait element by element.
  const auto load = [&](const thalweg_tensor& t, float otherwise, float(&x)[2]) {
    const int64_t at = chunk.b * t.stride[0] + (chunk.begin + 2 * lane) * t.stride[1] + hv * t.stride[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      x[e] = otherwise;
      if (2 * lane + e >= chunk.count || !cuda::is_there(t)) continue;
      x[e] = t.dtype == THALWEG_F32 ? static_cast<const float*>(t.data)[at + e * t.stride[1]]
                                    : cuda::load_at<float>(t, at + e * t.stride[1]);
    }
  };
  load(call.args.g, 0.f, g);
  load(call.args.beta, 1.f, b);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    g[e] = g[e] * kLog2e < kLeastGate ? kLeastGate : g[e] * kLog2e;
    if (2 * lane + e >= chunk.count) g[e] = b[e] = 0.f;
    if (!chunk.valid) g[e] = b[e] = cuda::nan_of<float>();
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  float before = __shfl_up_sync(0xffffffffu, sum, 1);
  if (lane == 0) before = 0.f;
  const float last = __shfl_sync(0xffffffffu, sum, 31);
  const float2 G2 = {before + g[0], sum}, E2 = {cuda::exp2_fast(G2.x), cuda::exp2_fast(G2.y)};
  const float2 Dn2 = {cuda::exp2_fast(last - G2.x), cuda::exp2_fast(last - G2.y)}, beta2 = {b[0], b[1]};
  reinterpret_cast<float2*>(s.G)[lane] = G2, reinterpret_cast<float2*>(s.beta)[lane] = beta2;
  float2* out = reinterpret_cast<float2*>(to);
  out[kG * 32 + lane] = G2, out[kE * 32 + lane] = E2, out[kDn * 32 + lane] = Dn2, out[kBeta * 32 + lane] = beta2;
}

// ---- Float32 products of 16x16 blocks by one warp ----

__device__ inline float high_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// d += a(row, k) b(k, column), a and b functions on 16x16.
template <class A, class B>
__device__ void block_product(int lane, const A& a, const B& b, float (&d)[2][4]) {
  const int g = lane >> 2, c = lane & 3;
  float cross[2][2][4];  // products with a low part, apart: shorter chains of sums
  zero(cross[0]), zero(cross[1]);
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    const float af[4] = {a(g, k + c), a(g + 8, k + c), a(g, k + c + 4), a(g + 8, k + c + 4)};
    float high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) high[i] = high_part(af[i]), low[i] = af[i] - high[i];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float b0 = b(k + c, 8 * n + g), b1 = b(k + c + 4, 8 * n + g), h0 = high_part(b0), h1 = high_part(b1);
      cuda::mma_tf32(cross[0][n], low, h0, h1);
      cuda::mma_tf32(cross[1][n], high, b0 - h0, b1 - h1);
      cuda::mma_tf32(d[n], high, h0, h1);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) d[n][e] += cross[0][n][e] + cross[1][n][e];
}
template <class Put>
__device__ void put_block(int lane, const float (&d)[2][4], const Put& put) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) put(g + (e >> 1) * 8, 8 * n + 2 * c + (e & 1), d[n][e]);
}

// ---- The inverse ----

// Column j of the diagonal block at `first`: 16 threads take one each, rows in step, so X may replace M.
__device__ inline void invert_diagonal(PrepHead& s, const float* betas, int first, int j) {
  float t[16];              // column j of (I + diag(beta) M)^-1
  float row[16], next[16];  // of M; rows are asked for one ahead, not all at once
  const auto load = [&](int i, float(&to)[16]) {
    const float4* from = reinterpret_cast<const float4*>(&s.M[first + i][first]);
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 x = from[m / 4];
      to[m] = x.x, to[m + 1] = x.y, to[m + 2] = x.z, to[m + 3] = x.w;
    }
  };
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float beta = betas[first + i];
    if (i < 15) load(i + 1, next);
    float x[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < i; ++m) x[m & 3] -= row[m] * t[m];
    x[0] = (x[0] + x[1]) + (x[2] + x[3]);
    t[i] = i == j ? 1.f : beta * x[0];
    __syncwarp();
    s.M[first + i][first + j] = x[0];
#pragma unroll
    for (int m = 0; m < 16; ++m) row[m] = next[m];
  }
}

// What stands left and right of M_21, where X is there already.
struct Factors {
  const PrepHead& s;
  const float* beta;
  __device__ float left(int i, int m) const { return s.M[i][m] * beta[m] + (i == m ? 1.f : 0.f); }
  __device__ float right(int m, int j) const { return s.M[m][j] * beta[m] + (m == j ? 1.f : 0.f); }
};

// The blocks (1, 0) and (3, 2) of 16, one warp each.
__device__ inline void merge_16(PrepHead& s, PrepHalves& half, const float* beta, int which, int lane) {
  const int J = which * 32, I = J + 16;
  const Factors f{s, beta};
  float y[2][4], x[2][4];
  zero(y), zero(x);
  block_product(
      lane, [&](int i, int m) { return s.M[I + i][J + m]; }, [&](int m, int j) { return f.right(J + m, J + j); }, y);
  put_block(lane, y, [&](int i, int j, float v) { half.Y[which * 16 + i][j] = v; });
  __syncwarp();
  block_product(
      lane, [&](int i, int m) { return f.left(I + i, I + m); }, [&](int m, int j) { return half.Y[which * 16 + m][j]; },
      x);
  put_block(lane, x, [&](int i, int j, float v) { s.M[I + i][J + j] = -v; });
}

// The 32x32 block below, a quarter for each of four warps, in two halves with a barrier between.
__device__ inline void merge_32_right(PrepHead& s, PrepHalves& half, const float* beta, int warp, int lane) {
  const int a = warp >> 1, b = warp & 1, I = 32 + 16 * a, J = 16 * b;
  const Factors f{s, beta};
  float y[2][4];
  zero(y);
  for (int c = b; c < 2; ++c)
    block_product(
        lane, [&](int i, int m) { return s.M[I + i][16 * c + m]; },
        [&](int m, int j) { return f.right(16 * c + m, J + j); }, y);
  put_block(lane, y, [&](int i, int j, float v) { half.Y[16 * a + i][J + j] = v; });
}
__device__ inline void merge_32_left(PrepHead& s, PrepHalves& half, const float* beta, int warp, int lane) {
  const int a = warp >> 1, b = warp & 1, I = 32 + 16 * a, J = 16 * b;
  const Factors f{s, beta};
  float x[2][4];
  zero(x);
  for (int c = 0; c <= a; ++c)
    block_product(
        lane, [&](int i, int m) { return f.left(I + i, 32 + 16 * c + m); },
        [&](int m, int j) { return half.Y[16 * c + m][J + j]; }, x);
  put_block(lane, x, [&](int i, int j, float v) { s.M[I + i][J + j] = -v; });
}

// ---- Tiles out ----

// M to shared memory, P to its image. kk, qk: this warp's 16 rows.
template <class T>
__device__ void decay_products(PrepHead& s, const float* G, char* image, float scale, int warp, int lane,
                               const float (&kk)[32], const float (&qk)[32]) {
  const int g = lane >> 2, c = lane & 3, first = 16 * warp + g;
  const Lanes lanes(lane);
  const float Gi[2] = {G[first], G[first + 8]};
  float2 Gj[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) Gj[n] = *reinterpret_cast<const float2*>(G + 8 * n + 2 * c);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    float p[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = first + 8 * e, j = 8 * (n + m) + 2 * c;
        float M[2];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float D = cuda::exp2_fast(Gi[e] - (x ? Gj[n + m].y : Gj[n + m].x));
          M[x] = i > j + x ? D * kk[4 * (n + m) + 2 * e + x] : 0.f;
          p[m][2 * e + x] = i >= j + x ? scale * D * qk[4 * (n + m) + 2 * e + x] : 0.f;
        }
        *reinterpret_cast<float2*>(&s.M[i][j]) = {M[0], M[1]};
      }
    uint32_t a[4];
    to_operand<T>(p[0], p[1], a);
    cuda::store_matrices(tile_at(lanes.down, cuda::smem_address(image), 16 * warp, n / 2), a[0], a[1], a[2], a[3]);
  }
}

__device__ inline void store_image(const char* image, char* P, int thread) {
#pragma unroll
  for (int i = thread; i < kTile / 16; i += kPrepThreads)
    reinterpret_cast<uint4*>(P)[i] = reinterpret_cast<const uint4*>(image)[i];
}
template <class T>
__device__ void store_inverse(const PrepHead& s, char* X, int thread) {
#pragma unroll
  for (int i = thread; i < kC * 8; i += kPrepThreads) {
    const int row = i / 8, piece = i % 8;
    const float4 *from = reinterpret_cast<const float4*>(&s.M[row][8 * piece]), low = from[0], high = from[1];
    *reinterpret_cast<uint4*>(X + piece_at(row, piece)) = {pack<T>(low.x, low.y), pack<T>(low.z, low.w),
                                                           pack<T>(high.x, high.y), pack<T>(high.z, high.w)};
  }
}

// ---- Kernel ----

// q.k and k.k of all tokens of the chunk: q k^T and k k^T.
template <class T, int D>
__device__ void key_products(uint32_t q, uint32_t k, float (&qk)[32], float (&kk)[32]) {
  const uint64_t a = cuda::sm90::descriptor(q), b = cuda::sm90::descriptor(k);
  cuda::sm90::wgmma_fence();
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    const uint32_t by = step / 4 * kTile + step % 4 * 32;
    cuda::sm90::wgmma_ss_n64<T>(kk, cuda::sm90::advanced(b, by), cuda::sm90::advanced(b, by), step > 0);
    cuda::sm90::wgmma_ss_n64<T>(qk, cuda::sm90::advanced(a, by), cuda::sm90::advanced(b, by), step > 0);
  }
  cuda::sm90::wgmma_commit();
  cuda::sm90::wgmma_wait<0>();
}

// Value heads [hv, hv + heads), from the products of the keys.
template <class T, int D>
__device__ void prepare_heads(const Call& call, int64_t place, int64_t hv, int heads, PrepSmem<D>& s, int thread,
                              const float (&qk)[32], const float (&kk)[32]) {
  const int warp = thread / 32, lane = thread % 32;
  auto& work = s.work;
  const auto beta = [&](int x) { return s.scalars[x].beta; };
  for (int x = 0; x < heads; ++x)
    decay_products<T>(work.head[x], s.scalars[x].G, work.image[x], call.scale, warp, lane, kk, qk);
  __syncthreads();
  for (int x = 0; x < heads; ++x) store_image(work.image[x], call.square(call.at.P, place, hv + x), thread);
  const int mine = thread / kC;
  if (mine < heads) invert_diagonal(work.head[mine], beta(mine), thread % kC / 16 * 16, thread % 16);
  __syncthreads();
  if (warp / 2 < heads) merge_16(work.head[warp / 2], work.half[warp / 2], beta(warp / 2), warp % 2, lane);
  __syncthreads();
  for (int x = 0; x < heads; ++x) merge_32_right(work.head[x], work.half[x], beta(x), warp, lane);
  __syncthreads();
  for (int x = 0; x < heads; ++x) merge_32_left(work.head[x], work.half[x], beta(x), warp, lane);
  __syncthreads();
  for (int x = 0; x < heads; ++x) store_inverse<T>(work.head[x], call.square(call.at.X, place, hv + x), thread);
}

// q and k of a chunk, as tiles; `landed` tells of those that come by TMA.
template <class T, int D>
__device__ void load_keys(const Call& call, const Maps& maps, const Chunk& chunk, int64_t h, PrepSmem<D>& s,
                          int thread) {
  if (call.tma && chunk.count == kC) {
    if (thread != 0) return;
    const uint32_t landed = cuda::smem_address(&s.landed);
    cuda::init_barrier(landed, 1);
    cuda::fence_barrier_init();
    load_boxes(cuda::smem_address(s.keys.q), maps.q, chunk, h, 0, D / 64, landed);
    load_boxes(cuda::smem_address(s.keys.k), maps.k, chunk, h, 0, D / 64, landed);
    cuda::arrive(landed);
    return;
  }
  const auto copy = [&](char* to, const thalweg_tensor& t) {
    copy_rows<T, D, kPrepThreads>(to, row_of<const T>(t, chunk.b, chunk.begin, h), t.stride[1], chunk.count, thread,
                                  call.aligned);
  };
  copy(s.keys.q, call.args.q), copy(s.keys.k, call.args.k);
  cuda::commit_copies();
  cuda::wait_copies<0>();
  cuda::fence_before_bulk();  // wgmma reads what was copied
}

// One block: a chunk and kPrepHeads value heads of a key head.
template <class T, int D>
__global__ void __launch_bounds__(kPrepThreads, 4)
    prep_kernel(const __grid_constant__ Call call, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<PrepSmem<D>*>(raw);
  const uint32_t group = uint32_t(call.HV / call.H), rounds = (group + kPrepHeads - 1) / kPrepHeads;
  const uint32_t unit = blockIdx.x / rounds, place = unit / uint32_t(call.H), h = unit % uint32_t(call.H);
  const int x = int(blockIdx.x % rounds) * kPrepHeads, left = int(group) - x;
  const int heads = left < kPrepHeads ? left : kPrepHeads;
  if (threadIdx.x == 0 && x == 0) *call.ready(place, h) = 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) *call.ready(call.at.chunks, 0) = 0;
  const Chunk chunk = chunk_at(call, place);
  if (chunk.count == 0) return;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t hv = int64_t(h) * group + x;
  load_keys<T>(call, maps, chunk, h, s, thread);
  if (warp < heads) load_scalars(call, chunk, hv + warp, lane, s.scalars[warp], call.scalars(place, hv + warp));
  __syncthreads();
  if (call.tma && chunk.count == kC) cuda::wait_barrier(cuda::smem_address(&s.landed), 0);
  float qk[32], kk[32];
  key_products<T, D>(cuda::smem_address(s.keys.q), cuda::smem_address(s.keys.k), qk, kk);
  __syncthreads();  // q and k are read
  prepare_heads<T>(call, place, hv, heads, s, thread, qk, kk);
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
