// The generic row of the delta-rule operators, forward and decode: token by token. Its contract opens each
// operator's cpu_generic.cpp.
#ifndef THALWEG_DELTA_RULE_GENERIC_FWD_H
#define THALWEG_DELTA_RULE_GENERIC_FWD_H

#include "thalweg/core/exec.h"
#include "thalweg/core/signature.h"
#include "thalweg/delta_rule/generic.h"

namespace thalweg::delta_rule {

template <class A>
struct FwdScratch {
  A *S, *q, *k, *r, *o;  // [K V] [K] [K] [V] [V]
  Token<A> token;

  static int64_t elements(const Problem& p) { return p.K * p.V + 2 * p.K + 2 * p.V + Token<A>::elements(p); }
  FwdScratch(const Problem& p, char* slot) {
    S = reinterpret_cast<A*>(slot);
    q = S + p.K * p.V;
    k = q + p.K;
    r = k + p.K;
    o = r + p.V;
    token.place(p, o + p.V);
  }
};

inline int64_t generic_fwd_slot_bytes(const Problem& p) {
  return p.dtype == THALWEG_F64 ? FwdScratch<double>::elements(p) * int64_t(sizeof(double))
                                : FwdScratch<float>::elements(p) * int64_t(sizeof(float));
}

template <class Args>
struct FwdJob {
  const Problem& p;
  const Args& a;
  char* slots;
  int64_t slot_bytes;
};

// Token t of batch entry b: the state takes it in, and its o is written.
template <class A, class Args>
void run_token(const Problem& p, const Args& a, int64_t b, int64_t t, int64_t hv, FwdScratch<A>& s) {
  const int64_t h = hv / (p.HV / p.H), K = p.K, V = p.V;
  load_token(a.q, b, t, h, K, s.q);
  load_token(a.k, b, t, h, K, s.k);
  load_token(a.v, b, t, hv, V, s.r);
  if (a.use_qk_l2norm) l2norm(s.q, K), l2norm(s.k, K);
  load_gates(p, a, b, t, hv, s.token);
  step(p, s.S, s.k, s.token, s.r);
  std::fill_n(s.o, V, A(0));
  for (int64_t i = 0; i < K; ++i) {
    const A factor = A(p.scale) * s.q[i];
    for (int64_t j = 0; j < V; ++j) s.o[j] += factor * s.S[i * V + j];
  }
  store_token(a.o, b, t, hv, V, s.o);
}

// Rows [begin, end) of chunk_states; S [K V] is scratch.
template <class A>
void zero_rows(const thalweg_tensor& chunk_states, int64_t begin, int64_t end, int64_t hv, A* S, int64_t K, int64_t V) {
  std::fill_n(S, K * V, A(0));
  for (int64_t row = begin; row < end; ++row) store_state(chunk_states, row, hv, K, V, S);
}

template <class A, class Args>
void fwd_task(void* arg, int64_t i, int64_t slot) {
  const auto& job = *static_cast<FwdJob<Args>*>(arg);
  const Problem& p = job.p;
  const Args& a = job.a;
  const int64_t n = i / p.HV, hv = i % p.HV, K = p.K, V = p.V;
  FwdScratch<A> s(p, job.slots + slot * job.slot_bytes);
  if (n == p.N) {  // rows that belong to no sequence
    std::fill_n(s.o, V, A(0));
    int64_t used = p.N > 0 ? sequence_span(p, a.cu_seqlens, p.N - 1).end : 0;
    for (int64_t t = used; t < p.T; ++t) store_token(a.o, 0, t, hv, V, s.o);
    if (p.N == 0) zero_rows(a.chunk_states, 0, p.T / p.every, hv, s.S, K, V);
    return;
  }
  const Span span = sequence_span(p, a.cu_seqlens, n);
  const int64_t b = p.packed ? 0 : n, first = p.packed ? span.begin : 0, row = span.begin / p.every + n;
  const int64_t length = span.end - span.begin;
  load_state(a.initial_state, n, hv, K, V, s.S);
  store_state(a.chunk_states, row, hv, K, V, s.S);
  for (int64_t t = 0; t < length; ++t) {
    if (t % p.every == 0) store_state(a.chunk_states, row + t / p.every, hv, K, V, s.S);
    run_token(p, a, b, first + t, hv, s);
  }
  store_state(a.final_state, n, hv, K, V, s.S);
  if (!is_there(a.chunk_states)) return;
  // Up to where the next sequence's rows start; the last one's end the tensor.
  const int64_t used = row + std::max<int64_t>(1, (length + p.every - 1) / p.every);
  const int64_t next =
      n + 1 < p.N ? sequence_span(p, a.cu_seqlens, n + 1).begin / p.every + n + 1 : a.chunk_states.shape[0];
  zero_rows(a.chunk_states, used, next, hv, s.S, K, V);
}

template <class A, class Args>
void decode_task(void* arg, int64_t i, int64_t slot) {
  const auto& job = *static_cast<FwdJob<Args>*>(arg);
  const Problem& p = job.p;
  const Args& a = job.a;
  const int64_t n = i / p.HV, hv = i % p.HV, K = p.K, V = p.V;
  FwdScratch<A> s(p, job.slots + slot * job.slot_bytes);
  const int64_t from = is_there(a.read_slots) ? int_at(a.read_slots, n) : n;
  if (from < 0) {
    std::fill_n(s.o, V, A(0));
    for (int64_t t = 0; t < p.T; ++t) store_token(a.o, n, t, hv, V, s.o);
    return;
  }
  load_state(a.state, from, hv, K, V, s.S);
  for (int64_t t = 0; t < p.T; ++t) {
    run_token(p, a, n, t, hv, s);
    const int64_t to = is_there(a.write_slots) ? int_at(a.write_slots, n, t) : t + 1 == p.T ? from : -1;
    if (to >= 0) store_state(a.state, to, hv, K, V, s.S);
  }
}

template <class Args>
void generic_fwd(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  FwdJob<Args> job{p, a, exec.workspace + plan.shared_bytes, plan.slot_bytes};
  const int64_t sequences = p.N + (p.packed ? 1 : 0);
  parallel_tasks(exec, sequences * p.HV, plan.num_slots,
                 p.dtype == THALWEG_F64 ? fwd_task<double, Args> : fwd_task<float, Args>, &job);
}

template <class Args>
void generic_decode(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  FwdJob<Args> job{p, a, exec.workspace + plan.shared_bytes, plan.slot_bytes};
  parallel_tasks(exec, p.N * p.HV, plan.num_slots,
                 p.dtype == THALWEG_F64 ? decode_task<double, Args> : decode_task<float, Args>, &job);
}

}  // namespace thalweg::delta_rule
#endif
