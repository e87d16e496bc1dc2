// cpu_generic – KDA gate, forward and backward, any dtype and strides.
//
// Math     y = x + dt_bias   a = exp(A_log)
//          softplus form: g = -a softplus(y)   dg/dx = -a sigmoid(y)   dg/dA_log = g
//          lower bound:   z = a y   s = sigmoid(z)   g = lower_bound s   dg/dx = lower_bound a s (1 - s)
//                         dg/dA_log = lower_bound s (1 - s) z
// Shapes   x,g,d_g,d_x [B T L HV K]  A_log [HV]  dt_bias [HV K]
// Takes    anything valid
// Threads  one task per block of tokens
// Vectors  whatever the compiler makes of the loops over a row
// Tile     64 tokens forward, backward_block() tokens backward
// Scratch  shared: A_log and dt_bias, partial sums; 3 rows a slot
// Numerics float64 for every dtype, rounded at the store; sums per block, then over blocks in order
// Traps    a may be infinite or 0 where its product with a tiny softplus or slope is not: such products are
//          exponentials of sums of logarithms.
// Measured the vector rows are the fast ones; see their headers
#include <algorithm>
#include <cmath>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"
#include "thalweg/ops/kda_gate/problem.h"

namespace thalweg::kda_gate {
namespace {

constexpr int64_t kForwardBlock = 64;

struct Slopes {
  double x, A_log;
};

// g, and its slopes when `slopes` is given.
double gate_at(double lower_bound, double A_log, double y, Slopes* slopes) {
  if (lower_bound == 0) {
    // e^y is taken out of a small softplus and sigmoid, and joins a.
    const double t = std::exp(-std::fabs(y)), common = std::exp(A_log + std::min(y, 0.0));
    const double softplus = y > 20 ? y : y > 0 ? y + std::log1p(t) : t > 1e-300 ? std::log1p(t) / t : 1;
    if (slopes) *slopes = {-common / (y > 20 ? 1 : 1 + t), -common * softplus};
    return -common * softplus;
  }
  const double z = y == 0 ? 0 : std::exp(A_log) * y, t = std::exp(-std::fabs(z));
  if (slopes) {
    const double part = lower_bound / ((1 + t) * (1 + t));
    *slopes = {part * std::exp(A_log - std::fabs(z)), t == 0 ? 0 : part * t * z};
  }
  return lower_bound * (z < 0 ? t : 1) / (1 + t);
}

template <class Args>
struct Call {
  const Problem& p;
  const Args& args;
  const double *A_log, *dt_bias;  // [HV], [HV][pitch]
  double *channels, *heads;       // backward: partial sums
  char* scratch;
  int64_t slot_bytes, block;
};

// Element 0 of row (token, hv) of t.
int64_t row_of(const Problem& p, const thalweg_tensor& t, int64_t token, int64_t hv) {
  return token / p.L / p.T * t.stride[0] + token / p.L % p.T * t.stride[1] + token % p.L * t.stride[2] + hv * t.stride[3];
}

// y of a row.
template <class Args>
void load_y(const Call<Args>& call, int64_t token, int64_t hv, double* y) {
  const Problem& p = call.p;
  load_row(call.args.x, row_of(p, call.args.x, token, hv), call.args.x.stride[4], p.K, y);
  const double* dt_bias = call.dt_bias + hv * row_pitch(p);
  for (int64_t k = 0; k < p.K; ++k) y[k] += dt_bias[k];
}

void forward_task(void* arg, int64_t i, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_kda_gate_fwd_args>*>(arg);
  const Problem& p = call.p;
  double* row = reinterpret_cast<double*>(call.scratch + slot * call.slot_bytes);
  for (int64_t token = i * call.block; token < std::min((i + 1) * call.block, num_tokens(p)); ++token)
    for (int64_t hv = 0; hv < p.HV; ++hv) {
      load_y(call, token, hv, row);
      for (int64_t k = 0; k < p.K; ++k) row[k] = gate_at(p.lower_bound, call.A_log[hv], row[k], nullptr);
      store_row(call.args.g, row_of(p, call.args.g, token, hv), call.args.g.stride[4], p.K, row);
    }
}

void backward_task(void* arg, int64_t i, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_kda_gate_bwd_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const int64_t pitch = row_pitch(p);
  double *y = reinterpret_cast<double*>(call.scratch + slot * call.slot_bytes), *d_g = y + pitch, *d_x = d_g + pitch;
  double* channels = p.channel_sums ? call.channels + i * p.HV * pitch : nullptr;
  double* heads = p.head_sums ? call.heads + i * p.HV : nullptr;
  if (channels) std::fill_n(channels, p.HV * pitch, 0.0);
  if (heads) std::fill_n(heads, p.HV, 0.0);
  for (int64_t token = i * call.block; token < std::min((i + 1) * call.block, num_tokens(p)); ++token)
    for (int64_t hv = 0; hv < p.HV; ++hv) {
      load_y(call, token, hv, y);
      load_row(args.d_g, row_of(p, args.d_g, token, hv), args.d_g.stride[4], p.K, d_g);
      double head = 0;
      for (int64_t k = 0; k < p.K; ++k) {
        Slopes slopes;
        gate_at(p.lower_bound, call.A_log[hv], y[k], &slopes);
        d_x[k] = d_g[k] == 0 ? 0 : d_g[k] * slopes.x;
        head += d_g[k] == 0 ? 0 : d_g[k] * slopes.A_log;
      }
      if (present(args.d_x)) store_row(args.d_x, row_of(p, args.d_x, token, hv), args.d_x.stride[4], p.K, d_x);
      if (heads) heads[hv] += head;
      for (int64_t k = 0; k < p.K && channels; ++k) channels[hv * pitch + k] += d_x[k];
    }
}

// The parameters as float64 in shared memory, then the tasks.
template <class Args>
Call<Args> prepare(const Problem& p, const Plan& plan, const Args& args, const Exec& exec, int64_t block) {
  const Shared shared = shared_of(p, kGenericGateBytes, kGenericBiasBytes, ceil_div(num_tokens(p), block));
  double *A_log = reinterpret_cast<double*>(exec.workspace), *dt_bias = A_log + shared.bias / 8;
  std::fill_n(A_log, p.HV, 0.0);
  if (present(args.A_log)) load_row(args.A_log, 0, args.A_log.stride[0], p.HV, A_log);
  for (int64_t hv = 0; hv < p.HV; ++hv) {
    double* row = dt_bias + hv * row_pitch(p);
    std::fill_n(row, p.K, 0.0);
    if (present(args.dt_bias)) load_row(args.dt_bias, hv * args.dt_bias.stride[0], args.dt_bias.stride[1], p.K, row);
  }
  return {p, args, A_log, dt_bias, A_log + shared.channels / 8, A_log + shared.heads / 8,
          exec.workspace + plan.shared_bytes, plan.slot_bytes, block};
}

}  // namespace

void cpu_generic_fwd(const Problem& p, const Plan& plan, const thalweg_kda_gate_fwd_args& args, const Exec& exec) {
  auto call = prepare(p, plan, args, exec, kForwardBlock);
  parallel_tasks(exec, ceil_div(num_tokens(p), kForwardBlock), plan.num_slots, forward_task, &call);
}

void cpu_generic_bwd(const Problem& p, const Plan& plan, const thalweg_kda_gate_bwd_args& args, const Exec& exec) {
  auto call = prepare(p, plan, args, exec, backward_block(p));
  const int64_t num_blocks = ceil_div(num_tokens(p), call.block);
  parallel_tasks(exec, num_blocks, plan.num_slots, backward_task, &call);
  store_sums(p, args, call.channels, call.heads, num_blocks, exec);
}

}  // namespace thalweg::kda_gate
