// What the rows of gated_rms_norm share, compiled once: the weight, and the sum over blocks.
#include <algorithm>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"
#include "thalweg/ops/gated_rms_norm/problem.h"

namespace thalweg::gated_rms_norm {
namespace {

constexpr int64_t kColumns = 256;  // of a task here

template <class A>
void load_weight_row(const Problem& problem, const thalweg_tensor& weight, A* out) {
  if (present(weight))
    load_row(weight, 0, weight.stride[0], problem.D, out);
  else
    std::fill_n(out, problem.D, A(1));
}

template <class A>
struct Partials {
  const Problem& problem;
  const thalweg_tensor& out;
  const A* partials;
  int64_t pitch, num_blocks;
};

template <class A>
void partials_task(void* arg, int64_t i, int64_t) {
  const auto& all = *static_cast<const Partials<A>*>(arg);
  const int64_t d0 = i * kColumns, count = std::min(kColumns, all.problem.D - d0);
  double sum[kColumns] = {};
  for (int64_t block = 0; block < all.num_blocks; ++block)
    for (int64_t d = 0; d < count; ++d) sum[d] += double(all.partials[block * all.pitch + d0 + d]);
  store_row(all.out, d0 * all.out.stride[0], all.out.stride[0], count, sum);
}

template <class A>
void sum_all(const Problem& problem, const thalweg_tensor& d_weight, const A* partials, int64_t pitch,
             int64_t num_blocks, const Exec& exec) {
  if (!present(d_weight)) return;
  Partials<A> all{problem, d_weight, partials, pitch, num_blocks};
  parallel_tasks(exec, (problem.D + kColumns - 1) / kColumns, exec.num_threads, partials_task<A>, &all);
}

}  // namespace

int64_t backward_block(const Problem& problem) { return std::max<int64_t>(64, (problem.M + 63) / 64); }

int64_t row_pitch(const Problem& problem) { return (problem.D + 15) / 16 * 16; }

void load_weight(const Problem& problem, const thalweg_tensor& weight, float* out) {
  load_weight_row(problem, weight, out);
}
void load_weight(const Problem& problem, const thalweg_tensor& weight, double* out) {
  load_weight_row(problem, weight, out);
}
void sum_partials(const Problem& problem, const thalweg_tensor& d_weight, const float* partials, int64_t pitch,
                  int64_t num_blocks, const Exec& exec) {
  sum_all(problem, d_weight, partials, pitch, num_blocks, exec);
}
void sum_partials(const Problem& problem, const thalweg_tensor& d_weight, const double* partials, int64_t pitch,
                  int64_t num_blocks, const Exec& exec) {
  sum_all(problem, d_weight, partials, pitch, num_blocks, exec);
}

}  // namespace thalweg::gated_rms_norm
