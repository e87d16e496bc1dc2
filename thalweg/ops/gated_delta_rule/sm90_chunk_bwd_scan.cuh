// Pieces of sm90_chunk_bwd.cu: the two recurrences along a sequence, one grid. A block owns 64 columns of V of one
// value head, forward (the states S that enter each chunk, and r) or in reverse (dS that leaves each chunk, y, d_v).
//
// One warpgroup holds the state transposed, [64 v][K], in the accumulators of wgmma; rounded, the same registers are
// operand a of the next product. All products have tokens or K along their columns, so nothing is exchanged between
// warps. Of the others, which wait for each other through shared memory alone, one warp loads, up to kStages chunks
// ahead - one thread of it, but for the last rows of a sequence and tensors that TMA cannot read -, one stores states
// and rows as they lie, and in reverse two make scale E d_o, ahead of the chunk that needs it, and two d_v.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_SCAN_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_SCAN_CUH

#include <stddef.h>

#include "thalweg/cuda/sm90/smem.cuh"
#include "thalweg/cuda/sm90/wgmma.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd.cuh"

namespace thalweg::gated_delta_rule {
namespace {

constexpr int kScanThreads = 384;  // a warpgroup that computes, four warps that move, two that make d_v, two more
constexpr int kStages = 3;

template <int K>
struct ScanStage {
  char k[K / 64 * kTile], q[K / 64 * kTile];  // q in reverse only
  char v[kTile];                              // v, or d_o in reverse: [token][v]
  char d_o_decayed[kTile];                    // in reverse: scale E d_o
  char X[kTile], P[kTile];                    // P in reverse only
  float scalars[4][kC];
};
template <int K>
struct alignas(1024) ScanSmem {
  ScanStage<K> stage[kStages];
  // On their way out:
  char state[K / 64 * kTile];  // [v][K]
  char rows[kTile];            // r, [v][token], or y, [token][v]
  uint64_t full[kStages], decayed[kStages], empty[kStages];
  uint64_t state_full, state_empty, rows_full, rows_empty;
  int stored;  // chunks whose states and rows are in memory
};

// A block's work.
struct Chain {
  int64_t n, hv, slice;
  bool reverse;
};

__device__ inline Chain chain_of(const Call& call, int64_t block) {
  const int64_t chains = call.N * call.HV * call.VS;
  const bool reverse = block < chains;
  if (!reverse) block -= chains;
  return {block / (call.VS * call.HV), block / call.VS % call.HV, block % call.VS, reverse};
}

// ---- The moving warps ----

// Walks over the chunks of a chain in its order.
struct ChunkWalk {
  int count, i = 0;  // chunks of the sequence, chunks done
  bool reverse;
  __device__ ChunkWalk(const Sequence& seq, bool reverse) : count(int(seq.chunks())), reverse(reverse) {}
  __device__ bool ends() const { return i == count; }
  __device__ int at() const { return reverse ? count - 1 - i : i; }  // chunk
};

// 16-byte piece `x` times f.
template <class T>
__device__ uint4 times_piece(const uint4& x, float f) {
  const auto both = [&](uint32_t pair) {
    const float2 y = unpack<T>(pair);
    return pack<T>(f * y.x, f * y.y);
  };
  return {both(x.x), both(x.y), both(x.z), both(x.w)};
}
// The rows of 64 columns that a moving thread has in hand: every eighth from thread / 8, piece thread % 8.
constexpr int kOwnRows = 8;
__device__ inline void load_factors(const float* from, int thread, float (&f)[kOwnRows]) {
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) f[i] = from[thread / 8 + 8 * i];
}
__device__ inline void warp_arrives(uint64_t& barrier, int thread) {
  __syncwarp();
  if (thread % 32 == 0) cuda::arrive(cuda::smem_address(&barrier));
}

// In reverse, two warps: scale E d_o.
template <class T, int K>
__device__ void decay_chunks(const Call& call, const Sequence& seq, ScanSmem<K>& s, int thread) {
  int stage = 0;
  uint32_t parity = 0;
  for (ChunkWalk walk(seq, true); !walk.ends(); ++walk.i) {
    ScanStage<K>& in = s.stage[stage];
    cuda::wait_barrier(cuda::smem_address(&s.full[stage]), parity);
    float E[kOwnRows];
    load_factors(in.scalars[kE], thread, E);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const uint32_t at = piece_at(thread / 8, thread % 8) + i * 8 * 128;
      *reinterpret_cast<uint4*>(in.d_o_decayed + at) =
          times_piece<T>(*reinterpret_cast<const uint4*>(in.v + at), call.scale * E[i]);
    }
    cuda::fence_before_bulk();  // wgmma reads them
    warp_arrives(s.decayed[stage], thread);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

// One thread: an image that the computing warps have left, which is free afterwards.
__device__ inline void store_image(char* to, const char* from, uint32_t bytes, uint64_t& full, uint64_t& empty,
                                   uint32_t parity) {
  cuda::wait_barrier(cuda::smem_address(&full), parity);
  cuda::fence_before_bulk();  // on the way from their writes to the copy's reads
  cuda::bulk_store(to, cuda::smem_address(from), bytes);
  cuda::commit_bulk_stores();
  cuda::wait_bulk_stores_read();
  cuda::arrive(cuda::smem_address(&empty));
}

// One warp. A chunk's place is free once the computing warps have read it: what else reads it comes before them.
template <class T, int K>
__device__ void load_chunks(const Call& call, const Maps& maps, const Chain& w, const Sequence& seq, ScanSmem<K>& s,
                            int lane) {
  const Args& a = call.args;
  const thalweg_tensor& vo = w.reverse ? a.d_o : a.v;
  const bool there = cuda::is_there(vo);
  const int64_t h = w.hv / (call.HV / call.H);
  int stage = 0;
  uint32_t parity = 1;  // a fresh barrier has completed the phase before its first
  for (ChunkWalk walk(seq, w.reverse); !walk.ends(); ++walk.i) {
    const Chunk chunk = chunk_of(seq, walk.at());
    const int64_t place = seq.first_chunk + walk.at();
    ScanStage<K>& to = s.stage[stage];
    const uint32_t full = cuda::smem_address(&s.full[stage]);
    cuda::wait_barrier(cuda::smem_address(&s.empty[stage]), parity);
    if (lane == 0) {
      expect_bytes(full, (w.reverse ? 2 : 1) * kTile + kScalarBytes);
      cuda::bulk_load(cuda::smem_address(to.scalars), call.scalars(place, w.hv), kScalarBytes, full);
      cuda::bulk_load(cuda::smem_address(to.X), call.square(call.at.X, place, w.hv), kTile, full);
      if (w.reverse) cuda::bulk_load(cuda::smem_address(to.P), call.square(call.at.P, place, w.hv), kTile, full);
    }
    if (call.tma && there && chunk.count == kC) {
      if (lane == 0) {
        load_boxes(cuda::smem_address(to.k), maps.k, chunk, h, 0, K / 64, full);
        if (w.reverse) load_boxes(cuda::smem_address(to.q), maps.q, chunk, h, 0, K / 64, full);
        load_boxes(cuda::smem_address(to.v), w.reverse ? maps.d_o : maps.v, chunk, w.hv, int(w.slice), 1, full);
      }
    } else {
      const auto copy = [&](char* to, const T* from, int64_t stride, int count) {
        copy_rows<T, 64, 32>(to, from, stride, count, lane, call.aligned);
      };
      for (int i = 0; i < K / 64; ++i) {
        copy(to.k + i * kTile, row_of<const T>(a.k, chunk.b, chunk.begin, h) + 64 * i, a.k.stride[1], chunk.count);
        if (w.reverse)
          copy(to.q + i * kTile, row_of<const T>(a.q, chunk.b, chunk.begin, h) + 64 * i, a.q.stride[1], chunk.count);
      }
      const T* from = there ? row_of<const T>(vo, chunk.b, chunk.begin, w.hv) + 64 * w.slice
                            : reinterpret_cast<const T*>(call.workspace);
      copy(to.v, from, there ? vo.stride[1] : 0, there ? chunk.count : 0);
      cuda::commit_copies();
      cuda::wait_copies<0>();
      cuda::fence_before_bulk();  // wgmma reads what was copied
    }
    warp_arrives(s.full[stage], lane);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

// One thread: states, r and y.
template <int K, bool beside>
__device__ void store_chunks(const Call& call, const Chain& w, const Sequence& seq, ScanSmem<K>& s) {
  uint32_t parity = 0;
  const auto arrived = [&](int chunks) {
    if constexpr (!beside) return;
    __threadfence_block();
    *static_cast<volatile int*>(&s.stored) = chunks;
  };
  for (ChunkWalk walk(seq, w.reverse); !walk.ends(); ++walk.i, parity ^= 1) {
    const int64_t place = seq.first_chunk + walk.at();
    store_image(call.state(w.reverse ? call.at.dS : call.at.S, place, w.hv, w.slice), s.state, K / 64 * kTile,
                s.state_full, s.state_empty, parity);
    store_image(call.rows(w.reverse ? call.at.y : call.at.r, place, w.hv, w.slice), s.rows, kTile, s.rows_full,
                s.rows_empty, parity);
    if constexpr (beside) cuda::wait_bulk_stores<2>();  // all but this chunk's
    arrived(walk.i);
  }
  cuda::wait_bulk_stores();
  arrived(int(seq.chunks()));
}

// One thread: tells the gradients of chunks that have been stored. A fence takes longer than the storing one has time.
template <int K>
__device__ void announce_chunks(const Call& call, const Chain& w, const Sequence& seq, const ScanSmem<K>& s) {
  const int64_t h = w.hv / (call.HV / call.H);
  int stored = 0;
  for (ChunkWalk walk(seq, w.reverse); !walk.ends(); ++walk.i) {
    while (stored <= walk.i) {
      stored = *static_cast<const volatile int*>(&s.stored);
      if (stored > walk.i) __threadfence();
    }
    atomicAdd(call.ready(seq.first_chunk + walk.at(), h), 1);
  }
}

// In reverse, two warps: d_v = beta y.
template <class T, int K>
__device__ void store_d_v(const Call& call, const Chain& w, const Sequence& seq, ScanSmem<K>& s, int thread) {
  const thalweg_tensor& d_v = call.args.d_v;
  const int64_t stride = d_v.stride[1];
  T* rows = row_of<T>(d_v, seq.b, seq.begin + thread / 8, w.hv) + 64 * w.slice + thread % 8 * 8;
  uint32_t parity = 0;
  for (ChunkWalk walk(seq, true); !walk.ends(); ++walk.i, parity ^= 1) {
    const int64_t first = int64_t(walk.at()) * kC, count = seq.length - first;
    float beta[kOwnRows];
    load_factors(call.scalars(seq.first_chunk + walk.at(), w.hv) + kBeta * kC, thread, beta);
    cuda::wait_barrier(cuda::smem_address(&s.rows_full), parity);
    uint4 y[kOwnRows];
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i)
      y[i] = *reinterpret_cast<const uint4*>(s.rows + piece_at(thread / 8, thread % 8) + i * 8 * 128);
    warp_arrives(s.rows_empty, thread);
    T* to = rows + first * stride;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i, to += 8 * stride) {
      const uint4 x = times_piece<T>(y[i], beta[i]);
      if (thread / 8 + 8 * i < count) store_piece(to, reinterpret_cast<const char*>(&x), call.aligned);
    }
  }
}

// ---- The computing warpgroup ----

template <class T, int K>
struct Scan {
  const Call& call;
  const Chain& chain;
  ScanSmem<K>& s;
  int warp, lane, g, c;
  Lanes lanes;
  float S[K / 2];  // S^T or dS^T: S[4n + e] has row v = 16 warp + g (+8), column k = 8n + 2c (+1)
  float x[32];     // [64 v][64 tokens]

  __device__ Scan(const Call& call, const Chain& chain, ScanSmem<K>& s, int warp, int lane)
      : call(call), chain(chain), s(s), warp(warp), lane(lane), g(lane >> 2), c(lane & 3), lanes(lane) {}

  __device__ static uint32_t at(const void* p) { return cuda::smem_address(p); }

  // f(element of S, where it is from this head's first on) for all of this lane's, given strides of k and v.
  template <class F>
  __device__ void each(int64_t stride_k, int64_t stride_v, const F& f) {
    int64_t at = 2 * c * stride_k + (64 * chain.slice + 16 * warp + g) * stride_v;
#pragma unroll
    for (int n = 0; n < K / 8; ++n, at += 8 * stride_k) {
      f(S[4 * n], at), f(S[4 * n + 1], at + stride_k);
      f(S[4 * n + 2], at + 8 * stride_v), f(S[4 * n + 3], at + 8 * stride_v + stride_k);
    }
  }
  // float32 without asking every element for its type: else each load would wait for the one before.
  __device__ void load_state(const thalweg_tensor& t) {
    const int64_t head = cuda::is_there(t) ? chain.n * t.stride[0] + chain.hv * t.stride[1] : 0;
    if (!cuda::is_there(t)) {
      each(0, 0, [](float& x, int64_t) { x = 0.f; });
    } else if (t.dtype == THALWEG_F32) {
      const float* from = static_cast<const float*>(t.data) + head;
      each(t.stride[2], t.stride[3], [&](float& x, int64_t at) { x = from[at]; });
    } else {
      each(t.stride[2], t.stride[3], [&](float& x, int64_t at) { x = cuda::load_at<float>(t, head + at); });
    }
  }
  __device__ void store_state(const thalweg_tensor& t, bool valid) {
    if (!cuda::is_there(t)) return;
    const int64_t head = chain.n * t.stride[0] + chain.hv * t.stride[1];
    const auto value = [&](float x) { return valid ? x : cuda::nan_of<float>(); };
    if (t.dtype == THALWEG_F32) {
      float* to = static_cast<float*>(t.data) + head;
      each(t.stride[2], t.stride[3], [&](float& x, int64_t at) { to[at] = value(x); });
    } else {
      each(t.stride[2], t.stride[3], [&](float& x, int64_t at) { cuda::store_at(t, head + at, value(x)); });
    }
  }

  // Four neighbours of two C tiles, from p[8n], as operand a.
  __device__ static void operand(const float* p, uint32_t (&a)[4]) {
    a[0] = pack<T>(p[0], p[1]), a[1] = pack<T>(p[2], p[3]), a[2] = pack<T>(p[4], p[5]), a[3] = pack<T>(p[6], p[7]);
  }
  // Factors of the tokens that those belong to: 16n + 2c, +1, +8, +9.
  __device__ float4 factors(const float* of, int n) const {
    const float2 low = *reinterpret_cast<const float2*>(of + 16 * n + 2 * c);
    const float2 high = *reinterpret_cast<const float2*>(of + 16 * n + 8 + 2 * c);
    return {low.x, low.y, high.x, high.y};
  }
  __device__ void all_factors(const float* of, float4 (&to)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) to[n] = factors(of, n);
  }
  // of times by, or its negative
  __device__ void all_factors(const float* of, const float4 (&by)[4], float sign, float4 (&to)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 x = factors(of, n);
      to[n] = {sign * x.x * by[n].x, sign * x.y * by[n].y, sign * x.z * by[n].z, sign * x.w * by[n].w};
    }
  }
  __device__ void scaled_operand(int n, const float4& f, uint32_t (&a)[4]) const {
    const float* p = x + 8 * n;
    a[0] = pack<T>(p[0] * f.x, p[1] * f.y), a[1] = pack<T>(p[2] * f.x, p[3] * f.y);
    a[2] = pack<T>(p[4] * f.z, p[5] * f.w), a[3] = pack<T>(p[6] * f.z, p[7] * f.w);
  }

  // Rounded, the state as operand a; then, while products run, to the storing warps.
  __device__ void round_state(uint32_t (&a)[K / 16][4]) const {
#pragma unroll
    for (int step = 0; step < K / 16; ++step) operand(S + 8 * step, a[step]);
  }
  __device__ void hand_over(uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) cuda::arrive(at(&barrier));
  }
  __device__ void publish_state(const uint32_t (&a)[K / 16][4], uint32_t parity) {
    cuda::wait_barrier(at(&s.state_empty), parity ^ 1);
#pragma unroll
    for (int step = 0; step < K / 16; ++step)
      cuda::store_matrices(tile_at(lanes.down, at(s.state), 16 * warp, step), a[step][0], a[step][1], a[step][2],
                           a[step][3]);
    hand_over(s.state_full);
  }
  // x as [v][token], in reverse as [token][v].
  template <bool reverse>
  __device__ void publish_rows(uint32_t parity) {
    cuda::wait_barrier(at(&s.rows_empty), parity ^ 1);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t a[4];
      operand(x + 8 * n, a);
      if constexpr (reverse)
        cuda::store_matrices_transposed(tile_at(lanes.across, at(s.rows), 16 * n, warp), a[0], a[1], a[2], a[3]);
      else
        cuda::store_matrices(tile_at(lanes.down, at(s.rows), 16 * warp, n), a[0], a[1], a[2], a[3]);
    }
    hand_over(s.rows_full);
  }

  // ---- Products: between a fence and a wait ----

  // x = a k^T
  __device__ void times_keys(const uint32_t (&a)[K / 16][4], uint32_t k) {
    const uint64_t b = cuda::sm90::descriptor(k);
#pragma unroll
    for (int step = 0; step < K / 16; ++step)
      cuda::sm90::wgmma_rs_n64<T, 0>(x, a[step], cuda::sm90::advanced(b, step / 4 * kTile + step % 4 * 32), step > 0);
  }
  // z (+)= a b^T or, with rows of b for each token summed over, a b
  template <int kMajorN>
  __device__ void times_square(float (&z)[32], const uint32_t (&a)[4][4], uint32_t tile, bool accumulate) {
    const uint64_t b = cuda::sm90::descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      cuda::sm90::wgmma_rs_n64<T, kMajorN>(z, a[step], cuda::sm90::advanced(b, step * (kMajorN ? 2048 : 32)),
                                           accumulate || step > 0);
  }
  // z = a b for a [64 tokens][64 v] transposed and b, rows for each token summed over
  __device__ static void times_tiles(float (&z)[32], uint32_t rows, uint32_t tile) {
    const uint64_t a = cuda::sm90::descriptor(rows), b = cuda::sm90::descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      cuda::sm90::wgmma_ss_n64<T, 1, 1>(z, cuda::sm90::advanced(a, step * 2048), cuda::sm90::advanced(b, step * 2048),
                                        step > 0);
  }
  // S += a b for b [64 tokens][K]
  __device__ void advance(const uint32_t (&a)[4][4], uint32_t rows) {
    const uint64_t b = cuda::sm90::descriptor(rows, kTile);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      if constexpr (K == 128)
        cuda::sm90::wgmma_rs_n128<T, 1>(S, a[step], cuda::sm90::advanced(b, step * 2048), true);
      else
        cuda::sm90::wgmma_rs_n64<T, 1>(S, a[step], cuda::sm90::advanced(b, step * 2048), true);
  }
  // The same, a from a tile [64 tokens][64 v].
  __device__ void advance_tiles(uint32_t rows, uint32_t columns) {
    const uint64_t a = cuda::sm90::descriptor(rows), b = cuda::sm90::descriptor(columns, kTile);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      if constexpr (K == 128)
        cuda::sm90::wgmma_ss_n128<T, 1, 1>(S, cuda::sm90::advanced(a, step * 2048),
                                           cuda::sm90::advanced(b, step * 2048), true);
      else
        cuda::sm90::wgmma_ss_n64<T, 1, 1>(S, cuda::sm90::advanced(a, step * 2048), cuda::sm90::advanced(b, step * 2048),
                                          true);
  }
  __device__ void decay(float f) {
#pragma unroll
    for (int i = 0; i < K / 2; ++i) S[i] *= f;
  }

  // Where a stage's tiles are, the same in all lanes as far as the compiler can see: descriptions of tiles are then
  // added up apart from the lanes' own registers.
  struct Tiles {
    uint32_t k, q, v, d_o_decayed, X, P;
    __device__ explicit Tiles(const ScanStage<K>& in) {
      using Stage = ScanStage<K>;
      const uint32_t first = __shfl_sync(0xffffffffu, at(&in), 0);
      k = first + offsetof(Stage, k), q = first + offsetof(Stage, q), v = first + offsetof(Stage, v);
      d_o_decayed = first + offsetof(Stage, d_o_decayed), X = first + offsetof(Stage, X),
      P = first + offsetof(Stage, P);
    }
  };

  // r = (I + X diag(beta)) (v - E k S);  S <- E_n S + k^T (D_n beta r)
  __device__ void forward(const ScanStage<K>& in, uint32_t parity) {
    const float(*f)[kC] = in.scalars;
    const Tiles tiles(in);
    uint32_t a[K / 16][4], b[4][4];
    round_state(a);
    cuda::sm90::wgmma_fence();
    times_keys(a, tiles.k);
    cuda::sm90::wgmma_commit();
    uint32_t v[4][4];  // what waits for no product comes before the waits, what the next step needs before the rest
#pragma unroll
    for (int n = 0; n < 4; ++n) cuda::load_matrices_transposed(v[n], tile_at(lanes.across, at(in.v), 16 * n, warp));
    float4 Es[4], beta[4], by[4];
    all_factors(f[kE], Es), all_factors(f[kBeta], beta);
    publish_state(a, parity);
    cuda::sm90::wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 E = Es[n];
      const float2 v0 = unpack<T>(v[n][0]), v1 = unpack<T>(v[n][1]), v2 = unpack<T>(v[n][2]), v3 = unpack<T>(v[n][3]);
      float* p = x + 8 * n;
      p[0] = v0.x - E.x * p[0], p[1] = v0.y - E.y * p[1], p[2] = v1.x - E.x * p[2], p[3] = v1.y - E.y * p[3];
      p[4] = v2.x - E.z * p[4], p[5] = v2.y - E.w * p[5], p[6] = v3.x - E.z * p[6], p[7] = v3.y - E.w * p[7];
      scaled_operand(n, beta[n], b[n]);
    }
    cuda::sm90::wgmma_fence();
    times_square<0>(x, b, tiles.X, true);
    cuda::sm90::wgmma_commit();
    decay(f[kE][kC - 1]);
    all_factors(f[kDn], beta, 1.f, by);
    cuda::sm90::wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < 4; ++n) scaled_operand(n, by[n], b[n]);
    cuda::sm90::wgmma_fence();
    advance(b, tiles.k);
    cuda::sm90::wgmma_commit();
    publish_rows<false>(parity);
    cuda::sm90::wgmma_wait<0>();
  }

  // dU = D_n k dS + P^T d_o;  y = (I + X^T diag(beta)) dU;  d_v = beta y;
  // dS <- E_n dS + q^T (scale E d_o) - k^T (E d_v)
  __device__ void backward(const ScanStage<K>& in, uint64_t& decayed, uint32_t stage_parity, uint32_t parity) {
    const float(*f)[kC] = in.scalars;
    const Tiles tiles(in);
    uint32_t a[K / 16][4], b[4][4];
    float z[32];
    cuda::sm90::wgmma_fence();
    times_tiles(z, tiles.v, tiles.P);
    cuda::sm90::wgmma_commit();
    round_state(a);
    cuda::sm90::wgmma_fence();
    times_keys(a, tiles.k);
    cuda::sm90::wgmma_commit();
    decay(f[kE][kC - 1]);
    cuda::wait_barrier(at(&decayed), stage_parity);
    cuda::sm90::wgmma_fence();
    advance_tiles(tiles.d_o_decayed, tiles.q);
    cuda::sm90::wgmma_commit();
    float4 Dns[4], beta[4], by[4];
    all_factors(f[kDn], Dns), all_factors(f[kBeta], beta);
    publish_state(a, parity);
    cuda::sm90::wgmma_wait<1>();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 Dn = Dns[n];
      float* p = x + 8 * n;
      const float* o = z + 8 * n;
      p[0] = o[0] + Dn.x * p[0], p[1] = o[1] + Dn.y * p[1], p[2] = o[2] + Dn.x * p[2], p[3] = o[3] + Dn.y * p[3];
      p[4] = o[4] + Dn.z * p[4], p[5] = o[5] + Dn.w * p[5], p[6] = o[6] + Dn.z * p[6], p[7] = o[7] + Dn.w * p[7];
      scaled_operand(n, beta[n], b[n]);
    }
    cuda::sm90::wgmma_fence();
    times_square<1>(x, b, tiles.X, true);
    cuda::sm90::wgmma_commit();
    all_factors(f[kE], beta, -1.f, by);
    cuda::sm90::wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < 4; ++n) scaled_operand(n, by[n], b[n]);
    cuda::sm90::wgmma_fence();
    advance(b, tiles.k);
    cuda::sm90::wgmma_commit();
    publish_rows<true>(parity);
    cuda::sm90::wgmma_wait<0>();
  }

  template <bool reverse>
  __device__ void run(const Sequence& seq) {
    load_state(reverse ? call.args.d_final_state : call.args.initial_state);
    int stage = 0;
    uint32_t parity = 0;
    for (ChunkWalk walk(seq, reverse); !walk.ends(); ++walk.i) {
      cuda::wait_barrier(at(&s.full[stage]), parity);
      if constexpr (reverse)
        backward(s.stage[stage], s.decayed[stage], parity, walk.i & 1);
      else
        forward(s.stage[stage], walk.i & 1);
      hand_over(s.empty[stage]);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    if (reverse) store_state(call.args.d_initial_state, seq.valid);
  }
};

// beside: gradients take their chunks while it goes on.
template <class T, int K, bool beside>
__device__ void scan_block(const Call& call, const Maps& maps, char* raw, int block) {
  constexpr int kMovingRegs = beside ? 88 : 136;  // beside gradients, of more threads
  auto& s = *reinterpret_cast<ScanSmem<K>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Chain chain = chain_of(call, block);
  const bool has_d_v = chain.reverse && cuda::is_there(call.args.d_v);
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      cuda::init_barrier(cuda::smem_address(&barrier), uint32_t(arrivals));
    };
    for (int i = 0; i < kStages; ++i) init(s.full[i], 1), init(s.decayed[i], 2), init(s.empty[i], 4);
    init(s.state_full, 4), init(s.state_empty, 1);
    init(s.rows_full, 4), init(s.rows_empty, has_d_v ? 1 + 2 : 1);
    cuda::fence_barrier_init();
    s.stored = 0;
  }
  __syncthreads();
  const Sequence seq = sequence_at(call, chain.n);
  if (warp < 4) {
    cuda::sm90::setmaxnreg_inc<232>();
    Scan<T, K> scan(call, chain, s, warp, lane);
    if (chain.reverse)
      scan.template run<true>(seq);
    else
      scan.template run<false>(seq);
  } else {
    cuda::sm90::setmaxnreg_dec<kMovingRegs>();
    if (warp == 4) {
      load_chunks<T, K>(call, maps, chain, seq, s, lane);
    } else if (warp == 5) {
      if (lane == 0) store_chunks<K, beside>(call, chain, seq, s);
    } else if (warp < 8) {
      if (chain.reverse) decay_chunks<T, K>(call, seq, s, int(threadIdx.x) - 192);
    } else if (warp < 10) {
      if (has_d_v) store_d_v<T, K>(call, chain, seq, s, int(threadIdx.x) - 256);
    } else if (beside && threadIdx.x == 320) {
      announce_chunks<K>(call, chain, seq, s);
    }
  }
}

template <class T, int K>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_kernel(const __grid_constant__ Call call, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char raw[];
  scan_block<T, K, false>(call, maps, raw, blockIdx.x);
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
