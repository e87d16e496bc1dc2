#include "mixer.h"

#include "products.h"

namespace language_model {
namespace {

using thalweg::view;

// Columns of a [B T width] matrix as [B T H X] heads, from column `first` on.
thalweg_tensor heads(const std::vector<float>& matrix, int64_t width, int64_t first, int64_t B, int64_t T, int64_t H,
                     int64_t X) {
  return view(matrix.data() + first, {B, T, H, X}, {T * width, width, X, 1}, THALWEG_F32);
}
// Columns of a [B T width] matrix as one number a head, [B T H].
thalweg_tensor scalars(const std::vector<float>& matrix, int64_t width, int64_t first, int64_t B, int64_t T,
                       int64_t H) {
  return view(matrix.data() + first, {B, T, H}, {T * width, width, 1}, THALWEG_F32);
}

// The views that the operator's passes share, of activations or of their gradients.
struct Views {
  thalweg_tensor q, k, v, g, beta, o;
};
Views views_of(const Config& c, int64_t B, int64_t T, const MixerActivations& x) {
  int64_t keys = c.H * c.K, width = c.qkv();
  return {.q = heads(x.conv, width, 0, B, T, c.H, c.K),
          .k = heads(x.conv, width, keys, B, T, c.H, c.K),
          .v = heads(x.conv, width, 2 * keys, B, T, c.H, c.V),
          .g = scalars(x.decay_beta, 2 * c.H, 0, B, T, c.H),
          .beta = scalars(x.decay_beta, 2 * c.H, c.H, B, T, c.H),
          .o = heads(x.o, c.o(), 0, B, T, c.H, c.V)};
}

void convolve(Threads& threads, const Config& c, Pass pass, int64_t B, int64_t T, const MixerWeights& w,
              MixerState* state, MixerActivations& x) {
  int64_t C = c.qkv();
  thalweg_tensor input = view(x.qkv.data(), {B, T, C}), output = view(x.conv.data(), {B, T, C});
  thalweg_tensor weight = view(w.conv, {C, c.W});
  if (pass == Pass::kDecode) {
    thalweg::short_conv_decode({.x = input,
                                .weight = weight,
                                .state = view(state->conv.data(), {1, C, c.W}),
                                .y = output,
                                .activation = THALWEG_ACTIVATION_SILU},
                               threads.context());
    return;
  }
  thalweg::short_conv_fwd_args args{
      .x = input, .weight = weight, .y = output, .activation = THALWEG_ACTIVATION_SILU};
  std::vector<float> after;
  if (state) {
    after.resize(state->conv.size());
    args.initial_state = view(state->conv.data(), {1, C, c.W});
    args.final_state = view(after.data(), {1, C, c.W});
  }
  thalweg::short_conv_fwd(args, threads.context());
  if (state) state->conv.swap(after);
}

void apply_delta_rule(Threads& threads, const Config& c, Pass pass, int64_t B, int64_t T, const MixerWeights& w,
                      MixerState* state, MixerActivations& x) {
  Views views = views_of(c, B, T, x);
  thalweg_tensor A_log = view(w.A_log, {c.H}), dt_bias = view(w.dt_bias, {c.H});
  if (pass == Pass::kDecode) {
    thalweg::gated_delta_rule_decode({.q = views.q,
                                      .k = views.k,
                                      .v = views.v,
                                      .g = views.g,
                                      .beta = views.beta,
                                      .A_log = A_log,
                                      .dt_bias = dt_bias,
                                      .state = view(state->delta.data(), {1, c.H, c.K, c.V}),
                                      .o = views.o,
                                      .use_qk_l2norm = 1,
                                      .use_gate = 1,
                                      .use_beta_sigmoid = 1},
                                     threads.context());
    return;
  }
  thalweg::gated_delta_rule_fwd_args args{.q = views.q,
                                          .k = views.k,
                                          .v = views.v,
                                          .g = views.g,
                                          .beta = views.beta,
                                          .A_log = A_log,
                                          .dt_bias = dt_bias,
                                          .o = views.o,
                                          .use_qk_l2norm = 1,
                                          .use_gate = 1,
                                          .use_beta_sigmoid = 1};
  std::vector<float> after;
  if (state) {
    after.resize(state->delta.size());
    args.initial_state = view(state->delta.data(), {1, c.H, c.K, c.V});
    args.final_state = view(after.data(), {1, c.H, c.K, c.V});
  }
  thalweg::gated_delta_rule_fwd(args, threads.context());
  if (state) state->delta.swap(after);
}

}  // namespace

void MixerActivations::resize(const Config& c, int64_t M) {
  qkv.resize(size_t(M * c.qkv()));
  gate.resize(size_t(M * c.o()));
  decay_beta.resize(size_t(M * 2 * c.H));
  conv.resize(size_t(M * c.qkv()));
  o.resize(size_t(M * c.o()));
  y.resize(size_t(M * c.o()));
}

MixerState::MixerState(const Config& c) : conv(size_t(c.qkv() * c.W)), delta(size_t(c.H * c.K * c.V)) {}

void mix(Threads& threads, const Config& c, Pass pass, int64_t B, int64_t T, const MixerWeights& w, const float* a,
         MixerState* state, MixerActivations& x, float* branch) {
  int64_t M = B * T;
  multiply(threads, M, c.qkv(), c.D, a, w.w_qkv, x.qkv.data());
  multiply(threads, M, c.o(), c.D, a, w.w_gate, x.gate.data());
  multiply(threads, M, 2 * c.H, c.D, a, w.w_decay_beta, x.decay_beta.data());
  convolve(threads, c, pass, B, T, w, state, x);
  apply_delta_rule(threads, c, pass, B, T, w, state, x);
  thalweg::gated_rms_norm_fwd({.x = view(x.o.data(), {M * c.H, c.V}),
                               .gate = view(x.gate.data(), {M * c.H, c.V}),
                               .weight = view(w.norm, {c.V}),
                               .y = view(x.y.data(), {M * c.H, c.V}),
                               .gate_activation = THALWEG_GATE_SILU},
                              threads.context());
  multiply(threads, M, c.D, c.o(), x.y.data(), w.w_out, branch);
}

void mix_backward(Threads& threads, const Config& c, int64_t B, int64_t T, const MixerWeights& w, const float* a,
                  const MixerActivations& x, const float* d_branch, MixerActivations& d, float* d_a,
                  const MixerWeights& d_w) {
  int64_t M = B * T, C = c.qkv();
  multiply_transposed(threads, M, c.o(), c.D, d_branch, w.w_out, d.y.data());
  transposed_multiply(threads, c.o(), c.D, M, x.y.data(), d_branch, d_w.w_out);

  thalweg::gated_rms_norm_bwd({.x = view(x.o.data(), {M * c.H, c.V}),
                               .gate = view(x.gate.data(), {M * c.H, c.V}),
                               .weight = view(w.norm, {c.V}),
                               .d_y = view(d.y.data(), {M * c.H, c.V}),
                               .d_x = view(d.o.data(), {M * c.H, c.V}),
                               .d_gate = view(d.gate.data(), {M * c.H, c.V}),
                               .d_weight = view(d_w.norm, {c.V}),
                               .gate_activation = THALWEG_GATE_SILU},
                              threads.context());

  Views views = views_of(c, B, T, x), d_views = views_of(c, B, T, d);
  thalweg::gated_delta_rule_bwd({.q = views.q,
                                 .k = views.k,
                                 .v = views.v,
                                 .g = views.g,
                                 .beta = views.beta,
                                 .A_log = view(w.A_log, {c.H}),
                                 .dt_bias = view(w.dt_bias, {c.H}),
                                 .d_o = d_views.o,
                                 .d_q = d_views.q,
                                 .d_k = d_views.k,
                                 .d_v = d_views.v,
                                 .d_g = d_views.g,
                                 .d_beta = d_views.beta,
                                 .d_A_log = view(d_w.A_log, {c.H}),
                                 .d_dt_bias = view(d_w.dt_bias, {c.H}),
                                 .use_qk_l2norm = 1,
                                 .use_gate = 1,
                                 .use_beta_sigmoid = 1},
                                threads.context());

  thalweg::short_conv_bwd({.x = view(x.qkv.data(), {B, T, C}),
                           .weight = view(w.conv, {C, c.W}),
                           .d_y = view(d.conv.data(), {B, T, C}),
                           .d_x = view(d.qkv.data(), {B, T, C}),
                           .d_weight = view(d_w.conv, {C, c.W}),
                           .activation = THALWEG_ACTIVATION_SILU},
                          threads.context());

  transposed_multiply(threads, c.D, C, M, a, d.qkv.data(), d_w.w_qkv);
  transposed_multiply(threads, c.D, c.o(), M, a, d.gate.data(), d_w.w_gate);
  transposed_multiply(threads, c.D, 2 * c.H, M, a, d.decay_beta.data(), d_w.w_decay_beta);
  multiply_transposed(threads, M, c.D, C, d.qkv.data(), w.w_qkv, d_a);
  multiply_transposed(threads, M, c.D, c.o(), d.gate.data(), w.w_gate, d_a, Into::kAdd);
  multiply_transposed(threads, M, c.D, 2 * c.H, d.decay_beta.data(), w.w_decay_beta, d_a, Into::kAdd);
}

}  // namespace language_model
