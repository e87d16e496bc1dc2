// Neighbouring queries whose lists name most of their keys, taken together: their heads are the rows of one product
// with every key of their range, and what a list does not name weighs 0. For files compiled per instruction set.
//
// Few heads have too few products a key. What a query gets has the same bits in any company, alone too: whether it
// goes this way depends on its own list, tiles start at the sequence's own keys, sums go key by key, and a key of
// weight 0 adds 0. Unless it is not finite: then its group goes query by query.
#ifndef THALWEG_OPS_SPARSE_FLASH_ATTENTION_CPU_FLASH_GROUP_H
#define THALWEG_OPS_SPARSE_FLASH_ATTENTION_CPU_FLASH_GROUP_H

#include "thalweg/ops/sparse_flash_attention/cpu_flash_tiles.h"

namespace thalweg::sparse_flash_attention {
namespace {

// A query and its list.
struct Listed {
  Query query;
  int64_t t, n;
  int32_t *keys, *counts;
  bool most;  // of its keys are named
  bool done;
};

// Queries of one sequence that go together.
struct Group {
  int64_t b, first, limit, size;  // keys [0, limit) from row `first` on
  Listed queries[kGroupQueries];
  int64_t at[kGroupQueries];  // how far each list is read
};

// Takes queries[i] and those behind it that may go with it.
inline Group take_group(Listed* queries, int64_t i, int64_t count, int64_t b) {
  Group group{b, queries[i].query.first, 0, 0, {}, {}};
  for (; i < count; ++i) {
    if (!queries[i].most || queries[i].query.first != group.first) continue;
    queries[i].done = true;
    group.limit = group.limit > queries[i].query.limit ? group.limit : queries[i].query.limit;
    group.at[group.size] = 0;
    group.queries[group.size++] = queries[i];
  }
  return group;
}

// weights[n][rows]: how often the list of a row's query names keys begin, begin + 1 .. Tiles come in order.
inline void weigh(Group& group, int64_t H, int64_t begin, int64_t n, float* weights, int64_t rows) {
  for (int64_t j = 0; j < group.size; ++j) {
    const Listed& query = group.queries[j];
    int64_t at = group.at[j];
    for (int64_t i = 0; i < n; ++i) {
      const bool named = at < query.n && query.keys[at] == begin + i;
      const float weight = named ? float(query.counts[at]) : 0.f;
      at += named;
      for (int64_t h = 0; h < H; ++h) weights[i * rows + j * H + h] = weight;
    }
    group.at[j] = at;
  }
}

inline bool all_finite(const float* rows, int64_t n, int64_t row, int64_t width) {
  vf sum = zero();
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < width; c += kLanes) {
      const vf x = load(rows + i * row + c);
      sum += x - x;
    }
  const float total = hsum(sum);
  return total == total;
}

}  // namespace
}  // namespace thalweg::sparse_flash_attention
#endif
