// cpu_generic - lightning indexer, forward, loss and backward, any dtype and strides.
//
// Math     u[h] = <q[h], k[s]>    I[s] = sum_h scale w[h] relu(u[h])
//          fwd   the E largest;  loss   sum_e p (ln p - ln y), y = softmax_e(I)
//          bwd   dI = d_loss ((sum p) y - p) + d_scores
//                d_w[h] = scale sum_e dI relu(u)    d_q[h] = sum_e dI scale w[h] H(u) k[s_e]
//                d_k[s] = sum_{t,h,e} dI scale w[h] H(u) q[h]
// Shapes   q [B T H K]  k [B S K]  w [B T H]  indices,scores,p [B T E]  loss [B T]
// Takes    anything valid
// Threads  one task per query row; bwd: then one per key_range() rows of d_k, which goes over every query row
// Vectors  the heads lie side by side, so that the compiler can use vectors
// Tile     one row, one key
// Scratch  a slot: the row's q as [K H], w, u, one key; fwd: a row of S scores; loss, bwd: a row of E entries; bwd:
//          one key_range() of sums. Shared, bwd: dI [B T E]
// Numerics float32, float64 where q is; sums in order of channels, heads, entries and rows; those of the
//          softmax, of p, of the loss and of d_k in float64. ln y comes from the score, so it never underflows.
// Traps    relu keeps NaN (u < 0 is false). An entry that is not visible is never read through.
// Measured the vector rows are the fast ones; see their headers
#include <algorithm>
#include <cmath>
#include <limits>

#include "thalweg/ops/lightning_indexer/problem.h"
#include "thalweg/ops/lightning_indexer/rows.h"
#include "thalweg/ops/lightning_indexer/select.h"

namespace thalweg::lightning_indexer {
namespace {

int64_t round_up(int64_t n) { return (n + 63) / 64 * 64; }
int64_t arithmetic_bytes(const Problem& p) { return p.dtype == THALWEG_F64 ? 8 : 4; }

// A query row in scratch: q as [K H], w times the scale, the products of one key, that key.
template <class A>
struct Query {
  A *q, *w, *u, *k;
};
int64_t query_bytes(const Problem& p) { return round_up((p.K * p.H + 2 * p.H + p.K) * arithmetic_bytes(p)); }

template <class A, class Args>
Query<A> load_query(const Problem& p, const Args& args, int64_t r, char* scratch) {
  A* q = reinterpret_cast<A*>(scratch);
  Query<A> query{q, q + p.K * p.H, q + p.K * p.H + p.H, q + p.K * p.H + 2 * p.H};
  for (int64_t h = 0; h < p.H; ++h) {
    const int64_t row = row_offset(args.q, r) + h * args.q.stride[2];
    for (int64_t i = 0; i < p.K; ++i) query.q[i * p.H + h] = load_at<A>(args.q, row + i * args.q.stride[3]);
    query.w[h] = A(p.scale) * load_at<A>(args.w, row_offset(args.w, r) + h * args.w.stride[2]);
  }
  return query;
}

// I of one key, a row of [B S][K]; leaves u and the key in scratch.
template <class A>
A score(const Problem& p, const thalweg_tensor& k, int64_t key, const Query<A>& query) {
  load_row(k, row_offset(k, key), k.stride[2], p.K, query.k);
  std::fill_n(query.u, p.H, A(0));
  for (int64_t i = 0; i < p.K; ++i)
    for (int64_t h = 0; h < p.H; ++h) query.u[h] += query.k[i] * query.q[i * p.H + h];
  A sum = 0;
  for (int64_t h = 0; h < p.H; ++h) sum += query.w[h] * (query.u[h] < 0 ? A(0) : query.u[h]);
  return sum;
}

template <class Args>
struct Call {
  const Problem& p;
  const Args& args;
  Mask mask;
  char* shared;
  char* slots;
  int64_t slot_bytes;
  char* slot(int64_t i) const { return slots + i * slot_bytes; }
};

template <class Args>
Call<Args> call_of(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  return {p, args, mask_of(args), exec.workspace, exec.workspace + plan.shared_bytes, plan.slot_bytes};
}

// ---- fwd --------------------------------------------------------------------------------------------

template <class A>
void forward_task(void* arg, int64_t r, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_lightning_indexer_fwd_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  char* scratch = call.slot(slot);
  const Query<A> query = load_query<A>(p, args, r, scratch);
  A* scores = reinterpret_cast<A*>(scratch + query_bytes(p));
  char* select = scratch + query_bytes(p) + round_up(p.S * int64_t(sizeof(A)));
  int32_t* positions = reinterpret_cast<int32_t*>(select + round_up(select_bytes(p.S, p.E, sizeof(A))));
  const Keys keys = visible_keys(p, call.mask, r);
  for (int64_t s = keys.begin; s < keys.end; ++s) scores[s - keys.begin] = score(p, args.k, keys.first + s, query);
  const int64_t n = select_largest(scores, keys.end - keys.begin, p.E, p.by_index, select, positions);
  const A lowest = -std::numeric_limits<A>::infinity();
  for (int64_t e = 0; e < p.E; ++e) {
    store_int(args.indices, row_offset(args.indices, r) + e * args.indices.stride[2],
              e < n ? keys.begin + positions[e] : -1);
    if (!present(args.scores)) continue;
    const A value = e < n ? scores[positions[e]] : lowest;
    store_at(args.scores, row_offset(args.scores, r) + e * args.scores.stride[2], value == value ? value : lowest);
  }
}

// ---- loss and bwd -----------------------------------------------------------------------------------

// A row's visible entries in scratch, behind the query.
template <class A>
struct List {
  int64_t n;
  int32_t* entries;  // places in the list
  int64_t* keys;     // rows of [B S][K]
  A *scores, *p;
};
int64_t list_bytes(const Problem& p) { return round_up(p.E * (12 + 2 * arithmetic_bytes(p))); }

template <class A, class Args>
List<A> load_list(const Problem& p, const Args& args, const Mask& mask, int64_t r, char* scratch) {
  List<A> list;
  list.keys = reinterpret_cast<int64_t*>(scratch);
  list.scores = reinterpret_cast<A*>(list.keys + p.E);
  list.p = list.scores + p.E;
  list.entries = reinterpret_cast<int32_t*>(list.p + p.E);
  list.n = visible_entries(p, mask, args.indices, r, list.entries, list.keys);
  for (int64_t i = 0; i < list.n; ++i)
    list.p[i] = present(args.p) ? load_at<A>(args.p, row_offset(args.p, r) + list.entries[i] * args.p.stride[2]) : 0;
  return list;
}

// What the softmax of a row's scores needs: y = exp(I - top) / sum.
template <class A>
struct Softmax {
  A top;
  double sum;
};
template <class A>
Softmax<A> softmax_of(const List<A>& list) {
  Softmax<A> softmax{-std::numeric_limits<A>::infinity(), 0};
  for (int64_t i = 0; i < list.n; ++i) softmax.top = std::max(softmax.top, list.scores[i]);
  for (int64_t i = 0; i < list.n; ++i) softmax.sum += double(std::exp(list.scores[i] - softmax.top));
  return softmax;
}

template <class A>
void loss_task(void* arg, int64_t r, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_lightning_indexer_loss_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const Query<A> query = load_query<A>(p, args, r, call.slot(slot));
  const List<A> list = load_list<A>(p, args, call.mask, r, call.slot(slot) + query_bytes(p));
  for (int64_t i = 0; i < list.n; ++i) list.scores[i] = score(p, args.k, list.keys[i], query);
  if (present(args.scores)) {
    const int64_t row = row_offset(args.scores, r);
    for (int64_t e = 0; e < p.E; ++e)
      store_at(args.scores, row + e * args.scores.stride[2], -std::numeric_limits<A>::infinity());
    for (int64_t i = 0; i < list.n; ++i)
      store_at(args.scores, row + list.entries[i] * args.scores.stride[2], list.scores[i]);
  }
  if (!present(args.loss)) return;
  const Softmax<A> softmax = softmax_of(list);
  double loss = 0;
  for (int64_t i = 0; i < list.n; ++i) {
    if (list.p[i] == 0) continue;
    const double log_y = double(list.scores[i] - softmax.top) - std::log(softmax.sum);
    loss += double(list.p[i]) * (std::log(double(list.p[i])) - log_y);
  }
  store_at(args.loss, row_offset(args.loss, r), A(loss));
}

// dI of every entry, kept for the second phase; d_q and d_w.
template <class A>
void query_task(void* arg, int64_t r, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_lightning_indexer_bwd_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const Query<A> query = load_query<A>(p, args, r, call.slot(slot));
  char* behind = call.slot(slot) + query_bytes(p);
  const List<A> list = load_list<A>(p, args, call.mask, r, behind);
  A* d_q = reinterpret_cast<A*>(behind + list_bytes(p));  // [H K]
  A* d_w = d_q + p.H * p.K;                               // [H]
  A* dI = reinterpret_cast<A*>(call.shared) + r * p.E;    // by visible entry
  std::fill_n(d_q, p.H * p.K + p.H, A(0));
  for (int64_t i = 0; i < list.n; ++i) list.scores[i] = score(p, args.k, list.keys[i], query);
  const Softmax<A> softmax = softmax_of(list);
  const A d_loss = present(args.d_loss) ? load_at<A>(args.d_loss, row_offset(args.d_loss, r)) : 0;
  double total = 0;
  for (int64_t i = 0; i < list.n; ++i) total += double(list.p[i]);
  const A factor = A(total / softmax.sum);
  for (int64_t i = 0; i < list.n; ++i) {
    dI[i] = present(args.d_loss) ? d_loss * (factor * std::exp(list.scores[i] - softmax.top) - list.p[i]) : 0;
    if (present(args.d_scores))
      dI[i] += load_at<A>(args.d_scores, row_offset(args.d_scores, r) + list.entries[i] * args.d_scores.stride[2]);
    score(p, args.k, list.keys[i], query);
    for (int64_t h = 0; h < p.H; ++h) {
      if (!(query.u[h] > 0)) continue;
      d_w[h] += dI[i] * query.u[h];
      for (int64_t c = 0; c < p.K; ++c) d_q[h * p.K + c] += dI[i] * query.k[c];
    }
  }
  for (int64_t h = 0; h < p.H; ++h) {
    for (int64_t c = 0; c < p.K && list.n > 0; ++c) d_q[h * p.K + c] *= query.w[h];  // no NaN of a padding query
    if (present(args.d_q))
      store_row(args.d_q, row_offset(args.d_q, r) + h * args.d_q.stride[2], args.d_q.stride[3], p.K, d_q + h * p.K);
    if (present(args.d_w)) store_at(args.d_w, row_offset(args.d_w, r) + h * args.d_w.stride[2], A(p.scale) * d_w[h]);
  }
}

// d_k of one range of keys: over all rows, in order.
template <class A>
void key_task(void* arg, int64_t i, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_lightning_indexer_bwd_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const int64_t first = i * key_range(p), last = std::min(first + key_range(p), p.B * p.S);
  char* behind = call.slot(slot) + query_bytes(p);
  double* sums = reinterpret_cast<double*>(behind + list_bytes(p));  // [key_range K]
  std::fill_n(sums, (last - first) * p.K, 0.0);
  for (int64_t r = 0; r < p.B * p.T; ++r) {
    if (r / p.T * p.S >= last || (r / p.T + 1) * p.S <= first) continue;  // keys of another batch item
    const List<A> list = load_list<A>(p, args, call.mask, r, behind);
    const A* dI = reinterpret_cast<const A*>(call.shared) + r * p.E;
    Query<A> query{};
    for (int64_t e = 0; e < list.n; ++e) {
      if (list.keys[e] < first || list.keys[e] >= last) continue;
      if (!query.q) query = load_query<A>(p, args, r, call.slot(slot));
      score(p, args.k, list.keys[e], query);
      double* sum = sums + (list.keys[e] - first) * p.K;
      for (int64_t h = 0; h < p.H; ++h) query.u[h] = query.u[h] > 0 ? dI[e] * query.w[h] : A(0);
      for (int64_t c = 0; c < p.K; ++c) {
        A dk = 0;
        for (int64_t h = 0; h < p.H; ++h) dk += query.u[h] * query.q[c * p.H + h];
        sum[c] += double(dk);
      }
    }
  }
  for (int64_t key = first; key < last; ++key)
    store_row(args.d_k, row_offset(args.d_k, key), args.d_k.stride[2], p.K, sums + (key - first) * p.K);
}

}  // namespace

int64_t generic_fwd_bytes(const Problem& p) {
  return query_bytes(p) + round_up(p.S * arithmetic_bytes(p)) + round_up(select_bytes(p.S, p.E, arithmetic_bytes(p))) +
         round_up(p.E * 4);
}
int64_t generic_list_bytes(const Problem& p) {
  const int64_t sums = std::max((p.H * p.K + p.H) * arithmetic_bytes(p), key_range(p) * p.K * 8);
  return query_bytes(p) + list_bytes(p) + round_up(sums);
}
int64_t generic_shared_bytes(const Problem& p) { return round_up(p.B * p.T * p.E * arithmetic_bytes(p)); }

void cpu_generic_fwd(const Problem& p, const Plan& plan, const thalweg_lightning_indexer_fwd_args& args,
                     const Exec& exec) {
  auto call = call_of(p, plan, args, exec);
  const bool wide = p.dtype == THALWEG_F64;
  parallel_tasks(exec, p.B * p.T, plan.num_slots, wide ? forward_task<double> : forward_task<float>, &call);
}

void cpu_generic_loss(const Problem& p, const Plan& plan, const thalweg_lightning_indexer_loss_args& args,
                      const Exec& exec) {
  auto call = call_of(p, plan, args, exec);
  const bool wide = p.dtype == THALWEG_F64;
  parallel_tasks(exec, p.B * p.T, plan.num_slots, wide ? loss_task<double> : loss_task<float>, &call);
}

void cpu_generic_bwd(const Problem& p, const Plan& plan, const thalweg_lightning_indexer_bwd_args& args,
                     const Exec& exec) {
  auto call = call_of(p, plan, args, exec);
  const bool wide = p.dtype == THALWEG_F64;
  parallel_tasks(exec, p.B * p.T, plan.num_slots, wide ? query_task<double> : query_task<float>, &call);
  if (!present(args.d_k)) return;
  const int64_t ranges = (p.B * p.S + key_range(p) - 1) / key_range(p);
  parallel_tasks(exec, ranges, plan.num_slots, wide ? key_task<double> : key_task<float>, &call);
}

}  // namespace thalweg::lightning_indexer
