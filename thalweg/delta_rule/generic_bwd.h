// The generic row of the delta-rule operators, backward: token by token, going back. Its contract opens each
// operator's cpu_generic.cpp.
#ifndef THALWEG_DELTA_RULE_GENERIC_BWD_H
#define THALWEG_DELTA_RULE_GENERIC_BWD_H

#include "thalweg/core/exec.h"
#include "thalweg/delta_rule/generic.h"

namespace thalweg::delta_rule {

constexpr int64_t kPiece = 64;

template <class A>
struct BwdScratch {
  A* checkpoints;        // [ceil(longest / kPiece), K V]
  A* states;             // [kPiece + 1, K V]
  A* dS;                 // [K V]
  A *q, *k, *r;          // [kPiece K] [kPiece K] [kPiece V]: normalised q, k, and the deltas
  A* gates;              // [kPiece, Token::elements]
  A *beta, *beta_slope;  // [kPiece]
  A *rstd_q, *rstd_k;    // [kPiece]
  A *d_o, *du, *dv, *u;  // [V]
  A *dq, *dk;            // [K]
  A* dg;                 // [channels]
  A *sum_dq, *sum_dk;    // [longest K]: over the value heads of the group

  int64_t elements;  // of the whole

  // With a null slot only `elements` means something.
  BwdScratch(const Problem& p, char* slot) {
    elements = 0;
    auto take = [&](int64_t n) {
      A* from = slot ? reinterpret_cast<A*>(slot) + elements : nullptr;
      elements += n;
      return from;
    };
    const int64_t state = p.K * p.V;
    checkpoints = take((p.longest + kPiece - 1) / kPiece * state);
    states = take((kPiece + 1) * state);
    dS = take(state);
    q = take(kPiece * p.K), k = take(kPiece * p.K), r = take(kPiece * p.V);
    gates = take(kPiece * Token<A>::elements(p));
    beta = take(kPiece), beta_slope = take(kPiece);
    rstd_q = take(kPiece), rstd_k = take(kPiece);
    d_o = take(p.V), du = take(p.V), dv = take(p.V), u = take(p.V);
    dq = take(p.K), dk = take(p.K);
    dg = take(p.channels);
    sum_dq = take(p.longest * p.K), sum_dk = take(p.longest * p.K);
  }
};

inline int64_t generic_bwd_slot_bytes(const Problem& p) {
  return p.dtype == THALWEG_F64 ? BwdScratch<double>(p, nullptr).elements * int64_t(sizeof(double))
                                : BwdScratch<float>(p, nullptr).elements * int64_t(sizeof(float));
}
// Of a value head of a sequence: the sums for d_A_log, then d_dt_bias.
inline int64_t num_sums(const Problem& p) { return 1 + p.channels; }
inline int64_t generic_bwd_shared_bytes(const Problem& p) { return p.N * p.HV * num_sums(p) * int64_t(sizeof(double)); }

template <class Args>
struct BwdJob {
  const Problem& p;
  const Args& a;
  double* sums;  // [N HV num_sums]
  char* slots;
  int64_t slot_bytes;
};

// One sequence and key head.
template <class A, class Args>
class BwdTask {
 public:
  BwdTask(const BwdJob<Args>& job, int64_t n, int64_t h, int64_t slot)
      : p_(job.p), a_(job.a), n_(n), h_(h), K_(p_.K), V_(p_.V), s_(p_, job.slots + slot * job.slot_bytes) {
    const Span span = sequence_span(p_, a_.cu_seqlens, n);
    b_ = p_.packed ? 0 : n;
    first_ = p_.packed ? span.begin : 0;
    length_ = span.end - span.begin;
  }

  void run(double* sums) {
    const int64_t group = p_.HV / p_.H;
    for (int64_t i = 0; i < length_ * K_; ++i) s_.sum_dq[i] = s_.sum_dk[i] = 0;
    for (int64_t hv = h_ * group; hv < (h_ + 1) * group; ++hv) run_head(hv, sums + (n_ * p_.HV + hv) * num_sums(p_));
    for (int64_t t = 0; t < length_; ++t) {
      store_token(a_.d_q, b_, first_ + t, h_, K_, s_.sum_dq + t * K_);
      store_token(a_.d_k, b_, first_ + t, h_, K_, s_.sum_dk + t * K_);
    }
  }

 private:
  void run_head(int64_t hv, double* sums) {
    const int64_t state = K_ * V_;
    std::fill_n(sums, num_sums(p_), 0.0);
    load_state(a_.initial_state, n_, hv, K_, V_, s_.states);
    for (int64_t begin = 0; begin < length_; begin += kPiece) {
      std::copy(s_.states, s_.states + state, s_.checkpoints + begin / kPiece * state);
      for (int64_t t = begin; t < std::min(begin + kPiece, length_); ++t) forward(hv, t, 0, s_.states);
    }
    load_state(a_.d_final_state, n_, hv, K_, V_, s_.dS);
    for (int64_t begin = (length_ - 1) / kPiece * kPiece; begin >= 0 && length_ > 0; begin -= kPiece) {
      const int64_t count = std::min(kPiece, length_ - begin);
      std::copy_n(s_.checkpoints + begin / kPiece * state, state, s_.states);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(s_.states + i * state, state, s_.states + (i + 1) * state);
        forward(hv, begin + i, i, s_.states + (i + 1) * state);
      }
      for (int64_t i = count - 1; i >= 0; --i) backward(hv, begin + i, i, sums);
    }
    store_state(a_.d_initial_state, n_, hv, K_, V_, s_.dS);
  }

  // What is kept of the piece's token i, beta aside.
  Token<A> token_at(int64_t i) const {
    Token<A> token;
    token.place(p_, s_.gates + i * Token<A>::elements(p_));
    token.beta = s_.beta[i], token.beta_slope = s_.beta_slope[i];
    return token;
  }

  // The state takes in token t; what the backward needs of it is kept as row i of the piece.
  void forward(int64_t hv, int64_t t, int64_t i, A* S) {
    A *q = s_.q + i * K_, *k = s_.k + i * K_, *r = s_.r + i * V_;
    load_token(a_.q, b_, first_ + t, h_, K_, q);
    load_token(a_.k, b_, first_ + t, h_, K_, k);
    load_token(a_.v, b_, first_ + t, hv, V_, r);
    s_.rstd_q[i] = a_.use_qk_l2norm ? l2norm(q, K_) : A(1);
    s_.rstd_k[i] = a_.use_qk_l2norm ? l2norm(k, K_) : A(1);
    Token<A> token;
    token.place(p_, s_.gates + i * Token<A>::elements(p_));
    load_gates(p_, a_, b_, first_ + t, hv, token);
    s_.beta[i] = token.beta, s_.beta_slope[i] = token.beta_slope;
    step(p_, S, k, token, r);
  }

  void backward(int64_t hv, int64_t t, int64_t i, double* sums) {
    const A *q = s_.q + i * K_, *k = s_.k + i * K_, *r = s_.r + i * V_;
    const A *before = s_.states + i * K_ * V_, *after = before + K_ * V_;
    const Token<A> token = token_at(i);
    const A scale = A(p_.scale);
    std::fill_n(s_.d_o, V_, A(0));
    if (is_there(a_.d_o)) load_token(a_.d_o, b_, first_ + t, hv, V_, s_.d_o);
    std::fill_n(s_.du, V_, A(0));
    for (int64_t x = 0; x < K_; ++x) {
      A* row = s_.dS + x * V_;
      const A write = scale * q[x];
      for (int64_t j = 0; j < V_; ++j) row[j] += write * s_.d_o[j];
      for (int64_t j = 0; j < V_; ++j) s_.du[j] += k[x] * row[j];
      s_.dq[x] = scale * dot(after + x * V_, s_.d_o, V_);
    }
    for (int64_t j = 0; j < V_; ++j) s_.dv[j] = token.beta * s_.du[j], s_.u[j] = token.beta * r[j];
    std::fill_n(s_.dg, p_.channels, A(0));
    for (int64_t x = 0; x < K_; ++x) {
      A* row = s_.dS + x * V_;
      const A* old = before + x * V_;
      const int64_t c = p_.channels == 1 ? 0 : x;
      s_.dk[x] = dot(row, s_.u, V_) - token.decay[c] * dot(old, s_.dv, V_);
      for (int64_t j = 0; j < V_; ++j) row[j] -= k[x] * s_.dv[j];
      s_.dg[c] += token.decay[c] * dot(row, old, V_);
      decay_row(row, token.decay[c], token.loss[c], V_);
    }
    add_l2norm_gradient(q, s_.rstd_q[i], s_.dq, s_.sum_dq + t * K_);
    add_l2norm_gradient(k, s_.rstd_k[i], s_.dk, s_.sum_dk + t * K_);
    store_token(a_.d_v, b_, first_ + t, hv, V_, s_.dv);
    for (int64_t c = 0; c < p_.channels; ++c) {
      const A dg = s_.dg[c], dx = dg == 0 ? A(0) : dg * token.slope[c];
      if (p_.lower_bound == 0)
        sums[0] += dg == 0 ? 0.0 : double(dg) * token.g[c];
      else
        sums[0] += dx == 0 ? 0.0 : double(dx) * token.x[c];
      sums[1 + c] += dx;
      s_.dg[c] = dx;
    }
    store_token(a_.d_g, b_, first_ + t, hv, p_.channels, s_.dg);
    const A d_beta = dot(s_.du, r, V_) * token.beta_slope;
    store_token(a_.d_beta, b_, first_ + t, hv, 1, &d_beta);
  }

  void add_l2norm_gradient(const A* y, A rstd, const A* dy, A* sum) {
    const A along = a_.use_qk_l2norm ? dot(y, dy, K_) : A(0);
    for (int64_t x = 0; x < K_; ++x) sum[x] += rstd * (dy[x] - y[x] * along);
  }

  const Problem& p_;
  const Args& a_;
  int64_t n_, h_, b_, first_, length_, K_, V_;
  BwdScratch<A> s_;
};

// Rows of no sequence, for key head h: every gradient is 0.
template <class A, class Args>
void zero_gradients(const BwdJob<Args>& job, int64_t h, int64_t slot) {
  const Problem& p = job.p;
  const Args& a = job.a;
  BwdScratch<A> s(p, job.slots + slot * job.slot_bytes);
  std::fill_n(s.dq, p.K, A(0));
  std::fill_n(s.dv, p.V, A(0));
  const int64_t group = p.HV / p.H;
  for (int64_t t = p.N > 0 ? sequence_span(p, a.cu_seqlens, p.N - 1).end : 0; t < p.T; ++t) {
    store_token(a.d_q, 0, t, h, p.K, s.dq);
    store_token(a.d_k, 0, t, h, p.K, s.dq);
    for (int64_t hv = h * group; hv < (h + 1) * group; ++hv) {
      store_token(a.d_v, 0, t, hv, p.V, s.dv);
      store_token(a.d_g, 0, t, hv, p.channels, s.dq);
      store_token(a.d_beta, 0, t, hv, 1, s.dq);
    }
  }
}

template <class A, class Args>
void bwd_task(void* arg, int64_t i, int64_t slot) {
  const auto& job = *static_cast<BwdJob<Args>*>(arg);
  const int64_t n = i / job.p.H, h = i % job.p.H;
  if (n == job.p.N)
    zero_gradients<A>(job, h, slot);
  else
    BwdTask<A, Args>(job, n, h, slot).run(job.sums);
}

template <class Args>
void generic_bwd(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  BwdJob<Args> job{p, a, reinterpret_cast<double*>(exec.workspace), exec.workspace + plan.shared_bytes,
                   plan.slot_bytes};
  const int64_t sequences = p.N + (p.packed ? 1 : 0);
  parallel_tasks(exec, sequences * p.H, plan.num_slots,
                 p.dtype == THALWEG_F64 ? bwd_task<double, Args> : bwd_task<float, Args>, &job);
  auto store_sum = [&](const thalweg_tensor& t, int64_t hv, int64_t channel, int64_t which) {
    if (!is_there(t)) return;
    double sum = 0;
    for (int64_t n = 0; n < p.N; ++n) sum += job.sums[(n * p.HV + hv) * num_sums(p) + which];
    store_at(t, hv * t.stride[0] + channel * t.stride[1], sum);
  };
  for (int64_t hv = 0; hv < p.HV; ++hv) {
    store_sum(a.d_A_log, hv, 0, 0);
    for (int64_t c = 0; c < p.channels; ++c) store_sum(a.d_dt_bias, hv, c, 1 + c);
  }
}

}  // namespace thalweg::delta_rule
#endif
