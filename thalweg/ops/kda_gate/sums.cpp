// What the backward rows of kda_gate share, compiled once: blocks of partial sums, and the sum over them.
#include <algorithm>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"
#include "thalweg/ops/kda_gate/problem.h"

namespace thalweg::kda_gate {
namespace {

struct Sums {
  const Problem& p;
  const thalweg_tensor &d_A_log, &d_dt_bias;
  const double *channels, *heads;  // [blocks][HV][pitch], [blocks][HV]
  int64_t num_blocks;
};

void head_task(void* arg, int64_t hv, int64_t) {
  const Sums& s = *static_cast<const Sums*>(arg);
  constexpr int64_t kColumns = 256;
  const int64_t pitch = row_pitch(s.p);
  if (s.p.head_sums) {
    double sum = 0;
    for (int64_t block = 0; block < s.num_blocks; ++block) sum += s.heads[block * s.p.HV + hv];
    store_at(s.d_A_log, hv * s.d_A_log.stride[0], sum);
  }
  for (int64_t k = 0; k < s.p.K && s.p.channel_sums; k += kColumns) {
    const int64_t count = std::min(kColumns, s.p.K - k);
    double sum[kColumns] = {};
    for (int64_t block = 0; block < s.num_blocks; ++block) {
      const double* part = s.channels + (block * s.p.HV + hv) * pitch + k;
      for (int64_t i = 0; i < count; ++i) sum[i] += part[i];
    }
    const int64_t* stride = s.d_dt_bias.stride;
    store_row(s.d_dt_bias, hv * stride[0] + k * stride[1], stride[1], count, sum);
  }
}

}  // namespace

int64_t backward_block(const Problem& p) {
  constexpr int64_t kMostSums = int64_t(1) << 22;
  const int64_t columns = std::max<int64_t>(1, p.HV * row_pitch(p));
  const int64_t most = std::clamp<int64_t>(kMostSums / columns, 1, 64);
  return std::max<int64_t>(64, ceil_div(num_tokens(p), most));
}

void store_sums(const Problem& p, const thalweg_kda_gate_bwd_args& args, const double* channels, const double* heads,
                int64_t num_blocks, const Exec& exec) {
  if (!p.head_sums && !p.channel_sums) return;
  Sums sums{p, args.d_A_log, args.d_dt_bias, channels, heads, num_blocks};
  parallel_tasks(exec, p.HV, exec.num_threads, head_task, &sums);
}

}  // namespace thalweg::kda_gate
