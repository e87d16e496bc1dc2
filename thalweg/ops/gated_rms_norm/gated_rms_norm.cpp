// Gated RMS norm: field tables, checks, kernel tables, entry points.
#include "thalweg/ops/gated_rms_norm/gated_rms_norm.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>

#include "thalweg/core/kernel.h"
#include "thalweg/cpu/streams.h"
#include "thalweg/cuda/layout.h"
#include "thalweg/ops/gated_rms_norm/problem.h"

namespace thalweg {
namespace gated_rms_norm {
namespace {

using Fwd = thalweg_gated_rms_norm_fwd_args;
using Bwd = thalweg_gated_rms_norm_bwd_args;

constexpr const char* kRefused =
    "bias: not supported; norm before gate is the only order; residual: add it before the call; "
    "activation swish is called silu";

constexpr thalweg_field eps(size_t offset) {
  return option_field("eps", THALWEG_REAL, offset, "added to the mean of squares, inside the root; 0 means 1e-6");
}
constexpr thalweg_field activation(size_t offset) {
  return option_field("gate_activation", THALWEG_CHOICE, offset, "what the gate goes through; 0 means silu",
                      "silu sigmoid");
}

constexpr thalweg_field kFwdFields[] = {
    tensor_field("x", THALWEG_IN, offsetof(Fwd, x), false, "M D", kFloats, THALWEG_ROWS, "rows to normalise"),
    tensor_field("gate", THALWEG_IN, offsetof(Fwd, gate), true, "M D", kFloats, THALWEG_ROWS,
                 "gate before its activation; absent: no gating"),
    tensor_field("weight", THALWEG_IN, offsetof(Fwd, weight), true, "D", kFloats, THALWEG_ANY, "absent means 1"),
    tensor_field("y", THALWEG_OUT, offsetof(Fwd, y), false, "M D", "=x", THALWEG_ROWS, "outputs"),
    tensor_field("rstd", THALWEG_OUT, offsetof(Fwd, rstd), true, "M", "f32 f64", THALWEG_ANY,
                 "1 / sqrt(mean(x^2) + eps) of each row; f64 where x is f64, else f32"),
    eps(offsetof(Fwd, eps)),
    activation(offsetof(Fwd, gate_activation)),
};

constexpr thalweg_field kBwdFields[] = {
    tensor_field("x", THALWEG_IN, offsetof(Bwd, x), false, "M D", kFloats, THALWEG_ROWS, "rows to normalise"),
    tensor_field("gate", THALWEG_IN, offsetof(Bwd, gate), true, "M D", kFloats, THALWEG_ROWS, "as in fwd"),
    tensor_field("weight", THALWEG_IN, offsetof(Bwd, weight), true, "D", kFloats, THALWEG_ANY, "absent means 1"),
    tensor_field("d_y", THALWEG_IN, offsetof(Bwd, d_y), false, "M D", "=x", THALWEG_ROWS, "gradient of y"),
    tensor_field("d_x", THALWEG_OUT, offsetof(Bwd, d_x), true, "M D", "=x", THALWEG_ROWS, "gradient of x"),
    tensor_field("d_gate", THALWEG_OUT, offsetof(Bwd, d_gate), true, "M D", "=gate", THALWEG_ROWS,
                 "gradient of gate; needs gate"),
    tensor_field("d_weight", THALWEG_OUT, offsetof(Bwd, d_weight), true, "D", "=weight", THALWEG_ANY,
                 "gradient of weight, summed over rows in a fixed order; needs weight"),
    eps(offsetof(Bwd, eps)),
    activation(offsetof(Bwd, gate_activation)),
};

extern const Pass<Problem, Fwd> kFwd;
extern const Pass<Problem, Bwd> kBwd;

constexpr thalweg_pass kPasses[] = {
    pass_row<kFwd, Fwd>("gated_rms_norm", "fwd", "RMS norm over the last axis, times weight, times an activated gate",
                        kFwdFields, kRefused),
    pass_row<kBwd, Bwd>("gated_rms_norm", "bwd", "gradients of x, gate and weight", kBwdFields, kRefused),
};

// ---- checks -----------------------------------------------------------------------------------------

template <class Args>
Problem check_both(const thalweg_pass& pass, const Args& args, const Sizes& sizes) {
  Problem p{};
  p.M = sizes["M"];
  p.D = sizes["D"];
  p.dtype = args.x.dtype;
  p.gate_dtype = args.gate.dtype;
  p.gate = !present(args.gate) ? kNoGate : args.gate_activation == THALWEG_GATE_SIGMOID ? kSigmoid : kSilu;
  if (args.eps < 0) fail_field(pass, "eps", "got %g, expected 0 or more", args.eps);
  p.eps = args.eps == 0 ? 1e-6 : args.eps;
  return p;
}

Problem check_fwd(const Fwd& args, const Sizes& sizes, Binding) {
  const thalweg_dtype expected = args.x.dtype == THALWEG_F64 ? THALWEG_F64 : THALWEG_F32;
  if (present(args.rstd) && args.rstd.dtype != expected)
    fail_field(kPasses[0], "rstd", "dtype, got %s, expected %s (from x)", thalweg_dtype_name(args.rstd.dtype),
               thalweg_dtype_name(expected));
  Problem p = check_both(kPasses[0], args, sizes);
  p.wide_rows = cuda::has_wide_rows(args.x) && cuda::has_wide_rows(args.gate) && cuda::has_wide_rows(args.y);
  return p;
}

Problem check_bwd(const Bwd& args, const Sizes& sizes, Binding) {
  Problem p = check_both(kPasses[1], args, sizes);
  p.sums = present(args.d_weight);
  p.wide_rows = cuda::has_wide_rows(args.x) && cuda::has_wide_rows(args.gate) && cuda::has_wide_rows(args.d_y) &&
                cuda::has_wide_rows(args.d_x) && cuda::has_wide_rows(args.d_gate);
  return p;
}

// ---- kernels ----------------------------------------------------------------------------------------

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t num_blocks(const Problem& p) { return ceil_div(p.M, backward_block(p)); }

// The weight and, backward, the partial sums; scratch rows of a slot.
void lay_out(const Problem& p, int64_t shared_rows, int64_t slot_rows, Plan* plan) {
  const int64_t row_bytes = row_pitch(p) * (p.dtype == THALWEG_F64 ? 8 : 4);
  plan->shared_bytes = shared_rows * row_bytes;
  plan->slot_bytes = slot_rows * row_bytes;
}

bool plan_generic_fwd(const Problem& p, const Device&, Plan* plan, std::string*) {
  lay_out(p, 1, kGenericRows, plan);
  return true;
}

bool plan_generic_bwd(const Problem& p, const Device&, Plan* plan, std::string*) {
  lay_out(p, 1 + (p.sums ? num_blocks(p) : 0), kGenericRows, plan);
  return true;
}

bool takes_vec(const Problem& p, std::string* why) {
  if (p.dtype != THALWEG_F64 && (p.gate == kNoGate || p.gate_dtype == p.dtype)) return true;
  if (why && p.dtype == THALWEG_F64) *why = "needs x of f32, bf16 or f16, got f64";
  if (why && p.dtype != THALWEG_F64)
    *why = std::string("needs a gate of the dtype of x (") + thalweg_dtype_name(p.dtype) + "), got " +
           thalweg_dtype_name(p.gate_dtype);
  return false;
}

bool streams(const Problem& p, const Device& device, int64_t num_threads, int64_t tensors) {
  return outgrow_caches(device, num_threads, tensors * p.M * p.D * int64_t(thalweg_dtype_bytes(p.dtype)));
}

bool plan_vec_fwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  if (!takes_vec(p, why)) return false;
  lay_out(p, 1, 0, plan);
  // About 32 K elements a task, and four tasks a thread.
  const int64_t most = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, p.D));
  plan->values[kBlock] = std::clamp<int64_t>(ceil_div(p.M, 4 * plan->num_slots), 1, most);
  plan->values[kStream] = streams(p, device, plan->num_slots, p.gate == kNoGate ? 2 : 3);
  return true;
}

bool plan_vec_bwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  if (!takes_vec(p, why)) return false;
  lay_out(p, 1 + (p.sums ? num_blocks(p) : 0), kVecBackwardRows, plan);
  plan->values[kBlock] = backward_block(p);
  plan->values[kStream] = streams(p, device, plan->num_slots, p.gate == kNoGate ? 3 : 5);
  return true;
}

bool plan_cuda_fwd(const Problem&, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = 0;
  return true;
}

bool plan_cuda_bwd(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = p.sums ? cuda_sums_of(p).end : 0;
  return true;
}

bool takes_sm90(const Problem& p, std::string* why) {
  const bool wide = p.wide_rows && p.D * int64_t(thalweg_dtype_bytes(p.dtype)) <= kSm90RowBytes;
  if (!wide && why) *why = "needs rows at multiples of 16 bytes, D a multiple of 8 and at most 1024 bytes, got others";
  return wide && takes_vec(p, why);
}

bool plan_sm90_fwd(const Problem& p, const Device&, Plan*, std::string* why) { return takes_sm90(p, why); }

bool plan_sm90_bwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  return takes_sm90(p, why) && plan_cuda_bwd(p, device, plan, why);
}

constexpr Kernel<Problem, Fwd> kFwdKernels[] = {
    {"sm90_vec_fwd", THALWEG_CUDA, Isa::kPortable, plan_sm90_fwd, sm90_vec_fwd},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda_fwd, cuda_generic_fwd},
    {"cpu_vec_fwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_vec_fwd, avx512::cpu_vec_fwd},
    {"cpu_vec_fwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_vec_fwd, avx2::cpu_vec_fwd},
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
}  // namespace gated_rms_norm

const thalweg_pass* gated_rms_norm_pass_at(int i);
const thalweg_pass* gated_rms_norm_pass_at(int i) {
  return i >= 0 && i < int(std::size(gated_rms_norm::kPasses)) ? &gated_rms_norm::kPasses[i] : nullptr;
}

}  // namespace thalweg

// ---- entry points -----------------------------------------------------------------------------------

namespace norm = thalweg::gated_rms_norm;

thalweg_status thalweg_gated_rms_norm_fwd(const thalweg_gated_rms_norm_fwd_args* args, const thalweg_context* ctx) {
  return thalweg::call_pass(norm::kFwd, args, ctx);
}
thalweg_status thalweg_gated_rms_norm_bwd(const thalweg_gated_rms_norm_bwd_args* args, const thalweg_context* ctx) {
  return thalweg::call_pass(norm::kBwd, args, ctx);
}
thalweg_status thalweg_gated_rms_norm_fwd_workspace(const thalweg_gated_rms_norm_fwd_args* args,
                                                    const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(norm::kFwd, args, ctx, bytes);
}
thalweg_status thalweg_gated_rms_norm_bwd_workspace(const thalweg_gated_rms_norm_bwd_args* args,
                                                    const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(norm::kBwd, args, ctx, bytes);
}
