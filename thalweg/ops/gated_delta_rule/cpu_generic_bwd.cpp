// cpu_generic – gated delta rule, backward, token by token.
//
// Math     backwards over tokens, dS the gradient of the state after the token:
//            dS += scale q d_o^T     dq = scale S d_o        du = dS^T k      dv = beta du
//            dk  = dS u - S~ dv      dbeta = du . r          dS~ = dS - k dv^T
//            dg  = sum(dS~ * S~)     dS <- exp(g) dS~        with S~, r, u as in the forward
// Shapes   q,k,d_q,d_k [B,T,H,K]  v,d_o,d_v [B,T,HV,V]  g,beta,d_g,d_beta [B,T,HV]  states [N,HV,K,V]
// Takes    any dtype, any legal strides, K and V up to 512; any B, T, HV, varlen, empty sequences
// Threads  one task per (sequence, key head), which owns d_q and d_k of its group
// Vectors  none by hand; inner loops run along V and are left to the compiler
// Tile     64 tokens between kept states
// Scratch  per slot: T/64 states, the 65 states of one piece, rows of the piece, and d_q, d_k [T K] of the
//          group. Shared: the sums for d_A_log and d_dt_bias, [N HV 2] in double.
// Numerics float32 arithmetic and states (float64 where q is f64). dg is the sum of dS~ * S~ itself, so
//          it stays accurate where the gate is strong; g = -inf gives S~ = 0 and dg = 0.
// Traps    d_A_log multiplies dg by g: 0 where dg is 0, because g may be infinite.
// Measured not tuned
#include "thalweg/ops/gated_delta_rule/cpu_generic.h"

namespace thalweg::gated_delta_rule {
namespace {

using namespace generic;
using Bwd = thalweg_gated_delta_rule_bwd_args;

constexpr int64_t kPiece = 64;

template <class A>
struct Scratch {
  A* checkpoints;  // [ceil(longest / kPiece), K V]
  A* states;       // [kPiece + 1, K V]
  A* dS;           // [K V]
  A *q, *k, *r;    // [kPiece K] [kPiece K] [kPiece V]: normalised q, k, and the deltas
  Scalars<A>* scalars;       // [kPiece]
  A *rstd_q, *rstd_k;        // [kPiece]
  A *d_o, *du, *dv, *u;      // [V]
  A *dq, *dk;      // [K]
  A *sum_dq, *sum_dk;  // [longest K]: over the value heads of the group

  int64_t elements;  // of the whole

  // With a null slot only `elements` means something.
  Scratch(const Problem& p, char* slot) {
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
    scalars = reinterpret_cast<Scalars<A>*>(take(kPiece * int64_t(sizeof(Scalars<A>) / sizeof(A))));
    rstd_q = take(kPiece), rstd_k = take(kPiece);
    d_o = take(p.V), du = take(p.V), dv = take(p.V), u = take(p.V);
    dq = take(p.K), dk = take(p.K);
    sum_dq = take(p.longest * p.K), sum_dk = take(p.longest * p.K);
  }
};

struct Job {
  const Problem& p;
  const Bwd& a;
  double* sums;  // [N HV 2]
  char* slots;
  int64_t slot_bytes;
};

// One sequence and key head.
template <class A>
class Task {
 public:
  Task(const Job& job, int64_t n, int64_t h, int64_t slot)
      : p_(job.p), a_(job.a), n_(n), h_(h), K_(p_.K), V_(p_.V), s_(p_, job.slots + slot * job.slot_bytes) {
    const Span span = sequence_span(p_, a_.cu_seqlens, n);
    b_ = p_.packed ? 0 : n;
    first_ = p_.packed ? span.begin : 0;
    length_ = span.end - span.begin;
  }

  void run(double* sums) {
    const int64_t group = p_.HV / p_.H;
    for (int64_t i = 0; i < length_ * K_; ++i) s_.sum_dq[i] = s_.sum_dk[i] = 0;
    for (int64_t hv = h_ * group; hv < (h_ + 1) * group; ++hv) run_head(hv, sums + (n_ * p_.HV + hv) * 2);
    for (int64_t t = 0; t < length_; ++t) {
      if (is_there(a_.d_q)) store_token(a_.d_q, b_, first_ + t, h_, K_, s_.sum_dq + t * K_);
      if (is_there(a_.d_k)) store_token(a_.d_k, b_, first_ + t, h_, K_, s_.sum_dk + t * K_);
    }
  }

 private:
  void run_head(int64_t hv, double* sums) {
    const int64_t state = K_ * V_;
    sums[0] = sums[1] = 0;
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

  // The state takes in token t; what the backward needs of it is kept as row i of the piece.
  void forward(int64_t hv, int64_t t, int64_t i, A* S) {
    A *q = s_.q + i * K_, *k = s_.k + i * K_, *r = s_.r + i * V_;
    load_token(a_.q, b_, first_ + t, h_, K_, q);
    load_token(a_.k, b_, first_ + t, h_, K_, k);
    load_token(a_.v, b_, first_ + t, hv, V_, r);
    s_.rstd_q[i] = a_.use_qk_l2norm ? l2norm(q, K_) : A(1);
    s_.rstd_k[i] = a_.use_qk_l2norm ? l2norm(k, K_) : A(1);
    s_.scalars[i] = load_scalars<A>(a_, b_, first_ + t, hv);
    step(S, k, s_.scalars[i], r, K_, V_);
  }

  void backward(int64_t hv, int64_t t, int64_t i, double* sums) {
    const A *q = s_.q + i * K_, *k = s_.k + i * K_, *r = s_.r + i * V_;
    const A *before = s_.states + i * K_ * V_, *after = before + K_ * V_;
    const Scalars<A>& scalars = s_.scalars[i];
    const A scale = A(p_.scale), decay = scalars.decay;
    if (is_there(a_.d_o)) load_token(a_.d_o, b_, first_ + t, hv, V_, s_.d_o);
    else std::fill_n(s_.d_o, V_, A(0));
    std::fill_n(s_.du, V_, A(0));
    for (int64_t x = 0; x < K_; ++x) {
      A* row = s_.dS + x * V_;
      const A write = scale * q[x];
      for (int64_t j = 0; j < V_; ++j) row[j] += write * s_.d_o[j];
      for (int64_t j = 0; j < V_; ++j) s_.du[j] += k[x] * row[j];
      s_.dq[x] = scale * dot(after + x * V_, s_.d_o, V_);
    }
    for (int64_t j = 0; j < V_; ++j) s_.dv[j] = scalars.beta * s_.du[j], s_.u[j] = scalars.beta * r[j];
    A dg = 0;
    for (int64_t x = 0; x < K_; ++x) {
      A* row = s_.dS + x * V_;
      const A* old = before + x * V_;
      s_.dk[x] = dot(row, s_.u, V_) - decay * dot(old, s_.dv, V_);
      for (int64_t j = 0; j < V_; ++j) row[j] -= k[x] * s_.dv[j];
      dg += decay * dot(row, old, V_);
      decay_row(row, scalars, V_);
    }
    add_l2norm_gradient(q, s_.rstd_q[i], s_.dq, s_.sum_dq + t * K_);
    add_l2norm_gradient(k, s_.rstd_k[i], s_.dk, s_.sum_dk + t * K_);
    if (is_there(a_.d_v)) store_token(a_.d_v, b_, first_ + t, hv, V_, s_.dv);
    const A dx = dg == 0 ? A(0) : dg * scalars.g_slope;
    sums[0] += dg == 0 ? 0.0 : double(dg) * scalars.g;
    sums[1] += dx;
    if (is_there(a_.d_g)) store_scalar(a_.d_g, b_, first_ + t, hv, dx);
    if (is_there(a_.d_beta)) store_scalar(a_.d_beta, b_, first_ + t, hv, dot(s_.du, r, V_) * scalars.beta_slope);
  }

  void add_l2norm_gradient(const A* y, A rstd, const A* dy, A* sum) {
    const A along = a_.use_qk_l2norm ? dot(y, dy, K_) : A(0);
    for (int64_t x = 0; x < K_; ++x) sum[x] += rstd * (dy[x] - y[x] * along);
  }

  const Problem& p_;
  const Bwd& a_;
  int64_t n_, h_, b_, first_, length_, K_, V_;
  Scratch<A> s_;
};

// Rows of no sequence, for key head h: every gradient is 0.
template <class A>
void zero_rest(const Job& job, int64_t h, int64_t slot) {
  const Problem& p = job.p;
  const Bwd& a = job.a;
  Scratch<A> s(p, job.slots + slot * job.slot_bytes);
  std::fill_n(s.dq, p.K, A(0));
  std::fill_n(s.dv, p.V, A(0));
  const int64_t group = p.HV / p.H;
  for (int64_t t = p.N > 0 ? sequence_span(p, a.cu_seqlens, p.N - 1).end : 0; t < p.T; ++t) {
    if (is_there(a.d_q)) store_token(a.d_q, 0, t, h, p.K, s.dq);
    if (is_there(a.d_k)) store_token(a.d_k, 0, t, h, p.K, s.dq);
    for (int64_t hv = h * group; hv < (h + 1) * group; ++hv) {
      if (is_there(a.d_v)) store_token(a.d_v, 0, t, hv, p.V, s.dv);
      if (is_there(a.d_g)) store_scalar(a.d_g, 0, t, hv, A(0));
      if (is_there(a.d_beta)) store_scalar(a.d_beta, 0, t, hv, A(0));
    }
  }
}

template <class A>
void bwd_task(void* arg, int64_t i, int64_t slot) {
  const Job& job = *static_cast<Job*>(arg);
  const int64_t n = i / job.p.H, h = i % job.p.H;
  if (n == job.p.N) zero_rest<A>(job, h, slot);
  else Task<A>(job, n, h, slot).run(job.sums);
}

}  // namespace

int64_t cpu_generic_bwd_slot_bytes(const Problem& p) {
  return p.dtype == THALWEG_F64 ? Scratch<double>(p, nullptr).elements * int64_t(sizeof(double))
                                : Scratch<float>(p, nullptr).elements * int64_t(sizeof(float));
}
int64_t cpu_generic_bwd_shared_bytes(const Problem& p) { return p.N * p.HV * 2 * int64_t(sizeof(double)); }

void cpu_generic_bwd(const Problem& p, const Plan& plan, const Bwd& a, const Exec& exec) {
  Job job{p, a, reinterpret_cast<double*>(exec.workspace), exec.workspace + plan.shared_bytes, plan.slot_bytes};
  const int64_t sequences = p.N + (p.packed ? 1 : 0);
  parallel_tasks(exec, sequences * p.H, plan.num_slots,
                 p.dtype == THALWEG_F64 ? bwd_task<double> : bwd_task<float>, &job);
  for (int64_t hv = 0; hv < p.HV; ++hv) {
    double d_A_log = 0, d_dt_bias = 0;
    for (int64_t n = 0; n < p.N; ++n) {
      const double* sums = job.sums + (n * p.HV + hv) * 2;
      d_A_log += sums[0];
      d_dt_bias += sums[1];
    }
    if (is_there(a.d_A_log)) store_at(a.d_A_log, hv * a.d_A_log.stride[0], d_A_log);
    if (is_there(a.d_dt_bias)) store_at(a.d_dt_bias, hv * a.d_dt_bias.stride[0], d_dt_bias);
  }
}

}  // namespace thalweg::gated_delta_rule
