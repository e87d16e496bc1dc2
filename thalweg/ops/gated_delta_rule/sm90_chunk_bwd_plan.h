// Where sm90_chunk_bwd keeps what its kernels hand to each other: the plan and the launcher agree by this. Plain C++.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_PLAN_H
#define THALWEG_OPS_GATED_DELTA_RULE_SM90_CHUNK_BWD_PLAN_H

#include <string>

#include "thalweg/core/device.h"
#include "thalweg/delta_rule/cuda_plan.h"
#include "thalweg/delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

// Bytes for one chunk of 64 tokens and one value head; offsets of the parts in the workspace.
struct ChunkBwdLayout {
  int64_t chunks;               // places for chunks: sequence n begins at place_of(n)
  int64_t state, rows, square;  // bytes: a state (16 bits), 64 rows of V (16 bits), a 64 x 64 tile (16 bits)
  int64_t slice;                // of a state: 64 columns of V
  int64_t S, dS, r, y, X, P, scalars, spans, bytes;
  int64_t ready;  // [chunks H] int32: scans that have passed a chunk; then a ticket
};
constexpr int64_t kScalarBytes = 4 * 64 * 4;  // per chunk and value head: [4][64] float32

inline ChunkBwdLayout chunk_bwd_layout(const delta_rule::Problem& p) {
  ChunkBwdLayout l{};
  l.chunks = p.packed ? p.T / 64 + p.N : p.B * ((p.T + 63) / 64);
  l.state = 2 * p.K * p.V, l.rows = 2 * 64 * p.V, l.square = 2 * 64 * 64, l.slice = 2 * p.K * 64;
  const int64_t places = l.chunks * p.HV;
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    int64_t here = at;
    at += bytes;
    return here;
  };
  l.S = take(places * l.state), l.dS = take(places * l.state);
  l.r = take(places * l.rows), l.y = take(places * l.rows);
  l.X = take(places * l.square), l.P = take(places * l.square);
  l.scalars = take(places * kScalarBytes);
  l.spans = take(delta_rule::spans_workspace(p));
  l.ready = take((l.chunks * p.H + 1) * 4);
  l.bytes = at;
  return l;
}

// values[0]: multiprocessors, what the gradients' grid is made for; values[1]: of them, those that the scans leave to
// gradients of chunks that both directions have passed, 0: gradients come after the scans, as where these leave less
// than three quarters (H200, 1x8192, K = 128: 8 value heads 207 us instead of 239, 16 value heads 338 instead of 325).
inline bool plan_chunk_bwd(const delta_rule::Problem& p, const Device& device, Plan* plan, std::string* why) {
  constexpr int64_t kMostBlocks = 2147483647;
  const ChunkBwdLayout l = chunk_bwd_layout(p);
  std::string reason;
  if (p.dtype != THALWEG_BF16 && p.dtype != THALWEG_F16)
    reason = std::string("needs q of bf16 or f16, got ") + thalweg_dtype_name(p.dtype);
  else if (p.K != p.V || (p.K != 64 && p.K != 128))
    reason = "needs K = V of 64 or 128, got K = " + std::to_string(p.K) + ", V = " + std::to_string(p.V);
  else if (p.fused)
    reason = "needs q, k, g and beta as the recurrence takes them, got use_qk_l2norm, use_gate or use_beta_sigmoid";
  else if (l.chunks * p.HV > kMostBlocks || 2 * p.N * p.HV * (p.V / 64) > kMostBlocks)
    reason = "needs chunks times value heads, and sequences times heads, of at most 2^31 - 1 blocks, got more";
  if (!reason.empty()) {
    if (why) *why = reason;
    return false;
  }
  const int64_t scans = 2 * p.N * p.HV * (p.V / 64);
  plan->values[0] = device.num_sms;
  plan->values[1] = p.K == 128 && scans > 0 && 4 * scans <= device.num_sms ? device.num_sms - scans : 0;
  plan->shared_bytes = l.bytes;
  return true;
}

}  // namespace thalweg::gated_delta_rule
#endif
