// What the forward rows of the sparse flash attention share: the state of a query's softmax, and its end. For files
// compiled per instruction set.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_CPU_FLASH_FWD_H
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_CPU_FLASH_FWD_H

#include "thalweg/ops/sparse_flash_attention/cpu_flash_tiles.h"

namespace thalweg::sparse_flash_attention {
namespace {

using Args = thalweg_sparse_flash_attention_fwd_args;

struct Call {
  const Problem& p;
  const Plan& plan;
  const Args& args;
  const Inputs& in;
  const Exec& exec;
};

// The part of a row's Scratch that is the same in all.
struct SoftmaxScratch {
  FlashShape shape;
  int64_t o_row;
  int32_t *keys, *counts, *list;
  float *s, *o, *m, *l, *shrink;  // scores of a tile [keys][heads]; [H][o_row]; [heads]
};

// The heads of no key yet, of one query or of several: m and l of the sink alone.
void start(const Problem& p, const Inputs& in, SoftmaxScratch& x, int64_t queries = 1) {
  for (int64_t h = 0; h < x.shape.heads; ++h) {
    x.m[h] = is_there(in.sink) && h < queries * p.H ? float_at(in.sink, h % p.H) : -infinity();
    x.l[h] = x.m[h] == -infinity() ? 0.f : 1.f;
  }
  for (int64_t i = 0; i < queries * p.H * x.o_row; ++i) x.o[i] = 0;
}

// Scores to probabilities of the tile, relative to the maxima so far; weight(i, h): how often key i counts for heads h
// and on.
template <class Weight>
[[gnu::always_inline]] inline void soften(const SoftmaxScratch& x, int64_t n, Weight&& weight) {
  const int64_t heads = x.shape.heads;
  for (int64_t h = 0; h < heads; h += kLanes) {
    const vf old = load(x.m + h);
    vf m = old;
    for (int64_t i = 0; i < n; ++i) m = max(load(x.s + i * heads + h), m);
    const vf base = where_greater(m, set1(-infinity()), m, m == m ? zero() : m);
    const vf shrink = exp(old - base);
    vf sum = load(x.l + h) * shrink;
    for (int64_t i = 0; i < n; ++i) {
      const vf P = weight(i, h) * exp(load(x.s + i * heads + h) - base);
      store(x.s + i * heads + h, P);
      sum += P;
    }
    store(x.m + h, m), store(x.l + h, sum), store(x.shrink + h, shrink);
  }
}
[[gnu::noinline]] void soften(const SoftmaxScratch& x, const int32_t* counts, int64_t n) {
  soften(x, n, [&](int64_t i, int64_t) __attribute__((always_inline)) { return set1(float(counts[i])); });
}

// Of `rows` heads.
void shrink_outputs(int64_t rows, const SoftmaxScratch& x) {
  for (int64_t h = 0; h < rows; ++h) {
    if (x.shrink[h] == 1) continue;
    const vf factor = set1(x.shrink[h]);
    for (int64_t c = 0; c < x.shape.value; c += kLanes) store(x.o + h * x.o_row + c, factor * load(x.o + h * x.o_row + c));
  }
}

void store_outputs(const Call& call, const SoftmaxScratch& x, int64_t b, int64_t t, bool used) {
  const Problem& p = call.p;
  const Args& args = call.args;
  for (int64_t h = 0; h < p.H; ++h) {
    const float l = used ? x.l[h] : 0, m = l == 0 ? 0 : x.m[h];
    float* o = x.o + h * x.o_row;
    const vf factor = set1(l == 0 ? 0.f : 1 / l);
    for (int64_t c = 0; c < x.shape.value; c += kLanes) store(o + c, factor * load(o + c));
    write_row(p.dtype, element_at(args.o, b, t, h), p.V, o);
    put_statistic(args.lse, b, t, h, l == 0 ? -infinity() : m + __builtin_logf(l));
    put_statistic(args.row_max, b, t, h, m);
    put_statistic(args.row_sum, b, t, h, l);
  }
}

}  // namespace
}  // namespace thalweg::sparse_flash_attention
#endif
