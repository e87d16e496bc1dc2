// cpu_vec_bwd - lightning indexer, backward, by rows and then by ranges of keys.
//
// Math     dI = d_loss ((sum p) y - p) + d_scores           m[e, h] = dI[e] where u[h, e] > 0, else 0
//          z[h] = sum_e m[e, h] k[s_e]      d_q[h] = scale w[h] z[h]      d_w[h] = scale <q[h], z[h]>
//          d_k[s] = sum_{t, e: s_e = s} sum_h m[e, h] scale w[h] q[h]
// Shapes   q,d_q [B T H K]  k,d_k [B S K]  w,d_w [B T H]  indices,p,d_scores [B T E]  d_loss [B T]
// Takes    q, k of f32, bf16, f16; the other float tensors of any float dtype; fewer than 2^31 keys in all
// Threads  a chunk of rows at a time: first one task per row (scores, dI, d_q, d_w; its entries sorted by range of
//          keys), then one per range, which adds the chunk's rows to its part of d_k in order
// Vectors  along the heads for scores, along the channels for z and d_k
// Tile     scores as in cpu_vec_fwd; 24 entries at a time for z [H x 24 x K] and d_k [24 x H x K], by blocks/gemm.h
// Scratch  shared: keys as float32 and d_k as float64 [B S K]; of a chunk's rows dI, signs (one bit a head and entry),
// entries
//          by range, and the query: 16 bytes an entry and 32 KiB at 64 x 128. A slot: as cpu_vec_loss, z, a tile
// Numerics float32; d_k adds up entries in float64, since a key may stand in many thousand lists, and rows in order
//          whatever the chunk, so its bits depend on no thread count. The signs of the scores' own products are kept:
//          H(u) is the same in all three products.
// Traps    an entry that stands twice in a list is added twice: a tile's sums go to d_k one entry after another. A
//          visible key that is infinite gives NaN where the reference has 0 * sign: both are lost.
// Measured prediction: three products of the forward's kind, 0.9 of its rate. Zen 3 with other work beside it, CPU time
//          of one thread, f32 T64 S4096 H64 K128 E2048: 41 to 53 GFLOP/s (the loss 56 to 63). The second phase was
//          half again as slow as the others while it read signs by an index, queries as rows of a 512-byte stride and
//          d_k without prefetch: now the first phase leaves entries sorted and queries by panels.
#include "thalweg/ops/lightning_indexer/list.h"

namespace thalweg::lightning_indexer {
namespace {

struct Slot {
  ListScratch list;
  float* dI;       // by visible entry
  uint8_t* signs;  // [entries, whole blocks][heads / 8]
  float* z;        // [heads][channels]
  float* tile;     // [kBlockKeys][pitch.row]: keys, or sums
  float* m;        // [kBlockKeys][heads]
};

// What the first phase leaves to the second, by row of the chunk: the query and its entries, sorted by range of keys.
struct Chunk {
  float *queries, *weights;  // queries in panels of channels, [heads][2 kLanes] each
  float* dI;
  uint8_t* signs;
  int32_t *keys, *begin;  // rows of [B S][K]; where each range begins
};

int64_t num_ranges(const Problem& p) { return (p.B * p.S + key_range(p) - 1) / key_range(p); }
int64_t signs_of_row(const Problem& p) { return round_up(p.E, kBlockKeys) * (Pitches(p).heads / 8); }

void lay_out_slot(const Problem& p, Cutter* memory, Slot* out) {
  const Pitches pitch(p);
  lay_out_list(p, memory, &out->list);
  out->dI = memory->take<float>(p.E);
  out->signs = memory->take<uint8_t>(signs_of_row(p));
  out->z = memory->take<float>(pitch.heads * pitch.channels);
  out->tile = memory->take<float>(kBlockKeys * pitch.row);
  out->m = memory->take<float>(kBlockKeys * pitch.heads);
}

void lay_out_chunk(const Problem& p, int64_t rows, Cutter* memory, Chunk* out) {
  const Pitches pitch(p);
  out->dI = memory->take<float>(rows * p.E);
  out->queries = memory->take<float>(rows * pitch.heads * pitch.channels);
  out->weights = memory->take<float>(rows * pitch.heads);
  out->signs = memory->take<uint8_t>(rows * signs_of_row(p));
  out->keys = memory->take<int32_t>(rows * p.E);
  out->begin = memory->take<int32_t>(rows * (num_ranges(p) + 1));
}

struct Call {
  const Problem& p;
  const thalweg_lightning_indexer_bwd_args& args;
  Mask mask;
  const float* keys;
  double* d_k;  // [B S][channels]
  Chunk chunk;
  char* slots;
  int64_t slot_bytes, first, rows;  // of the chunk
};

// m of one entry times `factor` (all 1 when null), to out [heads].
[[gnu::always_inline]] inline void write_signed(const uint8_t* signs, float dI, const float* factor, int64_t heads,
                                                float* out) {
  for (int64_t h = 0; h < heads; h += kLanes) {
    uint32_t bits = 0;
    memcpy(&bits, signs + h / 8, size_t(kLanes / 8));
    const vf x = set1(dI);
    store(out + h, where_lanes(bits, factor ? x * load(factor + h) : x));
  }
}

// ---- rows -------------------------------------------------------------------------------------------

void write_dI(const Call& call, int64_t r, const ListFacts& facts, const Slot& slot) {
  const auto& args = call.args;
  const ListScratch& s = slot.list;
  float* dI = slot.dI;
  float d_loss = 0;
  if (args.d_loss.dtype) read_row(args.d_loss.dtype, element_at(args.d_loss, r / call.p.T, r % call.p.T), 1, &d_loss);
  const float factor = float(facts.total / facts.sum);
  for (int64_t i = 0; i < facts.n; ++i) dI[i] = args.d_loss.dtype ? d_loss * (factor * s.y[i] - s.p[i]) : 0.f;
  if (!args.d_scores.dtype) return;
  read_entries(call.p, args.d_scores, r, facts.n, s, s.y);
  for (int64_t i = 0; i < facts.n; ++i) dI[i] += s.y[i];
}

// z = m^T keys, a block of entries at a time.
void sum_keys(const Call& call, int64_t n, const Slot& slot) {
  const Problem& p = call.p;
  const Pitches pitch(p);
  memset(slot.z, 0, size_t(pitch.heads * pitch.channels) * 4);
  for (int64_t i = 0; i < n; i += kBlockKeys) {
    const int64_t count = n - i < kBlockKeys ? n - i : kBlockKeys;
    prefetch_keys(p, call.keys, slot.list.keys, i + count, i + 2 * kBlockKeys < n ? i + 2 * kBlockKeys : n);
    for (int64_t j = 0; j < count; ++j) {
      write_signed(slot.signs + (i + j) * (pitch.heads / 8), slot.dI[i + j], nullptr, pitch.heads,
                   slot.m + j * pitch.heads);
      memcpy(slot.tile + j * pitch.row, call.keys + slot.list.keys[i + j] * pitch.row, size_t(pitch.channels) * 4);
    }
    gemm_add(p.H, pitch.channels, count, slot.m, 1, pitch.heads, slot.tile, pitch.row, slot.z, pitch.channels);
  }
}

void write_query_gradients(const Call& call, int64_t r, const Slot& slot) {
  const Problem& p = call.p;
  const auto& args = call.args;
  const Pitches pitch(p);
  for (int64_t h = 0; h < p.H; ++h) {
    float* z = slot.z + h * pitch.channels;
    const float* q = slot.list.rows + h * pitch.row;
    vf dot = zero();
    for (int64_t c = 0; c < pitch.channels; c += kLanes) {
      dot = fma(load(q + c), load(z + c), dot);
      store(z + c, load(z + c) * set1(slot.list.weights[h]));
    }
    slot.m[h] = float(p.scale) * hsum(dot);
    if (args.d_q.dtype) write_row(args.d_q.dtype, element_at(args.d_q, r / p.T, r % p.T, h), p.K, z);
  }
  if (args.d_w.dtype) write_row(args.d_w.dtype, element_at(args.d_w, r / p.T, r % p.T), p.H, slot.m);
}

void write_zeros(const Call& call, int64_t r, const Slot& slot) {
  const Problem& p = call.p;
  const auto& args = call.args;
  memset(slot.z, 0, size_t(Pitches(p).channels) * 4);
  memset(slot.m, 0, size_t(Pitches(p).heads) * 4);
  for (int64_t h = 0; h < p.H && args.d_q.dtype; ++h)
    write_row(args.d_q.dtype, element_at(args.d_q, r / p.T, r % p.T, h), p.K, slot.z);
  if (args.d_w.dtype) write_row(args.d_w.dtype, element_at(args.d_w, r / p.T, r % p.T), p.H, slot.m);
}

// The row's entries sorted by range of keys, in the list's order within a range, to the chunk.
void sort_entries(const Call& call, int64_t row, int64_t n, const Slot& slot) {
  const Problem& p = call.p;
  const Chunk& chunk = call.chunk;
  const int64_t ranges = num_ranges(p), size = key_range(p), signs_row = Pitches(p).heads / 8;
  const int64_t* keys = slot.list.keys;
  int32_t* begin = chunk.begin + row * (ranges + 1);
  memset(begin, 0, size_t(ranges + 1) * 4);
  for (int64_t i = 0; i < n; ++i) ++begin[keys[i] / size];
  int32_t sum = 0;
  for (int64_t g = 0; g <= ranges; ++g) sum += begin[g], begin[g] = sum;  // ends
  for (int64_t i = n - 1; i >= 0; --i) {
    const int64_t at = --begin[keys[i] / size];
    chunk.keys[row * p.E + at] = int32_t(keys[i]);
    chunk.dI[row * p.E + at] = slot.dI[i];
    memcpy(chunk.signs + row * signs_of_row(p) + at * signs_row, slot.signs + i * signs_row, size_t(signs_row));
  }
}

// The query's channels by panels, each contiguous, so that a range of keys streams through it.
void keep_query(const Problem& p, const float* rows, float* panels) {
  const Pitches pitch(p);
  for (int64_t c = 0; c < pitch.channels; c += kPanel) {
    const int64_t width = pitch.channels - c < kPanel ? kLanes : kPanel;
    for (int64_t h = 0; h < p.H; ++h)
      memcpy(panels + c * pitch.heads + h * width, rows + h * pitch.row + c, size_t(width) * 4);
  }
}

void row_task(void* arg, int64_t i, int64_t slot_index) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const Pitches pitch(p);
  const int64_t r = call.first + i;
  Cutter memory{call.slots + slot_index * call.slot_bytes};
  Slot slot;
  lay_out_slot(p, &memory, &slot);
  const ListFacts facts =
      score_list(p, call.mask, args.q, args.w, args.indices, args.p, call.keys, r, slot.list, slot.signs);
  if (facts.n) write_dI(call, r, facts, slot);
  sort_entries(call, i, facts.n, slot);
  if (facts.n == 0) return write_zeros(call, r, slot);
  keep_query(p, slot.list.rows, call.chunk.queries + i * pitch.heads * pitch.channels);
  memcpy(call.chunk.weights + i * pitch.heads, slot.list.weights, size_t(pitch.heads) * 4);
  if (!args.d_q.dtype && !args.d_w.dtype) return;
  sum_keys(call, facts.n, slot);
  write_query_gradients(call, r, slot);
}

// ---- ranges of keys ---------------------------------------------------------------------------------

void range_task(void* arg, int64_t g, int64_t slot_index) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const Chunk& chunk = call.chunk;
  const Pitches pitch(p);
  Cutter memory{call.slots + slot_index * call.slot_bytes};
  Slot slot;
  lay_out_slot(p, &memory, &slot);
  for (int64_t row = 0; row < call.rows; ++row) {
    const int32_t* begin = chunk.begin + row * (num_ranges(p) + 1);
    const int32_t* keys = chunk.keys + row * p.E;
    const uint8_t* signs = chunk.signs + row * signs_of_row(p);
    const float* queries = chunk.queries + row * pitch.heads * pitch.channels;
    for (int64_t i = begin[g]; i < begin[g + 1]; i += kBlockKeys) {
      const int64_t count = begin[g + 1] - i < kBlockKeys ? begin[g + 1] - i : kBlockKeys;
      for (int64_t j = 0; j < count; ++j)
        write_signed(signs + (i + j) * (pitch.heads / 8), chunk.dI[row * p.E + i + j],
                     chunk.weights + row * pitch.heads, pitch.heads, slot.m + j * pitch.heads);
      for (int64_t c = 0; c < pitch.channels; c += kPanel) {
        const int64_t width = pitch.channels - c < kPanel ? kLanes : kPanel;
        for (int64_t h = 0; h < p.H; ++h)  // the same of the next row, which comes from the L3
          prefetch_l2(queries + pitch.heads * pitch.channels + c * pitch.heads + h * width);
        gemm(count, width, p.H, slot.m, pitch.heads, 1, queries + c * pitch.heads, width, slot.tile + c, pitch.row);
      }
      for (int64_t j = 0; j < count; ++j) {
        double* d_k = call.d_k + keys[i + j] * pitch.channels;
        for (int64_t c = 0; c < pitch.channels && j + 1 < count; c += 8)
          prefetch_write(call.d_k + keys[i + j + 1] * pitch.channels + c);
        const float* sum = slot.tile + j * pitch.row;
        for (int64_t c = 0; c < pitch.channels; ++c) d_k[c] += double(sum[c]);
      }
    }
  }
}

void clear_task(void* arg, int64_t g, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const int64_t channels = Pitches(call.p).channels, n = call.p.B * call.p.S, first = g * key_range(call.p);
  const int64_t last = first + key_range(call.p) < n ? first + key_range(call.p) : n;
  memset(call.d_k + first * channels, 0, size_t((last - first) * channels) * 8);
}

void write_task(void* arg, int64_t g, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const thalweg_tensor& out = call.args.d_k;
  float* row = reinterpret_cast<float*>(call.slots + slot * call.slot_bytes);
  const int64_t channels = Pitches(p).channels, n = p.B * p.S, first = g * key_range(p);
  for (int64_t key = first; key < n && key < first + key_range(p); ++key) {
    for (int64_t c = 0; c < channels; ++c) row[c] = float(call.d_k[key * channels + c]);
    write_row(out.dtype, element_at(out, key / p.S, key % p.S), p.K, row);
  }
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_vec_bwd_slot_bytes(const Problem& p) {
  Cutter memory{nullptr};
  Slot slot;
  lay_out_slot(p, &memory, &slot);
  return memory.at;
}

int64_t cpu_vec_bwd_chunk_bytes(const Problem& p, int64_t rows) {
  Cutter memory{nullptr};
  Chunk chunk;
  lay_out_chunk(p, rows, &memory, &chunk);
  return memory.at;
}

int64_t cpu_vec_sum_bytes(const Problem& p) { return round_up(p.B * p.S * Pitches(p).channels * 8, 64); }

void cpu_vec_bwd(const Problem& p, const Plan& plan, const thalweg_lightning_indexer_bwd_args& args, const Exec& exec) {
  float* keys = reinterpret_cast<float*>(exec.workspace);
  double* d_k = reinterpret_cast<double*>(exec.workspace + cpu_vec_key_bytes(p));
  Cutter memory{exec.workspace + cpu_vec_key_bytes(p) + cpu_vec_sum_bytes(p)};
  Call call{p, args, mask_of(args), keys, d_k, {}, exec.workspace + plan.shared_bytes, plan.slot_bytes, 0, 0};
  lay_out_chunk(p, plan.values[kRows], &memory, &call.chunk);
  read_keys(p, plan, args.k, keys, exec);
  if (args.d_k.dtype) parallel_tasks(exec, num_ranges(p), plan.num_slots, clear_task, &call);
  for (call.first = 0; call.first < p.B * p.T; call.first += plan.values[kRows]) {
    const int64_t left = p.B * p.T - call.first;
    call.rows = left < plan.values[kRows] ? left : plan.values[kRows];
    parallel_tasks(exec, call.rows, plan.num_slots, row_task, &call);
    if (args.d_k.dtype) parallel_tasks(exec, num_ranges(p), plan.num_slots, range_task, &call);
  }
  if (args.d_k.dtype) parallel_tasks(exec, num_ranges(p), plan.num_slots, write_task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::lightning_indexer
