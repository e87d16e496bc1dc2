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
  int64_t keys = c.H * c.K, width = c.qkv(), scalar_width = c.decay_beta();
  return {.q = heads(x.conv, width, 0, B, T, c.H, c.K),
          .k = heads(x.conv, width, keys, B, T, c.H, c.K),
          .v = heads(x.conv, width, 2 * keys, B, T, c.H, c.V),
          .g = c.mixer == Mixer::kGdn ? scalars(x.decay_beta, scalar_width, 0, B, T, c.H)
                                      : heads(x.decay_beta, scalar_width, 0, B, T, c.H, c.K),
          .beta = scalars(x.decay_beta, scalar_width, c.decays(), B, T, c.H),
          .o = heads(x.o, c.o(), 0, B, T, c.H, c.V)};
}
thalweg_tensor dt_bias_of(const Config& c, float* dt_bias) {
  return c.mixer == Mixer::kGdn ? view(dt_bias, {c.H}) : view(dt_bias, {c.H, c.K});
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

// The args of a pass of either operator, with what all of them take. Their fields have the same names.
template <class Args>
Args args_of(const Config& c, const Views& views, const MixerWeights& w) {
  Args args{};
  args.q = views.q, args.k = views.k, args.v = views.v, args.g = views.g, args.beta = views.beta;
  args.A_log = view(w.A_log, {c.H});
  args.dt_bias = dt_bias_of(c, w.dt_bias);
  args.use_qk_l2norm = args.use_gate = args.use_beta_sigmoid = 1;
  return args;
}

template <class Args, class Run>
void decode_tokens(const Config& c, const Views& views, const MixerWeights& w, MixerState& state, Run run) {
  auto args = args_of<Args>(c, views, w);
  args.state = view(state.delta.data(), {1, c.H, c.K, c.V});
  args.o = views.o;
  run(args);
}

template <class Args, class Run>
void read_tokens(const Config& c, const Views& views, const MixerWeights& w, MixerState* state, Run run) {
  auto args = args_of<Args>(c, views, w);
  args.o = views.o;
  std::vector<float> after;
  if (state) {
    after.resize(state->delta.size());
    args.initial_state = view(state->delta.data(), {1, c.H, c.K, c.V});
    args.final_state = view(after.data(), {1, c.H, c.K, c.V});
  }
  run(args);
  if (state) state->delta.swap(after);
}

template <class Args, class Run>
void read_tokens_backward(const Config& c, const Views& views, const Views& d_views, const MixerWeights& w,
                          const MixerWeights& d_w, Run run) {
  auto args = args_of<Args>(c, views, w);
  args.d_o = d_views.o;
  args.d_q = d_views.q, args.d_k = d_views.k, args.d_v = d_views.v, args.d_g = d_views.g, args.d_beta = d_views.beta;
  args.d_A_log = view(d_w.A_log, {c.H});
  args.d_dt_bias = dt_bias_of(c, d_w.dt_bias);
  run(args);
}

void apply_delta_rule(Threads& threads, const Config& c, Pass pass, int64_t B, int64_t T, const MixerWeights& w,
                      MixerState* state, MixerActivations& x) {
  const Views views = views_of(c, B, T, x);
  const bool kda = c.mixer == Mixer::kKda;
  auto context = threads.context();
  using namespace thalweg;
  if (pass == Pass::kDecode && kda)
    decode_tokens<kimi_delta_attention_decode_args>(
        c, views, w, *state, [&](auto& a) { kimi_delta_attention_decode(a, context); });
  else if (pass == Pass::kDecode)
    decode_tokens<gated_delta_rule_decode_args>(
        c, views, w, *state, [&](auto& a) { gated_delta_rule_decode(a, context); });
  else if (kda)
    read_tokens<kimi_delta_attention_fwd_args>(
        c, views, w, state, [&](auto& a) { kimi_delta_attention_fwd(a, context); });
  else
    read_tokens<gated_delta_rule_fwd_args>(
        c, views, w, state, [&](auto& a) { gated_delta_rule_fwd(a, context); });
}

void delta_rule_backward(Threads& threads, const Config& c, int64_t B, int64_t T, const MixerWeights& w,
                         const MixerActivations& x, const MixerActivations& d, const MixerWeights& d_w) {
  const Views views = views_of(c, B, T, x), d_views = views_of(c, B, T, d);
  auto context = threads.context();
  using namespace thalweg;
  if (c.mixer == Mixer::kKda)
    read_tokens_backward<kimi_delta_attention_bwd_args>(
        c, views, d_views, w, d_w, [&](auto& a) { kimi_delta_attention_bwd(a, context); });
  else
    read_tokens_backward<gated_delta_rule_bwd_args>(
        c, views, d_views, w, d_w, [&](auto& a) { gated_delta_rule_bwd(a, context); });
}

}  // namespace

void MixerActivations::resize(const Config& c, int64_t M) {
  qkv.resize(size_t(M * c.qkv()));
  gate.resize(size_t(M * c.o()));
  decay_beta.resize(size_t(M * c.decay_beta()));
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
  multiply(threads, M, c.decay_beta(), c.D, a, w.w_decay_beta, x.decay_beta.data());
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

  delta_rule_backward(threads, c, B, T, w, x, d, d_w);

  thalweg::short_conv_bwd({.x = view(x.qkv.data(), {B, T, C}),
                           .weight = view(w.conv, {C, c.W}),
                           .d_y = view(d.conv.data(), {B, T, C}),
                           .d_x = view(d.qkv.data(), {B, T, C}),
                           .d_weight = view(d_w.conv, {C, c.W}),
                           .activation = THALWEG_ACTIVATION_SILU},
                          threads.context());

  transposed_multiply(threads, c.D, C, M, a, d.qkv.data(), d_w.w_qkv);
  transposed_multiply(threads, c.D, c.o(), M, a, d.gate.data(), d_w.w_gate);
  transposed_multiply(threads, c.D, c.decay_beta(), M, a, d.decay_beta.data(), d_w.w_decay_beta);
  multiply_transposed(threads, M, c.D, C, d.qkv.data(), w.w_qkv, d_a);
  multiply_transposed(threads, M, c.D, c.o(), d.gate.data(), w.w_gate, d_a, Into::kAdd);
  multiply_transposed(threads, M, c.D, c.decay_beta(), d.decay_beta.data(), w.w_decay_beta, d_a, Into::kAdd);
}

}  // namespace language_model
