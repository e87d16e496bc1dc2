// What the plan of row sm90_chunk_fwd and its launcher both need. Plain C++.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_PLAN_H
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_PLAN_H

#include <string>

#include "thalweg/core/device.h"
#include "thalweg/delta_rule/cuda_plan.h"

namespace thalweg::gated_delta_rule::sm90 {

constexpr int kChunk = 64;
constexpr int kGateRows = 6;                                        // sm90_chunk.cuh names them
constexpr int64_t kGateBytes = kGateRows * kChunk * 4;              // of a chunk and value head
constexpr int64_t kFactorBytes = kChunk * kChunk * 2 + kGateBytes;  // A and the gate rows

constexpr int64_t kFewestPrepBlocks = 24;  // they must keep ahead of the chains

// Chunk c of a sequence that starts at row `begin` of [B T] has slot begin / 64 + n + c.
inline int64_t chunk_slots(const delta_rule::Problem& p) { return p.B * p.T / kChunk + p.N; }
inline int64_t factors_at(const delta_rule::Problem& p) {
  return delta_rule::up_to(delta_rule::spans_workspace(p), 128);
}

// Tickets and flags of a launch in which the first blocks make the factors for the others.
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

// values[0]: blocks of 64 columns of V that one thread block takes; [1]: blocks that make factors beside the chains,
// 0: a kernel before them does; [2]: pieces of a sequence, 0: whole ones.
inline bool plan_fwd(const delta_rule::Problem& p, const Device& device, Plan* plan, std::string* why) {
  std::string reason;
  if (p.dtype != THALWEG_BF16 && p.dtype != THALWEG_F16)
    reason = std::string("needs q of bf16 or f16, got ") + thalweg_dtype_name(p.dtype);
  else if (p.K != p.V || (p.K != 64 && p.K != 128))
    reason = "needs K = V of 64 or 128, got K = " + std::to_string(p.K) + ", V = " + std::to_string(p.V);
  else if (p.every % kChunk != 0)
    reason = "needs every of a multiple of 64, got " + std::to_string(p.every);
  if (!reason.empty()) {
    if (why) *why = reason;
    return false;
  }
  // Two blocks of columns share the tiles; apart, they use twice the multiprocessors.
  plan->values[0] = p.K == 128 && 2 * p.N * p.HV > device.num_sms ? 2 : 1;
  const int64_t chains = p.N * p.HV * (p.V / 64) / plan->values[0];
  plan->shared_bytes = flags_at(p);
  if (plan->values[0] == 2 || chains == 0 || p.T >= int64_t(1) << 30) return true;
  // Pieces of one sequence fill the device; packed ones have lengths that only the device knows.
  int64_t pieces = device.num_sms / chains, most = p.T / kChunk / kFewestPieceChunks;
  if (most < pieces) pieces = most;
  if (pieces > kMostPieces) pieces = kMostPieces;
  if (pieces >= kFewestPieces && (!p.packed || p.N == 1)) {
    plan->values[2] = pieces;
    plan->shared_bytes = sums_end(p, pieces);
  } else if (chains + kFewestPrepBlocks <= device.num_sms) {
    plan->values[1] = device.num_sms - chains;
    plan->shared_bytes = flags_at(p) + flags_bytes(p);
  }
  return true;
}

}  // namespace thalweg::gated_delta_rule::sm90
#endif
