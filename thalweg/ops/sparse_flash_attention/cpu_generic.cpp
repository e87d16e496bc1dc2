// cpu_generic - sparse flash attention, forward and backward, any dtype and strides.
//
// Math     as reference.cpp, with each visible key once and its multiplicity as a weight
// Shapes   q [B T H K] k [B S K] v [B S V] q_rope [B T H KR] k_rope [B S KR] indices [B T E] o [B T H V]
// Takes    anything valid
// Threads  forward one task a query; backward one task a query (scores, d_q, p), then one task a range of keys: it walks
//          all queries in order and adds up d_k and d_v of its own keys
// Vectors  whatever the compiler makes of the loops over a row
// Tile     one key and all heads; ranges of 64 keys or more, at most 64 ranges
// Scratch  a list, its scores and their gradients for all heads, some rows; backward: log sums and delta of every row,
//          shared
// Numerics float32, float64 where q is float64; keys in ascending order, queries in order: no result depends on threads
// Traps    only visible rows are loaded, so that NaN in others stays there; a dead head's rows are skipped, not
//          multiplied by 0
// Measured the flash rows are the fast ones; see their headers
#include <algorithm>
#include <cmath>
#include <limits>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"
#include "thalweg/ops/sparse_flash_attention/problem.h"

namespace thalweg::sparse_flash_attention {
namespace {

using Fwd = thalweg_sparse_flash_attention_fwd_args;
using Bwd = thalweg_sparse_flash_attention_bwd_args;

template <class A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t num_bytes(const Problem& p) { return p.dtype == THALWEG_F64 ? 8 : 4; }

int64_t keys_per_range(const Problem& p) { return std::max<int64_t>(64, (p.S + 63) / 64); }
int64_t ranges_per_item(const Problem& p) { return (p.S + keys_per_range(p) - 1) / keys_per_range(p); }

// Numbers of a slot: the list; rows of all heads; a key; scores and their gradients; gradients of a query or a range.
struct Sizes {
  int64_t list, heads, key, scores, sums;
  explicit Sizes(const Problem& p)
      : list(rounded((2 * list_capacity(p) + 2 * p.E) * 4)),
        heads(p.H * (key_width(p) + p.V)),
        key(key_width(p) + p.V),
        scores(list_capacity(p) * p.H),
        sums(std::max(p.H * (key_width(p) + p.V), std::min(keys_per_range(p), p.S) * gradient_width(p))) {}
  int64_t bytes(const Problem& p) const {
    return list + rounded((heads + key + 2 * scores + sums + 3 * p.H + list_capacity(p)) * num_bytes(p));
  }
};

template <class A>
A dot(const A* a, const A* b, int64_t n) {
  A part[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int64_t l = 0; l < 4; ++l) part[l] += a[i + l] * b[i + l];
  for (; i < n; ++i) part[0] += a[i] * b[i];
  return (part[0] + part[1]) + (part[2] + part[3]);
}
template <class A>
void add_scaled(A factor, const A* x, A* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

int64_t offset_of(const thalweg_tensor& t, int64_t i, int64_t j, int64_t k = 0) {
  return i * t.stride[0] + j * t.stride[1] + (t.rank > 2 ? k * t.stride[2] : 0);
}
template <class A>
void store_statistic(const thalweg_tensor& t, int64_t b, int64_t i, int64_t h, A x) {
  if (present(t)) store_at(t, offset_of(t, b, i, h), x);
}

// What a running task has, and the rows that it loads.
template <class A>
struct Work {
  const Problem& p;
  const Inputs& in;
  int32_t *keys, *counts, *list_scratch;
  A *q, *d_o, *key, *s, *ds, *sums, *m, *l, *delta, *shares;
  Query query{};
  int64_t n = 0;

  Work(const Problem& problem, const Inputs& inputs, char* memory) : p(problem), in(inputs) {
    const Sizes sizes(p);
    keys = reinterpret_cast<int32_t*>(memory);
    counts = keys + list_capacity(p);
    list_scratch = counts + list_capacity(p);
    q = reinterpret_cast<A*>(memory + sizes.list);
    d_o = q + p.H * key_width(p);
    key = q + sizes.heads;
    s = key + sizes.key;
    ds = s + sizes.scores;
    sums = ds + sizes.scores;
    m = sums + sizes.sums;
    l = m + p.H;
    delta = l + p.H;
    shares = delta + p.H;
  }

  void load_list(int64_t b, int64_t t) {
    query = query_at(p, in, b, t);
    n = visible_keys(p, in, query, b, t, keys, counts, list_scratch);
  }
  void load_heads(const thalweg_tensor* d_out, int64_t b, int64_t t) {
    for (int64_t h = 0; h < p.H; ++h) {
      load_row(in.q, offset_of(in.q, b, t, h), 1, p.K, q + h * key_width(p));
      if (p.KR > 0) load_row(in.q_rope, offset_of(in.q_rope, b, t, h), 1, p.KR, q + h * key_width(p) + p.K);
      if (d_out) load_row(*d_out, offset_of(*d_out, b, t, h), 1, p.V, d_o + h * p.V);
    }
  }
  // Key i of the list with its value behind it.
  void load_key(int64_t b, int64_t i) {
    const int64_t row = query.first + keys[i];
    load_row(in.k, offset_of(in.k, b, row), 1, p.K, key);
    if (p.KR > 0) load_row(in.k_rope, offset_of(in.k_rope, b, row), 1, p.KR, key + p.K);
    const thalweg_tensor& value = p.latent ? in.k : in.v;
    load_row(value, offset_of(value, b, row), 1, p.V, key + key_width(p));
  }
  const A* value() const { return key + key_width(p); }

  void score_key(int64_t i) {
    for (int64_t h = 0; h < p.H; ++h)
      s[i * p.H + h] = A(p.scale) * dot(q + h * key_width(p), key, key_width(p));
  }
  // Row maxima and sums; an empty row has 0 and 0.
  void normalize() {
    for (int64_t h = 0; h < p.H; ++h) {
      const A z = present(in.sink) ? load_at<A>(in.sink, h * in.sink.stride[0]) : -kInfinity<A>;
      A largest = z, sum = 0;
      for (int64_t i = 0; i < n; ++i) largest = s[i * p.H + h] > largest ? s[i * p.H + h] : largest;
      if (largest == -kInfinity<A>) largest = 0;
      if (present(in.sink)) sum = std::exp(z - largest);
      for (int64_t i = 0; i < n; ++i) sum += A(counts[i]) * std::exp(s[i * p.H + h] - largest);
      m[h] = sum == 0 ? A(0) : largest;
      l[h] = sum;
    }
  }
  // From probabilities of whole keys in s.
  void store_shares(int64_t b, int64_t t, const thalweg_tensor& out) {
    for (int64_t i = 0; i < n; ++i) {
      A sum = 0;
      for (int64_t h = 0; h < p.H; ++h) sum += s[i * p.H + h];
      shares[i] = sum / (A(p.H) * A(counts[i]));
    }
    store_p(p, in, query, b, t, keys, n, shares, out);
  }
};

// ---- forward ----------------------------------------------------------------------------------------

struct ForwardCall {
  const Problem& p;
  const Plan& plan;
  const Fwd& args;
  const Inputs& in;
  const Exec& exec;
};

template <class A>
void forward_task(void* arg, int64_t task, int64_t slot) {
  const auto& call = *static_cast<const ForwardCall*>(arg);
  const Problem& p = call.p;
  const int64_t b = task / p.T, t = task % p.T;
  Work<A> work(p, call.in, call.exec.workspace + slot * call.plan.slot_bytes);
  work.load_list(b, t);
  if (work.query.used) work.load_heads(nullptr, b, t);
  for (int64_t i = 0; i < work.n; ++i) {
    work.load_key(b, i);
    work.score_key(i);
  }
  if (work.query.used) work.normalize();
  A* o = work.sums;
  std::fill_n(o, p.H * p.V, A(0));
  for (int64_t i = 0; i < work.n; ++i) {
    work.load_key(b, i);
    for (int64_t h = 0; h < p.H; ++h) {
      A& P = work.s[i * p.H + h];
      P = work.l[h] == 0 ? A(0) : A(work.counts[i]) * (std::exp(P - work.m[h]) / work.l[h]);
      if (work.l[h] != 0) add_scaled(P, work.value(), o + h * p.V, p.V);
    }
  }
  for (int64_t h = 0; h < p.H; ++h) {
    store_row(call.args.o, offset_of(call.args.o, b, t, h), 1, p.V, o + h * p.V);
    const A m = work.query.used ? work.m[h] : A(0), l = work.query.used ? work.l[h] : A(0);
    store_statistic(call.args.lse, b, t, h, m + std::log(l));
    store_statistic(call.args.row_max, b, t, h, m);
    store_statistic(call.args.row_sum, b, t, h, l);
  }
  if (p.wants_p) work.store_shares(b, t, call.args.p);
}

// ---- backward ---------------------------------------------------------------------------------------

struct BackwardCall {
  const Problem& p;
  const Plan& plan;
  const Bwd& args;
  const Inputs& in;
  const Exec& exec;

  int64_t rows() const { return p.B * p.T * p.H; }
  template <class A>
  A* log_sums() const { return reinterpret_cast<A*>(exec.workspace); }
  template <class A>
  A* deltas() const { return log_sums<A>() + rows(); }  // <d_o, o> - d_lse
  template <class A>
  A* sink_terms() const { return deltas<A>() + rows(); }
  char* slot(int64_t i) const { return exec.workspace + plan.shared_bytes + i * plan.slot_bytes; }
};

// Infinity: the row is dead.
template <class A>
A log_sum(const BackwardCall& call, const Work<A>& work, int64_t b, int64_t t, int64_t h) {
  const Bwd& args = call.args;
  if (!call.p.has_lse && !call.p.has_row_sum)
    return work.l[h] == 0 ? kInfinity<A> : work.m[h] + std::log(work.l[h]);
  const A L = call.p.has_lse ? load_at<A>(args.lse, offset_of(args.lse, b, t, h))
                             : load_at<A>(args.row_max, offset_of(args.row_max, b, t, h)) +
                                   std::log(load_at<A>(args.row_sum, offset_of(args.row_sum, b, t, h)));
  return std::isfinite(L) ? L : kInfinity<A>;
}

template <class A>
bool is_dead(A log_sum) { return log_sum == kInfinity<A>; }

// Scores to P, products <d_o, v> to dS, for one key and head.
template <class A>
void differentiate(A count, A log_sum, A delta, A* s, A* ds) {
  *s = is_dead(log_sum) ? A(0) : count * std::exp(*s - log_sum);
  *ds = is_dead(log_sum) ? A(0) : *s * (*ds - delta);
}

template <class A>
void query_task(void* arg, int64_t task, int64_t slot) {
  const auto& call = *static_cast<const BackwardCall*>(arg);
  const Problem& p = call.p;
  const Bwd& args = call.args;
  const int64_t b = task / p.T, t = task % p.T, W = key_width(p);
  Work<A> work(p, call.in, call.slot(slot));
  work.load_list(b, t);
  A *log_sums = call.log_sums<A>() + task * p.H, *deltas = call.deltas<A>() + task * p.H, *d_q = work.sums;
  std::fill_n(d_q, p.H * W, A(0));
  for (int64_t h = 0; h < p.H; ++h) log_sums[h] = kInfinity<A>, deltas[h] = 0;
  if (work.query.used) {
    work.load_heads(&args.d_o, b, t);
    for (int64_t i = 0; i < work.n; ++i) {
      work.load_key(b, i);
      work.score_key(i);
      for (int64_t h = 0; h < p.H; ++h) work.ds[i * p.H + h] = dot(work.d_o + h * p.V, work.value(), p.V);
    }
    work.normalize();
    for (int64_t h = 0; h < p.H; ++h) {
      const A L = log_sums[h] = log_sum(call, work, b, t, h);
      A delta = 0;
      if (work.n == 1 && !present(call.in.sink)) {
        delta = work.ds[h];  // P = 1 whatever the score: dS is exactly 0
      } else if (p.has_o) {
        A* o = work.key;  // free again
        load_row(args.o, offset_of(args.o, b, t, h), 1, p.V, o);
        delta = dot(work.d_o + h * p.V, o, p.V);
      } else if (!is_dead(L)) {
        for (int64_t i = 0; i < work.n; ++i)
          delta += A(work.counts[i]) * std::exp(work.s[i * p.H + h] - L) * work.ds[i * p.H + h];
      }
      if (present(args.d_lse)) delta -= load_at<A>(args.d_lse, offset_of(args.d_lse, b, t, h));
      deltas[h] = delta;
    }
    for (int64_t i = 0; i < work.n; ++i) {
      work.load_key(b, i);
      for (int64_t h = 0; h < p.H; ++h) {
        A &s = work.s[i * p.H + h], &ds = work.ds[i * p.H + h];
        differentiate(A(work.counts[i]), log_sums[h], deltas[h], &s, &ds);
        if (!is_dead(log_sums[h])) add_scaled(A(p.scale) * ds, work.key, d_q + h * W, W);
      }
    }
  }
  for (int64_t h = 0; h < p.H; ++h) {
    if (present(args.d_q)) store_row(args.d_q, offset_of(args.d_q, b, t, h), 1, p.K, d_q + h * W);
    if (present(args.d_q_rope)) store_row(args.d_q_rope, offset_of(args.d_q_rope, b, t, h), 1, p.KR, d_q + h * W + p.K);
    if (p.wants_d_sink)
      call.sink_terms<A>()[task * p.H + h] =
          is_dead(log_sums[h]) ? A(0)
                               : -std::exp(load_at<A>(call.in.sink, h * call.in.sink.stride[0]) - log_sums[h]) * deltas[h];
  }
  if (p.wants_p) work.store_shares(b, t, args.p);
}

// d_k, d_v of one range of keys.
template <class A>
void key_task(void* arg, int64_t task, int64_t slot) {
  const auto& call = *static_cast<const BackwardCall*>(arg);
  const Problem& p = call.p;
  const Bwd& args = call.args;
  const int64_t b = task / ranges_per_item(p), W = key_width(p), G = gradient_width(p);
  const int64_t begin = task % ranges_per_item(p) * keys_per_range(p), end = std::min(begin + keys_per_range(p), p.S);
  Work<A> work(p, call.in, call.slot(slot));
  A* sums = work.sums;
  std::fill_n(sums, (end - begin) * G, A(0));
  for (int64_t t = 0; t < p.T; ++t) {
    work.load_list(b, t);
    const int32_t *from = std::lower_bound(work.keys, work.keys + work.n, begin - work.query.first),
                  *to = std::lower_bound(from, const_cast<const int32_t*>(work.keys + work.n), end - work.query.first);
    if (from == to) continue;
    work.load_heads(&args.d_o, b, t);
    for (int64_t i = from - work.keys; i < to - work.keys; ++i) {
      work.load_key(b, i);
      A* d_key = sums + (work.query.first + work.keys[i] - begin) * G;
      for (int64_t h = 0; h < p.H; ++h) {
        const int64_t row = (b * p.T + t) * p.H + h;
        const A L = call.log_sums<A>()[row];
        if (is_dead(L)) continue;
        A s = A(p.scale) * dot(work.q + h * W, work.key, W), ds = dot(work.d_o + h * p.V, work.value(), p.V);
        differentiate(A(work.counts[i]), L, call.deltas<A>()[row], &s, &ds);
        add_scaled(A(p.scale) * ds, work.q + h * W, d_key, W);
        add_scaled(s, work.d_o + h * p.V, d_key + (p.latent ? 0 : W), p.V);
      }
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    const A* d_key = sums + (j - begin) * G;
    if (present(args.d_k)) store_row(args.d_k, offset_of(args.d_k, b, j), 1, p.K, d_key);
    if (present(args.d_k_rope)) store_row(args.d_k_rope, offset_of(args.d_k_rope, b, j), 1, p.KR, d_key + p.K);
    if (present(args.d_v)) store_row(args.d_v, offset_of(args.d_v, b, j), 1, p.V, d_key + W);
  }
}

template <class A>
void forward(const ForwardCall& call) {
  const Problem& p = call.p;
  parallel_tasks(call.exec, p.B * p.T, call.plan.num_slots, forward_task<A>, const_cast<ForwardCall*>(&call));
}

template <class A>
void backward(const BackwardCall& call) {
  const Problem& p = call.p;
  void* arg = const_cast<BackwardCall*>(&call);
  parallel_tasks(call.exec, p.B * p.T, call.plan.num_slots, query_task<A>, arg);
  if (p.wants_d_kv) parallel_tasks(call.exec, p.B * ranges_per_item(p), call.plan.num_slots, key_task<A>, arg);
  if (p.wants_d_sink) sum_sink(p, call.sink_terms<A>(), call.args.d_sink);
}

}  // namespace

void plan_generic_fwd(const Problem& p, Plan* plan) { plan->slot_bytes = Sizes(p).bytes(p); }

void plan_generic_bwd(const Problem& p, Plan* plan) {
  plan->slot_bytes = Sizes(p).bytes(p);
  plan->shared_bytes = rounded(3 * p.B * p.T * p.H * num_bytes(p));
}

void cpu_generic_fwd(const Problem& p, const Plan& plan, const Fwd& args, const Exec& exec) {
  const Inputs in = inputs_of(args);
  const ForwardCall call{p, plan, args, in, exec};
  p.dtype == THALWEG_F64 ? forward<double>(call) : forward<float>(call);
}

void cpu_generic_bwd(const Problem& p, const Plan& plan, const Bwd& args, const Exec& exec) {
  const Inputs in = inputs_of(args);
  const BackwardCall call{p, plan, args, in, exec};
  p.dtype == THALWEG_F64 ? backward<double>(call) : backward<float>(call);
}

}  // namespace thalweg::sparse_flash_attention
