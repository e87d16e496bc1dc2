// Token-by-token float64 oracle of the short convolution, written from the mathematics. A sequence
// carries a window of the last W inputs, which starts as the state and is the state when it ends:
//
//   window <- (window[1..W-1], x_t)     pre = bias + sum_j weight[j] window[j]     y_t = a(pre)
//
// and backwards, with dwindow the gradient of the window after the token, at first d_final_state:
//
//   dpre = d_y_t a'(pre)               d_weight[j] += dpre window[j]              d_bias += dpre
//   dwindow[j] += dpre weight[j]       d_x_t = dwindow[W-1]                       dwindow <- (0, dwindow[0..W-2])
//
// What is left of dwindow before the first token is d_initial_state.
#include "thalweg/ops/short_conv/reference.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "thalweg/core/signature.h"
#include "thalweg/ops/short_conv/short_conv.h"

namespace thalweg::short_conv {
namespace {

double& at(const thalweg_tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  const int64_t index[3] = {i, j, k};
  int64_t offset = 0;
  for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.stride[axis];
  return static_cast<double*>(t.data)[offset];
}

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

// silu and its slope; at infinity their limits.
double silu(double x) { return x == -INFINITY ? 0 : x * sigmoid(x); }
double silu_slope(double x) {
  if (std::isinf(x)) return x > 0;
  double s = sigmoid(x);
  return s * (1 + x * (1 - s));
}

// One sequence: rows [begin, end) of batch b.
struct Sequence {
  int64_t n, b, begin, end;
};

// Calls body with every sequence, then with what lies behind the last one, as n = -1.
template <class Args, class Body>
void for_sequences(const Args& args, Body body) {
  const int64_t B = args.x.shape[0], T = args.x.shape[1];
  if (!present(args.cu_seqlens)) {
    for (int64_t b = 0; b < B; ++b) body(Sequence{b, b, 0, T});
    return;
  }
  const int64_t N = args.cu_seqlens.shape[0] - 1;
  for (int64_t n = 0; n < N; ++n) body(Sequence{n, 0, int_at(args.cu_seqlens, n), int_at(args.cu_seqlens, n + 1)});
  body(Sequence{-1, 0, int_at(args.cu_seqlens, N), T});
}

// Inputs of a sequence by time, which is negative in the state.
struct Input {
  const thalweg_tensor& x;
  const thalweg_tensor& state;
  Sequence s;
  int64_t W;

  double operator()(int64_t t, int64_t d) const {
    if (t >= 0) return at(x, s.b, s.begin + t, d);
    return present(state) ? at(state, s.n, d, W + t) : 0;
  }
};

// pre of token t; slot j of its window is input(t - (W-1) + j).
double convolve(const thalweg_tensor& weight, const thalweg_tensor& bias, const Input& input, int64_t t, int64_t d) {
  double pre = present(bias) ? at(bias, d) : 0;
  for (int64_t j = 0; j < input.W; ++j) pre += at(weight, d, j) * input(t - (input.W - 1) + j, d);
  return pre;
}

void set_zero(const thalweg_tensor& t) {
  if (!present(t)) return;
  for (int64_t i = 0; i < t.shape[0]; ++i)
    for (int64_t j = 0; j < (t.rank > 1 ? t.shape[1] : 1); ++j)
      for (int64_t k = 0; k < (t.rank > 2 ? t.shape[2] : 1); ++k) at(t, i, j, k) = 0;
}

void backward_sequence(const thalweg_short_conv_bwd_args& args, const Sequence& s, int64_t d) {
  const int64_t W = args.weight.shape[1], L = s.end - s.begin;
  const bool use_silu = args.activation == THALWEG_ACTIVATION_SILU;
  const Input input{args.x, args.initial_state, s, W};
  double dwindow[16] = {};
  for (int64_t j = 0; j < W; ++j) dwindow[j] = present(args.d_final_state) ? at(args.d_final_state, s.n, d, j) : 0;
  for (int64_t t = L - 1; t >= 0; --t) {
    double dpre = present(args.d_y) ? at(args.d_y, s.b, s.begin + t, d) : 0;
    if (use_silu) dpre *= silu_slope(convolve(args.weight, args.bias, input, t, d));
    for (int64_t j = 0; j < W; ++j) dwindow[j] += dpre * at(args.weight, d, j);
    if (present(args.d_weight))
      for (int64_t j = 0; j < W; ++j) at(args.d_weight, d, j) += dpre * input(t - (W - 1) + j, d);
    if (present(args.d_bias)) at(args.d_bias, d) += dpre;
    if (present(args.d_x)) at(args.d_x, s.b, s.begin + t, d) = dwindow[W - 1];
    for (int64_t j = W - 1; j > 0; --j) dwindow[j] = dwindow[j - 1];
    dwindow[0] = 0;
  }
  if (present(args.d_initial_state))
    for (int64_t j = 0; j < W; ++j) at(args.d_initial_state, s.n, d, j) = dwindow[j];
}

}  // namespace

void reference_fwd(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_short_conv_fwd_args*>(pass_args);
  const int64_t D = args.x.shape[2], W = args.weight.shape[1];
  const bool use_silu = args.activation == THALWEG_ACTIVATION_SILU;
  for_sequences(args, [&](const Sequence& s) {
    const Input input{args.x, args.initial_state, s, W};
    for (int64_t t = 0; t < s.end - s.begin; ++t)
      for (int64_t d = 0; d < D; ++d) {
        double pre = s.n < 0 ? 0 : convolve(args.weight, args.bias, input, t, d);
        at(args.y, s.b, s.begin + t, d) = use_silu ? silu(pre) : pre;
      }
    if (s.n < 0 || !present(args.final_state)) return;
    for (int64_t d = 0; d < D; ++d)
      for (int64_t j = 0; j < W; ++j) at(args.final_state, s.n, d, j) = input(s.end - s.begin - W + j, d);
  });
}

void reference_bwd(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_short_conv_bwd_args*>(pass_args);
  for (const thalweg_tensor* t : {&args.d_x, &args.d_weight, &args.d_bias, &args.d_initial_state}) set_zero(*t);
  for_sequences(args, [&](const Sequence& s) {
    if (s.n < 0) return;
    for (int64_t d = 0; d < args.x.shape[2]; ++d) backward_sequence(args, s, d);
  });
}

void reference_decode(const void* pass_args) {
  const auto& args = *static_cast<const thalweg_short_conv_decode_args*>(pass_args);
  const int64_t N = args.x.shape[0], T = args.x.shape[1], D = args.x.shape[2], W = args.weight.shape[1];
  const bool use_silu = args.activation == THALWEG_ACTIVATION_SILU;
  std::vector<double> window(static_cast<size_t>(W));
  for (int64_t n = 0; n < N; ++n) {
    const int64_t slot = present(args.read_slots) ? int_at(args.read_slots, n) : n;
    for (int64_t d = 0; d < D; ++d) {
      for (int64_t j = 0; j < W && slot >= 0; ++j) window[j] = at(args.state, slot, d, j);
      for (int64_t t = 0; t < T; ++t) {
        if (slot < 0) {
          at(args.y, n, t, d) = 0;
          continue;
        }
        for (int64_t j = 0; j + 1 < W; ++j) window[j] = window[j + 1];
        window[W - 1] = at(args.x, n, t, d);
        double pre = present(args.bias) ? at(args.bias, d) : 0;
        for (int64_t j = 0; j < W; ++j) pre += at(args.weight, d, j) * window[j];
        at(args.y, n, t, d) = use_silu ? silu(pre) : pre;
        int64_t to = present(args.write_slots) ? int_at(args.write_slots, n, t) : t + 1 == T ? slot : -1;
        for (int64_t j = 0; j < W && to >= 0; ++j) at(args.state, to, d, j) = window[j];
      }
    }
  }
}

}  // namespace thalweg::short_conv
