// cpu_generic_fwd - block_sparse_attention, fwd, any dtype and strides.
//
// Math      per query: scores of the keys it sees, their maximum m, e_j = exp(s_j - m), l = sum e_j,
//           o = sum e_j v_j / l; the sink, where there is one, joins m and l
// Shapes    q [B T H K]  k [B S HK K]  v [B S HK V]  block_mask [N HM NQ NK]  o [B T H V]
// Takes     everything valid
// Threads   tasks of kRows queries of one head of one sequence, and one for each range of rows of no sequence
// Vectors   none by hand
// Tile      one query
// Scratch   a slot holds q, a key or value, o and the scores of one query
// Numerics  float32 (float64 for f64), exponents of differences from the maximum, none above 0
// Traps     a query without keys never reaches the division
// Measured  not tuned: it is the last row of the table and the judge of hard cases
#include "thalweg/ops/block_sparse_attention/cpu_generic.h"

namespace thalweg::block_sparse_attention {
namespace {

using namespace generic;
using Args = thalweg_block_sparse_attention_fwd_args;

constexpr int64_t kRows = 32;

struct Call {
  const Problem& p;
  const Plan& plan;
  const Args& args;
  const Exec& exec;
  int64_t chunks;  // of kRows queries
};

template <class A>
void query(const Call& call, const Item& item, const HeadMask& mask, int64_t h, int64_t i, A* scratch) {
  const Problem& p = call.p;
  const Args& a = call.args;
  const int64_t b = item.batch, t = item.q_begin + i, hk = h / (p.H / p.HK);
  A *q = scratch, *row = q + p.K, *o = row + (p.K > p.V ? p.K : p.V), *s = o + p.V;
  const A scale = A(p.scale), z = is_there(a.sink) ? thalweg::load_at<A>(a.sink, h * a.sink.stride[0]) : A(0);
  load_row(a.q, b, t, h, q);
  A m = is_there(a.sink) ? z : -std::numeric_limits<A>::infinity();
  int64_t count = 0, begin;
  Walk walk = keys_of(p, mask, item, i, 1);
  while (int64_t n = walk.next(p.S, &begin))
    for (int64_t j = begin; j < begin + n; ++j) {
      load_row(a.k, b, item.k_begin + j, hk, row);
      s[count] = scale * dot(q, row, p.K);
      m = s[count] > m || s[count] != s[count] ? s[count] : m;
      ++count;
    }
  const bool sees = count > 0 || is_there(a.sink);
  A l = is_there(a.sink) ? std::exp(z - m) : A(0);
  for (int64_t c = 0; c < p.V; ++c) o[c] = 0;
  walk = keys_of(p, mask, item, i, 1);
  count = 0;
  while (int64_t n = walk.next(p.S, &begin))
    for (int64_t j = begin; j < begin + n; ++j) {
      const A e = std::exp(s[count++] - m);
      l += e;
      load_row(a.v, b, item.k_begin + j, hk, row);
      axpy(e, row, p.V, o);
    }
  for (int64_t c = 0; c < p.V && sees; ++c) o[c] /= l;
  store_row(a.o, b, t, h, o);
  store_at(a.lse, b, t, h, sees ? m + std::log(l) : -std::numeric_limits<A>::infinity());
  store_at(a.row_max, b, t, h, sees ? m : A(0));
  store_at(a.row_sum, b, t, h, sees ? l : A(0));
}

void rest(const Call& call, int64_t i) {
  const Rest r = rest_at(call.p, call.args, i);
  fill_rows(call.args.o, r.batch, r.q_begin, r.q_end, 0);
  fill_rows(call.args.lse, r.batch, r.q_begin, r.q_end, -std::numeric_limits<double>::infinity());
  fill_rows(call.args.row_max, r.batch, r.q_begin, r.q_end, 0);
  fill_rows(call.args.row_sum, r.batch, r.q_begin, r.q_end, 0);
}

template <class A>
void task(void* arg, int64_t index, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  if (index < num_rests(p)) return rest(call, index);
  index -= num_rests(p);
  const int64_t chunk = index % call.chunks, h = index / call.chunks % p.H, n = index / call.chunks / p.H;
  const Item item = item_at(p, call.args, n);
  const HeadMask mask = head_mask(p, call.args.block_mask, n, h);
  A* scratch = reinterpret_cast<A*>(call.exec.workspace + slot * call.plan.slot_bytes);
  for (int64_t i = chunk * kRows; i < item.q_len && i < (chunk + 1) * kRows; ++i)
    query(call, item, mask, h, i, scratch);
}

}  // namespace

void plan_generic_fwd(const Problem& p, Plan* plan) {
  const int64_t numbers = p.K + std::max(p.K, p.V) + p.V + p.longest_k;
  plan->slot_bytes = round_up(numbers * (p.dtype == THALWEG_F64 ? 8 : 4));
}

void cpu_generic_fwd(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  Call call{p, plan, args, exec, (p.longest_q + kRows - 1) / kRows};
  parallel_tasks(exec, num_rests(p) + p.N * p.H * call.chunks, plan.num_slots,
                 p.dtype == THALWEG_F64 ? task<double> : task<float>, &call);
}

}  // namespace thalweg::block_sparse_attention
