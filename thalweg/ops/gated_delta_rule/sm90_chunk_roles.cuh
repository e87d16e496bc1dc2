// The warpgroups of a block of sm90_chunk_fwd (its contract is in sm90_chunk_fwd.cu): loads, output, chain.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_ROLES_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_ROLES_CUH

#include "thalweg/cuda/sm90/wgmma.cuh"
#include "thalweg/ops/gated_delta_rule/sm90_chunk.cuh"

namespace thalweg::gated_delta_rule::sm90 {
namespace {

using namespace cuda::sm90;

// Who makes O: a group of its own, so that a chain is not held up; the chains, so that nothing is handed over; or
// nobody, in blocks of sm90_chunk_pieces.cu that are after states alone.
enum class Output { kGroup, kChains, kNone };

// Two rings: keys (K, V, A and their rows, which a chain leaves early) and queries (Q, P, which the output leaves
// last).
template <int KD, int slices, Output output>
struct Layout {
  static constexpr bool kHasOutput = output != Output::kNone, kHandsOver = output == Output::kGroup,
                        kGoesOn = output == Output::kChains;  // from chain to chain
  static constexpr int kKeyStages = KD == 64 ? 4 : 3, kQueryStages = kHasOutput ? kKeyStages : 0;
  static constexpr int kThreads = kGroup * (1 + kHandsOver + slices);
  static constexpr int kColumns = 64 * slices, kHeadBlocks = KD / kColumns;  // V = K
  static constexpr int kLoadRegs = 56, kOutRegs = 152, kChainRegs = !kHasOutput ? 200 : kHandsOver ? 240 : 224;
  // More than a block starts with, and a group would wait for ever.
  static_assert(kGroup * (kLoadRegs + kHandsOver * kOutRegs + slices * kChainRegs) <=
                65536 / kThreads / 8 * 8 * kThreads);
  static constexpr uint32_t kTile = KD / 64 * kBlockBytes;  // of K or Q
  // Stages: K, V, A; and Q, P.
  static constexpr uint32_t kV = kTile, kA = kV + slices * kBlockBytes, kKeyBytes = kA + kBlockBytes;
  static constexpr uint32_t kP = kTile, kQueryBytes = kP + kBlockBytes;
  static constexpr uint32_t kState = KD / 16 * 16 * kGroup, kDelta = 4 * 16 * kGroup, kExchange = kState + kDelta,
                            kRows = kBlockBytes;  // rows of O on their way out
  // Offsets in shared memory.
  static constexpr uint32_t kQueries = kKeyStages * kKeyBytes, kExchanges = kQueries + kQueryStages * kQueryBytes,
                            kKeyRows = kExchanges + (kHandsOver   ? 2 * slices * kExchange
                                                     : kHasOutput ? slices * kRows
                                                                  : 0),
                            kQueryRows = kKeyRows + kKeyStages * uint32_t(kKeyRowBytes),
                            kBars = kQueryRows + kQueryStages * uint32_t(kQueryRowBytes);
  // Barriers, 8 bytes each.
  static constexpr uint32_t kKeysFull = kBars, kKeysEmpty = kKeysFull + 8 * kKeyStages,
                            kQueriesFull = kKeysEmpty + 8 * kKeyStages, kQueriesEmpty = kQueriesFull + 8 * kQueryStages,
                            kStateReady = kQueriesEmpty + 8 * kQueryStages, kDeltaReady = kStateReady + 16 * slices,
                            kExchangeFree = kDeltaReady + 16 * slices, kJobsFull = kExchangeFree + 16 * slices,
                            kJobsEmpty = kJobsFull + 16, kJobs = kJobsEmpty + 16,
                            kBytes = kGoesOn ? kJobs + 8 : kJobsFull;

  // By one thread, before the block's first __syncthreads().
  static __device__ void init_barriers(uint32_t smem) {
    for (int i = 0; i < kKeyStages; ++i) {
      mbarrier_init(smem + kKeysFull + 8 * i, 2);
      mbarrier_init(smem + kKeysEmpty + 8 * i, 4 * slices);
    }
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(smem + kQueriesFull + 8 * i, 2);
      mbarrier_init(smem + kQueriesEmpty + 8 * i, output == Output::kChains ? 4 * slices : 4);
    }
    for (uint32_t bar = kStateReady; bar < kJobsFull; bar += 8) mbarrier_init(smem + bar, 4);
    for (int i = 0; kGoesOn && i < 2; ++i) {
      mbarrier_init(smem + kJobsFull + 8 * i, 1);
      mbarrier_init(smem + kJobsEmpty + 8 * i, kThreads / 32 - 1);  // a warp takes the jobs, the others read them
    }
    mbarrier_init_fence();
  }
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
  int64_t length;                      // of the sequence
  int before;                          // chunks that went through the rings for the block's earlier work
  Start start;
  bool given_piece;  // `initial` is an offset into a.starts
  bool last;         // its state is the final one
  bool valid;        // false: borders are wrong, and nothing is read
};

// Piece `piece` of `pieces` (0 of 0: all) of sequence n, head hv, columns of V from v0. False: there is none.
template <class E>
__device__ inline bool make_work(const ChunkArgs& a, const cuda::Span& span, int64_t n, int64_t hv, int64_t v0,
                                 int pieces, int piece, Work<E>& work) {
  const int64_t length = span.end - span.begin, h = hv / (a.HV / a.H);
  const int chunks = int((length + kChunk - 1) / kChunk), first = pieces ? piece * a.piece_chunks : 0;
  if (piece > 0 && first >= chunks) return false;
  work.first = first, work.chunks = !span.valid ? 0 : pieces ? min(chunks - first, a.piece_chunks) : chunks;
  work.length = length, work.before = 0, work.valid = span.valid;
  work.last = first + work.chunks == chunks;
  work.tail = work.last ? int(length - (chunks - 1) * int64_t(kChunk)) : kChunk;
  const int64_t row = span.begin + int64_t(first) * kChunk, slot = first_slot(span.begin, n) + first;
  work.q = row_at<E>(a.q, a.T, row, h), work.k = row_at<E>(a.k, a.T, row, h);
  work.v = row_at<E>(a.v, a.T, row, hv) + v0, work.o = row_at<E>(a.o, a.T, row, hv) + v0;
  work.factors = a.factors + (slot * a.HV + hv) * kFactorBytes;
  work.flags = a.tickets + kTicketInts + slot * a.HV + hv;
  work.start = Start::kGiven, work.given_piece = piece > 0;
  work.initial = piece > 0
                     ? (((n * a.HV + hv) * pieces + piece) * a.V + v0) * a.K
                     : n * a.initial_state.stride[0] + hv * a.initial_state.stride[1] + v0 * a.initial_state.stride[3];
  work.final = n * a.final_state.stride[0] + hv * a.final_state.stride[1] + v0 * a.final_state.stride[3];
  work.checkpoint = first_checkpoint(a, span.begin, n) * a.chunk_states.stride[0] + hv * a.chunk_states.stride[1] +
                    v0 * a.chunk_states.stride[3];
  work.every = cuda::is_there(a.chunk_states) ? int(min(a.every / kChunk, int64_t(1) << 30)) : 0;
  work.b = int(row / a.T), work.t = int(row % a.T), work.h = int(h), work.hv = int(hv), work.v0 = int(v0);
  return true;
}

// A warp's shared memory writes are done: one arrival a warp.
__device__ inline void warp_arrive(uint32_t bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(bar);
}

// The piece of a chain with this number: false if there is none.
template <class E, class L>
__device__ inline bool find_work(const ChunkArgs& a, int job, Work<E>& work) {
  const int pieces = L::kGoesOn ? 0 : a.pieces, piece = pieces ? job % pieces : 0;
  const int64_t chain = pieces ? job / pieces : job, head = chain / L::kHeadBlocks,
                n = L::kGoesOn && a.spans ? a.order[head / a.HV] : head / a.HV;
  const cuda::Span span = span_of(a, n);
  return make_work(a, span, n, head % a.HV, chain % L::kHeadBlocks * L::kColumns, pieces, piece, work);
}

// A block that goes from chain to chain: run(work) for each. The first job is the block's number. The others its second
// warp takes from a.next_job, which the kernel before this one sets, and hands on: once all of the last one's loads are
// under way, and not before, or jobs would wait behind a long chain.
template <class E, class L, bool of_loads, class Run>
__device__ inline void each_work(const ChunkArgs& a, uint32_t smem, char* bytes, Run run) {
  const bool takes = of_loads && threadIdx.x / 32 == 1;
  int before = 0;
  for (int i = 0, job = blockIdx.x; job < a.jobs; ++i) {
    Work<E> work;
    find_work<E, L>(a, job, work);
    work.before = before, before += work.chunks;
    run(work);
    const uint32_t full = smem + L::kJobsFull + 8 * (i & 1), empty = smem + L::kJobsEmpty + 8 * (i & 1);
    int* const place = reinterpret_cast<int*>(bytes + L::kJobs) + (i & 1);
    if (takes) {
      mbarrier_wait(empty, (uint32_t(i / 2) & 1) ^ 1);
      if (threadIdx.x % 32 == 0) {
        *place = job = atomicAdd(a.next_job, 1);
        mbarrier_arrive(full);
      }
      job = __shfl_sync(0xffffffffu, job, 0);
    } else {
      mbarrier_wait(full, uint32_t(i / 2) & 1);
      job = *place;
      warp_arrive(empty);
    }
  }
}

template <class E, int KD, int slices, Output output>
struct Roles {
  using L = Layout<KD, slices, output>;
  static constexpr bool summary = output == Output::kNone;
  const ChunkArgs& a;
  const Maps& maps;
  const Work<E>& work;
  const uint32_t smem;  // shared memory's first byte
  char* const bytes;    // the same
  const int thread = threadIdx.x % kGroup, warp = thread / 32, lane = thread % 32;

  // Chunk c of this work in the rings.
  __device__ int round(int c) const { return L::kGoesOn ? work.before + c : c; }
  __device__ uint32_t keys(int c) const { return smem + uint32_t(round(c) % L::kKeyStages) * L::kKeyBytes; }
  __device__ uint32_t keys_full(int c) const { return smem + L::kKeysFull + uint32_t(round(c) % L::kKeyStages) * 8; }
  __device__ uint32_t keys_empty(int c) const { return smem + L::kKeysEmpty + uint32_t(round(c) % L::kKeyStages) * 8; }
  __device__ uint32_t keys_parity(int c) const { return uint32_t(round(c) / L::kKeyStages) & 1; }
  __device__ uint32_t queries(int c) const {
    return smem + L::kQueries + uint32_t(round(c) % L::kQueryStages) * L::kQueryBytes;
  }
  __device__ uint32_t queries_full(int c) const {
    return smem + L::kQueriesFull + uint32_t(round(c) % L::kQueryStages) * 8;
  }
  __device__ uint32_t queries_empty(int c) const {
    return smem + L::kQueriesEmpty + uint32_t(round(c) % L::kQueryStages) * 8;
  }
  __device__ uint32_t queries_parity(int c) const { return uint32_t(round(c) / L::kQueryStages) & 1; }
  __device__ const float* key_row(int c, GateRow row) const {
    return reinterpret_cast<const float*>(bytes + L::kKeyRows + uint32_t(round(c) % L::kKeyStages) * kKeyRowBytes) +
           row * kChunk;
  }
  __device__ const float* query_row(int c) const {
    return reinterpret_cast<const float*>(bytes + L::kQueryRows +
                                          uint32_t(round(c) % L::kQueryStages) * kQueryRowBytes);
  }
  __device__ uint32_t exchange(int slice, int c) const {  // this warp's part: [state, delta], 512 bytes a row
    return smem + L::kExchanges + uint32_t(2 * slice + (c & 1)) * L::kExchange + warp * (L::kExchange / 4) + lane * 16;
  }
  // This warp's place for 64 rows of 16 columns of O.
  __device__ uint32_t rows_place(int slice, int c) const {
    if constexpr (L::kHandsOver)
      return exchange(slice, c) - lane * 16;
    else
      return smem + L::kExchanges + slice * L::kRows + warp * (L::kRows / 4);
  }
  __device__ uint32_t bar(uint32_t first, int slice, int c) const { return smem + first + 8 * (2 * slice + (c & 1)); }

  __device__ int rows_of(int c) const { return c + 1 < work.chunks ? kChunk : work.tail; }
  __device__ void wait_keys(int c) const { mbarrier_wait(keys_full(c), keys_parity(c)); }

  // ---- loads: four warps, each with a stream of its own ----

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

  // A tile, or tiles, of chunk c: `by_map(t)` starts the copies of `tma_bytes`, `by_hand()` makes them.
  template <class ByMap, class ByHand>
  __device__ void load_tiles(int c, uint32_t bar, uint32_t tma_bytes, ByMap by_map, ByHand by_hand) const {
    const bool tma = by_tma(c);
    if (!tma) {
      by_hand();
      cp_async_wait_all();
      fence_proxy_async();
      __syncwarp();
    }
    if (lane != 0) return;
    mbarrier_arrive_expect(bar, tma ? tma_bytes : 0);
    if (tma) by_map(work.t + c * kChunk);
  }
  __device__ void load_keys(int c) const {
    const uint32_t to = keys(c), bar = keys_full(c);
    const bool has_V = work.start != Start::kIdentity;
    load_tiles(
        c, bar, has_V ? L::kA : L::kTile,
        [&](int t) {
          tensor_load_5d(to, &maps.k, 0, t, 0, work.h, work.b, bar);
          if (has_V) tensor_load_5d(to + L::kV, &maps.v, 0, t, work.v0 / 64, work.hv, work.b, bar);
        },
        [&] {
          copy_tile<KD>(to, work.k, a.k.stride[1], c);
          if (has_V) copy_tile<64 * slices>(to + L::kV, work.v, a.v.stride[1], c);
        });
  }
  __device__ void load_queries(int c) const {
    const uint32_t to = queries(c), bar = queries_full(c);
    load_tiles(
        c, bar, L::kTile, [&](int t) { tensor_load_5d(to, &maps.q, 0, t, 0, work.h, work.b, bar); },
        [&] { copy_tile<KD>(to, work.q, a.q.stride[1], c); });
  }

  // The factors of chunk c, once they are there.
  __device__ const char* wait_factors(int c) const {
    if (a.tickets) {
      while (load_acquire(work.flags + c * a.HV) == 0) {
      }
      fence_proxy_async_global();  // plain stores made them, bulk copies read them
    }
    return work.factors + c * (a.HV * kFactorBytes);
  }
  // A square of factors and the rows beside it.
  __device__ void load_factors(uint32_t square, const char* square_from, uint32_t rows, const char* rows_from,
                               uint32_t row_bytes, uint32_t bar) const {
    if (lane != 0) return;
    mbarrier_arrive_expect(bar, kBlockBytes + row_bytes);
    bulk_load(square, square_from, kBlockBytes, bar);
    bulk_load(rows, rows_from, row_bytes, bar);
  }

  // The state before the first chunk into L2, while the chains are still at the work before this one.
  __device__ void fetch_state() const {
    const thalweg_tensor& t = a.initial_state;
    if (lane != 0 || !cuda::is_there(t) || t.dtype != THALWEG_F32) return;
    const bool dense = (t.stride[3] == 1 && t.stride[2] == a.V) || (t.stride[2] == 1 && t.stride[3] == a.K);
    const float* from = static_cast<const float*>(t.data) + work.initial;
    if (dense && reinterpret_cast<uintptr_t>(from) % 16 == 0) bulk_prefetch(from, uint32_t(a.K * a.V * 4));
  }

  // Whether the factors are there is asked before there is room for them, which comes later as a rule.
  __device__ void run_loads() const {
    const bool of_keys = warp < 2;
    if (warp % 2 == 1) grid_wait();  // a kernel before this one may make the factors
    if (L::kGoesOn && warp == 2) fetch_state();
    for (int c = 0; c < work.chunks; ++c) {
      const char* from = warp % 2 == 1 ? wait_factors(c) : nullptr;
      if (of_keys)
        mbarrier_wait(keys_empty(c), keys_parity(c) ^ 1);
      else if constexpr (!summary)
        mbarrier_wait(queries_empty(c), queries_parity(c) ^ 1);
      if (warp == 0) load_keys(c);
      if (warp == 1)
        load_factors(keys(c) + L::kA, from, smem + L::kKeyRows + uint32_t(round(c) % L::kKeyStages) * kKeyRowBytes,
                     from + kKeyRowsAt, kKeyRowBytes, keys_full(c));
      if constexpr (!summary) {
        if (warp == 2) load_queries(c);
        if (warp == 3)
          load_factors(queries(c) + L::kP, from + kPAt,
                       smem + L::kQueryRows + uint32_t(round(c) % L::kQueryStages) * kQueryRowBytes,
                       from + kQueryRowsAt, kQueryRowBytes, queries_full(c));
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
    if (work.given_piece) {
      grid_wait();
      return load_state_of(s, slice, static_cast<const float*>(a.starts), 1, KD);
    }
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

  // A row of factors where the accumulators' columns are: of 8 tokens each, two.
  using TokenRow = float2[8];
  __device__ void load_row(const float* row, TokenRow& x) const {
#pragma unroll
    for (int b = 0; b < 8; ++b) x[b] = *reinterpret_cast<const float2*>(row + 8 * b + 2 * (lane % 4));
  }

  // W^T = V^T - X^T D(2^G rk), as operand a. V^T comes by transposing loads.
  static __device__ void make_W(const TokenRow& scale, const float (&x)[32], const uint32_t (&v)[4][4],
                                uint32_t (&w)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = scale[2 * step + i / 2], old = unpack<E>(v[step][i]);
        const int at = 8 * step + 2 * i;
        w[step][i] = pack<E>(old.x - f.x * x[at], old.y - f.y * x[at + 1]);
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

  // The state, rounded, as operand a; its products with the rows of a tile; and what a chunk adds to it.
  static __device__ void pack_state(const float (&s)[KD / 2], uint32_t (&state)[KD / 16][4]) {
#pragma unroll
    for (int step = 0; step < KD / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) state[step][i] = pack<E>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
  }
  static __device__ void times_tile(float (&x)[32], const uint32_t (&state)[KD / 16][4], uint64_t tile) {
#pragma unroll
    for (int step = 0; step < KD / 16; ++step)
      wgmma_rs_n64<E>(x, state[step], advanced(tile, step / 4 * kBlockBytes + step % 4 * 32), step > 0);
  }
  static __device__ void add_writes(float (&s)[KD / 2], const uint32_t (&w)[4][4], uint64_t k_rows) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (KD == 128)
        wgmma_rs_n128<E, 1>(s, w[step], advanced(k_rows, step * 2048), true);
      else
        wgmma_rs_n64<E, 1>(s, w[step], advanced(k_rows, step * 2048), true);
    }
  }
  // Accumulators, rounded, as operand a.
  static __device__ void pack_columns(const float (&x)[32], uint32_t (&w)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) w[i / 4][i % 4] = pack<E>(x[2 * i], x[2 * i + 1]);
  }
  static __device__ void pack_scaled(const float (&x)[32], const TokenRow& scale, uint32_t (&w)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) w[i / 4][i % 4] = pack<E>(x[2 * i] * scale[i / 2].x, x[2 * i + 1] * scale[i / 2].y);
  }

  // V'^T = W^T A^T, in flight afterwards.
  static __device__ void start_deltas(const uint32_t (&w)[4][4], uint64_t A, float (&x)[32]) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_rs_n64<E>(x, w[step], advanced(A, step * 32), step > 0);
    wgmma_commit();
  }
  // The state after the chunk, in flight afterwards; all products before it, V'^T in x the last, are done then.
  __device__ void start_state(int c, const float (&x)[32], uint64_t k_rows, float (&s)[KD / 2]) const {
    TokenRow scale;
    uint32_t w[4][4];
    load_row(key_row(c, kWriteK), scale);
    const float decay = *key_row(c, kDecay);
#pragma unroll
    for (int i = 0; i < KD / 2; ++i) s[i] *= decay;
    wgmma_wait<0>();
    pack_scaled(x, scale, w);
    wgmma_fence();
    add_writes(s, w, k_rows);
    wgmma_commit();
  }

  // A sequence whose borders are wrong.
  __device__ void fill_nan(int slice) const {
    const float nan = cuda::nan_of<float>();
    if (work.first > 0) return;  // by its first piece
    for (int64_t t = 0; t < work.length; ++t)
      if (thread < 64) work.o[t * a.o.stride[1] + 64 * slice + thread] = E(nan);
    const thalweg_tensor& t = a.final_state;
    if (!cuda::is_there(t)) return;
    for (int i = thread; i < KD * 64; i += kGroup)
      cuda::store_at<float>(t, work.final + i / 64 * t.stride[2] + (64 * slice + i % 64) * t.stride[3], nan);
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
      pack_state(s, state);
      wgmma_fence();
      times_tile(x, state, k);
      wgmma_commit();
      TokenRow scale;  // all that memory has to give comes before the waits
      load_V(c, slice, v);
      load_row(key_row(c, kReadK), scale);
      wgmma_wait<0>();
      make_W(scale, x, v, w);
      start_deltas(w, A, x);
      if constexpr (!summary) {  // beside the second product, when it delays nothing
        mbarrier_wait(bar(L::kExchangeFree, slice, c), (uint32_t(c / 2) & 1) ^ 1);
#pragma unroll
        for (int step = 0; step < KD / 16; ++step)
          st_shared_128(to + step * 512, state[step][0], state[step][1], state[step][2], state[step][3]);
        warp_arrive(bar(L::kStateReady, slice, c));
      }
      start_state(c, x, k_rows, s);
      if constexpr (!summary) {
        pack_columns(x, v);
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

  // The same with O in the chain's own hands: twelve more products a chunk, but nothing goes through shared memory to
  // others. O leaves while the next chunk's first product runs.
  __device__ void run_chain_with_output(int slice) const {
    if (!work.valid) return fill_nan(slice);
    float s[KD / 2];
    uint32_t rows[4][4];  // O of the last chunk
    load_state(s, slice);
    if (work.chunks > 0)
      wait_keys(0);
    else
      keep_state(s, slice, 0);
    for (int c = 0; c < work.chunks; ++c) {
      const uint64_t k = descriptor(keys(c)), k_rows = descriptor(keys(c), kBlockBytes),
                     A = descriptor(keys(c) + L::kA), q = descriptor(queries(c)), P = descriptor(queries(c) + L::kP);
      uint32_t state[KD / 16][4], v[4][4], w[4][4];
      float x[32], o[32];
      TokenRow scale;
      keep_state(s, slice, c);
      pack_state(s, state);
      wgmma_fence();
      times_tile(x, state, k);
      wgmma_commit();
      if (c > 0) store_O(c - 1, slice, rows);
      mbarrier_wait(queries_full(c), queries_parity(c));
      wgmma_fence();
      times_tile(o, state, q);
      wgmma_commit();
      load_V(c, slice, v);
      load_row(key_row(c, kReadK), scale);
      wgmma_wait<1>();
      make_W(scale, x, v, w);
      start_deltas(w, A, x);
      start_state(c, x, k_rows, s);
      pack_columns(x, v);
      load_row(query_row(c), scale);
      scale_O(scale, o);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma_rs_n64<E>(o, v[step], advanced(P, step * 32), true);
      wgmma_commit();
      if (c + 1 < work.chunks) wait_keys(c + 1);
      wgmma_wait<0>();
      warp_arrive(keys_empty(c));
      warp_arrive(queries_empty(c));
      pack_columns(o, rows);
    }
    if (work.chunks > 0) store_O(work.chunks - 1, slice, rows);
    if (work.last) store_state(s, slice, a.final_state, work.final);
  }

  // ---- output ----

  static __device__ void scale_O(const TokenRow& scale, float (&o)[32]) {
#pragma unroll
    for (int b = 0; b < 8; ++b)
      o[4 * b] *= scale[b].x, o[4 * b + 1] *= scale[b].y, o[4 * b + 2] *= scale[b].x, o[4 * b + 3] *= scale[b].y;
  }

  // O^T [16 columns of V, 64 tokens] of this warp to memory, through shared memory of its own.
  __device__ void store_O(int c, int slice, const uint32_t (&o)[4][4]) const {
    const uint32_t place = rows_place(slice, c);
    auto piece_at = [&](int row, int piece) { return place + row * 32 + ((piece ^ (row >> 2 & 1)) << 4); };
    __syncwarp();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      stmatrix_x4_trans(piece_at(16 * step + lane / 16 * 8 + lane % 8, lane / 8 % 2), o[step][0], o[step][1],
                        o[step][2], o[step][3]);
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
    const uint64_t q = descriptor(queries(c)), P = descriptor(queries(c) + L::kP);
    uint32_t state[KD / 16][4], delta[4][4];
    float o[32];
    mbarrier_wait(bar(L::kStateReady, slice, c), parity);
#pragma unroll
    for (int step = 0; step < KD / 16; ++step) ld_shared_128(state[step], from + step * 512);
    wgmma_fence();
    times_tile(o, state, q);
    wgmma_commit();
    TokenRow scale;
    load_row(query_row(c), scale);
    wgmma_wait<0>();
    scale_O(scale, o);
    mbarrier_wait(bar(L::kDeltaReady, slice, c), parity);
#pragma unroll
    for (int step = 0; step < 4; ++step) ld_shared_128(delta[step], from + L::kState / 4 + step * 512);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_rs_n64<E>(o, delta[step], advanced(P, step * 32), true);
    wgmma_commit();
    wgmma_wait<0>();
    pack_columns(o, delta);
    store_O(c, slice, delta);
    warp_arrive(bar(L::kExchangeFree, slice, c));
  }

  __device__ void run_output() const {
    for (int c = 0; c < work.chunks; ++c) {
      mbarrier_wait(queries_full(c), queries_parity(c));
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice) make_O(c, slice);
      warp_arrive(queries_empty(c));
    }
  }
};

}  // namespace
}  // namespace thalweg::gated_delta_rule::sm90
#endif
