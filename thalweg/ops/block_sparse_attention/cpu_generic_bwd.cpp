// cpu_generic_bwd - block_sparse_attention, bwd, any dtype and strides.
//
// Math      P_j = exp(s_j - L),  dS_j = P_j (<d_o, v_j> - delta),  delta = <d_o, o> - d_lse
//           d_q = scale sum_j dS_j k_j,  d_k_j = scale sum dS_j q,  d_v_j = sum P_j d_o,
//           d_sink = -sum exp(z - L) delta
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o, d_o [B T H V]  lse [B T H]
// Takes     everything valid
// Threads   four phases: L and delta of kRows queries of a head; d_q of the same; d_k and d_v of kRows keys of a key
//           head; d_sink of a head. Each sum is one task's, in order of head and token.
// Vectors   none by hand
// Tile      one query, or one key
// Scratch   shared: L and delta of every query; a slot holds two rows of queries, keys and values, and the sums
// Numerics  float32 (float64 for f64). A query that sees nothing has L = +inf, so that its P are exactly 0
// Traps     the rows of such a query are not read at all: they may hold NaN
// Measured  not tuned: it is the last row of the table and the judge of hard cases
#include "thalweg/ops/block_sparse_attention/cpu_generic.h"

namespace thalweg::block_sparse_attention {
namespace {

using namespace generic;
using Args = thalweg_block_sparse_attention_bwd_args;

constexpr int64_t kRows = 32;

struct Call {
  const Problem& p;
  const Plan& plan;
  const Args& args;
  const Exec& exec;
  int64_t chunks;  // of kRows queries or keys
};

template <class A>
struct Stat {
  A L, delta;
};
template <class A>
Stat<A>& stat(const Call& call, int64_t b, int64_t t, int64_t h) {
  return reinterpret_cast<Stat<A>*>(call.exec.workspace)[(b * call.p.T + t) * call.p.H + h];
}
template <class A>
A* scratch_of(const Call& call, int64_t slot) {
  return reinterpret_cast<A*>(call.exec.workspace + call.plan.shared_bytes + slot * call.plan.slot_bytes);
}

// L of a query, +inf where it sees nothing.
template <class A>
A log_sum(const Args& a, int64_t b, int64_t t, int64_t h) {
  const A dead = std::numeric_limits<A>::infinity();
  if (is_there(a.lse)) {
    const A L = load_at<A>(a.lse, b, t, h);
    return std::isfinite(L) ? L : dead;
  }
  const double m = load_at<double>(a.row_max, b, t, h), l = load_at<double>(a.row_sum, b, t, h);
  const double L = m + std::log(l);
  return l != 0 && std::isfinite(L) ? A(L) : dead;
}

// Which sequence, head and chunk a task has.
struct Place {
  int64_t n, h, chunk;
};
Place place(const Call& call, int64_t index, int64_t heads) {
  return {index / call.chunks / heads, index / call.chunks % heads, index % call.chunks};
}

template <class A>
void stats_task(void* arg, int64_t index, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Args& a = call.args;
  const Place at = place(call, index, call.p.H);
  const Item item = item_at(call.p, a, at.n);
  A *d_o = scratch_of<A>(call, slot), *o = d_o + call.p.V;
  for (int64_t i = at.chunk * kRows; i < item.q_len && i < (at.chunk + 1) * kRows; ++i) {
    const int64_t b = item.batch, t = item.q_begin + i;
    Stat<A>& s = stat<A>(call, b, t, at.h) = {log_sum<A>(a, b, t, at.h), 0};
    if (std::isinf(s.L)) continue;
    if (is_there(a.d_o)) {
      load_row(a.d_o, b, t, at.h, d_o), load_row(a.o, b, t, at.h, o);
      s.delta = dot(d_o, o, call.p.V);
    }
    if (is_there(a.d_lse)) s.delta -= load_at<A>(a.d_lse, b, t, at.h);
  }
}

// P and dS of one pair; `q` and `k` are rows, d_o may be null.
template <class A>
Stat<A> pair(const Problem& p, const Stat<A>& s, const A* q, const A* k, const A* d_o, const A* v) {
  const A P = std::exp(A(p.scale) * dot(q, k, p.K) - s.L);
  return {P, P * ((d_o ? dot(d_o, v, p.V) : A(0)) - s.delta)};
}

template <class A>
void queries_task(void* arg, int64_t index, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const Args& a = call.args;
  const Place at = place(call, index, p.H);
  const Item item = item_at(p, a, at.n);
  const HeadMask mask = head_mask(p, a.block_mask, at.n, at.h);
  const int64_t b = item.batch, hk = at.h / (p.H / p.HK);
  A *q = scratch_of<A>(call, slot), *k = q + p.K, *d_o = k + p.K, *v = d_o + p.V, *d_q = v + p.V;
  for (int64_t i = at.chunk * kRows; i < item.q_len && i < (at.chunk + 1) * kRows; ++i) {
    const int64_t t = item.q_begin + i;
    const Stat<A>& s = stat<A>(call, b, t, at.h);
    for (int64_t c = 0; c < p.K; ++c) d_q[c] = 0;
    if (!std::isinf(s.L)) {
      load_row(a.q, b, t, at.h, q);
      if (is_there(a.d_o)) load_row(a.d_o, b, t, at.h, d_o);
      Walk walk = keys_of(p, mask, item, i, 1);
      int64_t begin;
      while (int64_t n = walk.next(p.S, &begin))
        for (int64_t j = item.k_begin + begin; j < item.k_begin + begin + n; ++j) {
          load_row(a.k, b, j, hk, k), load_row(a.v, b, j, hk, v);
          const A dS = pair(p, s, q, k, is_there(a.d_o) ? d_o : nullptr, v).delta;
          axpy(A(p.scale) * dS, k, p.K, d_q);
        }
    }
    store_row(a.d_q, b, t, at.h, d_q);
  }
}

template <class A>
void keys_task(void* arg, int64_t index, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const Args& a = call.args;
  const Place at = place(call, index, p.HK);
  const Item item = item_at(p, a, at.n);
  const int64_t b = item.batch, G = p.H / p.HK;
  A *q = scratch_of<A>(call, slot), *k = q + p.K, *d_o = k + p.K, *v = d_o + p.V, *d_k = v + p.V, *d_v = d_k + p.K;
  for (int64_t j = at.chunk * kRows; j < item.k_len && j < (at.chunk + 1) * kRows; ++j) {
    load_row(a.k, b, item.k_begin + j, at.h, k), load_row(a.v, b, item.k_begin + j, at.h, v);
    for (int64_t c = 0; c < p.K; ++c) d_k[c] = 0;
    for (int64_t c = 0; c < p.V; ++c) d_v[c] = 0;
    for (int64_t h = at.h * G; h < (at.h + 1) * G; ++h) {
      const HeadMask mask = head_mask(p, a.block_mask, at.n, h);
      const int64_t first = p.causal ? j - item.k_len + item.q_len : 0;
      Walk walk{mask.data + j / p.block_k * mask.col, mask.row, p.block_q, item.q_len, first > 0 ? first : 0};
      int64_t begin;
      while (int64_t n = walk.next(p.T, &begin))
        for (int64_t t = item.q_begin + begin; t < item.q_begin + begin + n; ++t) {
          const Stat<A>& s = stat<A>(call, b, t, h);
          if (std::isinf(s.L)) continue;
          load_row(a.q, b, t, h, q);
          if (is_there(a.d_o)) load_row(a.d_o, b, t, h, d_o);
          const Stat<A> P_dS = pair(p, s, q, k, is_there(a.d_o) ? d_o : nullptr, v);
          axpy(A(p.scale) * P_dS.delta, q, p.K, d_k);
          if (is_there(a.d_o)) axpy(P_dS.L, d_o, p.V, d_v);
        }
    }
    if (is_there(a.d_k)) store_row(a.d_k, b, item.k_begin + j, at.h, d_k);
    if (is_there(a.d_v)) store_row(a.d_v, b, item.k_begin + j, at.h, d_v);
  }
}

template <class A>
void sink_task(void* arg, int64_t h, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const Args& a = call.args;
  const A z = thalweg::load_at<A>(a.sink, h * a.sink.stride[0]);
  A sum = 0;
  for (int64_t n = 0; n < call.p.N; ++n) {
    const Item item = item_at(call.p, a, n);
    A part = 0;
    for (int64_t t = item.q_begin; t < item.q_begin + item.q_len; ++t) {
      const Stat<A>& s = stat<A>(call, item.batch, t, h);
      if (!std::isinf(s.L)) part -= std::exp(z - s.L) * s.delta;
    }
    sum += part;
  }
  thalweg::store_at(a.d_sink, h * a.d_sink.stride[0], sum);
}

void rest_task(void* arg, int64_t i, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const Rest r = rest_at(call.p, call.args, i);
  fill_rows(call.args.d_q, r.batch, r.q_begin, r.q_end, 0);
  fill_rows(call.args.d_k, r.batch, r.k_begin, r.k_end, 0);
  fill_rows(call.args.d_v, r.batch, r.k_begin, r.k_end, 0);
}

template <class A>
void run(Call& call) {
  const Problem& p = call.p;
  const Args& a = call.args;
  const int64_t slots = call.plan.num_slots;
  parallel_tasks(call.exec, num_rests(p), slots, rest_task, &call);
  call.chunks = (p.longest_q + kRows - 1) / kRows;
  parallel_tasks(call.exec, p.N * p.H * call.chunks, slots, stats_task<A>, &call);
  if (is_there(a.d_q)) parallel_tasks(call.exec, p.N * p.H * call.chunks, slots, queries_task<A>, &call);
  call.chunks = (p.longest_k + kRows - 1) / kRows;
  if (is_there(a.d_k) || is_there(a.d_v))
    parallel_tasks(call.exec, p.N * p.HK * call.chunks, slots, keys_task<A>, &call);
  if (is_there(a.d_sink)) parallel_tasks(call.exec, p.H, slots, sink_task<A>, &call);
}

}  // namespace

void plan_generic_bwd(const Problem& p, Plan* plan) {
  const int64_t bytes = p.dtype == THALWEG_F64 ? 8 : 4;
  plan->shared_bytes = round_up(2 * bytes * p.B * p.T * p.H);
  plan->slot_bytes = round_up(3 * (p.K + p.V) * bytes);
}

void cpu_generic_bwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  Call call{p, plan, args, exec, 1};
  p.dtype == THALWEG_F64 ? run<double>(call) : run<float>(call);
}

}  // namespace thalweg::block_sparse_attention
