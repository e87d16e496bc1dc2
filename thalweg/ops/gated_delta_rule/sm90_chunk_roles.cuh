// The warpgroups of a block of sm90_chunk_fwd (its contract is in sm90_chunk_fwd.cu): aux, output, chain.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_ROLES_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_ROLES_CUH

#include "thalweg/cuda/sm90/wgmma.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk.cuh"

namespace thalweg::gated_delta_rule::sm90 {
namespace {

using namespace cuda::sm90;

constexpr int kGroup = 128;  // threads of a warpgroup

// Two rings: keys (K, V, A and gate rows, which a chain leaves early) and queries (Q, which the output group leaves
// last). Blocks of sm90_chunk_pieces.cu (summary) have a chain group and the ring of keys only.
template <int KD, int slices, bool summary = false>
struct Layout {
  static constexpr int kKeyStages = KD == 64 ? 4 : slices == 1 ? 3 : 2, kQueryStages = summary ? 0 : kKeyStages;
  static constexpr int kPBuffers = summary ? 0 : slices == 1 ? 2 : 1;
  // One slice: a group of its own loads. Two: registers are short, and a warp of the aux group does.
  static constexpr bool kLoadGroup = slices == 1;
  static constexpr int kThreads = kGroup * 4;
  static constexpr int kLoadRegs = 56, kAuxRegs = slices == 1 ? 104 : 88, kOutRegs = slices == 1 ? 136 : 104,
                       kChainRegs = slices == 1 ? 208 : 160, kPrepRegs = 160;
  static constexpr uint32_t kTile = KD / 64 * kBlockBytes;  // of K or Q
  static constexpr uint32_t kKeyRows = kReadQ * kChunk * 4, kQueryRows = kGateBytes - kKeyRows;
  static constexpr uint32_t kV = kTile, kA = kV + slices * kBlockBytes, kGates = kA + kBlockBytes,
                            kKeyBytes = (kGates + kKeyRows + 1023) / 1024 * 1024;
  static constexpr uint32_t kState = KD / 16 * 16 * kGroup, kDelta = 4 * 16 * kGroup, kExchange = kState + kDelta;
  // Offsets in shared memory.
  static constexpr uint32_t kQueries = kKeyStages * kKeyBytes, kP = kQueries + kQueryStages * kTile,
                            kExchanges = kP + kPBuffers * kBlockBytes,
                            kQueryGates = kExchanges + (summary ? 0 : 2 * slices * kExchange),
                            kBars = kQueryGates + kQueryStages * kQueryRows;
  // Barriers, 8 bytes each.
  static constexpr uint32_t kKeysFull = kBars, kKeysEmpty = kKeysFull + 8 * kKeyStages,
                            kQueriesFull = kKeysEmpty + 8 * kKeyStages, kQueriesEmpty = kQueriesFull + 8 * kQueryStages,
                            kPReady = kQueriesEmpty + 8 * kQueryStages, kPFree = kPReady + 16,
                            kStateReady = kPFree + 16, kDeltaReady = kStateReady + 16 * slices,
                            kExchangeFree = kDeltaReady + 16 * slices, kBytes = kExchangeFree + 16 * slices;
};

enum class Start { kGiven, kZero, kIdentity };  // of a state: from `initial`, or made

// One block's sequence, or piece of one, and head.
template <class E>
struct Work {
  const E *q, *k, *v;  // its first rows
  E* o;
  const char* factors;                 // of its first chunk
  const int* flags;                    // whether its factors are there
  int64_t initial, final, checkpoint;  // offsets of its states
  int chunks, tail;                    // rows of the last chunk
  int b, t, h, hv, v0;                 // its first token, heads, first column of V: places in the maps
  int every;                           // chunks between checkpoints, 0: none are kept
  int first;                           // chunk of the sequence that is chunk 0 here
  Start start;
  bool given_piece;  // `initial` is an offset into a.starts
  bool last;         // its state is the final one
};

// Piece `piece` (0 with whole sequences) of sequence n, head hv, columns of V from v0. False: there is none.
template <class E>
__device__ inline bool make_work(const ChunkArgs& a, const cuda::Span& span, int64_t n, int64_t hv, int64_t v0,
                                 int piece, Work<E>& work) {
  const int64_t length = span.end - span.begin, h = hv / (a.HV / a.H);
  const int chunks = int((length + kChunk - 1) / kChunk), first = a.pieces ? piece * a.piece_chunks : 0;
  if (piece > 0 && first >= chunks) return false;
  work.first = first, work.chunks = a.pieces ? min(chunks - first, a.piece_chunks) : chunks;
  work.last = first + work.chunks == chunks;
  work.tail = work.last ? int(length - (chunks - 1) * int64_t(kChunk)) : kChunk;
  const int64_t row = span.begin + int64_t(first) * kChunk, slot = first_slot(span.begin, n) + first;
  work.q = row_at<E>(a.q, a.T, row, h), work.k = row_at<E>(a.k, a.T, row, h);
  work.v = row_at<E>(a.v, a.T, row, hv) + v0, work.o = row_at<E>(a.o, a.T, row, hv) + v0;
  work.factors = a.factors + (slot * a.HV + hv) * kFactorBytes;
  work.flags = a.tickets + kTicketInts + slot * a.HV + hv;
  work.start = Start::kGiven, work.given_piece = piece > 0;
  work.initial = piece > 0
                     ? (((n * a.HV + hv) * a.pieces + piece) * a.V + v0) * a.K
                     : n * a.initial_state.stride[0] + hv * a.initial_state.stride[1] + v0 * a.initial_state.stride[3];
  work.final = n * a.final_state.stride[0] + hv * a.final_state.stride[1] + v0 * a.final_state.stride[3];
  work.checkpoint = first_checkpoint(a, span.begin, n) * a.chunk_states.stride[0] + hv * a.chunk_states.stride[1] +
                    v0 * a.chunk_states.stride[3];
  work.every = cuda::is_there(a.chunk_states) ? int(min(a.every / kChunk, int64_t(1) << 30)) : 0;
  work.b = int(row / a.T), work.t = int(row % a.T), work.h = int(h), work.hv = int(hv), work.v0 = int(v0);
  return true;
}

// x factor 2^exponent where `is`, else 0. Selections, never branches: the exponent is masked too.
__device__ inline float masked(bool is, float x, float exponent, float factor) {
  return (is ? x : 0) * (factor * exp2_fast(is ? exponent : -INFINITY));
}

// A warp's shared memory writes are done: one arrival a warp.
__device__ inline void warp_arrive(uint32_t bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(bar);
}

template <class E, int KD, int slices, bool summary = false>
struct Roles {
  using L = Layout<KD, slices, summary>;
  const ChunkArgs& a;
  const Maps& maps;
  const Work<E>& work;
  const uint32_t smem;  // shared memory's first byte
  char* const bytes;    // the same
  const int thread = threadIdx.x % kGroup, warp = thread / 32, lane = thread % 32;

  __device__ uint32_t keys(int c) const { return smem + uint32_t(c % L::kKeyStages) * L::kKeyBytes; }
  __device__ uint32_t keys_full(int c) const { return smem + L::kKeysFull + uint32_t(c % L::kKeyStages) * 8; }
  __device__ uint32_t keys_empty(int c) const { return smem + L::kKeysEmpty + uint32_t(c % L::kKeyStages) * 8; }
  __device__ uint32_t keys_parity(int c) const { return uint32_t(c / L::kKeyStages) & 1; }
  __device__ uint32_t queries(int c) const { return smem + L::kQueries + uint32_t(c % L::kQueryStages) * L::kTile; }
  __device__ uint32_t queries_full(int c) const { return smem + L::kQueriesFull + uint32_t(c % L::kQueryStages) * 8; }
  __device__ uint32_t queries_empty(int c) const { return smem + L::kQueriesEmpty + uint32_t(c % L::kQueryStages) * 8; }
  __device__ uint32_t queries_parity(int c) const { return uint32_t(c / L::kQueryStages) & 1; }
  __device__ const float* gates(int c, GateRow row) const {
    return reinterpret_cast<const float*>(bytes + uint32_t(c % L::kKeyStages) * L::kKeyBytes + L::kGates) +
           row * kChunk;
  }
  __device__ uint32_t exchange(int slice, int c) const {  // this warp's part: [state, delta], 512 bytes a row
    return smem + L::kExchanges + uint32_t(2 * slice + (c & 1)) * L::kExchange + warp * (L::kExchange / 4) + lane * 16;
  }
  __device__ uint32_t bar(uint32_t first, int slice, int c) const { return smem + first + 8 * (2 * slice + (c & 1)); }

  __device__ int rows_of(int c) const { return c + 1 < work.chunks ? kChunk : work.tail; }
  __device__ void wait_keys(int c) const { mbarrier_wait(keys_full(c), keys_parity(c)); }

  // ---- loads: one warp of its group ----

  // Tiles come by TMA where it can; the last rows of a sequence, and tensors that TMA cannot read, by plain copies.
  __device__ bool by_tma(int c) const { return a.tma && rows_of(c) == kChunk; }

  template <int columns>
  __device__ void copy_tile(uint32_t to, const E* from, int64_t stride, int c) const {
    constexpr int kPieces = columns / 8;
    const int valid = rows_of(c);
    from += int64_t(c) * kChunk * stride;
#pragma unroll 1
    for (int i = lane; i < kChunk * kPieces; i += 32) {
      const int row = i / kPieces, piece = i % kPieces;
      copy_piece(to + piece / 8 * kBlockBytes + swizzled(row, piece % 8), from + row * stride + piece * 8, row < valid,
                 a.aligned);
    }
  }

  __device__ void load_keys(int c) const {
    const uint32_t to = keys(c), bar = keys_full(c);
    const bool tma = by_tma(c);
    if (!tma) {
      copy_tile<KD>(to, work.k, a.k.stride[1], c);
      if (work.start != Start::kIdentity) copy_tile<64 * slices>(to + L::kV, work.v, a.v.stride[1], c);
      cp_async_wait_all();
      fence_proxy_async();
      __syncwarp();
    }
    if (lane != 0) return;
    const char* factors = work.factors + c * (a.HV * kFactorBytes);
    const int t = work.t + c * kChunk;
    mbarrier_arrive_expect(bar, kBlockBytes + L::kKeyRows +
                                    (!tma                             ? 0
                                     : work.start == Start::kIdentity ? L::kTile
                                                                      : L::kA));
    if (tma) {
      tensor_load_5d(to, &maps.k, 0, t, 0, work.h, work.b, bar);
      if (work.start != Start::kIdentity) tensor_load_5d(to + L::kV, &maps.v, 0, t, work.v0 / 64, work.hv, work.b, bar);
    }
    if (a.tickets)
      while (load_acquire(work.flags + c * a.HV) == 0) {
      }
    bulk_load(to + L::kA, factors, kBlockBytes + L::kKeyRows, bar);
  }

  // After the keys of the chunk: the factors are there then.
  __device__ void load_queries(int c) const {
    const uint32_t to = queries(c), bar = queries_full(c);
    const bool tma = by_tma(c);
    if (!tma) {
      copy_tile<KD>(to, work.q, a.q.stride[1], c);
      cp_async_wait_all();
      fence_proxy_async();
      __syncwarp();
    }
    if (lane != 0) return;
    const char* factors = work.factors + c * (a.HV * kFactorBytes);
    mbarrier_arrive_expect(bar, L::kQueryRows + (tma ? L::kTile : 0));
    if (tma) tensor_load_5d(to, &maps.q, 0, work.t + c * kChunk, 0, work.h, work.b, bar);
    bulk_load(smem + L::kQueryGates + uint32_t(c % L::kQueryStages) * L::kQueryRows,
              factors + kBlockBytes + L::kKeyRows, L::kQueryRows, bar);
  }

  // Chunk k's keys and chunk q's queries, where there is room.
  __device__ void try_loads(int& k, int& q) const {
    if (k < work.chunks && uniform(mbarrier_test(keys_empty(k), keys_parity(k) ^ 1))) load_keys(k++);
    if constexpr (summary)
      q = k;
    else if (q < k && uniform(mbarrier_test(queries_empty(q), queries_parity(q) ^ 1)))
      load_queries(q++);
  }
  __device__ void run_loads() const {
    for (int k = 0, q = 0; q < work.chunks;) try_loads(k, q);
  }
  static __device__ bool uniform(bool x) { return __shfl_sync(0xffffffffu, int(x), 0) != 0; }

  // ---- aux ----

  // P of chunk c, row i of it 128 bytes, swizzled.
  __device__ void make_P(int c) const {
    float d[32];
    wait_keys(c);
    mbarrier_wait(queries_full(c), queries_parity(c));
    const uint64_t q = descriptor(queries(c)), k = descriptor(keys(c));
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
    wgmma_wait<0>();
    uint32_t low[8], high[8];  // rows i0 and i1; nothing is stored before all are there, so that they overlap
#pragma unroll
    for (int b = 0; b < 8; ++b) {
      const int j = 8 * b + 2 * (lane % 4);
      const float2 Gj = *reinterpret_cast<const float2*>(G + j), kj = *reinterpret_cast<const float2*>(norm_k + j);
      low[b] = pack<E>(masked(j <= i0, d[4 * b], G0 - Gj.x, q0 * kj.x),
                       masked(j + 1 <= i0, d[4 * b + 1], G0 - Gj.y, q0 * kj.y));
      high[b] = pack<E>(masked(j <= i1, d[4 * b + 2], G1 - Gj.x, q1 * kj.x),
                        masked(j + 1 <= i1, d[4 * b + 3], G1 - Gj.y, q1 * kj.y));
    }
    mbarrier_wait(smem + L::kPFree + 8 * buffer, (uint32_t(c / L::kPBuffers) & 1) ^ 1);
#pragma unroll
    for (int b = 0; b < 8; ++b) {
      st_shared_32(to + swizzled(i0, b) + lane % 4 * 4, low[b]);
      st_shared_32(to + swizzled(i1, b) + lane % 4 * 4, high[b]);
    }
    fence_proxy_async();
    warp_arrive(smem + L::kPReady + 8 * buffer);
    warp_arrive(keys_empty(c));
    warp_arrive(queries_empty(c));
  }

  __device__ void run_aux() const {
    if constexpr (L::kLoadGroup) {
      for (int c = 0; c < work.chunks; ++c) make_P(c);
    } else {
      int k = 0, q = 0;
      for (int c = 0; c < work.chunks; ++c) {
        if (warp == 0) try_loads(k, q);
        while (warp == 0 && q <= c) try_loads(k, q);
        make_P(c);
        if (warp == 0) try_loads(k, q);
      }
    }
  }

  // ---- chain ----

  // States are read and written where the accumulators are (wgmma.cuh): once a sequence.
  template <class X>
  __device__ void load_state_of(float (&s)[KD / 2], int slice, const X* from, int64_t key_stride,
                                int64_t column_stride) const {
    from += work.initial + 2 * (lane % 4) * key_stride + (64 * slice + 16 * warp + lane / 4) * column_stride;
#pragma unroll
    for (int b = 0; b < KD / 8; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * b + i] = float(from[(8 * b + i % 2) * key_stride + i / 2 * 8 * column_stride]);
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
    const thalweg_tensor& t = a.initial_state;
    if (work.given_piece) return load_state_of(s, slice, static_cast<const float*>(a.starts), 1, KD);
    if (work.start == Start::kGiven) switch (t.dtype) {
        case THALWEG_F32:
          return load_state_of(s, slice, static_cast<const float*>(t.data), t.stride[2], t.stride[3]);
        case THALWEG_F64:
          return load_state_of(s, slice, static_cast<const double*>(t.data), t.stride[2], t.stride[3]);
        case THALWEG_BF16:
          return load_state_of(s, slice, static_cast<const __nv_bfloat16*>(t.data), t.stride[2], t.stride[3]);
        case THALWEG_F16:
          return load_state_of(s, slice, static_cast<const __half*>(t.data), t.stride[2], t.stride[3]);
      }
    const int column = work.v0 + 64 * slice + 16 * warp + lane / 4, key = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < KD / 2; ++i)
      s[i] = work.start == Start::kIdentity && column + i / 2 % 2 * 8 == key + i / 4 * 8 + i % 2 ? 1 : 0;
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
  __device__ void store_sum(const float (&s)[KD / 2]) const {
    float* to = a.sums + work.final + 2 * (lane % 4) + (16 * warp + lane / 4) * KD;
#pragma unroll
    for (int b = 0; b < KD / 8; ++b)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<float2*>(to + 8 * b + r * 8 * KD) = make_float2(s[4 * b + 2 * r], s[4 * b + 2 * r + 1]);
  }
  // The state before chunk c, where it is kept.
  __device__ void keep_state(const float (&s)[KD / 2], int slice, int c) const {
    const int chunk = work.first + c;
    if (work.every != 0 && chunk % work.every == 0)
      store_state(s, slice, a.chunk_states, work.checkpoint + chunk / work.every * a.chunk_states.stride[0]);
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
    const uint32_t block = keys(c) + L::kV + slice * kBlockBytes;
    if (summary && work.start == Start::kIdentity) {
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i / 4][i % 4] = 0;
      return;
    }
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ldmatrix_x4_trans(v[step], block + swizzled(16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
  }

  __device__ void run_chain(int slice) const {
    float s[KD / 2];
    load_state(s, slice);
    if (work.chunks > 0)
      wait_keys(0);
    else if constexpr (!summary)
      keep_state(s, slice, 0);
    for (int c = 0; c < work.chunks; ++c) {
      [[maybe_unused]] const uint32_t to = exchange(slice, c);
      const uint64_t k = descriptor(keys(c)), k_rows = descriptor(keys(c), kBlockBytes),
                     A = descriptor(keys(c) + L::kA);
      uint32_t state[KD / 16][4], v[4][4], w[4][4];
      float x[32];
      if constexpr (!summary) keep_state(s, slice, c);
#pragma unroll
      for (int step = 0; step < KD / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[step][i] = pack<E>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < KD / 16; ++step)
        wgmma_rs_n64<E>(x, state[step], advanced(k, step / 4 * kBlockBytes + step % 4 * 32), step > 0);
      wgmma_commit();
      [[maybe_unused]] auto hand_state = [&] {
        mbarrier_wait(bar(L::kExchangeFree, slice, c), (uint32_t(c / 2) & 1) ^ 1);
#pragma unroll
        for (int step = 0; step < KD / 16; ++step)
          st_shared_128(to + step * 512, state[step][0], state[step][1], state[step][2], state[step][3]);
        warp_arrive(bar(L::kStateReady, slice, c));
      };
      // Beside the first product where registers are short, else beside the second, when it delays nothing.
      if constexpr (!summary && slices > 1) hand_state();
      load_V(c, slice, v);
      wgmma_wait<0>();
      make_W(c, slice, x, v, w);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma_rs_n64<E>(x, w[step], advanced(A, step * 32), step > 0);
      wgmma_commit();
      if constexpr (!summary && slices == 1) hand_state();
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
      if constexpr (!summary) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
          st_shared_128(to + L::kState / 4 + step * 512, v[step][0], v[step][1], v[step][2], v[step][3]);
        warp_arrive(bar(L::kDeltaReady, slice, c));
      }
      if (c + 1 < work.chunks) wait_keys(c + 1);
      wgmma_wait<0>();
      warp_arrive(keys_empty(c));
    }
    if constexpr (summary)
      store_sum(s);
    else if (work.last)
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
    const int first = lane / 2;
    E* out = work.o + (int64_t(c) * kChunk + first) * a.o.stride[1] + 64 * slice + 16 * warp + lane % 2 * 8;
    uint32_t x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ld_shared_128(x[i], piece_at(16 * i + first, lane % 2));
    if (a.aligned && rows_of(c) == kChunk) {
      const int64_t step = 16 * a.o.stride[1];
#pragma unroll
      for (int i = 0; i < 4; ++i) st_global_128(out + i * step, x[i][0], x[i][1], x[i][2], x[i][3]);
      return;
    }
#pragma unroll 1
    for (int j = 0; j < 32; ++j) {  // element by element
      const int row = 16 * (j / 8) + first;
      const uint16_t bits = ld_shared_u16(piece_at(row, lane % 2) + j % 8 * 2);
      if (row < rows_of(c)) reinterpret_cast<uint16_t*>(out + j / 8 * 16 * a.o.stride[1])[j % 8] = bits;
    }
  }

  __device__ void make_O(int c, int slice) const {
    const uint32_t from = exchange(slice, c), parity = uint32_t(c / 2) & 1;
    const uint32_t buffer = uint32_t(c % L::kPBuffers);
    const uint64_t q = descriptor(queries(c)), P = descriptor(smem + L::kP + buffer * kBlockBytes);
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
    const float* read =
        reinterpret_cast<const float*>(bytes + L::kQueryGates + (c % L::kQueryStages) * L::kQueryRows) + 2 * (lane % 4);
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
      mbarrier_wait(queries_full(c), queries_parity(c));
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice) make_O(c, slice);
      warp_arrive(smem + L::kPFree + 8 * uint32_t(c % L::kPBuffers));
      warp_arrive(queries_empty(c));
    }
  }
};

}  // namespace
}  // namespace thalweg::gated_delta_rule::sm90
#endif
