// cpu_vec_fwd - lightning indexer, forward, vectors along the heads, then radix selection.
//
// Math     I[s] = sum_h scale w[h] relu(<q[h], k[s]>)    the E largest, by value descending, index ascending
// Shapes   q [B T H K]  k [B S K]  w [B T H]  indices,scores [B T E]
// Takes    q, k of f32, bf16, f16; w and scores of any float dtype; rows any stride apart
// Threads  first one task per 256 keys (to float32 rows), then one per block of query rows
// Vectors  along the heads of one query; a key's heads are added up across lanes once, at its end
// Tile     kTileRows keys x 2 vectors of heads over all K; 24 keys a block, which 4 query rows use in turn
// Scratch  shared: the keys as float32. A slot: 4 queries as panels (32 KiB each at 64 x 128, for the L2), their
//          scores [4 S], the sums of a block, room of the selection
// Numerics float32; channels in order, heads by vectors, then across lanes: a score's bits depend on its query and
//          key alone. Selection (select.cpp) looks at bits, so equal scores go by index whatever the threads.
// Traps    max(0, u) keeps a NaN in its second place: such a key is chosen last. Whole tiles are computed: the keys
//          behind a block's last are repeats of it.
// Measured prediction: bound by FMA; the tile's 12 sums need 8 loads and 3 other instructions, the selection is 5 %.
//          Zen 3 with other work beside it, CPU time of one thread, f32 T64 S8192 H64 K128 E2048: 52 to 64 GFLOP/s,
//          where one tile that never leaves the L1 gave 62 to 94. Lost: blocks of 48 keys, which leave the L1 between
//          two panels (8 % slower); four channels unrolled (GCC spills; two do not); digits of 8 bits in the
//          selection (most scores share the first one, so that counts wait for each other).
#include "thalweg/ops/lightning_indexer/select.h"
#include "thalweg/ops/lightning_indexer/tiles.h"

namespace thalweg::lightning_indexer {
namespace {

// A slot's scratch.
struct Scratch {
  float *rows, *panels, *weights, *scores, *sums;
  int32_t* positions;
  float* values;
  char* select;
};

struct Call {
  const Problem& p;
  const thalweg_lightning_indexer_fwd_args& args;
  Mask mask;
  const float* keys;
  char* slots;
  int64_t slot_bytes, rows;
};

void lay_out(const Problem& p, Cutter* memory, Scratch* out) {
  const Pitches pitch(p);
  out->rows = memory->take<float>(pitch.heads * pitch.row);
  out->panels = memory->take<float>(kForwardRows * pitch.heads * pitch.channels);
  out->weights = memory->take<float>(kForwardRows * pitch.heads);
  out->scores = memory->take<float>(kForwardRows * p.S);
  out->sums = memory->take<float>(kBlockKeys * kLanes);
  out->positions = memory->take<int32_t>(p.E);
  out->values = memory->take<float>(p.E);
  out->select = memory->take<char>(select_bytes(p.S, p.E, 4));
}

void write_indices(const thalweg_tensor& t, const Problem& p, int64_t r, const int32_t* positions, int64_t n,
                   int64_t begin) {
  if (t.dtype == THALWEG_I64) {
    auto* out = static_cast<int64_t*>(t.data) + r / p.T * t.stride[0] + r % p.T * t.stride[1];
    for (int64_t e = 0; e < p.E; ++e) out[e] = e < n ? begin + positions[e] : -1;
  } else {
    auto* out = static_cast<int32_t*>(t.data) + r / p.T * t.stride[0] + r % p.T * t.stride[1];
    for (int64_t e = 0; e < n; ++e) out[e] = int32_t(begin) + positions[e];
    for (int64_t e = n; e < p.E; ++e) out[e] = -1;
  }
}

void select_row(const Call& call, int64_t r, const Keys& keys, const float* scores, const Scratch& scratch) {
  const Problem& p = call.p;
  const int64_t n = select_largest(scores, keys.end - keys.begin, p.E, p.by_index, scratch.select, scratch.positions);
  write_indices(call.args.indices, p, r, scratch.positions, n, keys.begin);
  const thalweg_tensor& out = call.args.scores;
  if (!out.dtype) return;
  for (int64_t e = 0; e < p.E; ++e) {
    const float x = e < n ? scores[scratch.positions[e]] : -infinity();
    scratch.values[e] = x == x ? x : -infinity();
  }
  write_row(out.dtype, element_at(out, r / p.T, r % p.T), p.E, scratch.values);
}

void forward_task(void* arg, int64_t i, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const Pitches pitch(p);
  Cutter memory{call.slots + slot * call.slot_bytes};
  Scratch scratch;
  lay_out(p, &memory, &scratch);
  const int64_t r0 = i * call.rows, rows = p.B * p.T - r0 < call.rows ? p.B * p.T - r0 : call.rows;
  Keys keys[kForwardRows];
  int64_t low = INT64_MAX, high = 0;  // rows of [B S] that any of the queries sees
  for (int64_t j = 0; j < rows; ++j) {
    keys[j] = visible_keys(p, call.mask, r0 + j);
    if (keys[j].begin == keys[j].end) continue;
    low = low < keys[j].first + keys[j].begin ? low : keys[j].first + keys[j].begin;
    high = high > keys[j].first + keys[j].end ? high : keys[j].first + keys[j].end;
    read_query(p, call.args.q, r0 + j, scratch.rows);
    pack_query(p, scratch.rows, scratch.panels + j * pitch.heads * pitch.channels);
    read_weights(p, call.args.w, r0 + j, scratch.weights + j * pitch.heads);
  }
  for (int64_t block = low; block < high; block += kBlockKeys)
    for (int64_t j = 0; j < rows; ++j) {
      const int64_t begin = keys[j].first + keys[j].begin, end = keys[j].first + keys[j].end;
      const int64_t from = begin > block ? begin : block, to = end < block + kBlockKeys ? end : block + kBlockKeys;
      if (from >= to) continue;
      const float* key_rows[kBlockKeys];
      for (int64_t s = from; s < to; ++s) key_rows[s - from] = call.keys + s * pitch.row;
      score_block(p, to - from, key_rows, scratch.panels + j * pitch.heads * pitch.channels,
                  scratch.weights + j * pitch.heads, scratch.sums, scratch.scores + j * p.S + (from - begin), nullptr);
    }
  for (int64_t j = 0; j < rows; ++j) select_row(call, r0 + j, keys[j], scratch.scores + j * p.S, scratch);
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_vec_fwd_slot_bytes(const Problem& p) {
  Cutter memory{nullptr};
  Scratch scratch;
  lay_out(p, &memory, &scratch);
  return memory.at;
}

int64_t cpu_vec_key_bytes(const Problem& p) { return round_up(p.B * p.S * Pitches(p).row * 4, 64); }

void cpu_vec_fwd(const Problem& p, const Plan& plan, const thalweg_lightning_indexer_fwd_args& args, const Exec& exec) {
  float* keys = reinterpret_cast<float*>(exec.workspace);
  read_keys(p, plan, args.k, keys, exec);
  Call call{p, args, mask_of(args), keys, exec.workspace + plan.shared_bytes, plan.slot_bytes, plan.values[kRows]};
  parallel_tasks(exec, (p.B * p.T + call.rows - 1) / call.rows, plan.num_slots, forward_task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::lightning_indexer
