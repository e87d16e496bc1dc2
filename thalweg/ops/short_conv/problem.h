// What a short-conv kernel decides on, and the kernels. Plain data: files compiled per ISA include it.
#ifndef THALWEG_OPS_SHORT_CONV_PROBLEM_H
#define THALWEG_OPS_SHORT_CONV_PROBLEM_H

#include "thalweg/core/exec.h"
#include "thalweg/ops/short_conv/short_conv.h"

namespace thalweg::short_conv {

constexpr int64_t kMaxW = 8;

struct Problem {
  int64_t B, T, D, W;   // decode: B is N
  int64_t N;            // sequences
  int64_t M;            // decode: slots of the pool
  thalweg_dtype dtype;  // of x, y
  bool packed;          // cu_seqlens is there
  bool silu;
  bool sums;       // bwd: d_weight or d_bias is wanted
  bool state_f64;  // decode: the pool is f64
  bool slots;      // decode: read_slots or write_slots are there
  bool wide_rows;  // the rows of x, y and their gradients suit 16-byte loads (cuda/layout.h); decode: [D W] of a state
};

// Plan.values of the rows of this operator.
enum { kBlock = 0, kStrip = 1, kStream = 2 };  // tokens and channels of a task; y past the caches

// A sequence as rows of the flattened [B*T] token axis: row r is element (r / T, r % T) of [B T ...].
// n is -1 for the rows past cu_seqlens[N].
struct Span {
  int64_t n, begin, end;
};
// The sequence, never an empty one, that row belongs to.
Span span_at(const Problem& problem, const thalweg_tensor& cu_seqlens, int64_t row);
Span sequence_span(const Problem& problem, const thalweg_tensor& cu_seqlens, int64_t n);

// Offset of token r of the flattened token axis of a tensor [B T ...].
inline int64_t token_offset(const thalweg_tensor& t, int64_t T, int64_t r) {
  return r / T * t.stride[0] + r % T * t.stride[1];
}

// Rows of scratch, `pitch` elements apart, for `count` channels from d0.

// weight[:, j] to row j of W, bias (or 0) to row W.
void load_weight(const thalweg_tensor& weight, const thalweg_tensor& bias, int64_t d0, int64_t count, int64_t pitch,
                 float* out);
void load_weight(const thalweg_tensor& weight, const thalweg_tensor& bias, int64_t d0, int64_t count, int64_t pitch,
                 double* out);
// Slot j of state `n` to row j of W; zeros when the tensor is absent.
void load_state(const thalweg_tensor& state, int64_t W, int64_t n, int64_t d0, int64_t count, int64_t pitch,
                float* out);
void load_state(const thalweg_tensor& state, int64_t W, int64_t n, int64_t d0, int64_t count, int64_t pitch,
                double* out);
// Row j to slot j of state `n`.
void store_state(const float* rows, int64_t pitch, const thalweg_tensor& state, int64_t n, int64_t d0, int64_t count);
void store_state(const double* rows, int64_t pitch, const thalweg_tensor& state, int64_t n, int64_t d0, int64_t count);
// The W inputs before row `first` of a sequence, oldest first, from x and initial_state, to W rows.
void load_history(const Problem& problem, const thalweg_tensor& x, const thalweg_tensor& initial_state,
                  const Span& span, int64_t first, int64_t d0, int64_t count, int64_t pitch, float* out);
// One slot of a state from one row.
void store_slot(const float* row, const thalweg_tensor& state, int64_t n, int64_t slot, int64_t d0, int64_t count);
void store_slot(const double* row, const thalweg_tensor& state, int64_t n, int64_t slot, int64_t d0, int64_t count);

// Tokens of a block of partial sums, at most 64 blocks: by size alone, so that sums do not depend on threads.
int64_t backward_block(const Problem& problem);

// What all forward rows share: final_state of every sequence, from x and initial_state, exact.
void write_final_states(const Problem& problem, const thalweg_short_conv_fwd_args& args, const Exec& exec);
// What all backward rows share: d_initial_state of the sequences without tokens.
void write_empty_sequences(const Problem& problem, const thalweg_short_conv_bwd_args& args);
// d_weight and d_bias from partial sums [num_blocks][W + 1][D] (row W: bias), added in order of blocks.
void sum_partials(const Problem& problem, const thalweg_short_conv_bwd_args& args, const float* partials,
                  int64_t num_blocks, const Exec& exec);
void sum_partials(const Problem& problem, const thalweg_short_conv_bwd_args& args, const double* partials,
                  int64_t num_blocks, const Exec& exec);

// Any dtype, any strides.
void cpu_generic_fwd(const Problem&, const Plan&, const thalweg_short_conv_fwd_args&, const Exec&);
void cpu_generic_bwd(const Problem&, const Plan&, const thalweg_short_conv_bwd_args&, const Exec&);
void cpu_generic_decode(const Problem&, const Plan&, const thalweg_short_conv_decode_args&, const Exec&);
int64_t cpu_generic_slot_bytes(const Problem&);

// cpu_vec_fwd.cpp and cpu_vec_bwd.cpp, compiled per instruction set.
namespace avx2 {
void cpu_vec_fwd(const Problem&, const Plan&, const thalweg_short_conv_fwd_args&, const Exec&);
void cpu_vec_bwd(const Problem&, const Plan&, const thalweg_short_conv_bwd_args&, const Exec&);
void cpu_vec_decode(const Problem&, const Plan&, const thalweg_short_conv_decode_args&, const Exec&);
}  // namespace avx2
namespace avx512 {
void cpu_vec_fwd(const Problem&, const Plan&, const thalweg_short_conv_fwd_args&, const Exec&);
void cpu_vec_bwd(const Problem&, const Plan&, const thalweg_short_conv_bwd_args&, const Exec&);
void cpu_vec_decode(const Problem&, const Plan&, const thalweg_short_conv_decode_args&, const Exec&);
}  // namespace avx512

// CUDA: the shared workspace. Spans of packed sequences; backward the partial sums [blocks][W + 1][D] (row W: bias),
// float64 or, where x is not, float32. Blocks of at least 128 tokens, at most 1024 and about 4 M sums: by sizes alone,
// the same for every row of the table.
struct CudaLayout {
  int64_t block, num_blocks;  // tokens of a block of sums
  int64_t partials, end;      // in bytes
};
namespace {  // a copy for each file: some are compiled per instruction set
inline CudaLayout cuda_layout_of(const Problem& p) {
  constexpr int64_t kSpanBytes = 24;  // of cuda::Span
  const int64_t tokens = p.B * p.T, columns = (p.W + 1) * (p.D < 1 ? 1 : p.D);
  const int64_t fit = (int64_t(1) << 22) / columns, most = fit < 1 ? 1 : fit > 1024 ? 1024 : fit;
  CudaLayout at;
  at.block = (tokens + most - 1) / most < 128 ? 128 : (tokens + most - 1) / most;
  at.num_blocks = (tokens + at.block - 1) / at.block;
  at.partials = p.packed ? (p.N * kSpanBytes + 63) / 64 * 64 : 0;
  const int64_t bytes = p.sums ? at.num_blocks * (p.W + 1) * p.D * (p.dtype == THALWEG_F64 ? 8 : 4) : 0;
  at.end = at.partials + (bytes + 63) / 64 * 64;
  return at;
}
}  // namespace

// cuda_generic_fwd.cu, cuda_generic_bwd.cu: any dtype, any strides.
void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_short_conv_fwd_args&, const Exec&);
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_short_conv_bwd_args&, const Exec&);
void cuda_generic_decode(const Problem&, const Plan&, const thalweg_short_conv_decode_args&, const Exec&);

// sm90_vec_fwd.cu, sm90_vec_bwd.cu: wide rows, W 2 to 4.
void sm90_vec_fwd(const Problem&, const Plan&, const thalweg_short_conv_fwd_args&, const Exec&);
void sm90_vec_bwd(const Problem&, const Plan&, const thalweg_short_conv_bwd_args&, const Exec&);
// Blocks of the forward that a multiprocessor holds; channels and runs of tokens of one, where D is not small.
constexpr int64_t kSm90FwdBlocks = 3, kSm90FwdChannels = 128, kSm90FwdLanes = 4;
// sm90_decode.cu: W = 4, wide states.
void sm90_decode(const Problem&, const Plan&, const thalweg_short_conv_decode_args&, const Exec&);

}  // namespace thalweg::short_conv
#endif
