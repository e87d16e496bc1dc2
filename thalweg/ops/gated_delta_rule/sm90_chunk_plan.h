// Where row sm90_chunk_fwd keeps what its kernels hand to each other, and what its plan decides. Plain C++.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_PLAN_H
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_PLAN_H

#include "thalweg/core/device.h"
#include "thalweg/delta_rule/cuda_plan.h"

namespace thalweg::gated_delta_rule::sm90 {

constexpr int kChunk = 64;
// Factors of a chunk and value head (sm90_chunk.cuh), in bytes: A, rows for keys, row for queries, P.
constexpr int64_t kSquareBytes = kChunk * kChunk * 2, kRowOfChunk = kChunk * 4;
constexpr int64_t kKeyRowBytes = 2 * kRowOfChunk + 128, kQueryRowBytes = kRowOfChunk;
constexpr int64_t kKeyRowsAt = kSquareBytes, kQueryRowsAt = kKeyRowsAt + kKeyRowBytes,
                  kPAt = kQueryRowsAt + kQueryRowBytes, kFactorBytes = kPAt + kSquareBytes;

constexpr int64_t kFewestPrepBlocks = 24;  // they must keep ahead of the chains

// Chunk c of a sequence that starts at row `begin` of [B T] has slot begin / 64 + n + c.
inline int64_t chunk_slots(const delta_rule::Problem& p) { return p.B * p.T / kChunk + p.N; }
// Spans, then the sequences in the order in which their chains are taken, then factors.
inline int64_t order_at(const delta_rule::Problem& p) { return delta_rule::spans_workspace(p); }
inline int64_t factors_at(const delta_rule::Problem& p) { return delta_rule::up_to(order_at(p) + p.N * 4, 128); }

// Tickets and flags of a launch in which the first blocks make the factors for the others; where blocks go from chain
// to chain, the ticket alone, of the next one.
constexpr int64_t kTicketInts = 32;
inline int64_t flags_bytes(const delta_rule::Problem& p) { return (kTicketInts + chunk_slots(p) * p.HV) * 4; }
inline int64_t flags_at(const delta_rule::Problem& p) {
  return delta_rule::up_to(factors_at(p) + chunk_slots(p) * p.HV * kFactorBytes, 128);
}

// Pieces of a long sequence that run at once (sm90_chunk_pieces.cu): their start states, and what each makes of any
// state: N [V K] and M [K K], for all but the last. K = V.
constexpr int64_t kFewestPieces = 4, kMostPieces = 16, kFewestPieceChunks = 8;
inline int64_t piece_chunks(const delta_rule::Problem& p, int64_t pieces) {
  return delta_rule::parts_of(delta_rule::parts_of(p.T, kChunk), pieces);
}
inline int64_t starts_at(const delta_rule::Problem& p) { return delta_rule::up_to(flags_at(p) + flags_bytes(p), 128); }
inline int64_t sums_at(const delta_rule::Problem& p, int64_t pieces) {
  return starts_at(p) + p.N * p.HV * pieces * p.V * p.K * 4;
}
inline int64_t sums_end(const delta_rule::Problem& p, int64_t pieces) {
  return sums_at(p, pieces) + p.N * p.HV * (pieces - 1) * (p.V + p.K) * p.K * 4;
}

// Plan.values of sm90_chunk_fwd: blocks of 64 columns of V that one thread block takes; pieces of a sequence, 0: whole
// ones; blocks that make factors beside the chains, 0: a kernel before them does; multiprocessors.
enum { kColumnBlocks = 0, kPieces = 1, kPrepBlocks = 2, kNumSms = 3 };

}  // namespace thalweg::gated_delta_rule::sm90
#endif
