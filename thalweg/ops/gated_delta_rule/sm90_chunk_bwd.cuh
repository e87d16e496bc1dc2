// Pieces of sm90_chunk_bwd.cu that its kernels share. Letters as in its header.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_CUH

#include "thalweg/cuda/blocks/mma.cuh"
#include "thalweg/cuda/sm90/ptx.cuh"
#include "thalweg/cuda/sm90/tensor_map.h"
#include "thalweg/cuda/values.cuh"
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_bwd_plan.h"

namespace thalweg::gated_delta_rule {
namespace {

using cuda::mma;
using cuda::pack;
using cuda::unpack;
using Args = thalweg_gated_delta_rule_bwd_args;

constexpr int kC = 64;                // tokens of a chunk
constexpr int kTile = 64 * 128;       // bytes of a tile: 64 rows of 64 16-bit elements
constexpr float kLeastGate = -150.f;  // log2: 2^-150 is 0, so nothing is lost and no sum is infinite
enum Scalar { kG, kE, kDn, kBeta };   // rows of a chunk's scalars [4][64]

// One call, as its kernels see it.
struct Call {
  Args args;
  ChunkBwdLayout at;
  char* workspace;
  const cuda::Span* spans;     // packed
  int64_t B, T, H, HV, N, VS;  // VS: slices of 64 columns of V
  float scale;
  bool aligned;  // every row of q, k, v, d_o and their gradients starts at 16 bytes
  bool tma;      // there are maps of q, k, v and d_o
  bool beside;   // gradients run beside the scans

  // How many scans have left what a chunk and key head's gradients need; all of them: ready_count(). Behind the last,
  // how many blocks have started.
  __device__ int* ready(int64_t chunk, int64_t h) const {
    return reinterpret_cast<int*>(workspace + at.ready) + chunk * H + h;
  }
  __device__ int ready_count() const { return int(2 * VS * (HV / H)); }

  __device__ char* state(int64_t part, int64_t chunk, int64_t hv, int64_t slice) const {
    return workspace + part + (chunk * HV + hv) * at.state + slice * at.slice;
  }
  __device__ char* rows(int64_t part, int64_t chunk, int64_t hv, int64_t slice) const {
    return workspace + part + (chunk * HV + hv) * at.rows + slice * kTile;
  }
  __device__ char* square(int64_t part, int64_t chunk, int64_t hv) const {
    return workspace + part + (chunk * HV + hv) * at.square;
  }
  __device__ float* scalars(int64_t chunk, int64_t hv) const {
    return reinterpret_cast<float*>(workspace + at.scalars + (chunk * HV + hv) * kScalarBytes);
  }
};

struct Maps {
  CUtensorMap q, k, v, d_o;
};

// A sequence: where its tokens and its chunks are.
struct Sequence {
  int64_t b, begin, length, first_chunk;
  bool valid;
  __device__ int64_t chunks() const { return (length + kC - 1) / kC; }
};
__device__ inline int64_t first_chunk(const cuda::Span* spans, int64_t n) { return span_at(spans, n).begin / kC + n; }

__device__ inline Sequence sequence_at(const Call& call, int64_t n) {
  if (!call.spans) return {n, 0, call.T, n * ((call.T + kC - 1) / kC), true};
  const cuda::Span s = span_at(call.spans, n);
  return {0, s.begin, s.end - s.begin, s.begin / kC + n, s.valid != 0};
}

// A chunk of a sequence: tokens [begin, begin + count) of batch entry b; count 0: no chunk at this place.
struct Chunk {
  int64_t b, begin;
  int count;
  bool valid;
};
__device__ inline Chunk chunk_of(const Sequence& s, int64_t i) {
  const int64_t left = s.length - i * kC;
  return {s.b, s.begin + i * kC, int(left < 0 ? 0 : left < kC ? left : kC), s.valid};
}
__device__ inline Chunk chunk_at(const Call& call, int64_t place) {
  if (!call.spans) {
    const uint32_t per = uint32_t((call.T + kC - 1) / kC);  // there are fewer than 2^31 places
    return chunk_of(sequence_at(call, uint32_t(place) / per), uint32_t(place) % per);
  }
  int64_t low = 0, high = call.N;  // the last sequence whose places begin at or before this one
  while (high - low > 1) {
    const int64_t mid = (low + high) / 2;
    if (first_chunk(call.spans, mid) <= place)
      low = mid;
    else
      high = mid;
  }
  const Sequence s = sequence_at(call, low);
  return chunk_of(s, place - s.first_chunk);
}

// Row of a token of [B T heads dim].
template <class T>
__device__ T* row_of(const thalweg_tensor& t, int64_t b, int64_t token, int64_t head) {
  return static_cast<T*>(t.data) + b * t.stride[0] + token * t.stride[1] + head * t.stride[2];
}

// ---- Tiles ----

// Byte of the 16-byte piece `piece` of a row.
__device__ inline uint32_t piece_at(int row, int piece) {
  return uint32_t((piece >> 3) * kTile + row * 128 + (((piece & 7) ^ (row & 7)) << 4));
}

// Addresses that load_matrices wants of this lane, for 16x16 elements from (row, 16 * column) of tiles at `base`.
// Down: the second matrix is below the first (A as it lies, B transposed). Across: it is beside it.
struct Lanes {
  uint32_t down, across;
  __device__ explicit Lanes(int lane) {
    const int r = lane & 7, m = lane >> 3;
    down = uint32_t(((m & 1) * 8 + r) * 128 + (((m >> 1) ^ r) << 4));
    across = uint32_t(((m >> 1) * 8 + r) * 128 + (((m & 1) ^ r) << 4));
  }
};
__device__ inline uint32_t tile_at(uint32_t lane, uint32_t base, int row, int column) {
  return base + uint32_t((column >> 2) * kTile + row * 128) + (lane ^ uint32_t((column & 3) << 5));
}

// As many more bytes for a barrier's phase to wait for.
__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// One thread: 64 rows of a head, blocks [first, first + blocks) of 64 columns, as tiles.
__device__ inline void load_boxes(uint32_t to, const CUtensorMap& map, const Chunk& chunk, int64_t head, int first,
                                  int blocks, uint32_t barrier) {
  expect_bytes(barrier, uint32_t(blocks) * kTile);
  for (int i = 0; i < blocks; ++i)
    cuda::sm90::tensor_load_5d(to + i * kTile, &map, 0, int(chunk.begin), first + i, int(head), int(chunk.b), barrier);
}

// 8 elements between a tensor whose rows start anywhere and shared memory.
template <class T>
__device__ void copy_piece(T* to, const T* from) {
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = from[i];
}
// The same into shared memory, zeros where not wanted; aligned ones come by an asynchronous copy.
template <class T>
__device__ void fetch_piece(char* to, const T* from, bool wanted, bool aligned) {
  if (aligned)
    cuda::copy_16(cuda::smem_address(to), from, wanted);
  else if (wanted)
    copy_piece(reinterpret_cast<T*>(to), from);
  else
    *reinterpret_cast<uint4*>(to) = {0, 0, 0, 0};
}
template <class T>
__device__ void store_piece(T* to, const char* from, bool aligned) {
  if (aligned)
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  else
    copy_piece(to, reinterpret_cast<const T*>(from));
}

// Rows [0, 64) of `width` elements into tiles at `to`, zero from row `count` on; `threads` threads share the work. A
// thread keeps its piece and walks down by 4 rows, which flips one bit of the piece's place, or by a multiple of 8,
// which flips none. Aligned rows come by asynchronous copies.
template <class T, int width, int threads>
__device__ void copy_rows(char* to, const T* from, int64_t stride, int count, int thread, bool aligned) {
  constexpr int kPieces = width / 8, kStep = threads / kPieces;
  static_assert(kStep == 4 || kStep % 8 == 0);
  const int first = thread / kPieces, piece = thread % kPieces;
  from += piece * 8;
  const T* row = from + first * stride;
  if (aligned) {
    const uint32_t even = cuda::smem_address(to) + piece_at(first, piece), odd = kStep == 4 ? even ^ 64 : even;
#pragma unroll
    for (int i = 0; i < kC / kStep; ++i, row += kStep * stride) {
      const bool wanted = first + i * kStep < count;
      cuda::copy_16((i % 2 ? odd : even) + i * kStep * 128, wanted ? row : from, wanted);
    }
    return;
  }
  for (int i = first; i < kC; i += kStep, row += kStep * stride) {
    T* out = reinterpret_cast<T*>(to + piece_at(i, piece));
    if (i < count)
      copy_piece(out, row);
    else
      *reinterpret_cast<uint4*>(out) = {0, 0, 0, 0};
  }
}

__device__ inline void zero(float (&x)[4]) { x[0] = x[1] = x[2] = x[3] = 0.f; }
template <int n>
__device__ void zero(float (&x)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i) zero(x[i]);
}

// Two neighbouring C tiles as the A fragment of the next product.
template <class T>
__device__ void to_operand(const float (&x)[4], const float (&y)[4], uint32_t (&a)[4]) {
  a[0] = pack<T>(x[0], x[1]), a[1] = pack<T>(x[2], x[3]);
  a[2] = pack<T>(y[0], y[1]), a[3] = pack<T>(y[2], y[3]);
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace
}  // namespace thalweg::gated_delta_rule
#endif
