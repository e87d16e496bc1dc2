// Gated delta rule: field tables, what the tables cannot say, kernel tables, entry points.
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "thalweg/core/kernel.h"
#include "thalweg/ops/gated_delta_rule/cpu_generic.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {

Span sequence_span(const Problem& problem, const thalweg_tensor& cu_seqlens, int64_t n) {
  if (!problem.packed) return {n * problem.T, (n + 1) * problem.T};
  return {int_at(cu_seqlens, n), int_at(cu_seqlens, n + 1)};
}

namespace {

using Fwd = thalweg_gated_delta_rule_fwd_args;
using Bwd = thalweg_gated_delta_rule_bwd_args;
using Decode = thalweg_gated_delta_rule_decode_args;

constexpr int64_t kMaxHeadDim = 512;
// ---- Field tables ----

constexpr const char* kDocG = "log decay, natural logarithm, meant <= 0; absent: 0; with use_gate the raw gate";
constexpr const char* kDocBeta = "write strength; absent: 1; with use_beta_sigmoid its logit";
constexpr const char* kDocALog = "log of the decay rate, with use_gate";
constexpr const char* kDocDtBias = "added to the raw gate; absent: 0; with use_gate";
constexpr const char* kDocInitial = "state before the first token; absent: 0";
constexpr const char* kDocCu = "sequence borders in a packed batch of one; rows past the last are written as 0";
constexpr const char* kDocScale = "factor of q; 0: K^-0.5";
constexpr const char* kDocL2norm = "1: q, k <- x / sqrt(sum x^2 + 1e-6)";
constexpr const char* kDocGate = "1: g <- -exp(A_log) softplus(g + dt_bias)";
constexpr const char* kDocSigmoid = "1: beta <- sigmoid(beta)";
constexpr const char* kDocNeg = "1: beta <- 2 sigmoid(beta); needs use_beta_sigmoid";

constexpr thalweg_field kFwdFields[] = {
    tensor_field("q", THALWEG_IN, offsetof(Fwd, q), false, "B T H K", kFloats, THALWEG_ROWS, "queries"),
    tensor_field("k", THALWEG_IN, offsetof(Fwd, k), false, "B T H K", "=q", THALWEG_ROWS, "keys"),
    tensor_field("v", THALWEG_IN, offsetof(Fwd, v), false, "B T HV V", "=q", THALWEG_ROWS,
                 "values; value head hv reads key head hv / (HV / H)"),
    tensor_field("g", THALWEG_IN, offsetof(Fwd, g), true, "B T HV", kFloats, THALWEG_ANY, kDocG),
    tensor_field("beta", THALWEG_IN, offsetof(Fwd, beta), true, "B T HV", kFloats, THALWEG_ANY, kDocBeta),
    tensor_field("A_log", THALWEG_IN, offsetof(Fwd, A_log), true, "HV", kFloats, THALWEG_ROWS, kDocALog),
    tensor_field("dt_bias", THALWEG_IN, offsetof(Fwd, dt_bias), true, "HV", kFloats, THALWEG_ROWS, kDocDtBias),
    tensor_field("initial_state", THALWEG_IN, offsetof(Fwd, initial_state), true, "N HV K V", kFloats, THALWEG_STATE,
                 kDocInitial),
    tensor_field("cu_seqlens", THALWEG_IN, offsetof(Fwd, cu_seqlens), true, "N+1", kInts, THALWEG_ROWS, kDocCu),
    tensor_field("o", THALWEG_OUT, offsetof(Fwd, o), false, "B T HV V", "=q", THALWEG_ROWS,
                 "scale S^T q of every token"),
    tensor_field("final_state", THALWEG_OUT, offsetof(Fwd, final_state), true, "N HV K V", kFloats, THALWEG_STATE,
                 "state after the last token"),
    tensor_field("chunk_states", THALWEG_OUT, offsetof(Fwd, chunk_states), true, "R HV K V", kFloats, THALWEG_STATE,
                 "state before every every-th token; R = B*T/every + N, row start/every + n + c"),
    option_field("scale", THALWEG_REAL, offsetof(Fwd, scale), kDocScale),
    option_field("every", THALWEG_COUNT, offsetof(Fwd, every), "tokens between chunk_states; 0: 64"),
    option_field("use_qk_l2norm", THALWEG_FLAG, offsetof(Fwd, use_qk_l2norm), kDocL2norm),
    option_field("use_gate", THALWEG_FLAG, offsetof(Fwd, use_gate), kDocGate),
    option_field("use_beta_sigmoid", THALWEG_FLAG, offsetof(Fwd, use_beta_sigmoid), kDocSigmoid),
    option_field("allow_neg_eigval", THALWEG_FLAG, offsetof(Fwd, allow_neg_eigval), kDocNeg),
};

constexpr thalweg_field kBwdFields[] = {
    tensor_field("q", THALWEG_IN, offsetof(Bwd, q), false, "B T H K", kFloats, THALWEG_ROWS, "queries"),
    tensor_field("k", THALWEG_IN, offsetof(Bwd, k), false, "B T H K", "=q", THALWEG_ROWS, "keys"),
    tensor_field("v", THALWEG_IN, offsetof(Bwd, v), false, "B T HV V", "=q", THALWEG_ROWS, "values"),
    tensor_field("g", THALWEG_IN, offsetof(Bwd, g), true, "B T HV", kFloats, THALWEG_ANY, kDocG),
    tensor_field("beta", THALWEG_IN, offsetof(Bwd, beta), true, "B T HV", kFloats, THALWEG_ANY, kDocBeta),
    tensor_field("A_log", THALWEG_IN, offsetof(Bwd, A_log), true, "HV", kFloats, THALWEG_ROWS, kDocALog),
    tensor_field("dt_bias", THALWEG_IN, offsetof(Bwd, dt_bias), true, "HV", kFloats, THALWEG_ROWS, kDocDtBias),
    tensor_field("initial_state", THALWEG_IN, offsetof(Bwd, initial_state), true, "N HV K V", kFloats, THALWEG_STATE,
                 kDocInitial),
    tensor_field("cu_seqlens", THALWEG_IN, offsetof(Bwd, cu_seqlens), true, "N+1", kInts, THALWEG_ROWS, kDocCu),
    tensor_field("d_o", THALWEG_IN, offsetof(Bwd, d_o), true, "B T HV V", "=q", THALWEG_ROWS,
                 "gradient of o; absent: 0"),
    tensor_field("d_final_state", THALWEG_IN, offsetof(Bwd, d_final_state), true, "N HV K V", kFloats, THALWEG_STATE,
                 "gradient of final_state; absent: 0"),
    tensor_field("d_q", THALWEG_OUT, offsetof(Bwd, d_q), true, "B T H K", "=q", THALWEG_ROWS, "gradient of q"),
    tensor_field("d_k", THALWEG_OUT, offsetof(Bwd, d_k), true, "B T H K", "=q", THALWEG_ROWS, "gradient of k"),
    tensor_field("d_v", THALWEG_OUT, offsetof(Bwd, d_v), true, "B T HV V", "=q", THALWEG_ROWS, "gradient of v"),
    tensor_field("d_g", THALWEG_OUT, offsetof(Bwd, d_g), true, "B T HV", "=g", THALWEG_ANY,
                 "gradient of g as given (raw with use_gate)"),
    tensor_field("d_beta", THALWEG_OUT, offsetof(Bwd, d_beta), true, "B T HV", "=beta", THALWEG_ANY,
                 "gradient of beta as given (logits with use_beta_sigmoid)"),
    tensor_field("d_A_log", THALWEG_OUT, offsetof(Bwd, d_A_log), true, "HV", "=A_log", THALWEG_ROWS,
                 "gradient of A_log"),
    tensor_field("d_dt_bias", THALWEG_OUT, offsetof(Bwd, d_dt_bias), true, "HV", "=dt_bias", THALWEG_ROWS,
                 "gradient of dt_bias"),
    tensor_field("d_initial_state", THALWEG_OUT, offsetof(Bwd, d_initial_state), true, "N HV K V", kFloats,
                 THALWEG_STATE, "gradient of initial_state, which may be absent"),
    option_field("scale", THALWEG_REAL, offsetof(Bwd, scale), kDocScale),
    option_field("use_qk_l2norm", THALWEG_FLAG, offsetof(Bwd, use_qk_l2norm), kDocL2norm),
    option_field("use_gate", THALWEG_FLAG, offsetof(Bwd, use_gate), kDocGate),
    option_field("use_beta_sigmoid", THALWEG_FLAG, offsetof(Bwd, use_beta_sigmoid), kDocSigmoid),
    option_field("allow_neg_eigval", THALWEG_FLAG, offsetof(Bwd, allow_neg_eigval), kDocNeg),
};

constexpr thalweg_field kDecodeFields[] = {
    tensor_field("q", THALWEG_IN, offsetof(Decode, q), false, "N T H K", kFloats, THALWEG_ROWS, "queries"),
    tensor_field("k", THALWEG_IN, offsetof(Decode, k), false, "N T H K", "=q", THALWEG_ROWS, "keys"),
    tensor_field("v", THALWEG_IN, offsetof(Decode, v), false, "N T HV V", "=q", THALWEG_ROWS, "values"),
    tensor_field("g", THALWEG_IN, offsetof(Decode, g), true, "N T HV", kFloats, THALWEG_ANY, kDocG),
    tensor_field("beta", THALWEG_IN, offsetof(Decode, beta), true, "N T HV", kFloats, THALWEG_ANY, kDocBeta),
    tensor_field("A_log", THALWEG_IN, offsetof(Decode, A_log), true, "HV", kFloats, THALWEG_ROWS, kDocALog),
    tensor_field("dt_bias", THALWEG_IN, offsetof(Decode, dt_bias), true, "HV", kFloats, THALWEG_ROWS, kDocDtBias),
    tensor_field("state", THALWEG_INOUT, offsetof(Decode, state), false, "M HV K V", kFloats, THALWEG_STATE,
                 "pool of states, read and written"),
    tensor_field("read_slots", THALWEG_IN, offsetof(Decode, read_slots), true, "N", kInts, THALWEG_ROWS,
                 "slot each sequence starts from; -1: padding row, its o is 0 and nothing is written; absent: n"),
    tensor_field("write_slots", THALWEG_IN, offsetof(Decode, write_slots), true, "N T", kInts, THALWEG_ROWS,
                 "slot for the state after token t, -1: not kept; absent: the slot read, after the last token"),
    tensor_field("o", THALWEG_OUT, offsetof(Decode, o), false, "N T HV V", "=q", THALWEG_ROWS,
                 "scale S^T q of every token"),
    option_field("scale", THALWEG_REAL, offsetof(Decode, scale), kDocScale),
    option_field("use_qk_l2norm", THALWEG_FLAG, offsetof(Decode, use_qk_l2norm), kDocL2norm),
    option_field("use_gate", THALWEG_FLAG, offsetof(Decode, use_gate), kDocGate),
    option_field("use_beta_sigmoid", THALWEG_FLAG, offsetof(Decode, use_beta_sigmoid), kDocSigmoid),
    option_field("allow_neg_eigval", THALWEG_FLAG, offsetof(Decode, allow_neg_eigval), kDocNeg),
};

constexpr const char* kRefused =
    "gk: a decay per key channel belongs to kimi_delta_attention; "
    "gv: a decay per value channel is not computed; "
    "beta of rank 4: a write strength per channel is not computed; "
    "cp_context: context parallelism is not done, give each rank's states explicitly";

// ---- What the tables cannot say ----

extern const thalweg_pass kFwdInfo, kBwdInfo, kDecodeInfo;

// Per-channel g and beta fail on their rank in bind(); here they get their reason.
template <class Args, const thalweg_pass& pass>
void refuse_per_channel(const Args& a) {
  if (present(a.g) && a.g.rank == 4)
    fail_field(pass, "g", "rank, got 4, expected 3 (a decay per key or value channel (gk, gv) is refused)");
  if (present(a.beta) && a.beta.rank == 4)
    fail_field(pass, "beta", "rank, got 4, expected 3 (a write strength per channel is refused)");
}

template <class Args>
void check_options(const thalweg_pass& pass, const Args& a) {
  if (!std::isfinite(a.scale)) fail_field(pass, "scale", "got %g, expected a finite number", a.scale);
  if (a.allow_neg_eigval && !a.use_beta_sigmoid)
    fail_field(pass, "allow_neg_eigval", "got 1, expected 0 (without use_beta_sigmoid)");
  if (a.use_beta_sigmoid && !present(a.beta)) fail_field(pass, "use_beta_sigmoid", "got 1, expected 0 (without beta)");
  if (a.use_gate && !present(a.g)) fail_field(pass, "use_gate", "got 1, expected 0 (without g)");
  if (a.use_gate && !present(a.A_log)) fail_field(pass, "A_log", "missing, expected [HV] (with use_gate)");
  if (!a.use_gate && present(a.A_log)) fail_field(pass, "A_log", "got a tensor, expected none (without use_gate)");
  if (!a.use_gate && present(a.dt_bias)) fail_field(pass, "dt_bias", "got a tensor, expected none (without use_gate)");
}

void check_range(const thalweg_pass& pass, const Sizes& sizes, const char* name, int64_t most) {
  int64_t got = sizes[name];
  if (got >= 1 && got <= most) return;
  const Sizes::Entry* entry = sizes.find(name);
  fail_field(pass, entry ? entry->from : name, "%s, got %lld, expected 1 to %lld", name, (long long)got,
             (long long)most);
}

template <class Args>
Problem check_common(const thalweg_pass& pass, const Args& a, const Sizes& sizes) {
  check_options(pass, a);
  check_range(pass, sizes, "K", kMaxHeadDim);
  check_range(pass, sizes, "V", kMaxHeadDim);
  check_range(pass, sizes, "H", INT64_MAX);
  check_range(pass, sizes, "HV", INT64_MAX);
  Problem p{};
  p.T = sizes["T"], p.H = sizes["H"], p.HV = sizes["HV"], p.K = sizes["K"], p.V = sizes["V"];
  if (p.HV % p.H != 0)
    fail_field(pass, "v", "HV, got %lld, expected a multiple of H = %lld (from q)", (long long)p.HV, (long long)p.H);
  p.scale = a.scale == 0 ? 1 / std::sqrt(double(p.K)) : a.scale;
  p.dtype = a.q.dtype;
  p.every = 64;
  return p;
}

template <class Args>
void set_sequences(const thalweg_pass& pass, const Args& a, const Sizes& sizes, Binding binding, Problem& p) {
  p.B = sizes["B"];
  p.packed = present(a.cu_seqlens);
  p.N = check_sequences(pass, sizes, a.cu_seqlens, binding);
  p.longest = p.T;
  if (!p.packed || binding == Binding::kQuery) return;
  p.longest = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    Span span = sequence_span(p, a.cu_seqlens, n);
    p.longest = std::max(p.longest, span.end - span.begin);
  }
}

Problem check_fwd(const Fwd& a, const Sizes& sizes, Binding binding) {
  Problem p = check_common(kFwdInfo, a, sizes);
  set_sequences(kFwdInfo, a, sizes, binding, p);
  if (a.every < 0) fail_field(kFwdInfo, "every", "got %lld, expected 0 or more", (long long)a.every);
  if (a.every > 0) p.every = a.every;
  const int64_t rows = p.B * p.T / p.every + p.N;
  if (present(a.chunk_states) && sizes["R"] != rows)
    fail_field(kFwdInfo, "chunk_states", "R, got %lld, expected %lld (B*T/every + N)", (long long)sizes["R"],
               (long long)rows);
  return p;
}

Problem check_bwd(const Bwd& a, const Sizes& sizes, Binding binding) {
  Problem p = check_common(kBwdInfo, a, sizes);
  set_sequences(kBwdInfo, a, sizes, binding, p);
  if (present(a.d_g) && !present(a.g)) fail_field(kBwdInfo, "d_g", "got a tensor, expected none (without g)");
  if (present(a.d_beta) && !present(a.beta))
    fail_field(kBwdInfo, "d_beta", "got a tensor, expected none (without beta)");
  if (present(a.d_A_log) && !present(a.A_log))
    fail_field(kBwdInfo, "d_A_log", "got a tensor, expected none (without A_log)");
  if (present(a.d_dt_bias) && !present(a.dt_bias))
    fail_field(kBwdInfo, "d_dt_bias", "got a tensor, expected none (without dt_bias)");
  return p;
}

Problem check_decode(const Decode& a, const Sizes& sizes, Binding binding) {
  Problem p = check_common(kDecodeInfo, a, sizes);
  p.N = p.B = sizes["N"];
  p.M = sizes["M"];
  p.longest = p.T;
  check_slots(kDecodeInfo, p.N, p.T, p.M, a.read_slots, a.write_slots, binding);
  return p;
}

// ---- Kernel tables ----

int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

bool plan_tasks(int64_t tasks, int64_t slot_bytes, Plan* plan) {
  plan->num_slots = std::max<int64_t>(1, std::min(plan->num_slots, tasks));
  plan->slot_bytes = round_up(slot_bytes);
  return true;
}

bool is_wide(const Problem& p, std::string* why) {
  if (p.dtype != THALWEG_F64) return false;
  if (why) *why = "needs q of f32, bf16 or f16, got f64";
  return true;
}

// The fast rows: what they need comes from the kernel's own file.
template <int64_t (*slot_bytes)(const Problem&)>
bool plan_value_heads(const Problem& p, const Device&, Plan* plan, std::string* why) {
  return !is_wide(p, why) && plan_tasks(p.N * p.HV, slot_bytes(p), plan);
}
template <int64_t (*slot_bytes)(const Problem&)>
bool plan_key_heads(const Problem& p, const Device&, Plan* plan, std::string* why) {
  // With so few dimensions all keys are nearly parallel, and the chunk form's gradients lose digits that
  // the recurrence keeps.
  if (p.K < 4) {
    if (why) *why = "needs K >= 4, got K = " + std::to_string(p.K);
    return false;
  }
  return !is_wide(p, why) && plan_tasks(p.N * p.H, slot_bytes(p), plan);
}

bool plan_generic(const Problem& p, const Device&, Plan* plan, std::string*) {
  return plan_tasks(p.N * p.HV, cpu_generic_fwd_slot_bytes(p), plan);
}
bool plan_generic_bwd(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = round_up(cpu_generic_bwd_shared_bytes(p));
  return plan_tasks(p.N * p.H, cpu_generic_bwd_slot_bytes(p), plan);
}

const Kernel<Problem, Fwd> kFwdKernels[] = {
    {"cpu_chunk_fwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_value_heads<avx512::cpu_chunk_fwd_slot_bytes>,
     avx512::cpu_chunk_fwd},
    {"cpu_chunk_fwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_value_heads<avx2::cpu_chunk_fwd_slot_bytes>,
     avx2::cpu_chunk_fwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic, cpu_generic_fwd},
};
const Kernel<Problem, Bwd> kBwdKernels[] = {
    {"cpu_chunk_bwd_avx512", THALWEG_CPU, Isa::kAvx512, plan_key_heads<avx512::cpu_chunk_bwd_slot_bytes>,
     avx512::cpu_chunk_bwd},
    {"cpu_chunk_bwd_avx2", THALWEG_CPU, Isa::kAvx2, plan_key_heads<avx2::cpu_chunk_bwd_slot_bytes>,
     avx2::cpu_chunk_bwd},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic_bwd, cpu_generic_bwd},
};
const Kernel<Problem, Decode> kDecodeKernels[] = {
    {"cpu_decode_avx512", THALWEG_CPU, Isa::kAvx512, plan_value_heads<avx512::cpu_decode_slot_bytes>,
     avx512::cpu_decode},
    {"cpu_decode_avx2", THALWEG_CPU, Isa::kAvx2, plan_value_heads<avx2::cpu_decode_slot_bytes>, avx2::cpu_decode},
    {"cpu_generic", THALWEG_CPU, Isa::kPortable, plan_generic, cpu_generic_decode},
};

const Pass<Problem, Fwd> kFwd{&kFwdInfo, check_fwd, kFwdKernels, std::size(kFwdKernels),
                              refuse_per_channel<Fwd, kFwdInfo>};
const Pass<Problem, Bwd> kBwd{&kBwdInfo, check_bwd, kBwdKernels, std::size(kBwdKernels),
                              refuse_per_channel<Bwd, kBwdInfo>};
const Pass<Problem, Decode> kDecode{&kDecodeInfo, check_decode, kDecodeKernels, std::size(kDecodeKernels),
                                    refuse_per_channel<Decode, kDecodeInfo>};

// ---- Entry points ----

constexpr const char* kOp = "gated_delta_rule";

const thalweg_pass kFwdInfo =
    pass_row<kFwd, Fwd>(kOp, "fwd", "Gated DeltaNet over whole sequences: outputs and states", kFwdFields, kRefused);
const thalweg_pass kBwdInfo = pass_row<kBwd, Bwd>(
    kOp, "bwd", "gradients of every input of fwd, from its inputs and d_o, d_final_state", kBwdFields, kRefused);
const thalweg_pass kDecodeInfo = pass_row<kDecode, Decode>(
    kOp, "decode", "one or a few more tokens for each sequence, states in a pool", kDecodeFields, kRefused);

}  // namespace
}  // namespace thalweg::gated_delta_rule

namespace thalweg {

const thalweg_pass* gated_delta_rule_pass_at(int i) {
  using namespace gated_delta_rule;
  const thalweg_pass* passes[] = {&kFwdInfo, &kBwdInfo, &kDecodeInfo};
  return i >= 0 && i < 3 ? passes[i] : nullptr;
}

}  // namespace thalweg

using namespace thalweg::gated_delta_rule;

thalweg_status thalweg_gated_delta_rule_fwd(const thalweg_gated_delta_rule_fwd_args* args, const thalweg_context* ctx) {
  return kFwdInfo.call(args, ctx);
}
thalweg_status thalweg_gated_delta_rule_bwd(const thalweg_gated_delta_rule_bwd_args* args, const thalweg_context* ctx) {
  return kBwdInfo.call(args, ctx);
}
thalweg_status thalweg_gated_delta_rule_decode(const thalweg_gated_delta_rule_decode_args* args,
                                               const thalweg_context* ctx) {
  return kDecodeInfo.call(args, ctx);
}
thalweg_status thalweg_gated_delta_rule_fwd_workspace(const thalweg_gated_delta_rule_fwd_args* args,
                                                      const thalweg_context* ctx, size_t* bytes) {
  return kFwdInfo.workspace(args, ctx, bytes);
}
thalweg_status thalweg_gated_delta_rule_bwd_workspace(const thalweg_gated_delta_rule_bwd_args* args,
                                                      const thalweg_context* ctx, size_t* bytes) {
  return kBwdInfo.workspace(args, ctx, bytes);
}
thalweg_status thalweg_gated_delta_rule_decode_workspace(const thalweg_gated_delta_rule_decode_args* args,
                                                         const thalweg_context* ctx, size_t* bytes) {
  return kDecodeInfo.workspace(args, ctx, bytes);
}
