// Field tables of the delta-rule operators (gated_delta_rule, kimi_delta_attention), whose args structs have the
// same members but for the shapes of the gate's tensors and the lower bound.
#ifndef THALWEG_DELTA_RULE_FIELDS_H
#define THALWEG_DELTA_RULE_FIELDS_H

#include <algorithm>
#include <array>
#include <cstddef>

#include "thalweg/core/signature.h"

namespace thalweg::delta_rule {

// A decay per key channel, and then the gate may have a lower bound.
template <class Args>
inline constexpr bool kPerChannel = requires(Args a) { a.lower_bound; };

template <size_t... n>
constexpr auto join(const std::array<thalweg_field, n>&... parts) {
  std::array<thalweg_field, (n + ...)> all{};
  auto at = all.begin();
  ((at = std::copy(parts.begin(), parts.end(), at)), ...);
  return all;
}

// ---- What several passes have ----

// Dims of q, v, beta and g, which lead with the sequences (N) in decode.
struct TokenDims {
  const char *q, *v, *beta, *g;
};
template <class Args>
constexpr TokenDims token_dims() {
  if constexpr (requires(Args a) { a.write_slots; })
    return {"N T H K", "N T HV V", "N T HV", kPerChannel<Args> ? "N T HV K" : "N T HV"};
  else
    return {"B T H K", "B T HV V", "B T HV", kPerChannel<Args> ? "B T HV K" : "B T HV"};
}
template <class Args>
constexpr const char* dt_bias_dims() {
  return kPerChannel<Args> ? "HV K" : "HV";
}

template <class Args>
constexpr auto token_inputs() {
  constexpr TokenDims dims = token_dims<Args>();
  return std::array{
      tensor_field("q", THALWEG_IN, offsetof(Args, q), false, dims.q, kFloats, THALWEG_ROWS, "queries"),
      tensor_field("k", THALWEG_IN, offsetof(Args, k), false, dims.q, "=q", THALWEG_ROWS, "keys"),
      tensor_field("v", THALWEG_IN, offsetof(Args, v), false, dims.v, "=q", THALWEG_ROWS,
                   "values; value head hv reads key head hv / (HV / H)"),
      tensor_field("g", THALWEG_IN, offsetof(Args, g), true, dims.g, kFloats, THALWEG_ANY,
                   "log decay, natural logarithm, meant <= 0; absent: 0; with use_gate the raw gate"),
      tensor_field("beta", THALWEG_IN, offsetof(Args, beta), true, dims.beta, kFloats, THALWEG_ANY,
                   "write strength; absent: 1; with use_beta_sigmoid its logit"),
      tensor_field("A_log", THALWEG_IN, offsetof(Args, A_log), true, "HV", kFloats, THALWEG_ROWS,
                   kPerChannel<Args> ? "log of the decay rate, with use_gate; may be absent with lower_bound: 0"
                                     : "log of the decay rate, with use_gate"),
      tensor_field("dt_bias", THALWEG_IN, offsetof(Args, dt_bias), true, dt_bias_dims<Args>(), kFloats, THALWEG_ROWS,
                   "added to the raw gate; absent: 0; with use_gate"),
  };
}

// Of the passes over whole sequences.
template <class Args>
constexpr auto sequence_inputs() {
  return std::array{
      tensor_field("initial_state", THALWEG_IN, offsetof(Args, initial_state), true, "N HV K V", kFloats, THALWEG_STATE,
                   "state before the first token; absent: 0"),
      tensor_field("cu_seqlens", THALWEG_IN, offsetof(Args, cu_seqlens), true, "N+1", kInts, THALWEG_ROWS,
                   "sequence borders in a packed batch of one; rows past the last are written as 0"),
  };
}

template <class Args>
constexpr auto every_option() {
  if constexpr (requires(Args a) { a.every; })
    return std::array{
        option_field("every", THALWEG_COUNT, offsetof(Args, every), "tokens between chunk_states; 0: 64")};
  else
    return std::array<thalweg_field, 0>{};
}
template <class Args>
constexpr auto bound_option() {
  if constexpr (kPerChannel<Args>)
    return std::array{option_field("lower_bound", THALWEG_REAL, offsetof(Args, lower_bound),
                                   "with use_gate: the least g, below 0; 0: the softplus form")};
  else
    return std::array<thalweg_field, 0>{};
}

template <class Args>
constexpr auto options() {
  return join(
      std::array{option_field("scale", THALWEG_REAL, offsetof(Args, scale), "factor of q; 0: K^-0.5")},
      every_option<Args>(), bound_option<Args>(),
      std::array{
          option_field("use_qk_l2norm", THALWEG_FLAG, offsetof(Args, use_qk_l2norm),
                       "1: q, k <- x / sqrt(sum x^2 + 1e-6)"),
          option_field("use_gate", THALWEG_FLAG, offsetof(Args, use_gate),
                       kPerChannel<Args> ? "1: x = g + dt_bias; g <- -exp(A_log) softplus(x), or with lower_bound "
                                           "g <- lower_bound sigmoid(exp(A_log) x)"
                                         : "1: g <- -exp(A_log) softplus(g + dt_bias)"),
          option_field("use_beta_sigmoid", THALWEG_FLAG, offsetof(Args, use_beta_sigmoid), "1: beta <- sigmoid(beta)"),
          option_field("allow_neg_eigval", THALWEG_FLAG, offsetof(Args, allow_neg_eigval),
                       "1: beta <- 2 sigmoid(beta); needs use_beta_sigmoid"),
      });
}

// ---- The passes ----

template <class Args>
constexpr auto fwd_fields() {
  return join(
      token_inputs<Args>(), sequence_inputs<Args>(),
      std::array{
          tensor_field("o", THALWEG_OUT, offsetof(Args, o), false, "B T HV V", "=q", THALWEG_ROWS,
                       "scale S^T q of every token"),
          tensor_field("final_state", THALWEG_OUT, offsetof(Args, final_state), true, "N HV K V", kFloats,
                       THALWEG_STATE, "state after the last token"),
          tensor_field("chunk_states", THALWEG_OUT, offsetof(Args, chunk_states), true, "R HV K V", kFloats,
                       THALWEG_STATE, "state before every every-th token; R = B*T/every + N, row start/every + n + c"),
      },
      options<Args>());
}

template <class Args>
constexpr auto bwd_fields() {
  constexpr TokenDims dims = token_dims<Args>();
  return join(
      token_inputs<Args>(), sequence_inputs<Args>(),
      std::array{
          tensor_field("d_o", THALWEG_IN, offsetof(Args, d_o), true, dims.v, "=q", THALWEG_ROWS,
                       "gradient of o; absent: 0"),
          tensor_field("d_final_state", THALWEG_IN, offsetof(Args, d_final_state), true, "N HV K V", kFloats,
                       THALWEG_STATE, "gradient of final_state; absent: 0"),
          tensor_field("d_q", THALWEG_OUT, offsetof(Args, d_q), true, dims.q, "=q", THALWEG_ROWS, "gradient of q"),
          tensor_field("d_k", THALWEG_OUT, offsetof(Args, d_k), true, dims.q, "=q", THALWEG_ROWS, "gradient of k"),
          tensor_field("d_v", THALWEG_OUT, offsetof(Args, d_v), true, dims.v, "=q", THALWEG_ROWS, "gradient of v"),
          tensor_field("d_g", THALWEG_OUT, offsetof(Args, d_g), true, dims.g, "=g", THALWEG_ANY,
                       "gradient of g as given (raw with use_gate)"),
          tensor_field("d_beta", THALWEG_OUT, offsetof(Args, d_beta), true, dims.beta, "=beta", THALWEG_ANY,
                       "gradient of beta as given (logits with use_beta_sigmoid)"),
          tensor_field("d_A_log", THALWEG_OUT, offsetof(Args, d_A_log), true, "HV", "=A_log", THALWEG_ROWS,
                       "gradient of A_log"),
          tensor_field("d_dt_bias", THALWEG_OUT, offsetof(Args, d_dt_bias), true, dt_bias_dims<Args>(), "=dt_bias",
                       THALWEG_ROWS, "gradient of dt_bias"),
          tensor_field("d_initial_state", THALWEG_OUT, offsetof(Args, d_initial_state), true, "N HV K V", kFloats,
                       THALWEG_STATE, "gradient of initial_state, which may be absent"),
      },
      options<Args>());
}

template <class Args>
constexpr auto decode_fields() {
  return join(
      token_inputs<Args>(),
      std::array{
          tensor_field("state", THALWEG_INOUT, offsetof(Args, state), false, "M HV K V", kFloats, THALWEG_STATE,
                       "pool of states, read and written"),
          tensor_field("read_slots", THALWEG_IN, offsetof(Args, read_slots), true, "N", kInts, THALWEG_ROWS,
                       "slot each sequence starts from; -1: padding row, its o is 0 and nothing is written; absent: n"),
          tensor_field("write_slots", THALWEG_IN, offsetof(Args, write_slots), true, "N T", kInts, THALWEG_ROWS,
                       "slot for the state after token t, -1: not kept; absent: the slot read, after the last token"),
          tensor_field("o", THALWEG_OUT, offsetof(Args, o), false, "N T HV V", "=q", THALWEG_ROWS,
                       "scale S^T q of every token"),
      },
      options<Args>());
}

}  // namespace thalweg::delta_rule
#endif
