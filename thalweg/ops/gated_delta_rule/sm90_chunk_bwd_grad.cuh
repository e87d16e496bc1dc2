// Pieces of sm90_chunk_bwd.cu: d_q, d_k, d_g, d_beta of a chunk and a key head, from S, dS, r, y and d_o.
//
// A warpgroup for each 64 columns of K makes those of d_q = scale E (d_o S^T) + R k and d_k = D_n beta (r dS^T) -
// E beta (y S^T) + R^T q + (W + W^T) k, in registers over a key head's value heads. Another makes the pairs of tokens,
// R and W, of a value head and hands them over through shared memory; a fourth moves, and makes the scalars. They run
// ahead of each other as far as the stages go; blocks go from item to item.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_GRAD_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_GRAD_CUH

#include "thalweg/cuda/sm90/ptx.cuh"
#include "thalweg/cuda/sm90/smem.cuh"
#include "thalweg/cuda/sm90/wgmma.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd.cuh"

namespace thalweg::gated_delta_rule {
namespace {

template <int K>
constexpr int kGradThreads = 128 * (K / 64 + 2);
constexpr int kHeadStages = 2;
constexpr int kItems = 8;  // known at once: the warp of the scalars may be some behind the thread that looks for items

template <int K>
struct HeadStage {
  char r[K / 64 * kTile];                       // [v][token], in blocks of 64 v
  char y[K / 64 * kTile], d_o[K / 64 * kTile];  // [token][v]
  float scalars[4][kC];
};
// Sums of a value head on their way to d_g and d_beta.
struct alignas(16) HeadSums {
  float starts[2][kC];  // by 64 columns of K: E_i (scale q_i.S d_o_i - k_i.S d_v_i)
  float ends[2][kC];    // D_nj k_j.dS u_j
  float within[4][kC];  // by 16 rows i: sum over i >= t > j of R_ij q_i.k_j + W_ij k_i.k_j
  float beta[kC];       // y_i.r_i
  float states[2][4];   // S.dS, by 64 columns of K and 16 of them
  float E_n;
};
// A chunk and a key head; place < 0: none.
struct GradItem {
  Chunk chunk;
  int place, h;
};
template <int K>
struct alignas(1024) GradSmem {
  char q[K / 64 * kTile], k[K / 64 * kTile];
  HeadStage<K> head[kHeadStages];
  char S[K / 64][K / 64 * kTile], dS[K / 64][K / 64 * kTile];  // by 64 columns of K: [v][64]
  char R[kTile], W[kTile];
  HeadSums sums[2];
  GradItem item[kItems];
  uint64_t item_full[kItems];
  uint64_t keys_full, keys_empty, pairs_full, pairs_empty;
  uint64_t head_full[kHeadStages], head_empty[kHeadStages];
  uint64_t S_full[K / 64], S_empty[K / 64], dS_full[K / 64], dS_empty[K / 64];
  uint64_t sums_full[2], sums_empty[2];
};

template <class T, int K, bool beside>
struct Gradients {
  static constexpr int kBlocks = K / 64;  // of K, and of V
  const Call& call;
  const Maps& maps;
  GradSmem<K>& s;
  const int group;
  int thread, warp, lane, g, c;  // of its warpgroup
  Lanes lanes{0};
  const uint32_t block, blocks;  // of those that make gradients
  int number = 0;                // items so far
  uint32_t heads = 0;            // value heads so far

  __device__ Gradients(const Call& call, const Maps& maps, GradSmem<K>& s, uint32_t block, uint32_t blocks)
      : call(call), maps(maps), s(s), group(int(call.HV / call.H)), block(block), blocks(blocks) {
    take_place();
  }
  // Anew for every head: kept, these and the addresses that follow from them would crowd the sums out of the registers.
  __device__ void take_place() {
    thread = int(cuda::opaque(threadIdx.x) & 127);
    warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3, lanes = Lanes(lane);
  }

  __device__ static uint32_t at(const void* p) { return cuda::smem_address(p); }

  // ---- Hand-overs. A stage's n-th use completes phase n / stages of its barriers ----

  __device__ HeadStage<K>& head() const { return s.head[heads % kHeadStages]; }
  __device__ void wait(uint64_t& barrier, uint32_t phase) const { cuda::wait_barrier(at(&barrier), phase & 1); }
  __device__ void wait_head() const { wait(s.head_full[heads % kHeadStages], heads / kHeadStages); }
  __device__ void warp_arrives(uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) cuda::arrive(at(&barrier));
  }
  __device__ void head_is_read() const { warp_arrives(s.head_empty[heads % kHeadStages]); }
  __device__ HeadSums& free_sums() const {
    wait(s.sums_empty[heads & 1], (heads >> 1) + 1);
    return s.sums[heads & 1];
  }
  __device__ void sums_are_there() const { warp_arrives(s.sums_full[heads & 1]); }
  // The next item.
  __device__ const GradItem& next_item() {
    wait(s.item_full[number % kItems], uint32_t(number) / kItems);
    return s.item[number++ % kItems];
  }

  // ---- Moving ----

  // Beside the scans the chunks in the middle of sequences come first, as both directions pass them first.
  __device__ uint32_t place_of_rank(uint32_t rank) const {
    const uint32_t N = uint32_t(call.N), each = uint32_t(call.at.chunks) / N, k = rank / N;
    if (k >= each) return rank;
    return (rank - k * N) * each + each / 2 + (k % 2 == 0 ? k / 2 : ~(k / 2));
  }
  // The first item from index i on, in steps of the grid, that has tokens; returns the index. There are fewer than
  // 2^31.
  __device__ uint32_t find_item(uint32_t i, GradItem& to) const {
    const uint32_t H = uint32_t(call.H), items = uint32_t(call.at.chunks) * H;
    for (; i < items; i += blocks) {
      const uint32_t rank = i / H, place = beside ? place_of_rank(rank) : rank;
      const Chunk chunk = chunk_at(call, place);
      if (chunk.count == 0) continue;
      to = {chunk, int(place), int(i - rank * H)};
      return i;
    }
    to.place = -1;
    return i;
  }
  __device__ void wait_for_scans(int place, int h) const {
    while (cuda::sm90::load_acquire(call.ready(place, h)) < call.ready_count()) {
    }
    cuda::sm90::fence_proxy_async_global();
  }
  // One thread: items, and by bulk copies all that the kernels before have left.
  __device__ void move_states() {
    for (uint32_t i = block;; i += blocks) {
      GradItem& item = s.item[number % kItems];
      i = find_item(i, item);
      cuda::arrive(at(&s.item_full[number++ % kItems]));
      if (item.place < 0) return;
      if constexpr (beside) wait_for_scans(item.place, item.h);
      for (int x = 0; x < group; ++x, ++heads) {
        const int hv = item.h * group + x;
        const uint32_t full = at(&s.head_full[heads % kHeadStages]);
        wait(s.head_empty[heads % kHeadStages], heads / kHeadStages + 1);
        cuda::arrive_expecting(full, 2 * kBlocks * kTile + kScalarBytes);
        cuda::bulk_load(at(head().r), call.rows(call.at.r, item.place, hv, 0), kBlocks * kTile, full);
        cuda::bulk_load(at(head().y), call.rows(call.at.y, item.place, hv, 0), kBlocks * kTile, full);
        cuda::bulk_load(at(head().scalars), call.scalars(item.place, hv), kScalarBytes, full);
#pragma unroll 1
        for (int part = 0; part < kBlocks; ++part) {
          move_state(s.dS[part], call.at.dS, item.place, hv, part, s.dS_full[part], s.dS_empty[part]);
          move_state(s.S[part], call.at.S, item.place, hv, part, s.S_full[part], s.S_empty[part]);
        }
      }
    }
  }
  __device__ void move_state(char* to, int64_t from, int place, int hv, int part, uint64_t& full,
                             uint64_t& empty) const {
    wait(empty, heads + 1);
    cuda::arrive_expecting(at(&full), kBlocks * kTile);
#pragma unroll
    for (int slice = 0; slice < kBlocks; ++slice)
      cuda::bulk_load(at(to) + slice * kTile, call.state(from, place, hv, slice) + part * kTile, kTile, at(&full));
  }
  // By one warp: a chunk's rows of a head, all K of them, and their announcement.
  __device__ void copy_tiles(char* to, const thalweg_tensor& t, const CUtensorMap& map, const Chunk& chunk, int head,
                             uint64_t& barrier) const {
    const bool there = cuda::is_there(t);
    if (call.tma && there && chunk.count == kC) {
      if (lane == 0) load_boxes(at(to), map, chunk, head, 0, kBlocks, at(&barrier));
      return;
    }
#pragma unroll 1
    for (int i = lane; i < kC * K / 8; i += 32) {
      const int row = i / (K / 8), piece = i % (K / 8);
      const bool wanted = there && row < chunk.count;
      const T* from = wanted ? row_of<const T>(t, chunk.b, chunk.begin + row, head) + 8 * piece
                             : reinterpret_cast<const T*>(call.workspace);
      fetch_piece(to + piece_at(row, piece), from, wanted, call.aligned);
    }
    cuda::commit_copies();
    cuda::wait_copies<0>();
    cuda::fence_before_bulk();  // wgmma reads what was copied
  }
  // One warp: q, k and d_o. The next item's first d_o before its keys, whose place is free later.
  __device__ void move_rows() {
    for (;;) {
      const GradItem& item = next_item();
      if (item.place < 0) return;
      const Chunk& chunk = item.chunk;
      for (int i = 0; i < group; ++i, ++heads) {
        uint64_t& there = s.head_full[heads % kHeadStages];
        wait(s.head_empty[heads % kHeadStages], heads / kHeadStages + 1);
        copy_tiles(head().d_o, call.args.d_o, maps.d_o, chunk, item.h * group + i, there);
        warp_arrives(there);
        if (i > 0) continue;
        wait(s.keys_empty, uint32_t(number));
        copy_tiles(s.q, call.args.q, maps.q, chunk, item.h, s.keys_full);
        copy_tiles(s.k, call.args.k, maps.k, chunk, item.h, s.keys_full);
        warp_arrives(s.keys_full);
      }
    }
  }
  // One warp: d_g and d_beta.
  __device__ void make_scalars() {
    for (;;) {
      const GradItem& item = next_item();
      if (item.place < 0) return;
      for (int x = 0; x < group; ++x, ++heads) {
        wait(s.sums_full[heads & 1], heads >> 1);
        store_head(item, item.h * group + x, s.sums[heads & 1]);
        warp_arrives(s.sums_empty[heads & 1]);
      }
    }
  }
  // d_g and d_beta of a head, lane l those of tokens 2l and 2l+1.
  __device__ void store_head(const GradItem& item, int hv, const HeadSums& sums) const {
    const auto pair = [&](const float* x) { return reinterpret_cast<const float2*>(x)[lane]; };
    const auto both = [&](const float(&x)[2][kC]) {
      const float2 low = pair(x[0]), high = kBlocks == 2 ? pair(x[1]) : float2{0.f, 0.f};
      return float2{low.x + high.x, low.y + high.y};
    };
    const float2 starts = both(sums.starts), ends = both(sums.ends), beta = pair(sums.beta);
    float2 within = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = pair(sums.within[i]);
      within.x += x.x, within.y += x.y;
    }
    float after = starts.x + starts.y, before = ends.x + ends.y;  // sums over the lanes from, up to, this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float x = __shfl_down_sync(0xffffffffu, after, step), z = __shfl_up_sync(0xffffffffu, before, step);
      after += lane + step < 32 ? x : 0.f;
      before += lane >= step ? z : 0.f;
    }
    const float up_to_last = __shfl_up_sync(0xffffffffu, before, 1);
    const float from_next = __shfl_down_sync(0xffffffffu, after, 1);
    before = lane == 0 ? 0.f : up_to_last;
    float S_dS = 0.f;
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) S_dS += sums.states[i / 4][i % 4];
    S_dS *= sums.E_n;
    const float d_g[2] = {S_dS + before + after + within.x,
                          S_dS + (before + ends.x) + (starts.y + (lane == 31 ? 0.f : from_next)) + within.y};
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
      put(x.d_beta, e ? beta.y : beta.x);
    }
  }

  // ---- Products: between a fence and a wait ----

  // x (+)= a b, b [64 inner][64 columns] a tile; a a tile [64 tokens][64 inner], or [inner][token] with kMajorM.
  template <int kMajorM>
  __device__ static void times(float (&x)[32], uint32_t rows, uint32_t tile, bool accumulate) {
    const uint64_t a = cuda::sm90::descriptor(rows), b = cuda::sm90::descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      cuda::sm90::wgmma_ss_n64<T, kMajorM, 1>(x, cuda::sm90::advanced(a, step * (kMajorM ? 2048 : 32)),
                                              cuda::sm90::advanced(b, step * 2048), accumulate || step > 0);
  }
  // The same over all blocks of V.
  template <int kMajorM>
  __device__ static void times_all(float (&x)[32], const char* rows, const char* tiles) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) times<kMajorM>(x, at(rows) + i * kTile, at(tiles) + i * kTile, i > 0);
  }
  // x = a k^T over K
  __device__ void times_keys(float (&x)[32], const char* rows) const {
    const uint64_t a = cuda::sm90::descriptor(at(rows)), b = cuda::sm90::descriptor(at(s.k));
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
      const uint32_t by = step / 4 * kTile + step % 4 * 32;
      cuda::sm90::wgmma_ss_n64<T, 0, 0>(x, cuda::sm90::advanced(a, by), cuda::sm90::advanced(b, by), step > 0);
    }
  }

  // ---- 64 columns of d_q and d_k ----

  // Of this lane's rows, times beta if asked for.
  __device__ void row_factors(const float (&of)[4][kC], Scalar which, bool with_beta, float (&f)[2]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 16 * warp + g + 8 * e;
      f[e] = with_beta ? of[which][i] * of[kBeta][i] : of[which][i];
    }
  }
  // sum += factor x; dots += factor x.keys, by row; keys: block of 64 columns.
  __device__ void add_rows(const float (&x)[32], const float (&factor)[2], const char* keys, float (&sum)[32],
                           float (&dots)[2]) const {
    float along[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t pairs[4];
      cuda::load_matrices(pairs, tile_at(lanes.down, at(keys), 16 * warp, n));
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows g, g + 8 of 8 columns, then of the next 8
        const float2 k = unpack<T>(pairs[i]);
        const int e = i & 1, from = 8 * n + 2 * i;
        sum[from] += factor[e] * x[from], sum[from + 1] += factor[e] * x[from + 1];
        along[e] += x[from] * k.x + x[from + 1] * k.y;
      }
    }
    dots[0] += factor[0] * along[0], dots[1] += factor[1] * along[1];
  }
  // Of a 64 x 64 product.
  __device__ float sum_of_diagonal(const float (&x)[32]) const {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {  // columns 8n and on are rows g + 8 (n % 2) of warp n / 2
      const float* pair = x + 4 * n + 2 * (n & 1);
      const float mine = g == 2 * c ? pair[0] : g == 2 * c + 1 ? pair[1] : 0.f;
      sum += n / 2 == warp ? mine : 0.f;
    }
    return cuda::warp_sum(sum);
  }
  // Dots of the lanes that share rows, to their place.
  __device__ void put_dots(const float (&dots)[2], float* to) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = quad_sum(dots[e]);
      if (c == 0) to[16 * warp + g + 8 * e] = sum;
    }
  }
  // A quad's lanes have 4 bytes each of four pieces of 16; afterwards lane c has piece c.
  __device__ void exchange(uint32_t (&x)[4]) const {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & step) continue;
        const bool odd = c & step;
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i ^ step], step);
        x[i] = odd ? other : x[i];
        x[i ^ step] = odd ? x[i ^ step] : other;
      }
  }
  __device__ void store_rows(const GradItem& item, const thalweg_tensor& t, int part, const float (&x)[32]) const {
    if (!cuda::is_there(t)) return;
    T* to = row_of<T>(t, item.chunk.b, item.chunk.begin, item.h) + (16 * warp + g) * t.stride[1] + 64 * part + 8 * c;
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        uint32_t piece[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) piece[i] = pack<T>(x[4 * (n + i) + 2 * e], x[4 * (n + i) + 2 * e + 1]);
        exchange(piece);
        const uint4 out = {piece[0], piece[1], piece[2], piece[3]};
        if (16 * warp + g + 8 * e < item.chunk.count)
          store_piece(to + 8 * e * t.stride[1] + 8 * n, reinterpret_cast<const char*>(&out), call.aligned);
      }
  }
  __device__ void run_columns(int part) {
    float d_q[32], d_k[32], x[32], y[32];
    for (;;) {
      const GradItem& item = next_item();
      if (item.place < 0) return;
#pragma unroll
      for (int i = 0; i < 32; ++i) d_q[i] = d_k[i] = 0.f;
      for (int head_of_group = 0; head_of_group < group; ++head_of_group, ++heads) {
        wait_head();
        const HeadStage<K>& in = head();
        // Anew for every head: descriptions of tiles that are kept crowd the sums out of the registers.
        lanes.down = cuda::opaque(lanes.down);
        const uint32_t here = __shfl_sync(0xffffffffu, cuda::opaque(part * kTile), 0);
        const char *q = s.q + here, *k = s.k + here, *S = s.S[0] + kBlocks * here, *dS = s.dS[0] + kBlocks * here;
        wait(s.dS_full[part], heads);
        wait(s.S_full[part], heads);
        cuda::sm90::wgmma_fence();
        times_all<1>(x, S, dS);
        cuda::sm90::wgmma_commit();
        times_all<1>(y, in.r, dS);
        cuda::sm90::wgmma_commit();
        float f[2], starts[2] = {0.f, 0.f}, ends[2] = {0.f, 0.f};
        cuda::sm90::wgmma_wait<1>();
        const float S_dS = sum_of_diagonal(x);
        cuda::sm90::wgmma_fence();
        times_all<0>(x, in.y, S);
        cuda::sm90::wgmma_commit();
        if (head_of_group == 0) wait(s.keys_full, uint32_t(number - 1));
        cuda::sm90::wgmma_wait<1>();
        warp_arrives(s.dS_empty[part]);
        row_factors(in.scalars, kDn, true, f);
        add_rows(y, f, k, d_k, ends);
        cuda::sm90::wgmma_fence();
        times_all<0>(y, in.d_o, S);
        cuda::sm90::wgmma_commit();
        cuda::sm90::wgmma_wait<1>();
        row_factors(in.scalars, kE, true, f);
        f[0] = -f[0], f[1] = -f[1];
        add_rows(x, f, k, d_k, starts);
        row_factors(in.scalars, kE, false, f);
        f[0] *= call.scale, f[1] *= call.scale;
        cuda::sm90::wgmma_wait<0>();
        warp_arrives(s.S_empty[part]);
        head_is_read();
        add_rows(y, f, q, d_q, starts);
        HeadSums& sums = free_sums();
        if (lane == 0) sums.states[part][warp] = S_dS;
        put_dots(starts, sums.starts[part]);
        put_dots(ends, sums.ends[part]);
        sums_are_there();
        wait(s.pairs_full, heads);
        cuda::sm90::wgmma_fence();
        times<0>(d_q, at(s.R), at(k), true);
        times<1>(d_k, at(s.R), at(q), true);
        times<0>(d_k, at(s.W), at(k), true);
        times<1>(d_k, at(s.W), at(k), true);
        cuda::sm90::wgmma_commit();
        cuda::sm90::wgmma_wait<0>();
        warp_arrives(s.pairs_empty);
      }
      warp_arrives(s.keys_empty);
      store_rows(item, call.args.d_q, part, d_q);
      store_rows(item, call.args.d_k, part, d_k);
    }
  }

  // ---- Pairs of tokens: R, W, and what of d_g and d_beta follows from them ----

  // R and W of this warp's rows from d_o.r and y.r, with beta_j, to their tiles; diagonal: y_i.r_i.
  __device__ void weigh(const HeadStage<K>& in, const float (&d_o_r)[32], const float (&y_r)[32],
                        float (&diagonal)[2]) const {
    float Gi[2], beta_i[2];
    row_factors(in.scalars, kG, false, Gi);
    row_factors(in.scalars, kBeta, false, beta_i);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t R[4], W[4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int column = 16 * n + 8 * m + 2 * c;
        const float2 Gj = *reinterpret_cast<const float2*>(in.scalars[kG] + column);
        const float2 beta = *reinterpret_cast<const float2*>(in.scalars[kBeta] + column);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 16 * warp + g + 8 * e;
          float r[2], w[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int at = 8 * n + 4 * m + 2 * e + j;
            const float D = cuda::exp2_fast(Gi[e] - (j ? Gj.y : Gj.x)) * (j ? beta.y : beta.x);
            r[j] = column + j <= i ? call.scale * (D * d_o_r[at]) : 0.f;
            w[j] = column + j < i ? -beta_i[e] * (D * y_r[at]) : 0.f;
            diagonal[e] = column + j == i ? y_r[at] : diagonal[e];
          }
          R[2 * m + e] = pack<T>(r[0], r[1]), W[2 * m + e] = pack<T>(w[0], w[1]);
        }
      }
      const uint32_t to = tile_at(lanes.down, 0, 16 * warp, n);
      cuda::store_matrices(at(s.R) + to, R[0], R[1], R[2], R[3]);
      cuda::store_matrices(at(s.W) + to, W[0], W[1], W[2], W[3]);
    }
  }
  // z: R q.k + W k.k of this warp's rows.
  __device__ void times_pairs(const uint32_t (&qk)[16], const uint32_t (&kk)[16], uint32_t (&z)[16]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n == 2) __syncwarp();  // not all loads at once: there are not the registers
      uint32_t R[4], W[4];
      const uint32_t from = tile_at(lanes.down, 0, 16 * warp, n);
      cuda::load_matrices(R, at(s.R) + from);
      cuda::load_matrices(W, at(s.W) + from);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 r = unpack<T>(R[i]), w = unpack<T>(W[i]);
        const float2 x = unpack<cuda::bf16>(qk[4 * n + i]), y = unpack<cuda::bf16>(kk[4 * n + i]);
        z[4 * n + i] = pack<cuda::bf16>(r.x * x.x + w.x * y.x, r.y * x.y + w.y * y.y);
      }
    }
  }
  // within_t = sum_j<t sum_i>=t z_ij over this warp's rows i: only terms that token t's decay is a factor of. The inner
  // sum is a product of a triangle of ones with z^T.
  __device__ void put_within(const uint32_t (&z)[16], float* to) const {
    const auto ones = [&](int t, int k) { return pack<cuda::bf16>(k < t ? 1.f : 0.f, k + 1 < t ? 1.f : 0.f); };
    const uint32_t below[4] = {ones(g, 2 * c), ones(g + 8, 2 * c), ones(g, 2 * c + 8), ones(g + 8, 2 * c + 8)};
    const uint32_t one = pack<cuda::bf16>(1.f, 1.f), all[4] = {one, one, one, one};
    float before[2][4];  // of the columns of earlier blocks, by 8 rows i
    zero(before);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x[4] = {before[e][0], before[e][1], before[e][2], before[e][3]};
        mma<cuda::bf16>(x, below, z[4 * n + e], z[4 * n + 2 + e]);
        if (n < 3) mma<cuda::bf16>(before[e], all, z[4 * n + e], z[4 * n + 2 + e]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 16 * warp + 8 * e + 2 * c + (j & 1), t = 16 * n + g + (j >> 1) * 8;
          sums[j >> 1] += i >= t ? x[j] : 0.f;
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = quad_sum(sums[e]);
        if (c == 0) to[16 * n + g + 8 * e] = sum;
      }
    }
  }
  __device__ void key_products(uint32_t (&qk)[16], uint32_t (&kk)[16]) const {
    float x[32], y[32];
    cuda::sm90::wgmma_fence();
    times_keys(x, s.q);
    times_keys(y, s.k);
    cuda::sm90::wgmma_commit();
    cuda::sm90::wgmma_wait<0>();
    // tiles 2n and 2n+1, rows g and g + 8
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      qk[i] = pack<cuda::bf16>(x[2 * i], x[2 * i + 1]);
      kk[i] = pack<cuda::bf16>(y[2 * i], y[2 * i + 1]);
    }
  }
  __device__ void run_pairs() {
    uint32_t qk[16], kk[16];
    for (;;) {
      const GradItem& item = next_item();
      if (item.place < 0) return;
      for (int head_of_group = 0; head_of_group < group; ++head_of_group, ++heads) {
        take_place();
        wait_head();
        const HeadStage<K>& in = head();
        float d_o_r[32], y_r[32], diagonal[2] = {0.f, 0.f};
        uint32_t z[16];
        cuda::sm90::wgmma_fence();
        times_all<0>(d_o_r, in.d_o, in.r);
        times_all<0>(y_r, in.y, in.r);
        cuda::sm90::wgmma_commit();
        wait(s.pairs_empty, heads + 1);
        cuda::sm90::wgmma_wait<0>();
        weigh(in, d_o_r, y_r, diagonal);
        cuda::fence_before_bulk();  // wgmma reads R and W
        warp_arrives(s.pairs_full);
        HeadSums& sums = free_sums();
        // The diagonal is in the lane whose columns 2c, 2c+1 hold g.
        if (g / 2 == c) sums.beta[16 * warp + g] = diagonal[0], sums.beta[16 * warp + g + 8] = diagonal[1];
        if (thread == 0) sums.E_n = in.scalars[kE][kC - 1];
        head_is_read();
        if (head_of_group == 0) {
          wait(s.keys_full, uint32_t(number - 1));
          key_products(qk, kk);
          warp_arrives(s.keys_empty);
        }
        times_pairs(qk, kk, z);
        put_within(z, sums.within[warp]);
        sums_are_there();
      }
    }
  }
};

// Blocks take items (a chunk and a key head) with a stride of the grid.
template <class T, int K, bool beside>
__device__ void gradient_block(const Call& call, const Maps& maps, char* raw, uint32_t block, uint32_t blocks) {
  auto& s = *reinterpret_cast<GradSmem<K>*>(raw);
  constexpr int kBlocks = K / 64, kReaders = 4 * kBlocks + 4;  // warps that read a head's rows
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      cuda::init_barrier(cuda::smem_address(&barrier), uint32_t(arrivals));
    };
    for (int i = 0; i < kItems; ++i) init(s.item_full[i], 1);
    init(s.keys_full, 1), init(s.keys_empty, kReaders), init(s.pairs_full, 4), init(s.pairs_empty, 4 * kBlocks);
    for (int i = 0; i < kHeadStages; ++i) init(s.head_full[i], 2), init(s.head_empty[i], kReaders);
    for (int i = 0; i < kBlocks; ++i) {
      init(s.S_full[i], 1), init(s.S_empty[i], 4);
      init(s.dS_full[i], 1), init(s.dS_empty[i], 4);
    }
    for (int i = 0; i < 2; ++i) init(s.sums_full[i], kReaders), init(s.sums_empty[i], 1);
    cuda::fence_barrier_init();
  }
  __syncthreads();
  // Each role makes its own place: kept from before, it would crowd the sums out of the registers.
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role < kBlocks) {
    cuda::sm90::setmaxnreg_inc<K == 128 ? 168 : 216>();
    Gradients<T, K, beside>(call, maps, s, block, blocks).run_columns(role);
  } else if (role == kBlocks) {
    cuda::sm90::setmaxnreg_inc<K == 128 ? 128 : 216>();
    Gradients<T, K, beside>(call, maps, s, block, blocks).run_pairs();
  } else {
    cuda::sm90::setmaxnreg_dec<K == 128 ? 48 : 72>();
    Gradients<T, K, beside> gradients(call, maps, s, block, blocks);
    if (gradients.warp == 0) {
      if (gradients.lane == 0) gradients.move_states();
    } else if (gradients.warp == 1) {
      gradients.move_rows();
    } else if (gradients.warp == 2) {
      gradients.make_scalars();
    }
  }
}

template <class T, int K>
__global__ void __launch_bounds__(kGradThreads<K>, 1)
    gradient_kernel(const __grid_constant__ Call call, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char raw[];
  gradient_block<T, K, false>(call, maps, raw, blockIdx.x, gridDim.x);
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
