// Token-by-token float64 oracle of the gated delta rule, written from the mathematics:
//
//   S~ = exp(g) S      r = v - S~^T k      u = beta r      S = S~ + k u^T      o = scale S^T q
//
// and backwards, with dS the gradient of the state after the token:
//
//   dS += scale q d_o^T        dq = scale S d_o         du = dS^T k       dv = beta du
//   dk  = dS u - S~ dv         dbeta = du . r           dS~ = dS - k dv^T
//   dg  = sum(dS~ * S~)        dS <- exp(g) dS~
//
// It keeps a state every sqrt(T) tokens and recomputes the states between two of them, so a long
// sequence fits in memory. Sequences and key heads are independent and run on their own threads.
#include "thalweg/ops/gated_delta_rule/reference.h"

#include <algorithm>
#include <cmath>

#include "testing/reference.h"
#include "thalweg/ops/gated_delta_rule/gated_delta_rule.h"

namespace thalweg::gated_delta_rule {
namespace {

using namespace testing::reference;

// The inputs that all three passes share, and where a token is.
template <class Args>
struct Inputs {
  const Args& args;
  int64_t B, T, H, HV, K, V, group;
  double scale;

  explicit Inputs(const Args& a) : args(a) {
    B = a.q.shape[0], T = a.q.shape[1], H = a.q.shape[2], K = a.q.shape[3];
    HV = a.v.shape[2], V = a.v.shape[3];
    group = H ? HV / H : 0;
    scale = a.scale == 0 ? 1 / std::sqrt(double(K)) : a.scale;
  }

  double work() const { return double(B) * double(T) * double(HV) * double(K) * double(V); }
};

// One token as one value head sees it, after the fused steps.
struct Token {
  Row q, k, v;            // [K] [K] [V]
  double rstd_q, rstd_k;  // 1 without l2norm
  double g, decay, beta;  // effective
  double x;               // gate input with its bias
};

template <class Args>
void load(const Inputs<Args>& in, int64_t b, int64_t t, int64_t hv, Token& token) {
  const Args& a = in.args;
  int64_t h = hv / in.group;
  token.q.resize(in.K), token.k.resize(in.K), token.v.resize(in.V);
  for (int64_t i = 0; i < in.K; ++i) token.q[i] = at(a.q, b, t, h, i), token.k[i] = at(a.k, b, t, h, i);
  for (int64_t j = 0; j < in.V; ++j) token.v[j] = at(a.v, b, t, hv, j);
  token.rstd_q = a.use_qk_l2norm ? l2norm(token.q) : 1;
  token.rstd_k = a.use_qk_l2norm ? l2norm(token.k) : 1;
  token.x = present(a.g) ? at(a.g, b, t, hv) : 0;
  token.g = token.x;
  if (a.use_gate) {
    if (present(a.dt_bias)) token.x += at(a.dt_bias, hv);
    token.g = -std::exp(at(a.A_log, hv)) * softplus(token.x);
  }
  token.decay = std::exp(token.g);
  token.beta = present(a.beta) ? at(a.beta, b, t, hv) : 1;
  if (a.use_beta_sigmoid) token.beta = (a.allow_neg_eigval ? 2 : 1) * sigmoid(token.beta);
}

// S [K V] takes in one token; r [V] becomes the delta before beta.
void step(const Token& token, double* S, Row& r, int64_t K, int64_t V) {
  r = token.v;
  for (int64_t i = 0; i < K; ++i) {
    double* row = S + i * V;
    for (int64_t j = 0; j < V; ++j) row[j] *= token.decay;
    for (int64_t j = 0; j < V; ++j) r[j] -= token.k[i] * row[j];
  }
  for (int64_t i = 0; i < K; ++i) {
    double* row = S + i * V;
    double write = token.k[i] * token.beta;
    for (int64_t j = 0; j < V; ++j) row[j] += write * r[j];
  }
}

void read_out(const Token& token, const double* S, double scale, Row& o, int64_t K, int64_t V) {
  o.assign(V, 0);
  for (int64_t i = 0; i < K; ++i)
    for (int64_t j = 0; j < V; ++j) o[j] += scale * token.q[i] * S[i * V + j];
}

template <class Args>
int64_t num_sequences(const Inputs<Args>& in) {
  return present(in.args.cu_seqlens) ? in.args.cu_seqlens.shape[0] - 1 : in.B;
}

void forward_head(const Inputs<thalweg_gated_delta_rule_fwd_args>& in, int64_t n, int64_t hv) {
  const auto& a = in.args;
  const int64_t K = in.K, V = in.V, every = a.every == 0 ? 64 : a.every;
  Span span = span_of(a.cu_seqlens, in.T, n);
  int64_t first_row = (span.b * in.T + span.begin) / every + n;
  Row S, r(V), o;
  Token token;
  load_state(a.initial_state, n, hv, S, K, V);
  store_state(a.chunk_states, first_row, hv, S, K, V);
  for (int64_t t = span.begin; t < span.end; ++t) {
    int64_t since = t - span.begin;
    if (since % every == 0) store_state(a.chunk_states, first_row + since / every, hv, S, K, V);
    load(in, span.b, t, hv, token);
    step(token, S.data(), r, K, V);
    read_out(token, S.data(), in.scale, o, K, V);
    for (int64_t j = 0; j < V; ++j) at(a.o, span.b, t, hv, j) = o[j];
  }
  store_state(a.final_state, n, hv, S, K, V);
}

// Backward of one value head of one sequence. d_q and d_k of the group are summed in the outputs.
class HeadBackward {
 public:
  HeadBackward(const Inputs<thalweg_gated_delta_rule_bwd_args>& in, int64_t n, int64_t hv)
      : in_(in), a_(in.args), n_(n), hv_(hv), K_(in.K), V_(in.V), span_(span_of(in.args.cu_seqlens, in.T, n)) {}

  void run() {
    const int64_t length = span_.end - span_.begin;
    const int64_t piece = std::max<int64_t>(1, int64_t(std::sqrt(double(length))));
    std::vector<Row> checkpoints;
    Row S, r(V_);
    load_state(a_.initial_state, n_, hv_, S, K_, V_);
    Token token;
    for (int64_t t = 0; t < length; ++t) {
      if (t % piece == 0) checkpoints.push_back(S);
      load(in_, span_.b, span_.begin + t, hv_, token);
      step(token, S.data(), r, K_, V_);
    }
    load_state(a_.d_final_state, n_, hv_, dS_, K_, V_);
    for (int64_t c = int64_t(checkpoints.size()) - 1; c >= 0; --c)
      run_piece(checkpoints[c], span_.begin + c * piece, std::min(span_.begin + (c + 1) * piece, span_.end));
    store_state(a_.d_initial_state, n_, hv_, dS_, K_, V_);
  }

  double d_A_log = 0, d_dt_bias = 0;

 private:
  // Tokens [begin, end): the states again, then backwards.
  void run_piece(const Row& state, int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    states_.resize(count + 1);
    tokens_.resize(count);
    deltas_.resize(count);
    states_[0] = state;
    for (int64_t t = 0; t < count; ++t) {
      load(in_, span_.b, begin + t, hv_, tokens_[t]);
      states_[t + 1] = states_[t];
      deltas_[t].resize(V_);
      step(tokens_[t], states_[t + 1].data(), deltas_[t], K_, V_);
    }
    for (int64_t t = count - 1; t >= 0; --t) run_token(begin + t, tokens_[t], states_[t], states_[t + 1], deltas_[t]);
  }

  void run_token(int64_t t, const Token& token, const Row& before, const Row& after, const Row& r) {
    const double scale = in_.scale, decay = token.decay;
    Row d_o(V_, 0), du(V_, 0), dv(V_), u(V_), dq(K_), dk(K_);
    if (present(a_.d_o))
      for (int64_t j = 0; j < V_; ++j) d_o[j] = at(a_.d_o, span_.b, t, hv_, j);
    for (int64_t i = 0; i < K_; ++i) {
      double* row = &dS_[i * V_];
      for (int64_t j = 0; j < V_; ++j) row[j] += scale * token.q[i] * d_o[j];
      for (int64_t j = 0; j < V_; ++j) du[j] += token.k[i] * row[j];
      dq[i] = scale * dot(&after[i * V_], d_o.data(), V_);
    }
    for (int64_t j = 0; j < V_; ++j) dv[j] = token.beta * du[j], u[j] = token.beta * r[j];
    double dg = 0;
    for (int64_t i = 0; i < K_; ++i) {
      double* row = &dS_[i * V_];
      const double* old = &before[i * V_];
      dk[i] = dot(row, u.data(), V_) - decay * dot(old, dv.data(), V_);
      for (int64_t j = 0; j < V_; ++j) row[j] -= token.k[i] * dv[j];
      dg += decay * dot(row, old, V_);
      for (int64_t j = 0; j < V_; ++j) row[j] *= decay;
    }
    store(t, token, dq, dk, dv, dg, dot(du.data(), r.data(), V_));
  }

  void store(int64_t t, const Token& token, const Row& dq, const Row& dk, const Row& dv, double dg, double dbeta) {
    const int64_t b = span_.b, h = hv_ / in_.group;
    if (present(a_.d_q)) add_l2norm_gradient(a_.d_q, b, t, h, token.q, token.rstd_q, dq);
    if (present(a_.d_k)) add_l2norm_gradient(a_.d_k, b, t, h, token.k, token.rstd_k, dk);
    if (present(a_.d_v))
      for (int64_t j = 0; j < V_; ++j) at(a_.d_v, b, t, hv_, j) = dv[j];
    if (a_.use_gate) {
      d_A_log += dg == 0 ? 0 : dg * token.g;
      dg *= -std::exp(at(a_.A_log, hv_)) * softplus_slope(token.x);
      d_dt_bias += dg;
    }
    if (present(a_.d_g)) at(a_.d_g, b, t, hv_) = dg;
    if (a_.use_beta_sigmoid) {
      double c = a_.allow_neg_eigval ? 2 : 1;
      dbeta *= token.beta * (1 - token.beta / c);
    }
    if (present(a_.d_beta)) at(a_.d_beta, b, t, hv_) = dbeta;
  }

  // The gradient of x from that of y = x rstd is linear in dy, so each head of the group may add its own.
  void add_l2norm_gradient(const thalweg_tensor& out, int64_t b, int64_t t, int64_t h, const Row& y, double rstd,
                           const Row& dy) {
    double along = a_.use_qk_l2norm ? dot(y.data(), dy.data(), K_) : 0;
    for (int64_t i = 0; i < K_; ++i) at(out, b, t, h, i) += rstd * (dy[i] - y[i] * along);
  }

  const Inputs<thalweg_gated_delta_rule_bwd_args>& in_;
  const thalweg_gated_delta_rule_bwd_args& a_;
  int64_t n_, hv_, K_, V_;
  Span span_;
  Row dS_;
  std::vector<Row> states_, deltas_;
  std::vector<Token> tokens_;
};

}  // namespace

void reference_fwd(const void* args) {
  const auto& a = *static_cast<const thalweg_gated_delta_rule_fwd_args*>(args);
  Inputs in(a);
  set_zero(a.o);  // also the rows that belong to no sequence
  set_zero(a.final_state);
  set_zero(a.chunk_states);
  parallel(num_sequences(in) * in.HV, in.work(), [&](int64_t i) { forward_head(in, i / in.HV, i % in.HV); });
}

void reference_bwd(const void* args) {
  const auto& a = *static_cast<const thalweg_gated_delta_rule_bwd_args*>(args);
  Inputs in(a);
  for (const thalweg_tensor* t : {&a.d_q, &a.d_k, &a.d_v, &a.d_g, &a.d_beta, &a.d_A_log, &a.d_dt_bias,
                                  &a.d_initial_state})
    set_zero(*t);
  const int64_t N = num_sequences(in);
  std::vector<double> d_A_log(N * in.HV), d_dt_bias(N * in.HV);  // [N HV]
  parallel(N * in.H, in.work(), [&](int64_t i) {
    int64_t n = i / in.H, h = i % in.H;
    for (int64_t hv = h * in.group; hv < (h + 1) * in.group; ++hv) {
      HeadBackward head(in, n, hv);
      head.run();
      d_A_log[n * in.HV + hv] = head.d_A_log;
      d_dt_bias[n * in.HV + hv] = head.d_dt_bias;
    }
  });
  for (int64_t n = 0; n < N; ++n)
    for (int64_t hv = 0; hv < in.HV; ++hv) {
      if (present(a.d_A_log)) at(a.d_A_log, hv) += d_A_log[n * in.HV + hv];
      if (present(a.d_dt_bias)) at(a.d_dt_bias, hv) += d_dt_bias[n * in.HV + hv];
    }
}

void reference_decode(const void* args) {
  const auto& a = *static_cast<const thalweg_gated_delta_rule_decode_args*>(args);
  Inputs in(a);
  set_zero(a.o);
  parallel(in.B * in.HV, in.work(), [&](int64_t i) {
    const int64_t n = i / in.HV, hv = i % in.HV, K = in.K, V = in.V;
    const int64_t from = present(a.read_slots) ? int_at(a.read_slots, n) : n;
    if (from < 0) return;
    Row S, r(V), o;
    Token token;
    load_state(a.state, from, hv, S, K, V);
    for (int64_t t = 0; t < in.T; ++t) {
      load(in, n, t, hv, token);
      step(token, S.data(), r, K, V);
      read_out(token, S.data(), in.scale, o, K, V);
      for (int64_t j = 0; j < V; ++j) at(a.o, n, t, hv, j) = o[j];
      int64_t to = present(a.write_slots) ? int_at(a.write_slots, n, t) : t + 1 == in.T ? from : -1;
      if (to >= 0) store_state(a.state, to, hv, S, K, V);
    }
  });
}

}  // namespace thalweg::gated_delta_rule
