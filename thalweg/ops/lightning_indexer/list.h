// A query's list of visible entries and their scores, for the vector rows of loss and bwd. For files compiled per
// instruction set only.
#ifndef THALWEG_OPS_LIGHTNING_INDEXER_LIST_H
#define THALWEG_OPS_LIGHTNING_INDEXER_LIST_H

#include "thalweg/ops/lightning_indexer/tiles.h"

namespace thalweg::lightning_indexer {
namespace {

// A slot's scratch for one row; arrays by visible entry have room for whole vectors of E.
struct ListScratch {
  float *rows, *panels, *weights;  // the query as [heads][pitch.row], as panels; w times the scale
  int32_t* entries;                // places in the list
  int64_t* keys;                   // rows of [B S][K]
  float *scores, *y, *p, *line;    // I, exp(I - top), p; a row of a tensor [.. E]
  float* sums;                     // of a block
};

inline void lay_out_list(const Problem& p, Cutter* memory, ListScratch* out) {
  const Pitches pitch(p);
  const int64_t E = round_up(p.E, kLanes);
  out->rows = memory->take<float>(pitch.heads * pitch.row);
  out->panels = memory->take<float>(pitch.heads * pitch.channels);
  out->weights = memory->take<float>(pitch.heads);
  out->entries = memory->take<int32_t>(p.E);
  out->keys = memory->take<int64_t>(p.E);
  out->scores = memory->take<float>(E);
  out->y = memory->take<float>(E);
  out->p = memory->take<float>(E);
  out->line = memory->take<float>(E);
  out->sums = memory->take<float>(kBlockKeys * kLanes);
}

// What a row's entries have in common.
struct ListFacts {
  int64_t n;     // visible entries
  float top;     // largest score
  double sum;    // of exp(I - top)
  double total;  // of p
};

inline double sum_of(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double(x[i]);
  return sum;
}

// The entries' elements of a row of t [B T E] to out.
inline void read_entries(const Problem& p, const thalweg_tensor& t, int64_t r, int64_t n, const ListScratch& s,
                         float* out) {
  read_row(t.dtype, element_at(t, r / p.T, r % p.T), p.E, s.line);
  for (int64_t i = 0; i < n; ++i) out[i] = s.line[s.entries[i]];
}

// Entries, scores and exponentials of row r; `signs` [whole tiles][heads / 8] or null.
inline ListFacts score_list(const Problem& p, const Mask& mask, const thalweg_tensor& q, const thalweg_tensor& w,
                            const thalweg_tensor& indices, const thalweg_tensor& teacher, const float* keys, int64_t r,
                            const ListScratch& s, uint8_t* signs) {
  const Pitches pitch(p);
  ListFacts facts{visible_entries(p, mask, indices, r, s.entries, s.keys), -infinity(), 0, 0};
  if (facts.n == 0) return facts;
  read_query(p, q, r, s.rows);
  pack_query(p, s.rows, s.panels);
  read_weights(p, w, r, s.weights);
  for (int64_t i = 0; i < facts.n; i += kBlockKeys) {
    const int64_t count = facts.n - i < kBlockKeys ? facts.n - i : kBlockKeys;
    const int64_t next = i + 2 * kBlockKeys < facts.n ? i + 2 * kBlockKeys : facts.n;
    prefetch_keys(p, keys, s.keys, i + count, next);
    const float* block[kBlockKeys];
    for (int64_t j = 0; j < count; ++j) block[j] = keys + s.keys[i + j] * pitch.row;
    score_block(p, count, block, s.panels, s.weights, s.sums, s.scores + i,
                signs ? signs + i * (pitch.heads / 8) : nullptr);
  }
  for (int64_t i = facts.n; i < round_up(facts.n, kLanes); ++i) s.scores[i] = -infinity();
  vf top = set1(-infinity());
  for (int64_t i = 0; i < facts.n; i += kLanes) top = max(top, load(s.scores + i));
  facts.top = hmax(top);
  for (int64_t i = 0; i < facts.n; i += kLanes) store(s.y + i, exp(load(s.scores + i) - set1(facts.top)));
  facts.sum = sum_of(s.y, facts.n);
  if (!teacher.dtype) return facts;
  read_entries(p, teacher, r, facts.n, s, s.p);
  facts.total = sum_of(s.p, facts.n);
  return facts;
}

}  // namespace
}  // namespace thalweg::lightning_indexer
#endif
