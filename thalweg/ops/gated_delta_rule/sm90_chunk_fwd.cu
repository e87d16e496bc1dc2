// sm90_chunk_fwd - gated delta rule, forward, chunks of 64 tokens on Hopper's tensor cores.
//
// Math      with A and the gate rows of sm90_chunk_prep.cu (D(x): columns scaled by x), per chunk and value head:
//             W^T  = V^T - (S^T K^T) D(2^G rk)                       chain
//             V'^T = W^T A^T                                         chain
//             S^T  = 2^G_last S^T + (V'^T D(2^(G_last - G) rk)) K    chain
//             P    = tril(Q K^T * rq_i rk_j scale 2^(G_i - G_j))     aux
//             O^T  = (S^T Q^T) D(2^G rq scale) + V'^T P^T            output, S before the chunk
// Shapes    q,k [B,T,H,K]  v,o [B,T,HV,V]  initial,final_state [N,HV,K,V]
// Takes     K = V in {64, 128}, bf16 or f16, any strides of tokens and heads, states of any dtype
// Grid      one block a sequence, value head and 64 kSlices columns of V
// Groups    of 128 threads: aux loads the tiles kStages chunks ahead (cp.async, factors by bulk copy) and makes P;
//           output makes O; one chain group for each 64 columns of V
// Tile      M = 64 columns of V, everything transposed, so the state stays in the chain group's accumulators (float32)
//           and is operand a of the next products from registers. The output group gets the same registers through
//           shared memory, thread by thread, as 16-bit operands.
// Smem      see Layout
// Numerics  operands bf16 or f16, sums and state float32; exponents never positive; mask by selection
// Traps     tiles past the sequence's end are zero, so no product sees another sequence's rows. Plain writes that
//           wgmma reads (cp.async too) need fence_proxy_async before it.
#include "thalweg/cuda/launch.h"
#include "thalweg/cuda/sm90/wgmma.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk.cuh"

namespace thalweg::gated_delta_rule {
namespace sm90 {
namespace {

using namespace cuda::sm90;

constexpr int kGroup = 128;  // threads of a warpgroup

template <int KD, int slices>
struct Layout {
  static constexpr int kStages = KD == 64 ? 4 : slices == 1 ? 3 : 2;
  static constexpr int kPBuffers = slices == 1 ? 2 : 1;
  static constexpr int kThreads = kGroup * (2 + slices);
  static constexpr int kAuxRegs = slices == 1 ? 104 : 88, kOutRegs = slices == 1 ? 152 : 104,
                       kChainRegs = slices == 1 ? 240 : 160;
  static constexpr uint32_t kTile = KD / 64 * kBlockBytes;  // of K or Q
  static constexpr uint32_t kQ = kTile, kV = 2 * kTile, kA = kV + slices * kBlockBytes, kStageBytes = kA + kBlockBytes;
  static constexpr uint32_t kState = KD / 16 * 16 * kGroup, kDelta = 4 * 16 * kGroup, kExchange = kState + kDelta;
  // Offsets in shared memory.
  static constexpr uint32_t kP = kStages * kStageBytes, kExchanges = kP + kPBuffers * kBlockBytes,
                            kGates = kExchanges + 2 * slices * kExchange, kBars = kGates + kStages * kGateBytes;
  // Barriers, 8 bytes each.
  static constexpr uint32_t kFull = kBars, kEmpty = kFull + 8 * kStages, kPReady = kEmpty + 8 * kStages,
                            kPFree = kPReady + 16, kStateReady = kPFree + 16, kDeltaReady = kStateReady + 16 * slices,
                            kExchangeFree = kDeltaReady + 16 * slices, kBytes = kExchangeFree + 16 * slices;
};

// One block's sequence and head.
template <class E>
struct Work {
  const E *q, *k, *v;  // its first rows
  E* o;
  const char* factors;                 // of its first chunk
  int64_t initial, final, checkpoint;  // offsets of its states
  int chunks, tail;                    // rows of the last chunk
  int every;                           // chunks between checkpoints, 0: none are kept
};

// A warp's shared memory writes are done: one arrival a warp.
__device__ inline void warp_arrive(uint32_t bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(bar);
}

template <class E, int KD, int slices>
struct Roles {
  using L = Layout<KD, slices>;
  const ChunkArgs& a;
  const Work<E>& work;
  const uint32_t smem;  // shared memory's first byte
  char* const bytes;    // the same
  const int thread = threadIdx.x % kGroup, warp = thread / 32, lane = thread % 32;

  __device__ uint32_t stage(int c) const { return smem + uint32_t(c % L::kStages) * L::kStageBytes; }
  __device__ uint32_t full(int c) const { return smem + L::kFull + uint32_t(c % L::kStages) * 8; }
  __device__ uint32_t empty(int c) const { return smem + L::kEmpty + uint32_t(c % L::kStages) * 8; }
  __device__ uint32_t stage_parity(int c) const { return uint32_t(c / L::kStages) & 1; }
  __device__ const float* gates(int c, GateRow row) const {
    return reinterpret_cast<const float*>(bytes + L::kGates + (c % L::kStages) * kGateBytes) + row * kChunk;
  }
  __device__ uint32_t exchange(int slice, int c) const {  // this warp's part: [state, delta], 512 bytes a row
    return smem + L::kExchanges + uint32_t(2 * slice + (c & 1)) * L::kExchange + warp * (L::kExchange / 4) + lane * 16;
  }
  __device__ uint32_t bar(uint32_t first, int slice, int c) const { return smem + first + 8 * (2 * slice + (c & 1)); }

  __device__ int rows_of(int c) const { return c + 1 < work.chunks ? kChunk : work.tail; }
  __device__ void wait_full(int c) const {
    mbarrier_wait(full(c), stage_parity(c));
    fence_proxy_async();
  }

  // ---- aux ----

  __device__ void load(int c) const {
    const int64_t row = int64_t(c) * kChunk;
    const int valid = rows_of(c);
    const uint32_t to = stage(c);
    mbarrier_wait(empty(c), stage_parity(c) ^ 1);
    if (thread == 0) {
      const char* factors = work.factors + c * (a.HV * kFactorBytes);
      mbarrier_arrive_expect(full(c), kFactorBytes);
      bulk_load(to + L::kA, factors, kBlockBytes, full(c));
      bulk_load(smem + L::kGates + uint32_t(c % L::kStages) * kGateBytes, factors + kBlockBytes, kGateBytes, full(c));
    }
    const int64_t kt = a.k.stride[1], vt = a.v.stride[1], qt = a.q.stride[1];
    load_tile<E, KD, kGroup>(to, work.k + row * kt, kt, valid, a.aligned, thread);
    load_tile<E, 64 * slices, kGroup>(to + L::kV, work.v + row * vt, vt, valid, a.aligned, thread);
    load_tile<E, KD, kGroup>(to + L::kQ, work.q + row * qt, qt, valid, a.aligned, thread);
    if (a.aligned) {
      mbarrier_arrive_after_cp_async(full(c));
    } else {
      fence_proxy_async();
      mbarrier_arrive(full(c));
    }
  }

  // P of chunk c, row i of it 128 bytes, swizzled.
  __device__ void make_P(int c) const {
    float d[32];
    wait_full(c);
    const uint64_t q = descriptor(stage(c) + L::kQ), k = descriptor(stage(c));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KD / 16; ++step) {
      const uint32_t at = step / 4 * kBlockBytes + step % 4 * 32;
      wgmma_ss_n64<E>(d, advanced(q, at), advanced(k, at), step > 0);
    }
    wgmma_commit();
    const float *G = gates(c, kG), *norm_k = gates(c, kNormK), *norm_q = gates(c, kNormQ);
    const int i0 = 16 * warp + lane / 4, i1 = i0 + 8;
    const float G0 = G[i0], G1 = G[i1], q0 = norm_q[i0], q1 = norm_q[i1];
    const uint32_t buffer = uint32_t(c % L::kPBuffers), to = smem + L::kP + buffer * kBlockBytes;
    mbarrier_wait(smem + L::kPFree + 8 * buffer, (uint32_t(c / L::kPBuffers) & 1) ^ 1);
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < 8; ++b) {
      const int j = 8 * b + 2 * (lane % 4);
      const float2 Gj = *reinterpret_cast<const float2*>(G + j), kj = *reinterpret_cast<const float2*>(norm_k + j);
      const float x0 = j <= i0 ? d[4 * b] * q0 * kj.x * exp2_fast(G0 - Gj.x) : 0;
      const float y0 = j + 1 <= i0 ? d[4 * b + 1] * q0 * kj.y * exp2_fast(G0 - Gj.y) : 0;
      const float x1 = j <= i1 ? d[4 * b + 2] * q1 * kj.x * exp2_fast(G1 - Gj.x) : 0;
      const float y1 = j + 1 <= i1 ? d[4 * b + 3] * q1 * kj.y * exp2_fast(G1 - Gj.y) : 0;
      st_shared_32(to + swizzled(i0, b) + lane % 4 * 4, pack<E>(x0, y0));
      st_shared_32(to + swizzled(i1, b) + lane % 4 * 4, pack<E>(x1, y1));
    }
    fence_proxy_async();
    warp_arrive(smem + L::kPReady + 8 * buffer);
    warp_arrive(empty(c));
  }

  __device__ void run_aux() const {
    for (int c = 0; c < min(work.chunks, L::kStages); ++c) load(c);
    for (int c = 0; c < work.chunks; ++c) {
      make_P(c);
      // The slot of chunk c - 1, so that P is one chunk ahead of the output group.
      const int next = c - 1 + L::kStages;
      if (c > 0 && next < work.chunks) load(next);
    }
  }

  // ---- chain ----

  // States are read and written where the accumulators are (wgmma.cuh): once a sequence.
  template <class X>
  __device__ void load_state_of(float (&s)[KD / 2], int slice) const {
    const thalweg_tensor& t = a.initial_state;
    const X* from = static_cast<const X*>(t.data) + work.initial + 2 * (lane % 4) * t.stride[2] +
                    (64 * slice + 16 * warp + lane / 4) * t.stride[3];
#pragma unroll
    for (int b = 0; b < KD / 8; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * b + i] = float(from[(8 * b + i % 2) * t.stride[2] + i / 2 * 8 * t.stride[3]]);
  }
  template <class X>
  __device__ void store_state_of(const float (&s)[KD / 2], int slice, const thalweg_tensor& t, int64_t offset) const {
    X* to = static_cast<X*>(t.data) + offset + 2 * (lane % 4) * t.stride[2] +
            (64 * slice + 16 * warp + lane / 4) * t.stride[3];
#pragma unroll
    for (int b = 0; b < KD / 8; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(8 * b + i % 2) * t.stride[2] + i / 2 * 8 * t.stride[3]] = X(s[4 * b + i]);
  }
  __device__ void load_state(float (&s)[KD / 2], int slice) const {
    switch (a.initial_state.dtype) {
      case THALWEG_F32:
        return load_state_of<float>(s, slice);
      case THALWEG_F64:
        return load_state_of<double>(s, slice);
      case THALWEG_BF16:
        return load_state_of<__nv_bfloat16>(s, slice);
      case THALWEG_F16:
        return load_state_of<__half>(s, slice);
    }
#pragma unroll
    for (int i = 0; i < KD / 2; ++i) s[i] = 0;
  }
  __device__ void store_state(const float (&s)[KD / 2], int slice, const thalweg_tensor& t, int64_t offset) const {
    switch (t.dtype) {
      case THALWEG_F32:
        return store_state_of<float>(s, slice, t, offset);
      case THALWEG_F64:
        return store_state_of<double>(s, slice, t, offset);
      case THALWEG_BF16:
        return store_state_of<__nv_bfloat16>(s, slice, t, offset);
      case THALWEG_F16:
        return store_state_of<__half>(s, slice, t, offset);
    }
  }
  // The state before chunk c, where it is kept.
  __device__ void keep_state(const float (&s)[KD / 2], int slice, int c) const {
    if (work.every && c % work.every == 0)
      store_state(s, slice, a.chunk_states, work.checkpoint + c / work.every * a.chunk_states.stride[0]);
  }

  // W^T = V^T - X^T D(2^G rk), as operand a. V^T comes by transposing loads.
  __device__ void make_W(int c, int slice, const float (&x)[32], const uint32_t (&v)[4][4], uint32_t (&w)[4][4]) const {
    const float* read = gates(c, kReadK) + 2 * (lane % 4);
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 scale = *reinterpret_cast<const float2*>(read + 16 * step + i / 2 * 8);
        const float2 old = unpack<E>(v[step][i]);
        const int at = 8 * step + 2 * i;
        w[step][i] = pack<E>(old.x - scale.x * x[at], old.y - scale.y * x[at + 1]);
      }
  }

  __device__ void load_V(int c, int slice, uint32_t (&v)[4][4]) const {
    // Matrices: rows j 0-7 and 8-15 of a step, each for 8 columns of V and the next 8; a[1] is 8 columns of V further.
    const uint32_t block = stage(c) + L::kV + slice * kBlockBytes;
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ldmatrix_x4_trans(v[step], block + swizzled(16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
  }

  __device__ void run_chain(int slice) const {
    float s[KD / 2];
    load_state(s, slice);
    if (work.chunks > 0)
      wait_full(0);
    else
      keep_state(s, slice, 0);
    for (int c = 0; c < work.chunks; ++c) {
      const uint32_t to = exchange(slice, c);
      const uint64_t k = descriptor(stage(c)), k_rows = descriptor(stage(c), kBlockBytes),
                     A = descriptor(stage(c) + L::kA);
      uint32_t state[KD / 16][4], v[4][4], w[4][4];
      float x[32];
      keep_state(s, slice, c);
#pragma unroll
      for (int step = 0; step < KD / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[step][i] = pack<E>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < KD / 16; ++step)
        wgmma_rs_n64<E>(x, state[step], advanced(k, step / 4 * kBlockBytes + step % 4 * 32), step > 0);
      wgmma_commit();
      mbarrier_wait(bar(L::kExchangeFree, slice, c), (uint32_t(c / 2) & 1) ^ 1);
#pragma unroll
      for (int step = 0; step < KD / 16; ++step)
        st_shared_128(to + step * 512, state[step][0], state[step][1], state[step][2], state[step][3]);
      warp_arrive(bar(L::kStateReady, slice, c));
      load_V(c, slice, v);
      wgmma_wait<0>();
      make_W(c, slice, x, v, w);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma_rs_n64<E>(x, w[step], advanced(A, step * 32), step > 0);
      wgmma_commit();
      const float decay = exp2_fast(gates(c, kG)[kChunk - 1]);
#pragma unroll
      for (int i = 0; i < KD / 2; ++i) s[i] *= decay;
      wgmma_wait<0>();
      const float* write = gates(c, kWriteK) + 2 * (lane % 4);
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 scale = *reinterpret_cast<const float2*>(write + 16 * step + i / 2 * 8);
          const int at = 8 * step + 2 * i;
          w[step][i] = pack<E>(x[at] * scale.x, x[at + 1] * scale.y);
          v[step][i] = pack<E>(x[at], x[at + 1]);
        }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if constexpr (KD == 128)
          wgmma_rs_n128<E, 1>(s, w[step], advanced(k_rows, step * 2048), true);
        else
          wgmma_rs_n64<E, 1>(s, w[step], advanced(k_rows, step * 2048), true);
      }
      wgmma_commit();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        st_shared_128(to + L::kState / 4 + step * 512, v[step][0], v[step][1], v[step][2], v[step][3]);
      warp_arrive(bar(L::kDeltaReady, slice, c));
      if (c + 1 < work.chunks) wait_full(c + 1);
      wgmma_wait<0>();
      warp_arrive(empty(c));
    }
    store_state(s, slice, a.final_state, work.final);
  }

  // ---- output ----

  // O^T [16 columns of V, 64 tokens] of this warp to memory, through its own part of the exchange.
  __device__ void store_O(int c, int slice, const float (&o)[32]) const {
    const uint32_t place = exchange(slice, c) - lane * 16;
    auto piece_at = [&](int row, int piece) { return place + row * 32 + ((piece ^ (row >> 2 & 1)) << 4); };
    __syncwarp();
#pragma unroll
    for (int b = 0; b < 8; b += 2)
      stmatrix_x4_trans(piece_at(8 * b + lane / 16 * 8 + lane % 8, lane / 8 % 2), pack<E>(o[4 * b], o[4 * b + 1]),
                        pack<E>(o[4 * b + 2], o[4 * b + 3]), pack<E>(o[4 * b + 4], o[4 * b + 5]),
                        pack<E>(o[4 * b + 6], o[4 * b + 7]));
    __syncwarp();
    const int valid = rows_of(c);
    E* out = work.o + int64_t(c) * kChunk * a.o.stride[1] + 64 * slice + 16 * warp + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * i + lane / 2;
      uint32_t x[4];
      ld_shared_128(x, piece_at(row, lane % 2));
      if (row >= valid) continue;
      E* to = out + row * a.o.stride[1];
      if (a.aligned) {
        *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
      } else {
        for (int j = 0; j < 8; ++j) reinterpret_cast<uint16_t*>(to)[j] = uint16_t(x[j / 2] >> 16 * (j % 2));
      }
    }
  }

  __device__ void make_O(int c, int slice) const {
    const uint32_t from = exchange(slice, c), parity = uint32_t(c / 2) & 1;
    const uint32_t buffer = uint32_t(c % L::kPBuffers);
    const uint64_t q = descriptor(stage(c) + L::kQ), P = descriptor(smem + L::kP + buffer * kBlockBytes);
    uint32_t state[KD / 16][4], delta[4][4];
    float o[32];
    mbarrier_wait(bar(L::kStateReady, slice, c), parity);
#pragma unroll
    for (int step = 0; step < KD / 16; ++step) ld_shared_128(state[step], from + step * 512);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KD / 16; ++step)
      wgmma_rs_n64<E>(o, state[step], advanced(q, step / 4 * kBlockBytes + step % 4 * 32), step > 0);
    wgmma_commit();
    mbarrier_wait(smem + L::kPReady + 8 * buffer, uint32_t(c / L::kPBuffers) & 1);
    wgmma_wait<0>();
    const float* read = gates(c, kReadQ) + 2 * (lane % 4);
#pragma unroll
    for (int b = 0; b < 8; ++b) {
      const float2 scale = *reinterpret_cast<const float2*>(read + 8 * b);
      o[4 * b] *= scale.x, o[4 * b + 1] *= scale.y, o[4 * b + 2] *= scale.x, o[4 * b + 3] *= scale.y;
    }
    mbarrier_wait(bar(L::kDeltaReady, slice, c), parity);
#pragma unroll
    for (int step = 0; step < 4; ++step) ld_shared_128(delta[step], from + L::kState / 4 + step * 512);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_rs_n64<E>(o, delta[step], advanced(P, step * 32), true);
    wgmma_commit();
    wgmma_wait<0>();
    store_O(c, slice, o);
    warp_arrive(bar(L::kExchangeFree, slice, c));
  }

  __device__ void run_output() const {
    for (int c = 0; c < work.chunks; ++c) {
      wait_full(c);
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice) make_O(c, slice);
      warp_arrive(smem + L::kPFree + 8 * uint32_t(c % L::kPBuffers));
      warp_arrive(empty(c));
    }
  }
};

// A sequence whose borders are wrong.
template <class E>
__device__ void fill_nan(const ChunkArgs& a, const Work<E>& work, int64_t length, int K, int columns) {
  const float nan = cuda::nan_of<float>();
  for (int64_t t = 0; t < length; ++t)
    for (int j = threadIdx.x; j < columns; j += blockDim.x) work.o[t * a.o.stride[1] + j] = E(nan);
  const thalweg_tensor& t = a.final_state;
  if (!cuda::is_there(t)) return;
  for (int i = threadIdx.x; i < K * columns; i += blockDim.x)
    cuda::store_at<float>(t, work.final + i / columns * t.stride[2] + i % columns * t.stride[3], nan);
}

template <class E, int KD, int slices>
__global__ void __launch_bounds__(Layout<KD, slices>::kThreads, 1) chunk_fwd(const __grid_constant__ ChunkArgs a) {
  using L = Layout<KD, slices>;
  extern __shared__ __align__(1024) char bytes[];
  constexpr int kColumns = 64 * slices;
  const int64_t per_head = a.V / kColumns, head = blockIdx.x / per_head, v0 = blockIdx.x % per_head * kColumns;
  const int64_t n = head / a.HV, hv = head % a.HV, h = hv / (a.HV / a.H);
  const cuda::Span span = span_of(a, n);
  const int64_t length = span.end - span.begin;
  Work<E> work;
  work.q = row_at<E>(a.q, a.T, span.begin, h), work.k = row_at<E>(a.k, a.T, span.begin, h);
  work.v = row_at<E>(a.v, a.T, span.begin, hv) + v0, work.o = row_at<E>(a.o, a.T, span.begin, hv) + v0;
  work.factors = a.factors + (first_slot(span.begin, n) * a.HV + hv) * kFactorBytes;
  work.chunks = int((length + kChunk - 1) / kChunk), work.tail = int(length - (work.chunks - 1) * int64_t(kChunk));
  work.initial = n * a.initial_state.stride[0] + hv * a.initial_state.stride[1] + v0 * a.initial_state.stride[3];
  work.final = n * a.final_state.stride[0] + hv * a.final_state.stride[1] + v0 * a.final_state.stride[3];
  work.checkpoint = first_checkpoint(a, span.begin, n) * a.chunk_states.stride[0] + hv * a.chunk_states.stride[1] +
                    v0 * a.chunk_states.stride[3];
  work.every = cuda::is_there(a.chunk_states) ? int(min(a.every / kChunk, int64_t(1) << 30)) : 0;
  if (!span.valid) return fill_nan(a, work, length, KD, kColumns);
  const Roles<E, KD, slices> roles{a, work, smem_address(bytes), bytes};
  if (threadIdx.x == 0) {
    const uint32_t smem = roles.smem;
    for (int i = 0; i < L::kStages; ++i) {
      mbarrier_init(smem + L::kFull + 8 * i, kGroup + 1);
      mbarrier_init(smem + L::kEmpty + 8 * i, 4 * (2 + slices));
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(smem + L::kPReady + 8 * i, 4), mbarrier_init(smem + L::kPFree + 8 * i, 4);
    for (int i = 0; i < 2 * slices; ++i) {
      mbarrier_init(smem + L::kStateReady + 8 * i, 4);
      mbarrier_init(smem + L::kDeltaReady + 8 * i, 4);
      mbarrier_init(smem + L::kExchangeFree + 8 * i, 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int group = threadIdx.x / kGroup;
  if (group == 0) {
    setmaxnreg_dec<L::kAuxRegs>();
    roles.run_aux();
  } else if (group == 1) {
    setmaxnreg_dec<L::kOutRegs>();
    roles.run_output();
  } else {
    setmaxnreg_inc<L::kChainRegs>();
    roles.run_chain(group - 2);
  }
}

// Rows past the last sequence.
template <class E>
__global__ void zero_rest(const __grid_constant__ ChunkArgs a) {
  const int64_t end = a.N > 0 ? cuda::span_at(a.spans, a.N - 1).end : 0;
  for (int64_t row = end + blockIdx.x; row < a.T; row += gridDim.x)
    for (int64_t i = threadIdx.x; i < a.HV * a.V; i += blockDim.x) row_at<E>(a.o, a.T, row, i / a.V)[i % a.V] = E(0.f);
}

// Rows of chunk_states that belong to no checkpoint, and those of a sequence whose borders are wrong. A block a
// sequence and head.
__global__ void fill_checkpoints(const __grid_constant__ ChunkArgs a) {
  const thalweg_tensor& t = a.chunk_states;
  const int64_t n = blockIdx.x / a.HV, hv = blockIdx.x % a.HV, size = a.K * a.V;
  int64_t begin = 0, end = a.N > 0 ? t.shape[0] : a.B * a.T / a.every;
  float x = 0;
  if (n < a.N) {
    const cuda::Span span = span_of(a, n);
    begin = first_checkpoint(a, span.begin, n);
    if (n + 1 < a.N) end = first_checkpoint(a, span_of(a, n + 1).begin, n + 1);
    if (span.valid)
      begin += max(int64_t(1), (span.end - span.begin + a.every - 1) / a.every);
    else
      x = cuda::nan_of<float>();
  }
  for (int64_t row = begin; row < end; ++row)
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x)
      cuda::store_at<float>(t, row * t.stride[0] + hv * t.stride[1] + i / a.V * t.stride[2] + i % a.V * t.stride[3], x);
}

template <class E, int KD, int slices>
void launch_fwd(const Problem& p, const ChunkArgs& a, const Exec& exec) {
  using L = Layout<KD, slices>;
  static_assert(L::kBytes <= 227 * 1024);
  cuda::launch(exec, "sm90_chunk_fwd", chunk_fwd<E, KD, slices>, {p.N * p.HV * (p.V / (64 * slices))}, L::kThreads,
               L::kBytes, a);
}

template <class E>
void run_dtype(const Problem& p, const Plan& plan, const ChunkArgs& a, const Exec& exec) {
  if (a.spans) cuda::launch(exec, "sm90_chunk_zero", zero_rest<E>, {p.T < 1024 ? p.T : 1024}, 256, 0, a);
  if (cuda::is_there(a.chunk_states))
    cuda::launch(exec, "sm90_chunk_checkpoints", fill_checkpoints, {(p.N > 0 ? p.N : 1) * p.HV}, 256, 0, a);
  launch_prep(p, a, exec);
  if (p.K == 64)
    launch_fwd<E, 64, 1>(p, a, exec);
  else if (plan.values[0] == 2)
    launch_fwd<E, 128, 2>(p, a, exec);
  else
    launch_fwd<E, 128, 1>(p, a, exec);
}

bool rows_aligned(const thalweg_tensor& t) {
  bool ok = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis) ok = ok && (t.stride[axis] % 8 == 0 || t.shape[axis] <= 1);
  return ok;
}

}  // namespace
}  // namespace sm90

void sm90_chunk_fwd(const Problem& p, const Plan& plan, const thalweg_gated_delta_rule_fwd_args& a, const Exec& exec) {
  using namespace sm90;
  cuda::Span* spans = nullptr;
  if (p.packed) {
    spans = reinterpret_cast<cuda::Span*>(exec.workspace);
    cuda::check_borders(exec, a.cu_seqlens, p.N, p.T, spans, offsetof(thalweg_gated_delta_rule_fwd_args, cu_seqlens));
  }
  ChunkArgs args{a.q,
                 a.k,
                 a.v,
                 a.g,
                 a.beta,
                 a.A_log,
                 a.dt_bias,
                 a.initial_state,
                 a.o,
                 a.final_state,
                 a.chunk_states,
                 spans,
                 exec.workspace + factors_at(p),
                 p.N,
                 p.B,
                 p.T,
                 p.H,
                 p.HV,
                 p.K,
                 p.V,
                 p.every,
                 float(p.scale),
                 a.use_qk_l2norm != 0,
                 a.use_gate != 0,
                 a.use_beta_sigmoid != 0,
                 a.allow_neg_eigval != 0,
                 rows_aligned(a.q) && rows_aligned(a.k) && rows_aligned(a.v) && rows_aligned(a.o)};
  if (p.dtype == THALWEG_F16)
    run_dtype<__half>(p, plan, args, exec);
  else
    run_dtype<__nv_bfloat16>(p, plan, args, exec);
}

}  // namespace thalweg::gated_delta_rule
