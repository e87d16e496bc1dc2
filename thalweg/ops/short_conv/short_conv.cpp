// Short convolution: field tables, checks, kernel tables, entry points.
#include "thalweg/ops/short_conv/short_conv.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "thalweg/core/kernel.h"
#include "thalweg/cpu/streams.h"
#include "thalweg/cuda/layout.h"
#include "thalweg/cuda/slot_uses.h"
#include "thalweg/ops/short_conv/problem.h"

namespace thalweg {
namespace short_conv {
namespace {

using Fwd = thalweg_short_conv_fwd_args;
using Bwd = thalweg_short_conv_bwd_args;
using Decode = thalweg_short_conv_decode_args;

constexpr const char* kRefused =
    "residual: add it to y; mask: pack the sequences instead; cp_context: one rank only; chunk_indices: not needed";

constexpr thalweg_field activation(size_t offset) {
  return option_field("activation", THALWEG_CHOICE, offset, "applied to the sum: none or silu; 0 means none",
                      "none silu");
}

constexpr thalweg_field kFwdFields[] = {
    tensor_field("x", THALWEG_IN, offsetof(Fwd, x), false, "B T D", kFloats, THALWEG_ROWS, "inputs"),
    tensor_field("weight", THALWEG_IN, offsetof(Fwd, weight), false, "D W", kFloats, THALWEG_ANY,
                 "taps, the newest input's last; W is 1 to 8"),
    tensor_field("bias", THALWEG_IN, offsetof(Fwd, bias), true, "D", kFloats, THALWEG_ANY, "absent means 0"),
    tensor_field("initial_state", THALWEG_IN, offsetof(Fwd, initial_state), true, "N D W", kFloats, THALWEG_STATE,
                 "last W inputs before each sequence, oldest first; absent means 0"),
    tensor_field("cu_seqlens", THALWEG_IN, offsetof(Fwd, cu_seqlens), true, "N+1", kInts, THALWEG_ANY,
                 "starts of packed sequences and the end of the last, then B is 1; rows past it get y = 0"),
    tensor_field("y", THALWEG_OUT, offsetof(Fwd, y), false, "B T D", "=x", THALWEG_ROWS, "outputs"),
    tensor_field("final_state", THALWEG_OUT, offsetof(Fwd, final_state), true, "N D W", kFloats, THALWEG_STATE,
                 "last W inputs of each sequence, initial_state's included"),
    activation(offsetof(Fwd, activation)),
};

constexpr thalweg_field kBwdFields[] = {
    tensor_field("x", THALWEG_IN, offsetof(Bwd, x), false, "B T D", kFloats, THALWEG_ROWS, "inputs"),
    tensor_field("weight", THALWEG_IN, offsetof(Bwd, weight), false, "D W", kFloats, THALWEG_ANY,
                 "taps, the newest input's last; W is 1 to 8"),
    tensor_field("bias", THALWEG_IN, offsetof(Bwd, bias), true, "D", kFloats, THALWEG_ANY, "absent means 0"),
    tensor_field("initial_state", THALWEG_IN, offsetof(Bwd, initial_state), true, "N D W", kFloats, THALWEG_STATE,
                 "as in fwd; absent means 0"),
    tensor_field("cu_seqlens", THALWEG_IN, offsetof(Bwd, cu_seqlens), true, "N+1", kInts, THALWEG_ANY,
                 "as in fwd; rows past it get d_x = 0"),
    tensor_field("d_y", THALWEG_IN, offsetof(Bwd, d_y), true, "B T D", "=x", THALWEG_ROWS,
                 "gradient of y; absent means 0"),
    tensor_field("d_final_state", THALWEG_IN, offsetof(Bwd, d_final_state), true, "N D W", kFloats, THALWEG_STATE,
                 "gradient of final_state; absent means 0"),
    tensor_field("d_x", THALWEG_OUT, offsetof(Bwd, d_x), true, "B T D", "=x", THALWEG_ROWS, "gradient of x"),
    tensor_field("d_weight", THALWEG_OUT, offsetof(Bwd, d_weight), true, "D W", "=weight", THALWEG_ANY,
                 "gradient of weight, summed over tokens in a fixed order"),
    tensor_field("d_bias", THALWEG_OUT, offsetof(Bwd, d_bias), true, "D", "=bias", THALWEG_ANY,
                 "gradient of bias; needs bias"),
    tensor_field("d_initial_state", THALWEG_OUT, offsetof(Bwd, d_initial_state), true, "N D W", "=initial_state",
                 THALWEG_STATE, "gradient of initial_state; needs initial_state"),
    activation(offsetof(Bwd, activation)),
};

constexpr thalweg_field kDecodeFields[] = {
    tensor_field("x", THALWEG_IN, offsetof(Decode, x), false, "N T D", kFloats, THALWEG_ROWS,
                 "inputs: one token, or the draft tokens, of each sequence"),
    tensor_field("weight", THALWEG_IN, offsetof(Decode, weight), false, "D W", kFloats, THALWEG_ANY,
                 "taps, the newest input's last; W is 1 to 8"),
    tensor_field("bias", THALWEG_IN, offsetof(Decode, bias), true, "D", kFloats, THALWEG_ANY, "absent means 0"),
    tensor_field("state", THALWEG_INOUT, offsetof(Decode, state), false, "M D W", kFloats, THALWEG_STATE,
                 "pool of states: the last W inputs, oldest first"),
    tensor_field("read_slots", THALWEG_IN, offsetof(Decode, read_slots), true, "N", kInts, THALWEG_ANY,
                 "state that each sequence starts from; -1 is a padding row, its y is 0; absent means n"),
    tensor_field("write_slots", THALWEG_IN, offsetof(Decode, write_slots), true, "N T", kInts, THALWEG_ANY,
                 "where the state after each token goes, -1 is not kept; absent: after the last, where it was read"),
    tensor_field("y", THALWEG_OUT, offsetof(Decode, y), false, "N T D", "=x", THALWEG_ROWS, "outputs"),
    activation(offsetof(Decode, activation)),
};

extern const Pass<Problem, Fwd> kFwd;
extern const Pass<Problem, Bwd> kBwd;
extern const Pass<Problem, Decode> kDecode;

constexpr thalweg_pass kPasses[] = {
    pass_row<kFwd, Fwd>("short_conv", "fwd", "causal depthwise convolution over W tokens, bias, SiLU", kFwdFields,
                        kRefused),
    pass_row<kBwd, Bwd>("short_conv", "bwd", "gradients of x, weight, bias and initial_state", kBwdFields, kRefused),
    pass_row<kDecode, Decode>("short_conv", "decode", "a few more tokens of many sequences, states in a pool",
                              kDecodeFields, kRefused),
};

// ---- checks -----------------------------------------------------------------------------------------

Problem sizes_of(const thalweg_pass& pass, const Sizes& sizes, thalweg_dtype dtype, int32_t activation) {
  Problem p{};
  p.T = sizes["T"];
  p.D = sizes["D"];
  p.W = sizes["W"];
  p.dtype = dtype;
  p.silu = activation == THALWEG_ACTIVATION_SILU;
  if (p.W < 1 || p.W > kMaxW)
    fail_field(pass, "weight", "W, got %lld, expected 1 to %lld", static_cast<long long>(p.W),
               static_cast<long long>(kMaxW));
  return p;
}

Problem check_fwd(const Fwd& args, const Sizes& sizes, Binding binding) {
  Problem p = sizes_of(kPasses[0], sizes, args.x.dtype, args.activation);
  p.B = sizes["B"];
  p.packed = present(args.cu_seqlens);
  p.N = check_sequences(kPasses[0], sizes, args.cu_seqlens, binding);
  p.wide_rows = cuda::has_wide_rows(args.x) && cuda::has_wide_rows(args.y);
  return p;
}

Problem check_bwd(const Bwd& args, const Sizes& sizes, Binding binding) {
  Problem p = sizes_of(kPasses[1], sizes, args.x.dtype, args.activation);
  p.B = sizes["B"];
  p.packed = present(args.cu_seqlens);
  p.N = check_sequences(kPasses[1], sizes, args.cu_seqlens, binding);
  p.sums = present(args.d_weight) || present(args.d_bias);
  p.wide_rows = cuda::has_wide_rows(args.x) && cuda::has_wide_rows(args.d_y) && cuda::has_wide_rows(args.d_x);
  return p;
}

Problem check_decode(const Decode& args, const Sizes& sizes, Binding binding) {
  Problem p = sizes_of(kPasses[2], sizes, args.x.dtype, args.activation);
  p.B = p.N = sizes["N"];
  p.M = sizes["M"];
  p.state_f64 = args.state.dtype == THALWEG_F64;
  p.slots = present(args.read_slots) || present(args.write_slots);
  const int64_t* stride = args.state.stride;
  const int64_t bytes = int64_t(thalweg_dtype_bytes(args.state.dtype));
  p.wide_rows = stride[2] == 1 && (p.D <= 1 || stride[1] == p.W) && (p.M <= 1 || stride[0] * bytes % 16 == 0) &&
                reinterpret_cast<uintptr_t>(args.state.data) % 16 == 0;
  check_slots(kPasses[2], p.N, p.T, p.M, args.read_slots, args.write_slots, binding);
  return p;
}

// ---- kernels ----------------------------------------------------------------------------------------

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t element_bytes(const Problem& p) { return int64_t(thalweg_dtype_bytes(p.dtype)); }

bool plan_generic(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->slot_bytes = cpu_generic_slot_bytes(p);
  return true;
}

bool plan_generic_bwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  const int64_t blocks = ceil_div(p.B * p.T, backward_block(p));
  const int64_t bytes = p.dtype == THALWEG_F64 ? 8 : 4;
  if (p.sums) plan->shared_bytes = ceil_div(blocks * (p.W + 1) * p.D * bytes, 64) * 64;
  return plan_generic(p, device, plan, why);
}

bool takes_vec(const Problem& p, std::string* why) {
  if (p.dtype != THALWEG_F64 && !p.state_f64) return true;
  if (why) *why = p.state_f64 ? "needs a pool of f32, bf16 or f16, got f64" : "needs x of f32, bf16 or f16, got f64";
  return false;
}

// Whole rows if they fit, else strips of about a page; channels a multiple of 64.
int64_t strip_of(const Problem& p, int64_t most) {
  const int64_t strips = std::max<int64_t>(1, ceil_div(p.D, most));
  return std::max<int64_t>(64, ceil_div(ceil_div(p.D, strips), 64) * 64);
}

bool plan_vec_fwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  if (!takes_vec(p, why)) return false;
  const int64_t strip = strip_of(p, 1024), strips = std::max<int64_t>(1, ceil_div(p.D, strip));
  // Long blocks read few tokens twice; four tasks a thread keep threads busy to the end.
  const int64_t wanted = ceil_div(4 * plan->num_slots, strips);
  const int64_t block = std::clamp<int64_t>(p.B * p.T / wanted / 8 * 8, 16, 256);
  plan->values[kBlock] = block;
  plan->values[kStrip] = strip;
  plan->values[kStream] = outgrow_caches(device, plan->num_slots, 2 * p.B * p.T * p.D * element_bytes(p));
  plan->slot_bytes = (3 * kMaxW + 2) * strip * 4;
  return true;
}

bool plan_vec_bwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  if (!takes_vec(p, why)) return false;
  const int64_t strip = strip_of(p, 512), block = backward_block(p);
  plan->values[kBlock] = block;
  plan->values[kStrip] = strip;
  plan->values[kStream] = outgrow_caches(device, plan->num_slots, 3 * p.B * p.T * p.D * element_bytes(p));
  if (p.sums) plan->shared_bytes = ceil_div(ceil_div(p.B * p.T, block) * (p.W + 1) * p.D * 4, 64) * 64;
  plan->slot_bytes = (5 * kMaxW + 4) * strip * 4;
  return true;
}

bool plan_vec_decode(const Problem& p, const Device&, Plan* plan, std::string* why) {
  if (!takes_vec(p, why)) return false;
  // As many strips as threads want, whole vectors each.
  const int64_t wanted = ceil_div(4 * plan->num_slots, std::max<int64_t>(p.N, 1));
  plan->values[kStrip] = strip_of(p, std::clamp<int64_t>(ceil_div(p.D, wanted), 256, 2048));
  return true;
}

bool plan_cuda(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = cuda_layout_of(p).end;
  return true;
}

bool plan_cuda_decode(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = p.slots ? cuda::slot_uses_bytes(p.M) : 0;
  return true;
}

bool takes_sm90(const Problem& p, std::string* why) {
  const bool wide = p.wide_rows && p.W >= 2 && p.W <= 4;
  if (!wide && why) *why = "needs rows at multiples of 16 bytes, D a multiple of 8, W from 2 to 4, got others";
  return wide && takes_vec(p, why);
}

bool plan_sm90_fwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  if (!takes_sm90(p, why)) return false;
  // Runs of tokens as short as fill whole waves of blocks, 64 tokens at most: long ones read few tokens twice.
  const int64_t blocks = kSm90FwdBlocks * std::max<int64_t>(1, device.num_sms);
  const int64_t strips = std::max<int64_t>(1, ceil_div(p.D, kSm90FwdChannels));
  for (int64_t wave = 1, run = 128; run > 64; ++wave) {
    const int64_t tiles = std::max<int64_t>(1, wave * blocks / strips);
    run = ceil_div(ceil_div(p.B * p.T, tiles * kSm90FwdLanes), 4) * 4;
    plan->values[kBlock] = std::max<int64_t>(8, run);
  }
  return plan_cuda(p, device, plan, why);
}

bool plan_sm90_bwd(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  return takes_sm90(p, why) && plan_cuda(p, device, plan, why);
}

bool plan_sm90_decode(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  const bool wide = p.wide_rows && p.W == 4 && p.D % 2 == 0;
  if (!wide && why) *why = "needs contiguous [D W] of each state at multiples of 16 bytes, W 4, D even, got others";
  return wide && takes_vec(p, why) && plan_cuda_decode(p, device, plan, why);
}

constexpr Kernel<Problem, Fwd> kFwdKernels[] = {
    {"sm90_vec_fwd", THALWEG_CUDA, Isa::kPortable, plan_sm90_fwd, sm90_vec_fwd},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda, cuda_generic_fwd},
    {"cpu_vec_fwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_vec_fwd, avx512::cpu_vec_fwd},
    {"cpu_vec_fwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_vec_fwd, avx2::cpu_vec_fwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic, cpu_generic_fwd},
};
constexpr Kernel<Problem, Bwd> kBwdKernels[] = {
    {"sm90_vec_bwd", THALWEG_CUDA, Isa::kPortable, plan_sm90_bwd, sm90_vec_bwd},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda, cuda_generic_bwd},
    {"cpu_vec_bwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_vec_bwd, avx512::cpu_vec_bwd},
    {"cpu_vec_bwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_vec_bwd, avx2::cpu_vec_bwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_bwd, cpu_generic_bwd},
};
constexpr Kernel<Problem, Decode> kDecodeKernels[] = {
    {"sm90_decode", THALWEG_CUDA, Isa::kPortable, plan_sm90_decode, sm90_decode},
    {"cuda_generic", THALWEG_CUDA, Isa::kPortable, plan_cuda_decode, cuda_generic_decode},
    {"cpu_vec_decode_avx512", THALWEG_CPU, Isa::kAvx512, plan_vec_decode, avx512::cpu_vec_decode},
    {"cpu_vec_decode_avx2", THALWEG_CPU, Isa::kAvx2, plan_vec_decode, avx2::cpu_vec_decode},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic, cpu_generic_decode},
};

constexpr Pass<Problem, Fwd> kFwd = {&kPasses[0], check_fwd, kFwdKernels, std::size(kFwdKernels)};
constexpr Pass<Problem, Bwd> kBwd = {&kPasses[1], check_bwd, kBwdKernels, std::size(kBwdKernels)};
constexpr Pass<Problem, Decode> kDecode = {&kPasses[2], check_decode, kDecodeKernels, std::size(kDecodeKernels)};

}  // namespace
}  // namespace short_conv

const thalweg_pass* short_conv_pass_at(int i);
const thalweg_pass* short_conv_pass_at(int i) {
  return i >= 0 && i < int(std::size(short_conv::kPasses)) ? &short_conv::kPasses[i] : nullptr;
}

}  // namespace thalweg

// ---- entry points -----------------------------------------------------------------------------------

namespace conv = thalweg::short_conv;

thalweg_status thalweg_short_conv_fwd(const thalweg_short_conv_fwd_args* args, const thalweg_context* ctx) {
  return thalweg::call_pass(conv::kFwd, args, ctx);
}
thalweg_status thalweg_short_conv_bwd(const thalweg_short_conv_bwd_args* args, const thalweg_context* ctx) {
  return thalweg::call_pass(conv::kBwd, args, ctx);
}
thalweg_status thalweg_short_conv_decode(const thalweg_short_conv_decode_args* args, const thalweg_context* ctx) {
  return thalweg::call_pass(conv::kDecode, args, ctx);
}
thalweg_status thalweg_short_conv_fwd_workspace(const thalweg_short_conv_fwd_args* args, const thalweg_context* ctx,
                                                size_t* bytes) {
  return thalweg::query_workspace(conv::kFwd, args, ctx, bytes);
}
thalweg_status thalweg_short_conv_bwd_workspace(const thalweg_short_conv_bwd_args* args, const thalweg_context* ctx,
                                                size_t* bytes) {
  return thalweg::query_workspace(conv::kBwd, args, ctx, bytes);
}
thalweg_status thalweg_short_conv_decode_workspace(const thalweg_short_conv_decode_args* args,
                                                   const thalweg_context* ctx, size_t* bytes) {
  return thalweg::query_workspace(conv::kDecode, args, ctx, bytes);
}
