// What a KDA-gate kernel decides on, and the kernels. Plain data: files compiled per ISA include it.
#ifndef THALWEG_OPS_KDA_GATE_PROBLEM_H
#define THALWEG_OPS_KDA_GATE_PROBLEM_H

#include "thalweg/core/exec.h"
#include "thalweg/ops/kda_gate/kda_gate.h"

namespace thalweg::kda_gate {

// How B, T and L of every tensor are one axis of tokens at one stride: all three, all but B, all but L, or not at all.
enum Planes { kNoPlanes = 0, kOnePlane = 1, kBAxisApart = 2, kLAxisApart = 3 };

struct Problem {
  int64_t B, T, L, HV, K;
  double lower_bound;     // 0: the softplus form
  thalweg_dtype dtype;    // of x, d_x
  thalweg_dtype g_dtype;  // of g, d_g
  bool rows;              // every tensor of x's shape has K contiguous
  bool wide_rows;         // and its rows suit 16-byte loads (cuda/layout.h)
  Planes planes;
  bool head_sums;         // bwd: d_A_log is wanted
  bool channel_sums;      // bwd: d_dt_bias is wanted
};

// Plan.values of the rows of this operator.
enum { kBlock = 0, kStream = 1, kGroup = 2 };  // tokens of a task; outputs past the caches; bwd: heads of a task

namespace {  // a copy for each file: some are compiled per instruction set

// A token is a place along B, T and L; it has HV rows of K.
inline int64_t num_tokens(const Problem& p) { return p.B * p.T * p.L; }
inline int64_t row_pitch(const Problem& p) { return (p.K + 15) / 16 * 16; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Shared workspace: what the kernels make of A_log, `gate_bytes` a head, then dt_bias or zeros, [HV][pitch] numbers
// of `bias_bytes`, and backward the partial sums, float64.
struct Shared {
  int64_t bias;      // where it starts, in bytes
  int64_t channels;  // [blocks][HV][pitch]: terms of d_dt_bias
  int64_t heads;     // [blocks][HV]: terms of d_A_log
  int64_t end;
};
inline Shared shared_of(const Problem& p, int64_t gate_bytes, int64_t bias_bytes, int64_t num_blocks) {
  Shared s;
  s.bias = ceil_div(p.HV * gate_bytes, 64) * 64;
  s.channels = s.bias + p.HV * row_pitch(p) * bias_bytes;
  s.heads = s.channels + (p.channel_sums ? num_blocks * p.HV * row_pitch(p) * 8 : 0);
  s.end = s.heads + (p.head_sums ? ceil_div(num_blocks * p.HV * 8, 64) * 64 : 0);
  return s;
}

// CUDA, backward: workspace of the partial sums, float64 [blocks][HV][K + 1], d_A_log's last. Blocks of at least 32
// tokens, at most 65535 and about 4 M sums: by sizes alone, the same for every row of the table.
struct CudaSums {
  int64_t block, num_blocks;  // tokens of a block
  int64_t end;                // in bytes; 0 where no sums are wanted
};
inline CudaSums cuda_sums_of(const Problem& p) {
  const int64_t columns = p.HV * (p.K + 1) < 1 ? 1 : p.HV * (p.K + 1);
  const int64_t fit = (int64_t(1) << 22) / columns, most = fit < 1 ? 1 : fit > 65535 ? 65535 : fit;
  CudaSums s;
  s.block = ceil_div(num_tokens(p), most) < 32 ? 32 : ceil_div(num_tokens(p), most);
  s.num_blocks = ceil_div(num_tokens(p), s.block);
  s.end = p.head_sums || p.channel_sums ? ceil_div(s.num_blocks * p.HV * (p.K + 1) * 8, 64) * 64 : 0;
  return s;
}

}  // namespace

// Tokens of a block of partial sums: by sizes alone, so that sums do not depend on threads. At most 64 blocks and,
// where a token is long, 4 M sums.
int64_t backward_block(const Problem& p);

// d_A_log and d_dt_bias, those that are there, from partial sums as Shared has them, added in order of blocks.
void store_sums(const Problem& p, const thalweg_kda_gate_bwd_args& args, const double* channels, const double* heads,
                int64_t num_blocks, const Exec& exec);

// Any dtype, any strides.
void cpu_generic_fwd(const Problem&, const Plan&, const thalweg_kda_gate_fwd_args&, const Exec&);
void cpu_generic_bwd(const Problem&, const Plan&, const thalweg_kda_gate_bwd_args&, const Exec&);
constexpr int64_t kGenericGateBytes = 8, kGenericBiasBytes = 8;
constexpr int64_t kGenericRows = 3;  // of scratch a slot, float64

// cpu_vec_fwd.cpp and cpu_vec_bwd.cpp, compiled per instruction set.
constexpr int64_t kVecGateBytes = 32, kVecBiasBytes = 4;
constexpr int64_t kVecHeadFloats = 16;  // backward, scratch of a slot: a row of sums and this a head of its group
namespace avx2 {
void cpu_vec_fwd(const Problem&, const Plan&, const thalweg_kda_gate_fwd_args&, const Exec&);
void cpu_vec_bwd(const Problem&, const Plan&, const thalweg_kda_gate_bwd_args&, const Exec&);
}  // namespace avx2
namespace avx512 {
void cpu_vec_fwd(const Problem&, const Plan&, const thalweg_kda_gate_fwd_args&, const Exec&);
void cpu_vec_bwd(const Problem&, const Plan&, const thalweg_kda_gate_bwd_args&, const Exec&);
}  // namespace avx512

// cuda_generic.cu: any dtype, any strides.
void cuda_generic_fwd(const Problem&, const Plan&, const thalweg_kda_gate_fwd_args&, const Exec&);
void cuda_generic_bwd(const Problem&, const Plan&, const thalweg_kda_gate_bwd_args&, const Exec&);

// sm90_vec_fwd.cu, sm90_vec_bwd.cu: wide rows.
void sm90_vec_fwd(const Problem&, const Plan&, const thalweg_kda_gate_fwd_args&, const Exec&);
void sm90_vec_bwd(const Problem&, const Plan&, const thalweg_kda_gate_bwd_args&, const Exec&);
constexpr int64_t kSm90MostChannels = 1024;  // a row is at most 256 packs of 4

}  // namespace thalweg::kda_gate
#endif
