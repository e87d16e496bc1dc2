// What the field tables of the delta-rule operators cannot say: checks, the Problem, and the plans of their rows.
// Functions take the pass as a template argument where a table of function pointers names them.
#ifndef THALWEG_DELTA_RULE_CHECK_H
#define THALWEG_DELTA_RULE_CHECK_H

#include <algorithm>
#include <cmath>
#include <string>

#include "thalweg/core/device.h"
#include "thalweg/core/exec.h"
#include "thalweg/delta_rule/cuda_plan.h"
#include "thalweg/delta_rule/fields.h"
#include "thalweg/delta_rule/generic_bwd.h"
#include "thalweg/delta_rule/generic_fwd.h"
#include "thalweg/delta_rule/problem.h"

namespace thalweg::delta_rule {

constexpr int64_t kMaxHeadDim = 512;

// ---- Checks ----

// What bind() would refuse for its rank, with the reason.
inline void refuse_rank(const thalweg_pass& pass, const char* name, const thalweg_tensor& t, int rank, const char* dims,
                        const char* reason) {
  if (!present(t) || t.rank != rank) return;
  std::string shape;
  for (int axis = 0; axis < rank; ++axis) shape += (axis ? ", " : "") + std::to_string(t.shape[axis]);
  fail_field(pass, name, "shape, got [%s], expected [%s] (%s)", shape.c_str(), dims, reason);
}
template <const thalweg_pass& pass, class Args>
void refuse_ranks(const Args& a) {
  constexpr TokenDims dims = token_dims<Args>();
  if (kPerChannel<Args>)
    refuse_rank(pass, "g", a.g, 3, dims.g,
                "a decay per head belongs to gated_delta_rule, or is broadcast by a zero stride");
  else
    refuse_rank(pass, "g", a.g, 4, dims.g, "a decay per key or value channel (gk, gv) is refused");
  refuse_rank(pass, "beta", a.beta, 4, dims.beta, "a write strength per channel is refused");
}

template <class Args>
void check_gate(const thalweg_pass& pass, const Args& a) {
  bool needs_rate = a.use_gate;
  if constexpr (kPerChannel<Args>) {
    if (a.lower_bound > 0) fail_field(pass, "lower_bound", "got %g, expected 0 or less", a.lower_bound);
    if (a.lower_bound != 0 && !a.use_gate)
      fail_field(pass, "lower_bound", "got %g, expected 0 (without use_gate)", a.lower_bound);
    needs_rate = a.use_gate && a.lower_bound == 0;
  }
  if (a.use_gate && !present(a.g)) fail_field(pass, "use_gate", "got 1, expected 0 (without g)");
  if (needs_rate && !present(a.A_log))
    fail_field(pass, "A_log",
               kPerChannel<Args> ? "missing, expected [HV] (with use_gate, without lower_bound)"
                                 : "missing, expected [HV] (with use_gate)");
  if (!a.use_gate && present(a.A_log)) fail_field(pass, "A_log", "got a tensor, expected none (without use_gate)");
  if (!a.use_gate && present(a.dt_bias)) fail_field(pass, "dt_bias", "got a tensor, expected none (without use_gate)");
}

inline void check_range(const thalweg_pass& pass, const Sizes& sizes, const char* name, int64_t most) {
  int64_t got = sizes[name];
  if (got >= 1 && got <= most) return;
  const Sizes::Entry* entry = sizes.find(name);
  fail_field(pass, entry ? entry->from : name, "%s, got %lld, expected 1 to %lld", name, (long long)got,
             (long long)most);
}

template <class Args>
Problem check_common(const thalweg_pass& pass, const Args& a, const Sizes& sizes) {
  if (!std::isfinite(a.scale)) fail_field(pass, "scale", "got %g, expected a finite number", a.scale);
  if (a.allow_neg_eigval && !a.use_beta_sigmoid)
    fail_field(pass, "allow_neg_eigval", "got 1, expected 0 (without use_beta_sigmoid)");
  if (a.use_beta_sigmoid && !present(a.beta)) fail_field(pass, "use_beta_sigmoid", "got 1, expected 0 (without beta)");
  check_gate(pass, a);
  check_range(pass, sizes, "K", kMaxHeadDim);
  check_range(pass, sizes, "V", kMaxHeadDim);
  check_range(pass, sizes, "H", INT64_MAX);
  check_range(pass, sizes, "HV", INT64_MAX);
  Problem p{};
  p.T = sizes["T"], p.H = sizes["H"], p.HV = sizes["HV"], p.K = sizes["K"], p.V = sizes["V"];
  if (p.HV % p.H != 0)
    fail_field(pass, "v", "HV, got %lld, expected a multiple of H = %lld (from q)", (long long)p.HV, (long long)p.H);
  p.channels = kPerChannel<Args> ? p.K : 1;
  p.fused = a.use_qk_l2norm || a.use_gate || a.use_beta_sigmoid;
  p.scale = a.scale == 0 ? 1 / std::sqrt(double(p.K)) : a.scale;
  if constexpr (kPerChannel<Args>) p.lower_bound = a.lower_bound;
  p.dtype = a.q.dtype;
  p.longest = p.T;
  p.every = 64;
  return p;
}

template <class Args>
void set_sequences(const thalweg_pass& pass, const Args& a, const Sizes& sizes, Binding binding, Problem& p) {
  p.B = sizes["B"];
  p.packed = present(a.cu_seqlens);
  p.N = check_sequences(pass, sizes, a.cu_seqlens, binding);
  if (!p.packed || binding != Binding::kRun) return;
  p.longest = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    Span span = sequence_span(p, a.cu_seqlens, n);
    p.longest = std::max(p.longest, span.end - span.begin);
  }
}

template <const thalweg_pass& pass, class Args>
Problem check_fwd(const Args& a, const Sizes& sizes, Binding binding) {
  Problem p = check_common(pass, a, sizes);
  set_sequences(pass, a, sizes, binding, p);
  if (a.every < 0) fail_field(pass, "every", "got %lld, expected 0 or more", (long long)a.every);
  if (a.every > 0) p.every = a.every;
  const int64_t rows = p.B * p.T / p.every + p.N;
  if (present(a.chunk_states) && sizes["R"] != rows)
    fail_field(pass, "chunk_states", "R, got %lld, expected %lld (B*T/every + N)", (long long)sizes["R"],
               (long long)rows);
  return p;
}

template <const thalweg_pass& pass, class Args>
Problem check_bwd(const Args& a, const Sizes& sizes, Binding binding) {
  Problem p = check_common(pass, a, sizes);
  set_sequences(pass, a, sizes, binding, p);
  auto needs = [](const char* gradient, const thalweg_tensor& d_x, const char* input, const thalweg_tensor& x) {
    if (present(d_x) && !present(x)) fail_field(pass, gradient, "got a tensor, expected none (without %s)", input);
  };
  needs("d_g", a.d_g, "g", a.g);
  needs("d_beta", a.d_beta, "beta", a.beta);
  needs("d_A_log", a.d_A_log, "A_log", a.A_log);
  needs("d_dt_bias", a.d_dt_bias, "dt_bias", a.dt_bias);
  p.rate_sum = present(a.d_A_log);
  return p;
}

template <const thalweg_pass& pass, class Args>
Problem check_decode(const Args& a, const Sizes& sizes, Binding binding) {
  Problem p = check_common(pass, a, sizes);
  p.N = p.B = sizes["N"];
  p.M = sizes["M"];
  check_slots(pass, p.N, p.T, p.M, a.read_slots, a.write_slots, binding);
  const thalweg_tensor& s = a.state;
  p.slots = present(a.read_slots) || present(a.write_slots);
  p.state = s.dtype;
  p.k_contiguous = s.stride[3] != 1 && s.stride[2] == 1;
  const int64_t step = 16 / int64_t(thalweg_dtype_bytes(s.dtype));
  p.aligned16 = reinterpret_cast<uintptr_t>(s.data) % 16 == 0 && s.stride[0] % step == 0 && s.stride[1] % step == 0 &&
                s.stride[p.k_contiguous ? 3 : 2] % step == 0;
  return p;
}

// ---- Plans ----

inline int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

inline bool plan_tasks(int64_t tasks, int64_t slot_bytes, Plan* plan) {
  plan->num_slots = std::max<int64_t>(1, std::min(plan->num_slots, tasks));
  plan->slot_bytes = round_up(slot_bytes);
  return true;
}

inline bool is_wide(const Problem& p, std::string* why) {
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

inline bool plan_generic(const Problem& p, const Device&, Plan* plan, std::string*) {
  return plan_tasks(p.N * p.HV, generic_fwd_slot_bytes(p), plan);
}
inline bool plan_generic_bwd(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = round_up(generic_bwd_shared_bytes(p));
  return plan_tasks(p.N * p.H, generic_bwd_slot_bytes(p), plan);
}

// The CUDA rows: shared_bytes is the whole workspace.
inline bool plan_cuda_generic(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = spans_workspace(p);
  return true;
}
inline bool plan_cuda_generic_decode(const Problem& p, const Device&, Plan* plan, std::string*) {
  plan->shared_bytes = slots_workspace(p);
  return true;
}
inline bool plan_cuda_generic_bwd(const Problem& p, const Device& device, Plan* plan, std::string*) {
  plan->values[0] = device.num_sms;
  plan->shared_bytes = bwd_layout(p, device.num_sms).bytes;
  return true;
}

// Why sm90_decode cannot take the problem; empty if it can.
inline std::string why_not_sm90_decode(const Problem& p) {
  if (p.dtype == THALWEG_F64) return "needs q of f32, bf16 or f16, got f64";
  if (p.state != THALWEG_F32 && p.state != THALWEG_BF16)
    return std::string("needs a state of f32 or bf16, got ") + thalweg_dtype_name(p.state);
  if (!p.aligned16) return "needs rows of the state that start at 16 bytes, got others";
  if (p.K != 64 && p.K != 128 && p.K != 256) return "needs K of 64, 128 or 256, got K = " + std::to_string(p.K);
  if (p.V % 64 != 0) return "needs V of a multiple of 64, got V = " + std::to_string(p.V);
  if (p.HV > 65535) return "needs HV of at most 65535, got HV = " + std::to_string(p.HV);
  if (p.T > kMaxDrafts) return "needs T of at most 8, got T = " + std::to_string(p.T);
  return "";
}
inline bool plan_sm90_decode(const Problem& p, const Device& device, Plan* plan, std::string* why) {
  plan->shared_bytes = slots_workspace(p);
  const DecodeCut cut = decode_cut(p, device.num_sms);
  plan->values[0] = cut.warps, plan->values[1] = cut.columns;
  plan->values[2] = cut.steps, plan->values[3] = cut.helpers;
  std::string reason = why_not_sm90_decode(p);
  const bool takes = reason.empty();
  if (why && !takes) *why = std::move(reason);
  return takes;
}

}  // namespace thalweg::delta_rule
#endif
