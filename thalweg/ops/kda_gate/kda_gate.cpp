// KDA gate: field tables, checks, kernel tables, entry points.
#include "thalweg/ops/kda_gate/kda_gate.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>

#include "thalweg/core/kernel.h"
#include "thalweg/cpu/streams.h"
#include "thalweg/cuda/layout.h"
#include "thalweg/ops/kda_gate/problem.h"

namespace thalweg {
namespace kda_gate {
namespace {

using Fwd = thalweg_kda_gate_fwd_args;
using Bwd = thalweg_kda_gate_bwd_args;

constexpr const char* kShape = "B T L HV K";
constexpr const char* kRefused =
    "output_dtype: the dtype of g says it; A_log of any other shape than [HV]: view it so; "
    "dt_bias [HV*K]: view it as [HV K]; beta: it has no part in the gate";

constexpr thalweg_field A_log(size_t offset) {
  return tensor_field("A_log", THALWEG_IN, offset, true, "HV", kFloats, THALWEG_ANY,
                      "logarithm of the rate a of each head; absent means 0, a = 1");
}
constexpr thalweg_field dt_bias(size_t offset) {
  return tensor_field("dt_bias", THALWEG_IN, offset, true, "HV K", kFloats, THALWEG_ANY,
                      "added to x; absent means 0");
}
constexpr thalweg_field lower_bound(size_t offset) {
  return option_field("lower_bound", THALWEG_REAL, offset,
                      "0: -a softplus(x + dt_bias); below 0: lower_bound sigmoid(a (x + dt_bias))");
}

constexpr thalweg_field kFwdFields[] = {
    tensor_field("x", THALWEG_IN, offsetof(Fwd, x), false, kShape, kFloats, THALWEG_ANY, "raw gate"),
    A_log(offsetof(Fwd, A_log)),
    dt_bias(offsetof(Fwd, dt_bias)),
    tensor_field("g", THALWEG_OUT, offsetof(Fwd, g), false, kShape, kFloats, THALWEG_ANY,
                 "natural logarithm of the decay, at most 0"),
    lower_bound(offsetof(Fwd, lower_bound)),
};

constexpr thalweg_field kBwdFields[] = {
    tensor_field("x", THALWEG_IN, offsetof(Bwd, x), false, kShape, kFloats, THALWEG_ANY, "raw gate"),
    A_log(offsetof(Bwd, A_log)),
    dt_bias(offsetof(Bwd, dt_bias)),
    tensor_field("d_g", THALWEG_IN, offsetof(Bwd, d_g), false, kShape, kFloats, THALWEG_ANY, "gradient of g"),
    tensor_field("d_x", THALWEG_OUT, offsetof(Bwd, d_x), true, kShape, "=x", THALWEG_ANY, "gradient of x"),
    tensor_field("d_A_log", THALWEG_OUT, offsetof(Bwd, d_A_log), true, "HV", "=A_log", THALWEG_ANY,
                 "gradient of A_log, summed in a fixed order; needs A_log"),
    tensor_field("d_dt_bias", THALWEG_OUT, offsetof(Bwd, d_dt_bias), true, "HV K", "=dt_bias", THALWEG_ANY,
                 "gradient of dt_bias, summed in a fixed order; needs dt_bias"),
    lower_bound(offsetof(Bwd, lower_bound)),
};

extern const Pass<Problem, Fwd> kFwd;
extern const Pass<Problem, Bwd> kBwd;

constexpr thalweg_pass kPasses[] = {
    pass_row<kFwd, Fwd>("kda_gate", "fwd", "decay gate of Kimi Delta Attention, per head and channel", kFwdFields,
                        kRefused),
    pass_row<kBwd, Bwd>("kda_gate", "bwd", "gradients of x, A_log and dt_bias", kBwdFields, kRefused),
};

// ---- checks -----------------------------------------------------------------------------------------

bool has_rows(const thalweg_tensor& t) { return !present(t) || t.shape[4] <= 1 || t.stride[4] == 1; }

// Whether the axes first to last are one at one stride; axes of size 1 are none.
bool are_one_axis(const thalweg_tensor& t, int first, int last) {
  int64_t size = 1, stride = 0;
  for (int axis = last; axis >= first; --axis) {
    if (t.shape[axis] <= 1) continue;
    if (size > 1 && t.stride[axis] != stride * size) return false;
    if (size == 1) stride = t.stride[axis];
    size *= t.shape[axis];
  }
  return true;
}

Planes planes_of(const thalweg_tensor& x, const thalweg_tensor& g) {
  auto both = [&](int first, int last) { return are_one_axis(x, first, last) && are_one_axis(g, first, last); };
  return both(0, 2) ? kOnePlane : both(1, 2) ? kBAxisApart : both(0, 1) ? kLAxisApart : kNoPlanes;
}

template <class Args>
Problem check_both(const thalweg_pass& pass, const Args& args, const Sizes& sizes) {
  Problem p{};
  p.B = sizes["B"], p.T = sizes["T"], p.L = sizes["L"], p.HV = sizes["HV"], p.K = sizes["K"];
  p.dtype = args.x.dtype;
  p.lower_bound = args.lower_bound;
  if (p.lower_bound > 0) fail_field(pass, "lower_bound", "got %g, expected 0 or less", p.lower_bound);
  if (p.lower_bound != 0 && !(p.lower_bound >= -1e30 && p.lower_bound <= -1e-30))
    fail_field(pass, "lower_bound", "got %g, expected 0, or -1e30 to -1e-30", p.lower_bound);
  return p;
}

Problem check_fwd(const Fwd& args, const Sizes& sizes, Binding) {
  Problem p = check_both(kPasses[0], args, sizes);
  p.g_dtype = args.g.dtype;
  p.rows = has_rows(args.x) && has_rows(args.g);
  p.wide_rows = cuda::has_wide_rows(args.x) && cuda::has_wide_rows(args.g);
  p.planes = planes_of(args.x, args.g);
  return p;
}

Problem check_bwd(const Bwd& args, const Sizes& sizes, Binding) {
  Problem p = check_both(kPasses[1], args, sizes);
  p.g_dtype = args.d_g.dtype;
  p.rows = has_rows(args.x) && has_rows(args.d_g) && has_rows(args.d_x);
  p.wide_rows = cuda::has_wide_rows(args.x) && cuda::has_wide_rows(args.d_g) && cuda::has_wide_rows(args.d_x);
  p.head_sums = present(args.d_A_log);
  p.channel_sums = present(args.d_dt_bias);
  return p;
}

// ---- kernels ----------------------------------------------------------------------------------------

constexpr int64_t kGroupColumns = 8192;  // backward, of a task's sums: 32 KiB

int64_t num_blocks(const Problem& p) { return ceil_div(num_tokens(p), backward_block(p)); }

bool plan_generic_fwd(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = shared_of(p, kGenericGateBytes, kGenericBiasBytes, 0).end;
  plan->slot_bytes = kGenericRows * row_pitch(p) * 8;
  return true;
}

bool plan_generic_bwd(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = shared_of(p, kGenericGateBytes, kGenericBiasBytes, num_blocks(p)).end;
  plan->slot_bytes = kGenericRows * row_pitch(p) * 8;
  return true;
}

bool takes_vec(const Problem& p, const char* g, std::string* why) {
  if (p.rows && p.dtype != THALWEG_F64 && p.g_dtype != THALWEG_F64) return true;
  if (why && !p.rows) *why = "needs a contiguous last axis, got another stride";
  if (why && p.rows) *why = std::string("needs ") + (p.dtype == THALWEG_F64 ? "x" : g) + " of f32, bf16 or f16, got f64";
  return false;
}

// `bytes` an element.
bool streams(const Problem& p, const Device& device, int64_t num_threads, int64_t bytes) {
  return outgrow_caches(device, num_threads, num_tokens(p) * p.HV * p.K * bytes);
}

constexpr char kFwdChoices[] = "block=1|2|4|8|16|64 stream=0|1";
bool plan_vec_fwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  if (!takes_vec(p, "g", why)) return false;
  plan->shared_bytes = shared_of(p, kVecGateBytes, kVecBiasBytes, 0).end;
  // About 32 K elements a task, and four tasks a thread.
  const int64_t most = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, p.HV * p.K));
  const int64_t block = std::clamp<int64_t>(ceil_div(num_tokens(p), 4 * plan->num_slots), 1, most);
  const int64_t bytes = int64_t(thalweg_dtype_bytes(p.dtype) + thalweg_dtype_bytes(p.g_dtype));
  const bool stream = streams(p, device, plan->num_slots, bytes);
  return decide(&plan->values[kBlock], "block", block, 1, int64_t(1) << 30, why) &&
         decide(&plan->values[kStream], "stream", stream, 0, 1, why);
}

bool plan_vec_bwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  if (!takes_vec(p, "d_g", why)) return false;
  plan->shared_bytes = shared_of(p, kVecGateBytes, kVecBiasBytes, num_blocks(p)).end;
  plan->values[kBlock] = backward_block(p);
  plan->values[kStream] =
      streams(p, device, plan->num_slots, int64_t(2 * thalweg_dtype_bytes(p.dtype) + thalweg_dtype_bytes(p.g_dtype)));
  plan->values[kGroup] = std::max<int64_t>(1, kGroupColumns / std::max<int64_t>(1, row_pitch(p)));
  plan->slot_bytes = std::min(plan->values[kGroup], p.HV) * (row_pitch(p) + kVecHeadFloats) * 4;
  return true;
}

bool plan_cuda_fwd(const Problem&, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = 0;
  return true;
}

bool plan_cuda_bwd(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = cuda_sums_of(p).end;
  return true;
}

bool takes_sm90(const Problem& p, const char* g, std::string* why) {
  const bool wide = p.wide_rows && p.K >= 8 && p.K <= kSm90MostChannels && p.HV <= INT32_MAX && num_tokens(p) <= (int64_t(1) << 30);
  if (wide && p.dtype != THALWEG_F64 && p.g_dtype != THALWEG_F64) return true;
  if (why && !wide)
    *why = "needs contiguous rows at multiples of 16 bytes, K a multiple of 8 from 8 to 1024, at most 2^30 tokens, "
           "got others";
  if (why && wide) *why = std::string("needs ") + (p.dtype == THALWEG_F64 ? "x" : g) + " of f32, bf16 or f16, got f64";
  return false;
}

bool plan_sm90_fwd(const Problem& p, const Device&, Plan*, std::string* why) {
  const bool planes = p.planes == kOnePlane || (p.planes == kBAxisApart && p.B <= 65535) ||
                      (p.planes == kLAxisApart && p.L <= 65535);
  if (!planes && why) *why = "needs B, T, L at one stride, but for B or L of at most 65535, got others";
  return planes && takes_sm90(p, "g", why);
}

bool plan_sm90_bwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  return takes_sm90(p, "d_g", why) && plan_cuda_bwd(p, device, plan, why);
}

constexpr Kernel<Problem, Fwd> kFwdKernels[] = {
    {"sm90_vec_fwd", THALWEG_CUDA, Isa::kPortable, plan_sm90_fwd, sm90_vec_fwd},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda_fwd, cuda_generic_fwd},
    {"cpu_vec_fwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_vec_fwd, avx512::cpu_vec_fwd, kFwdChoices},
    {"cpu_vec_fwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_vec_fwd, avx2::cpu_vec_fwd, kFwdChoices},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_fwd, cpu_generic_fwd},
};
constexpr Kernel<Problem, Bwd> kBwdKernels[] = {
    {"sm90_vec_bwd", THALWEG_CUDA, Isa::kPortable, plan_sm90_bwd, sm90_vec_bwd},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda_bwd, cuda_generic_bwd},
    {"cpu_vec_bwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_vec_bwd, avx512::cpu_vec_bwd},
    {"cpu_vec_bwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_vec_bwd, avx2::cpu_vec_bwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_bwd, cpu_generic_bwd},
};

constexpr Pass<Problem, Fwd> kFwd = {&kPasses[0], check_fwd, kFwdKernels, std::size(kFwdKernels)};
constexpr Pass<Problem, Bwd> kBwd = {&kPasses[1], check_bwd, kBwdKernels, std::size(kBwdKernels)};

}  // namespace
}  // namespace kda_gate

const thalweg_pass* kda_gate_pass_at(int i);
const thalweg_pass* kda_gate_pass_at(int i) {
  return i >= 0 && i < int(std::size(kda_gate::kPasses)) ? &kda_gate::kPasses[i] : nullptr;
}

}  // namespace thalweg

// ---- entry points -----------------------------------------------------------------------------------

namespace gate = thalweg::kda_gate;

thalweg_status thalweg_kda_gate_fwd(const thalweg_kda_gate_fwd_args* args, const thalweg_context* ctx) {
  return thalweg::call_pass(gate::kFwd, args, ctx);
}
thalweg_status thalweg_kda_gate_bwd(const thalweg_kda_gate_bwd_args* args, const thalweg_context* ctx) {
  return thalweg::call_pass(gate::kBwd, args, ctx);
}
thalweg_status thalweg_kda_gate_fwd_workspace(const thalweg_kda_gate_fwd_args* args, const thalweg_context* ctx,
                                              size_t* bytes) {
  return thalweg::query_workspace(gate::kFwd, args, ctx, bytes);
}
thalweg_status thalweg_kda_gate_bwd_workspace(const thalweg_kda_gate_bwd_args* args, const thalweg_context* ctx,
                                              size_t* bytes) {
  return thalweg::query_workspace(gate::kBwd, args, ctx, bytes);
}
