// Pieces of sm90_chunk_bwd.cu: d_q, d_k, d_g, d_beta of a chunk and a key head, from S, dS, r, y and d_o.
//
// Two warpgroups. K = 128: each has half of K. K = 64: the first has d_q, the second d_k. They also share out the
// products of token pairs, reads (R) to the first and writes (W) to the second. Value heads, and slices of V in them,
// come one after another through two buffers; d_q, d_k, R and W are summed over them on the chip, so R and W meet q and
// k once. Blocks go from item to item, and the next item's first buffer fills while the last one's gradients leave.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_GRAD_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_GRAD_CUH

#include "thalweg/cuda/sm90/smem.cuh"
#include "thalweg/cuda/sm90/wgmma.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd.cuh"

namespace thalweg::gated_delta_rule {
namespace {

constexpr int kGradThreads = 256;

template <int K>
struct GradBuffer {
  char S[K / 64 * kTile], dS[K / 64 * kTile];  // [v][K]
  char r[kTile];                               // [v][token]
  char y[kTile], d_o[kTile];                   // [token][v]
  float scalars[4][kC];
};
// Sums of a value head over parts of K (first index: half) on their way to d_g and d_beta.
struct HeadSums {
  float through_start[2][kC];  // a_i = E_i (scale q_i.S d_o_i - k_i.S d_v_i)
  float through_end[2][kC];    // b_j = D_nj k_j.dS u_j
  float within[2][kC];         // sum over i >= t > j of R_ij q_i.k_j, or W_ij k_i.k_j
  float beta[kC];              // y_i.r_i
  float states[8];             // S.dS, by warp
};
// A chunk and a key head; place < 0: none.
struct GradItem {
  Chunk chunk;
  int place, h;
};
template <int K>
struct alignas(1024) GradSmem {
  char q[K / 64 * kTile], k[K / 64 * kTile];
  GradBuffer<K> buffer[2];
  char pairs_out[2][kTile];  // Z of each half; at the end R and W
  union {
    struct {
      // C tiles of token pairs, as the threads hold them: only those that are not above the diagonal (see pair_tile).
      float4 keys[40][32];  // q_i.k_j, k_i.k_j
      float4 sum[40][32];   // R, W, over value heads
    } pairs;
    struct {
      char d_q[K / 64 * kTile], d_k[K / 64 * kTile];
    } out;
  };
  HeadSums sums[2];
  GradItem item[4];  // by number: a slow warp may still read the one before
  int64_t index;     // of the next
  uint64_t landed[2];
};

template <class T, int K>
struct Gradients {
  const Call& call;
  GradSmem<K>& s;
  const int group, slices;
  int thread, warp, lane, g, c, half, rows;  // rows: the warp's first token / 16
  bool has_d_q, has_d_k;
  int first_column;  // of K, in blocks of 64
  Lanes lanes{0};
  uint32_t own;            // byte of (16 rows + g, 2c) in a tile
  float d_q[32], d_k[32];  // 4n + e: row g (+8), column 8n + 2c (+1) of 64 columns of K
  // Of this value head, summed over slices of V: r dS^T; d_o S^T and y S^T, the second half the other way round; d_o.r
  // or, in the second half, y.r.
  float by_r[32], by_mine[32], by_other[32], head_pairs[32];
  float a[2], b[2], S_dS;

  __device__ Gradients(const Call& call, GradSmem<K>& s)
      : call(call), s(s), group(int(call.HV / call.H)), slices(int(call.VS)) {
    take_place();
  }
  // Computed anew at every turn: kept from step to step, these and the addresses that follow from them would crowd the
  // sums out of the registers.
  __device__ void take_place() {
    thread = int(cuda::opaque(threadIdx.x));
    warp = thread / 32, lane = thread % 32, g = lane >> 2, c = lane & 3, half = warp >> 2, rows = warp & 3;
    has_d_q = K == 128 || half == 0, has_d_k = K == 128 || half == 1, first_column = K == 128 ? half : 0;
    lanes = Lanes(lane);
    own = uint32_t((16 * rows + g) * 128 + (g << 4) + 4 * c);
  }

  __device__ static uint32_t at(const void* p) { return cuda::smem_address(p); }

  // ---- Fetching ----

  // The first item from index i on, in steps of the grid, that has tokens.
  __device__ void find_item(int64_t i, GradItem& to) const {
    const int64_t items = call.at.chunks * call.H;
    for (; i < items; i += gridDim.x) {
      const Chunk chunk = chunk_at(call, i / call.H);
      if (chunk.count == 0) continue;
      to = {chunk, int(i / call.H), int(i % call.H)};
      s.index = i;
      return;
    }
    to.place = -1;
  }
  __device__ void fetch_keys(const GradItem& item) {
    const Args& x = call.args;
    const Chunk& chunk = item.chunk;
    copy_rows<T, K, kGradThreads>(s.q, row_of<const T>(x.q, chunk.b, chunk.begin, item.h), x.q.stride[1], chunk.count,
                                  thread, call.aligned);
    copy_rows<T, K, kGradThreads>(s.k, row_of<const T>(x.k, chunk.b, chunk.begin, item.h), x.k.stride[1], chunk.count,
                                  thread, call.aligned);
  }
  __device__ void fetch(const GradItem& item, int step, int fill) {
    const int hv = item.h * group + step / slices, slice = step % slices;
    GradBuffer<K>& to = s.buffer[fill & 1];
    if (lane == 0) {  // warps ask for a part each
      const uint32_t landed = at(&s.landed[fill & 1]);
      constexpr uint32_t kState = K / 64 * kTile;
      if (warp == 0) cuda::arrive_expecting(landed, 2 * kState + 2 * kTile + kScalarBytes);
      if (warp == 1) cuda::bulk_load(at(to.S), call.state(call.at.S, item.place, hv, slice), kState, landed);
      if (warp == 2) cuda::bulk_load(at(to.dS), call.state(call.at.dS, item.place, hv, slice), kState, landed);
      if (warp == 3) cuda::bulk_load(at(to.r), call.rows(call.at.r, item.place, hv, slice), kTile, landed);
      if (warp == 4) cuda::bulk_load(at(to.y), call.rows(call.at.y, item.place, hv, slice), kTile, landed);
      if (warp == 5) cuda::bulk_load(at(to.scalars), call.scalars(item.place, hv), kScalarBytes, landed);
    }
    const thalweg_tensor& d_o = call.args.d_o;
    const bool there = cuda::is_there(d_o);
    const T* from = there ? row_of<const T>(d_o, item.chunk.b, item.chunk.begin, hv) + 64 * slice
                          : reinterpret_cast<const T*>(call.workspace);
    copy_rows<T, 64, kGradThreads>(to.d_o, from, there ? d_o.stride[1] : 0, there ? item.chunk.count : 0, thread,
                                   call.aligned);
  }

  // ---- Products ----

  // q.k (first half) or k.k of this warp's tokens with those up to its own block.
  __device__ void key_products() {
    float x[8][4];
    zero(x);
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
      uint32_t row[4];
      cuda::load_matrices(row, tile_at(lanes.down, half ? at(s.k) : at(s.q), 16 * rows, step));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n > rows) break;
        uint32_t k[4];
        cuda::load_matrices(k, tile_at(lanes.across, at(s.k), 16 * n, step));
        mma<T>(x[2 * n], row, k[0], k[1]), mma<T>(x[2 * n + 1], row, k[2], k[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n / 2 > rows) break;
      s.pairs.keys[pair_tile(n)][lane] = {x[n][0], x[n][1], x[n][2], x[n][3]};
      s.pairs.sum[pair_tile(n)][lane] = {0.f, 0.f, 0.f, 0.f};
    }
  }
  // Where C tile n of this warp's tokens is kept: warps with more earlier tokens have more of them.
  __device__ int pair_tile(int n) const { return half * 20 + rows * (rows + 1) + n; }

  // x (+)= a b for b [64 inner][64 columns]; a in registers, or a tile [64 tokens][64 inner], or [inner][token] with
  // kMajorM.
  __device__ static void times(float (&x)[32], const uint32_t (&rows)[4][4], uint32_t tile) {
    const uint64_t b = cuda::sm90::descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      cuda::sm90::wgmma_rs_n64<T, 1>(x, rows[step], cuda::sm90::advanced(b, step * 2048), true);
  }
  template <int kMajorM>
  __device__ static void times(float (&x)[32], uint32_t rows, uint32_t tile, bool accumulate) {
    const uint64_t a = cuda::sm90::descriptor(rows), b = cuda::sm90::descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      cuda::sm90::wgmma_ss_n64<T, kMajorM, 1>(x, cuda::sm90::advanced(a, step * (kMajorM ? 2048 : 32)),
                                              cuda::sm90::advanced(b, step * 2048), accumulate || step > 0);
  }

  // This lane's pair of elements in C tile n of 16-bit tiles, row 16 rows + g + 8e.
  __device__ uint32_t own_at(int n, int e) const { return uint32_t(1024 * e) + (own ^ uint32_t(n << 4)); }
  __device__ float2 key_pair(const char* tile, int n, int e) const {
    return unpack<T>(*reinterpret_cast<const uint32_t*>(tile + first_column * kTile + own_at(n, e)));
  }

  // sum += factor x; returns x.keys, by row.
  __device__ void add_rows(const float (&x)[32], const float (&factor)[2], const char* keys, float (&sum)[32],
                           float (&dots)[2]) const {
    float along[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 k = key_pair(keys, n, e);
        const float x0 = x[4 * n + 2 * e], x1 = x[4 * n + 2 * e + 1];
        sum[4 * n + 2 * e] += factor[e] * x0, sum[4 * n + 2 * e + 1] += factor[e] * x1;
        along[e] += x0 * k.x + x1 * k.y;
      }
    dots[0] += factor[0] * along[0], dots[1] += factor[1] * along[1];
  }

  // S.dS over this warp's 16 rows of V and half of K: the diagonal of a product, which costs less than its elements.
  __device__ void dot_states(const GradBuffer<K>& in) {
    float x[2][4];
    zero(x);
#pragma unroll
    for (int step = 0; step < K / 32; ++step) {
      uint32_t S[4], dS[4];
      cuda::load_matrices(S, tile_at(lanes.down, at(in.S), 16 * rows, half * (K / 32) + step));
      cuda::load_matrices(dS, tile_at(lanes.across, at(in.dS), 16 * rows, half * (K / 32) + step));
      mma<T>(x[0], S, dS[0], dS[1]), mma<T>(x[1], S, dS[2], dS[3]);
    }
    if (g == 2 * c) S_dS += x[0][0] + x[1][2];
    if (g == 2 * c + 1) S_dS += x[0][1] + x[1][3];
  }

  // One slice of V. Which half has which stays out of the products' control flow, where ptxas would serialise them.
  // With K = 64 a half computes more than it uses.
  template <bool is_first, class Meanwhile>
  __device__ void slice(const GradBuffer<K>& in, const Meanwhile& meanwhile) {
    const uint32_t S = at(in.S) + first_column * kTile, dS = at(in.dS) + first_column * kTile;
    const uint32_t mine = half ? at(in.y) : at(in.d_o), other = half ? at(in.d_o) : at(in.y), r = at(in.r);
    cuda::sm90::wgmma_fence();
    times<1>(by_r, r, dS, !is_first);
    times<0>(by_mine, mine, S, !is_first);
    if constexpr (K == 128) times<0>(by_other, other, S, !is_first);
    times<0>(head_pairs, mine, r, !is_first);
    cuda::sm90::wgmma_commit();
    meanwhile();
    dot_states(in);
    cuda::sm90::wgmma_wait<0>();
  }

  // ---- A value head's end ----

  // R or W of this head from head_pairs, without beta_j: to the sum with it; times q.k or k.k to `out`, as Z.
  // The diagonal of y.r is d_beta. Half of the C tiles at a time, all loads before the stores that might, for all ptxas
  // knows, change what is loaded.
  template <int first_tile>
  __device__ void weigh_pairs(const GradBuffer<K>& in, char* out, HeadSums& sums) {
    constexpr int kEnd = first_tile + 4;
    if (first_tile / 2 > rows) return;
    const float *G = in.scalars[kG], *beta = in.scalars[kBeta];
    const int first = 16 * rows + g;
    const float Gi[2] = {G[first], G[first + 8]};
    const float f[2] = {half ? -beta[first] : call.scale, half ? -beta[first + 8] : call.scale};
    const int limit = first + 1 - half - 2 * c;  // column 8n + e of row first is in the triangle if below it
    float diagonal[2] = {0.f, 0.f};
    bool has_diagonal = false;
    uint32_t z[4][2];
#pragma unroll
    for (int n = first_tile; n < kEnd; ++n) {
      if (n / 2 > rows) break;
      has_diagonal = n / 2 == rows;
      const float4 keys = s.pairs.keys[pair_tile(n)][lane];
      const float2 Gj = *reinterpret_cast<const float2*>(G + 8 * n + 2 * c);
      const float2 beta_j = *reinterpret_cast<const float2*>(beta + 8 * n + 2 * c);
      float* x = head_pairs + 4 * n;
      const float products[4] = {keys.x, keys.y, keys.z, keys.w};
      float w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = e >> 1, column = 8 * n + (e & 1) - 8 * row;
        if (column == limit - 1 + half) diagonal[row] = x[e];
        const float D = cuda::exp2_fast(Gi[row] - (e & 1 ? Gj.y : Gj.x));
        w[e] = column < limit ? f[row] * D * x[e] : 0.f;
        x[e] = w[e] * (e & 1 ? beta_j.y : beta_j.x);
      }
      z[n - first_tile][0] = pack<cuda::bf16>(w[0] * products[0], w[1] * products[1]);
      z[n - first_tile][1] = pack<cuda::bf16>(w[2] * products[2], w[3] * products[3]);
    }
    // The diagonal is in the lane whose columns 2c, 2c+1 hold g.
    if (half && has_diagonal && g / 2 == c) sums.beta[first] = diagonal[0], sums.beta[first + 8] = diagonal[1];
#pragma unroll
    for (int n = first_tile; n < kEnd; ++n) {
      if (n / 2 > rows) break;
      const float4 sum = s.pairs.sum[pair_tile(n)][lane];
      float* x = head_pairs + 4 * n;
      x[0] += sum.x, x[1] += sum.y, x[2] += sum.z, x[3] += sum.w;
    }
#pragma unroll
    for (int n = first_tile; n < kEnd; ++n) {
      if (n / 2 > rows) break;
      const float* x = head_pairs + 4 * n;
      s.pairs.sum[pair_tile(n)][lane] = {x[0], x[1], x[2], x[3]};
      *reinterpret_cast<uint32_t*>(out + own_at(n, 0)) = z[n - first_tile][0];
      *reinterpret_cast<uint32_t*>(out + own_at(n, 1)) = z[n - first_tile][1];
    }
  }

  // within_t = sum_j<t beta_j sum_i>=t Z_ij: only terms that token t's decay is a factor of. The inner sum is a product
  // with a triangle of ones.
  __device__ void sum_within(const GradBuffer<K>& in, uint32_t z, float (&within)[2]) {
    float x[8][4];
    zero(x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < rows) continue;
      const bool own = i == rows;
      const auto ones = [&](int t, int k) { return pack<cuda::bf16>(!own || k >= t, !own || k + 1 >= t); };
      const uint32_t triangle[4] = {ones(g, 2 * c), ones(g + 8, 2 * c), ones(g, 2 * c + 8), ones(g + 8, 2 * c + 8)};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n > rows) break;
        uint32_t b[4];
        cuda::load_matrices_transposed(b, tile_at(lanes.down, z, 16 * i, n));
        mma<cuda::bf16>(x[2 * n], triangle, b[0], b[1]), mma<cuda::bf16>(x[2 * n + 1], triangle, b[2], b[3]);
      }
    }
    within[0] = within[1] = 0.f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n / 2 > rows) break;
      const float2 beta = *reinterpret_cast<const float2*>(in.scalars[kBeta] + 8 * n + 2 * c);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int t = 16 * rows + g + (e >> 1) * 8, j = 8 * n + 2 * c + (e & 1);
        within[e >> 1] += j < t ? (e & 1 ? beta.y : beta.x) * x[n][e] : 0.f;
      }
    }
  }

  // The states' part to d_q and d_k.
  __device__ void add_states(const GradBuffer<K>& in) {
    float read[2], erase[2], write[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 16 * rows + g + 8 * e;
      const float E = in.scalars[kE][i], beta = in.scalars[kBeta][i];
      read[e] = call.scale * E, erase[e] = -E * beta, write[e] = in.scalars[kDn][i] * beta;
    }
    a[0] = a[1] = b[0] = b[1] = 0.f;
    if (has_d_k) add_rows(by_r, write, s.k, d_k, b);
    if (half)
      add_rows(by_mine, erase, s.k, d_k, a);
    else
      add_rows(by_mine, read, s.q, d_q, a);
    if constexpr (K == 128) {
      if (half)
        add_rows(by_other, read, s.q, d_q, a);
      else
        add_rows(by_other, erase, s.k, d_k, a);
    }
  }

  __device__ void end_head(const GradBuffer<K>& in, HeadSums& sums) {
    take_place();
    add_states(in);
    weigh_pairs<0>(in, s.pairs_out[half], sums);
    weigh_pairs<4>(in, s.pairs_out[half], sums);
    cuda::sync_threads(1 + half, kGradThreads / 2);
    float within[2];
    sum_within(in, at(s.pairs_out[half]), within);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 16 * rows + g + 8 * e;
      const float a_sum = quad_sum(a[e]), b_sum = quad_sum(b[e]), w = quad_sum(within[e]);
      if (c == 0) sums.through_start[half][i] = a_sum, sums.through_end[half][i] = b_sum;
      if (c == 0) sums.within[half][i] = w;
    }
    const float states = cuda::warp_sum(S_dS);
    if (lane == 0) sums.states[warp] = states;
  }

  // One warp: d_g and d_beta of the head, lane l those of tokens 2l and 2l+1.
  __device__ void store_scalars(const GradItem& item, int64_t hv, const HeadSums& sums, float E_n) {
    const auto both = [&](const float(&x)[2][kC], int e) { return x[0][2 * lane + e] + x[1][2 * lane + e]; };
    const float a0 = both(sums.through_start, 0), a1 = both(sums.through_start, 1);
    const float b0 = both(sums.through_end, 0), b1 = both(sums.through_end, 1);
    float after = a0 + a1, before = b0 + b1;  // sums over the lanes from, up to, this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float x = __shfl_down_sync(0xffffffffu, after, step), z = __shfl_up_sync(0xffffffffu, before, step);
      if (lane + step < 32) after += x;
      if (lane >= step) before += z;
    }
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) before = 0.f;
    float after_next = __shfl_down_sync(0xffffffffu, after, 1);
    if (lane == 31) after_next = 0.f;
    float states = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) states += sums.states[i];
    const float d_g[2] = {E_n * states + before + after + both(sums.within, 0),
                          E_n * states + (before + b0) + (a1 + after_next) + both(sums.within, 1)};
    const Args& x = call.args;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (2 * lane + e >= item.chunk.count) continue;
      const auto put = [&](const thalweg_tensor& t, float value) {
        if (!cuda::is_there(t)) return;
        const int64_t token = item.chunk.begin + 2 * lane + e;
        cuda::store_at(t, item.chunk.b * t.stride[0] + token * t.stride[1] + hv * t.stride[2], value);
      };
      put(x.d_g, d_g[e]);
      put(x.d_beta, sums.beta[2 * lane + e]);
    }
  }

  // ---- The key head's end ----

  // d_q += R k;  d_k += R^T q + (W + W^T) k. Blocks above the diagonal are zeros in registers.
  template <class Meanwhile>
  __device__ void add_pairs(const Meanwhile& meanwhile) {
    take_place();
    char* out = s.pairs_out[half];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n / 2 > rows) break;
      const float4 x = s.pairs.sum[pair_tile(n)][lane];
      *reinterpret_cast<uint32_t*>(out + own_at(n, 0)) = pack<T>(x.x, x.y);
      *reinterpret_cast<uint32_t*>(out + own_at(n, 1)) = pack<T>(x.z, x.w);
    }
    __syncthreads();
    const uint32_t R = at(s.pairs_out[0]), W = at(s.pairs_out[1]);
    const uint32_t q = at(s.q) + first_column * kTile, k = at(s.k) + first_column * kTile;
    uint32_t x[4][4], y[4][4];
    load_lower(x, R);
    load_upper(y, R);
    cuda::sm90::wgmma_fence();
    times(d_q, x, k);
    times(d_k, y, q);
    cuda::sm90::wgmma_commit();
    meanwhile();
    cuda::sm90::wgmma_wait<0>();
    load_lower(x, W);
    load_upper(y, W);
    cuda::sm90::wgmma_fence();
    times(d_k, x, k);
    times(d_k, y, k);
    cuda::sm90::wgmma_commit();
    cuda::sm90::wgmma_wait<0>();
  }
  // This warp's rows of a lower triangle, and of its transposition.
  __device__ void load_lower(uint32_t (&x)[4][4], uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0;
      if (i <= rows) cuda::load_matrices(x[i], tile_at(lanes.down, tile, 16 * rows, i));
    }
  }
  __device__ void load_upper(uint32_t (&x)[4][4], uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0;
      if (i >= rows) cuda::load_matrices_transposed(x[i], tile_at(lanes.across, tile, 16 * i, rows));
    }
  }

  __device__ void to_image(const float (&x)[32], char* image) const {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        *reinterpret_cast<uint32_t*>(image + first_column * kTile + own_at(n, e)) =
            pack<T>(x[4 * n + 2 * e], x[4 * n + 2 * e + 1]);
  }
  __device__ void store_rows(const GradItem& item, const thalweg_tensor& t, const char* image) const {
    if (!cuda::is_there(t)) return;
    T* to = row_of<T>(t, item.chunk.b, item.chunk.begin, item.h);
#pragma unroll
    for (int i = thread; i < kC * K / 8; i += kGradThreads) {
      const int row = i / (K / 8), piece = i % (K / 8);
      if (row < item.chunk.count)
        store_piece(to + row * t.stride[1] + piece * 8, image + piece_at(row, piece), call.aligned);
    }
  }

  // Waits for fill `fill`.
  __device__ const GradBuffer<K>& filled(int fill) {
    cuda::wait_copies<0>();
    cuda::fence_before_bulk();  // q, k and d_o are read by wgmma
    cuda::wait_barrier(at(&s.landed[fill & 1]), uint32_t(fill >> 1) & 1);
    __syncthreads();
    take_place();
    return s.buffer[fill & 1];
  }
  // Asks for the fill after `fill`, which is step `step` of `item`: the item's or, at its end, that of `next`.
  __device__ void fetch_ahead(const GradItem& item, const GradItem& next, int step, int fill) {
    const bool same = step + 1 < group * slices;
    const GradItem& from = same ? item : next;
    if (from.place < 0) return;
    fetch(from, same ? step + 1 : 0, fill + 1);
    cuda::commit_copies();
  }
  // Returns the number of fills so far. What can wait is done while products run.
  __device__ int run_item(const GradItem& item, const GradItem& next, int fill) {
#pragma unroll
    for (int i = 0; i < 32; ++i) d_q[i] = d_k[i] = 0.f;
    int step = 0;
    float E_n = 0.f;
    const auto store_before = [&](int x) {  // scalars of the head before head x
      if (x > 0 && warp == 0) store_scalars(item, item.h * group + x - 1, s.sums[(x - 1) & 1], E_n);
    };
    for (int x = 0; x < group; ++x, ++step, ++fill) {
      const GradBuffer<K>* in = &filled(fill);
      if (x == 0) key_products();
      S_dS = 0.f;
      slice<true>(*in, [&] {
        fetch_ahead(item, next, step, fill);
        store_before(x);
      });
      for (int part = 1; part < slices; ++part) {
        __syncthreads();  // the buffer is read
        in = &filled(++fill);
        ++step;
        slice<false>(*in, [&] { fetch_ahead(item, next, step, fill); });
      }
      E_n = in->scalars[kE][kC - 1];
      end_head(*in, s.sums[x & 1]);
      __syncthreads();
    }
    add_pairs([&] { store_before(group); });
    return fill;
  }

  __device__ void run() {
    if (thread == 0) find_item(blockIdx.x, s.item[0]);
    __syncthreads();
    if (s.item[0].place < 0) return;
    fetch_keys(s.item[0]);
    fetch(s.item[0], 0, 0);
    cuda::commit_copies();
    for (int fill = 0;;) {
      const int number = fill / (group * slices);
      const GradItem& item = s.item[number & 3];
      GradItem& next = s.item[(number + 1) & 3];
      if (thread == 0) find_item(s.index + gridDim.x, next);
      __syncthreads();
      fill = run_item(item, next, fill);
      take_place();
      if (has_d_q) to_image(d_q, s.out.d_q);
      if (has_d_k) to_image(d_k, s.out.d_k);
      __syncthreads();  // q and k are read, d_q and d_k written
      if (next.place >= 0) fetch_keys(next);
      cuda::commit_copies();
      store_rows(item, call.args.d_q, s.out.d_q);
      store_rows(item, call.args.d_k, s.out.d_k);
      if (next.place < 0) return;
    }
  }
};

// Blocks take items (a chunk and a key head) with a stride of the grid.
template <class T, int K>
__global__ void __launch_bounds__(kGradThreads, 1) gradient_kernel(const __grid_constant__ Call call) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<GradSmem<K>*>(raw);
  if (threadIdx.x == 0) {
    cuda::init_barrier(cuda::smem_address(&s.landed[0]), 1);
    cuda::init_barrier(cuda::smem_address(&s.landed[1]), 1);
    cuda::fence_barrier_init();
  }
  __syncthreads();
  Gradients<T, K> gradients(call, s);
  gradients.run();
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
