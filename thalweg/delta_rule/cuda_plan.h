// What the plans of the CUDA rows and their launchers both need: how a problem is cut, and where things lie in the
// workspace. Plain C++.
#ifndef THALWEG_DELTA_RULE_CUDA_PLAN_H
#define THALWEG_DELTA_RULE_CUDA_PLAN_H

#include "thalweg/core/exec.h"
#include "thalweg/delta_rule/problem.h"

namespace thalweg::delta_rule {

inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
inline int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }
inline int64_t arithmetic_bytes(const Problem& p) { return p.dtype == THALWEG_F64 ? 8 : 4; }

// How the generic rows hold a state: a column (fixed j of V) in `lanes` lanes, kLaneRows rows of K in each.
constexpr int64_t kLaneRows = 16;
struct Columns {
  int64_t lanes;    // of a column: a power of two
  int64_t rows;     // lanes * kLaneRows: K, padded
  int64_t columns;  // of a block
  int64_t slices;   // blocks' worth of columns in V
};
inline Columns columns_of(const Problem& p, int64_t threads) {
  int64_t lanes = 1;
  while (lanes * kLaneRows < p.K) lanes *= 2;
  return {lanes, lanes * kLaneRows, threads / lanes, parts_of(p.V, threads / lanes)};
}

// Of the spans of packed sequences (cuda::Span).
inline int64_t spans_workspace(const Problem& p) { return p.packed ? up_to(p.N * 24, 64) : 0; }

constexpr int64_t kMaxDrafts = 8;  // tokens that sm90_decode takes in one call

// How sm90_decode cuts a state into blocks. A block takes `steps` times `columns` of V, one after another; a warp has
// 1024 numbers of a step's columns in its registers.
struct DecodeCut {
  int64_t warps, columns, steps;
  int64_t helpers;  // warps without a part of the state, for the tokens
};
constexpr int64_t kDecodeWarps = 8;  // of a block at most; twice as many run at once on a multiprocessor
inline DecodeCut decode_cut(const Problem& p, int64_t num_sms) {
  const int64_t columns = p.k_contiguous ? 2048 / p.K : 32, warps = p.K * columns / 1024;
  const auto all_at_once = [&](int64_t steps, int64_t warps_of_block) {
    return p.N * p.HV * (p.V / (columns * steps)) * warps_of_block <= 2 * kDecodeWarps * num_sms;
  };
  if (warps + 2 <= kDecodeWarps && all_at_once(1, warps + 2)) return {warps, columns, 1, 2};
  if (all_at_once(1, warps)) return {warps, columns, 1, 0};
  if (all_at_once(2, warps)) return {warps, columns, 2, 0};
  if (p.k_contiguous) return {warps, columns, 1, 0};
  if (p.K == 256) return {warps, columns, 2, 0};
  return {2 * warps, 2 * columns, p.V % 128 == 0 ? 2 : 1, 0};
}

// ---- Decode: the uses of every slot (cuda_slots.cuh) ----

struct SlotUse {
  int32_t writes;       // how many, at most 2
  int32_t first, last;  // lowest and highest sequence that reads or writes it
};
// Never 0 with slots: a table that is there says that they are to be looked at, of a pool without any too.
inline int64_t slots_workspace(const Problem& p) {
  return p.slots ? up_to((p.M > 0 ? p.M : 1) * int64_t(sizeof(SlotUse)), 64) : 0;
}

// ---- Generic backward ----

constexpr int64_t kBwdThreads = 256;
constexpr int64_t kBwdPiece = 64;   // tokens between checkpoints
constexpr int64_t kGateChunk = 32;  // rows whose gate gradients one block sums

// Of float32 tensors d_A_log is float64's work too: a sum over all tokens and channels, whose terms may cancel to a
// hundredth, and with them the digits of a float32 recurrence.
inline bool bwd_in_float64(const Problem& p) {
  return p.dtype == THALWEG_F64 || (p.dtype == THALWEG_F32 && p.rate_sum);
}
inline int64_t bwd_arithmetic_bytes(const Problem& p) { return bwd_in_float64(p) ? 8 : 4; }

// Tasks are (sequence, value head, group of slices); a task takes the slices of its group one after another and adds
// up what it finds for d_q, d_k, d_g, d_beta. One sequence more has the rows past cu_seqlens[N].
struct BwdLayout {
  Columns cut;
  int64_t groups, tasks, blocks;
  int64_t entry;          // numbers per token, head and group: d_q [rows], d_k [rows], d_g [gates], d_beta, padded
  int64_t gates;          // decays of a token: 1, or rows
  int64_t chunks, state;  // gate chunks; numbers of a block's slice of a state
  int64_t kinds_at, checkpoints_at, states_at, partial_at, sums_at, bytes;  // offsets; the spans are first
};
inline BwdLayout bwd_layout(const Problem& p, int64_t num_sms) {
  BwdLayout l{};
  l.cut = columns_of(p, kBwdThreads);
  const int64_t heads = p.N * p.HV, bytes = bwd_arithmetic_bytes(p), tokens = p.B * p.T;
  l.groups = heads > 0 ? parts_of(num_sms, heads) : 1;
  if (l.groups > l.cut.slices) l.groups = l.cut.slices;
  l.tasks = (heads + (p.packed ? p.HV : 0)) * l.groups;
  l.blocks = l.tasks < 2 * num_sms ? l.tasks : 2 * num_sms;
  l.gates = p.channels == 1 ? 1 : l.cut.rows;
  l.entry = up_to(2 * l.cut.rows + l.gates + 1, 4);
  l.chunks = parts_of(tokens, kGateChunk);
  l.state = kBwdThreads * kLaneRows;
  l.bytes = spans_workspace(p);
  auto take = [&](int64_t n, int64_t size) {
    const int64_t from = l.bytes;
    l.bytes += up_to(n * size, 64);
    return from;
  };
  l.kinds_at = take(p.packed ? tokens : 0, 4);
  l.checkpoints_at = take((tokens / kBwdPiece + p.N) * p.HV * l.groups * l.state, bytes);
  l.states_at = take(l.blocks * kBwdPiece * l.state, bytes);
  l.partial_at = take(tokens * p.HV * l.groups * l.entry, bytes);
  l.sums_at = take(l.chunks * p.HV * (1 + p.channels), 8);
  return l;
}

}  // namespace thalweg::delta_rule
#endif
