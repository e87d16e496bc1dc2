// What the kernels of row sm90_chunk_fwd share: where chunks lie, what one chunk's factors are, tile loads.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_CUH
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_CUH

#include "thalweg/cuda/sm90/ptx.cuh"
#include "thalweg/cuda/sm90/smem.cuh"
#include "thalweg/cuda/sm90/tensor_map.h"
#include "thalweg/cuda/values.cuh"
#include "thalweg/ops/gated_delta_rule/problem.h"
#include "thalweg/ops/gated_delta_rule/sm90_chunk_plan.h"

namespace thalweg::gated_delta_rule::sm90 {

// Factors of one chunk and value head, in the workspace: A [64 64] and P [64 64] as swizzled blocks (smem.cuh), and
// rows of float between them. G is the running sum of gates in units of log 2; rk, rq are 1 / |k|, 1 / |q| with
// use_qk_l2norm, else 1.
enum GateRow {
  kReadK,   // 2^G_i rk_i:            S^T k of the state before the chunk
  kWriteK,  // 2^(G_last - G_j) rk_j: V'_j k_j into the state after the chunk
  kDecay,   // 2^G_last, once
  kReadQ,   // 2^G_i rq_i scale:      S^T q of the state before the chunk; a row of its own
};

constexpr int kGroup = 128;  // threads of a warpgroup

struct Maps {
  CUtensorMap q, k, v;
};

struct ChunkArgs {
  thalweg_tensor q, k, v, g, beta, A_log, dt_bias, initial_state, o, final_state, chunk_states;
  const cuda::Span* spans;  // null: not packed
  const int32_t* order;     // packed sequences, longest first
  char* factors;            // [slots HV kFactorBytes]
  int* tickets;             // blocks that have started, then flags [slots HV]: factors are there; null: all are
  int prep_blocks;          // the first blocks to start make factors
  int num_sms;
  int jobs;                  // pieces of chains
  int* next_job;             // that no block has taken yet, where blocks go from chain to chain
  int pieces, piece_chunks;  // of a sequence, at most; chunks of a piece
  float *starts, *sums;      // [N HV pieces V K]: states before a piece; [N HV pieces-1]: N [V K], M [K K] of a piece
  int64_t N, B, T, H, HV, K, V;
  int64_t every;  // tokens between chunk_states, a multiple of 64
  float scale;
  bool l2norm, gate, sigmoid, neg_eigval;
  bool tma;         // q, k, v can be read through maps
  bool aligned;     // rows of q, k, v, o start at multiples of 16 bytes
  bool wide_gates;  // g and beta are float32 with value heads side by side, four of them at a multiple of 16 bytes
};

// Sequence n, as rows of the flattened [B T] axis.
__device__ inline cuda::Span span_of(const ChunkArgs& a, int64_t n) {
  return a.spans ? cuda::span_at(a.spans, n) : cuda::Span{n * a.T, (n + 1) * a.T, 1};
}
// Chunk c of sequence n has slot first_slot + c; there are at most T / 64 + N of them (B T / 64 + N).
__device__ inline int64_t first_slot(int64_t begin, int64_t n) { return begin / kChunk + n; }

// Of chunk_states: the row of sequence n's first checkpoint.
__device__ inline int64_t first_checkpoint(const ChunkArgs& a, int64_t begin, int64_t n) { return begin / a.every + n; }

// Element (row of [B T], head, 0) of a tensor [B T heads ...].
template <class E>
__device__ inline E* row_at(const thalweg_tensor& t, int64_t T, int64_t row, int64_t head) {
  return static_cast<E*>(t.data) + row / T * t.stride[0] + row % T * t.stride[1] + head * t.stride[2];
}

// Zeros for the rows past the last packed sequence: this block's part of them.
template <class E>
__device__ inline void zero_rest(const ChunkArgs& a, int block, int blocks) {
  if (!a.spans) return;
  const int64_t end = a.N > 0 ? cuda::span_at(a.spans, a.N - 1).end : 0;
  for (int64_t row = end + block; row < a.T; row += blocks)
    for (int64_t i = 8 * threadIdx.x; i < a.HV * a.V; i += 8 * blockDim.x) {
      E* const to = row_at<E>(a.o, a.T, row, i / a.V) + i % a.V;
      if (a.aligned)
        *reinterpret_cast<uint4*>(to) = uint4{};
      else
        for (int j = 0; j < 8; ++j) to[j] = E(0.f);
    }
}

// 8 elements, zeros where they are not valid. Aligned: in flight afterwards; otherwise done, element by element.
template <class E>
__device__ inline void copy_piece(uint32_t to, const E* from, bool valid, bool aligned) {
  using namespace cuda::sm90;
  if (aligned) return cp_async_16(to, from, valid);
  uint32_t x[4] = {};
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  if (valid)
    for (int j = 0; j < 4; ++j) x[j] = uint32_t(bits[2 * j]) | uint32_t(bits[2 * j + 1]) << 16;
  st_shared_128(to, x[0], x[1], x[2], x[3]);
}

// The states before pieces 1 and on, in `starts` (sm90_chunk_pieces.cu).
void launch_pieces(const Problem& p, const ChunkArgs& a, const Maps& maps, const Exec& exec);
// The factors of every chunk and value head (sm90_chunk_prep.cu).
void launch_prep(const Problem& p, const ChunkArgs& a, const Maps& maps, const Exec& exec);

}  // namespace thalweg::gated_delta_rule::sm90
#endif
