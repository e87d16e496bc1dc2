// What a gated-RMS-norm kernel decides on, and the kernels. Plain data: files compiled per ISA include it.
#ifndef THALWEG_OPS_GATED_RMS_NORM_PROBLEM_H
#define THALWEG_OPS_GATED_RMS_NORM_PROBLEM_H

#include "thalweg/core/exec.h"
#include "thalweg/ops/gated_rms_norm/gated_rms_norm.h"

namespace thalweg::gated_rms_norm {

enum Gate { kNoGate = 0, kSilu = 1, kSigmoid = 2 };

struct Problem {
  int64_t M, D;
  double eps;           // never 0
  thalweg_dtype dtype;  // of x, y
  thalweg_dtype gate_dtype;
  Gate gate;
  bool sums;       // bwd: d_weight is wanted
  bool wide_rows;  // every [M D] tensor's rows suit 16-byte loads (cuda/layout.h)
};

// Plan.values of the rows of this operator.
enum { kBlock = 0, kStream = 1 };  // rows of a task; outputs past the caches

// Rows of a block of partial sums, at most 64 blocks: by size alone, so that sums do not depend on threads.
int64_t backward_block(const Problem& problem);

// weight, or ones, as D numbers of the arithmetic.
void load_weight(const Problem& problem, const thalweg_tensor& weight, float* out);
void load_weight(const Problem& problem, const thalweg_tensor& weight, double* out);
// d_weight from partial sums [num_blocks][pitch], added in order of blocks.
void sum_partials(const Problem& problem, const thalweg_tensor& d_weight, const float* partials, int64_t pitch,
                  int64_t num_blocks, const Exec& exec);
void sum_partials(const Problem& problem, const thalweg_tensor& d_weight, const double* partials, int64_t pitch,
                  int64_t num_blocks, const Exec& exec);

// Shared workspace starts with the weight, `weight_bytes`; backward, the partial sums follow. Rows of
// scratch are row_pitch() elements apart.
int64_t row_pitch(const Problem& problem);

// Any dtype, any strides.
void cpu_generic_fwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_fwd_args&, const Exec&);
void cpu_generic_bwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_bwd_args&, const Exec&);
constexpr int64_t kGenericRows = 6;  // of scratch a slot

// cpu_vec_fwd.cpp and cpu_vec_bwd.cpp, compiled per instruction set.
constexpr int64_t kVecBackwardRows = 2;  // of scratch a slot
namespace avx2 {
void cpu_vec_fwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_fwd_args&, const Exec&);
void cpu_vec_bwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_bwd_args&, const Exec&);
}  // namespace avx2
namespace avx512 {
void cpu_vec_fwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_fwd_args&, const Exec&);
void cpu_vec_bwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_bwd_args&, const Exec&);
}  // namespace avx512

// CUDA, backward with sums: workspace of the partial sums, float64 [blocks][D], then rstd [M]. Blocks of at least 32
// rows, at most 512 and about 4 M sums: by sizes alone, the same for every row of the table.
struct CudaSums {
  int64_t block, num_blocks;  // rows of a block
  int64_t rstd, end;          // in bytes
};
namespace {  // a copy for each file: some are compiled per instruction set
inline CudaSums cuda_sums_of(const Problem& p) {
  const int64_t fit = (int64_t(1) << 22) / (p.D < 1 ? 1 : p.D), most = fit < 1 ? 1 : fit > 512 ? 512 : fit;
  CudaSums s;
  s.block = (p.M + most - 1) / most < 32 ? 32 : (p.M + most - 1) / most;
  s.num_blocks = (p.M + s.block - 1) / s.block;
  s.rstd = (s.num_blocks * p.D * 8 + 63) / 64 * 64;
  s.end = (s.rstd + p.M * (p.dtype == THALWEG_F64 ? 8 : 4) + 63) / 64 * 64;
  return s;
}
}  // namespace

// cuda_generic.cu: any dtype, any strides.
void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_fwd_args&, const Exec&);
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_bwd_args&, const Exec&);

// sm90_vec_fwd.cu, sm90_vec_bwd.cu: wide rows of at most this many bytes.
void sm90_vec_fwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_fwd_args&, const Exec&);
void sm90_vec_bwd(const Problem&, const Plan&, const thalweg_gated_rms_norm_bwd_args&, const Exec&);
constexpr int64_t kSm90RowBytes = 1024;

}  // namespace thalweg::gated_rms_norm
#endif
