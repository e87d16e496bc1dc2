// The frame of the chunked forwards of the delta rules, for files compiled per instruction set: tasks, blocks of
// chunks, values, outputs and states in and out, rows fetched ahead. The products are in delta_chunk.h. What a chunk's
// keys and decays are is the operator's, given as a type:
//
//   struct Op {
//     using Problem = ...; using Args = ...;  // the operator's, of which the members used here
//     using Chunk = ...;                      // HeadChunk or ChannelChunk
//     struct Scratch { ... };                 // its part of a task's scratch
//     static void carve(const Cut&, Carver*, Scratch*);
//     // The tensors whose rows are fetched ahead: q, k, those by value head, o at the end (touched only).
//     static int64_t streams(const Args&, const thalweg_tensor** tensors);
//     // Of `count` tokens from `row` on: once a block and key head, and once a block and value head.
//     template <class S> static void load_keys(const Task<Op>&, int64_t row, int64_t count);
//     static void load_head(const Task<Op>&, int64_t hv, int64_t row, int64_t count);
//     static void set_chunk(const Task<Op>&, int64_t c, Chunk*);  // its members of chunk c
//   };
//
// A task is one sequence and 1, 2 or 4 neighbouring key heads with all their value heads, which take turns block by
// block: their rows of [B T H K] storage share pages, which are walked once for all. More than 1 only where rows share
// pages, states fit kHeadBytes and 2 tasks a slot are left. Where even 1 leaves fewer than kMinTasks tasks, the panels
// of a head's states are split over several, by the problem's size alone. Heads and columns of a state do not mix, so
// neither storage nor slots change a bit. More tasks clear the rows of o past the last sequence. Chunks start at the
// sequence's start, and also at multiples of `every` when chunk_states is asked for.
#ifndef THALWEG_CPU_BLOCKS_DELTA_FORWARD_H
#define THALWEG_CPU_BLOCKS_DELTA_FORWARD_H

#include "thalweg/core/exec.h"
#include "thalweg/cpu/blocks/delta_chunk.h"
#include "thalweg/cpu/blocks/rows.h"

namespace thalweg {
namespace {

constexpr int64_t kChunks = 4;      // chunks of a block: keys are prepared and panels loaded once a block
constexpr int64_t kBlock = kChunks * C;
constexpr int64_t kMinTasks = 8;    // below this, the columns of V are split over tasks
constexpr int64_t kMaxHeads = 4;           // key heads of a task, where
constexpr int64_t kHeadBytes = 512 << 10;  // their states are no larger than this (they should fit the L2),
constexpr int64_t kMinGroups = 4;          // as many tasks are left,
constexpr int64_t kTasksPerSlot = 2;       // as many for each slot,
constexpr int64_t kManyPerSlot = 8;        // and equally many for each slot or so many
constexpr int64_t kZeroRows = 1024;        // rows of o past the last sequence that one task clears
constexpr int64_t kLine = 512;             // the longest row of K or V

// How a problem is cut into tasks. A unit is one panel of kPanel columns of one value head's state.
struct Cut {
  int64_t G;       // value heads of a key head
  int64_t Kp;      // K padded to whole vectors
  int64_t panels;  // of one value head
  int64_t parts;   // tasks that share one (sequence, key head)
  int64_t units;   // at most, of one task and key head
  int64_t heads;   // key heads of a task
  int64_t groups;  // of key heads
};

// With `heads` key heads to a task, or fewer where that would leave too few tasks, or slots idle at the end.
template <class Problem>
Cut cut_of(const Problem& p, int64_t heads, int64_t slots) {
  Cut cut;
  cut.G = p.HV / p.H;
  cut.Kp = round_up(p.K, kLanes);
  cut.panels = round_up(p.V, kPanel) / kPanel;
  int64_t pairs = p.N * p.H, all = cut.G * cut.panels;
  int64_t parts = pairs > 0 ? (kMinTasks + pairs - 1) / pairs : 1;
  cut.parts = parts < all ? parts : all;
  cut.units = (all + cut.parts - 1) / cut.parts;
  int64_t bytes = all * cut.Kp * kPanel * int64_t(sizeof(float));
  if (cut.parts > 1) heads = 1;
  for (; heads > 1; heads /= 2) {
    int64_t tasks = p.N * (p.H / heads);
    bool enough = tasks >= kMinGroups && tasks >= kTasksPerSlot * slots;
    bool even = tasks % slots == 0 || tasks >= kManyPerSlot * slots;
    if (p.H % heads == 0 && heads * bytes <= kHeadBytes && enough && even) break;
  }
  cut.heads = heads;
  cut.groups = p.H / heads;
  return cut;
}

// How many key heads are worth a task: as long as some of their rows share pages.
template <class Problem, class Args>
int64_t heads_of(const Problem& p, const Args& a) {
  int64_t q = a.q.stride[2], v = a.v.stride[2] * (p.HV / p.H), heads = kMaxHeads;
  while (heads > 1 && heads / 2 * (q < v ? q : v) * element_bytes(p.dtype) >= kPageBytes) heads /= 2;
  return heads;
}

// Hands out scratch, each array 64-byte aligned.
struct Carver {
  char* base;
  int64_t offset;
  float* take(int64_t floats) {
    float* at = reinterpret_cast<float*>(base + offset);
    offset += round_up(floats * 4, 64);
    return at;
  }
};

// What every operator's task has of scratch; chunks follow one another.
struct DeltaScratch {
  float* beta;  // [kBlock]
  float* vo;    // [panels kBlock kPanel]  v of one value head, then its o
  float* u;     // [C kPanel]              what each token writes
  float* line;  // [kLine]
  float* s;     // [heads units Kp kPanel]  states
};

template <class Op>
int64_t carve(const Cut& cut, char* base, typename Op::Scratch* own, DeltaScratch* x) {
  Carver carver{base, 0};
  Op::carve(cut, &carver, own);
  x->beta = carver.take(kBlock);
  x->vo = carver.take(cut.panels * kBlock * kPanel);
  x->u = carver.take(C * kPanel);
  x->line = carver.take(kLine);
  x->s = carver.take(cut.heads * cut.units * cut.Kp * kPanel);
  return carver.offset;
}

template <class Op>
struct Call {
  const typename Op::Problem* problem;
  const typename Op::Args* args;
  Cut cut;
  char* slots;
  int64_t slot_bytes;
  int64_t rows_end;  // where the last sequence ends
};

// One task's place: columns `first` .. `last` (in units) of the value heads of each key head from first_head to
// end_head, of which h is worked on; tokens begin .. end, as rows of [B*T].
template <class Op>
struct Task {
  const Call<Op>* call;
  DeltaScratch x;
  typename Op::Scratch own;
  int64_t n, h, first_head, end_head, first, last, begin, end;

  const typename Op::Problem& problem() const { return *call->problem; }
  const typename Op::Args& args() const { return *call->args; }
};

// ---- beta, values and outputs -------------------------------------------------------------------------

// beta of `count` tokens after its activation; 0 up to the end of the last chunk.
template <class Op>
void load_beta(const Task<Op>& t, int64_t hv, int64_t row, int64_t count) {
  const auto& pb = t.problem();
  const auto& a = t.args();
  int64_t padded = round_up(count, C);
  float* beta = t.x.beta;
  for (int64_t i = 0; i < padded; ++i) beta[i] = i < count ? 1.f : 0.f;
  if (a.beta.dtype)
    read_strided(a.beta.dtype, element_at(a.beta, row / pb.T, row % pb.T, hv), a.beta.stride[1], count, beta);
  if (!a.use_beta_sigmoid) return;
  for (int64_t i = 0; i < padded; i += kLanes) {
    vf x = sigmoid(load(beta + i));
    store(beta + i, a.allow_neg_eigval ? x + x : x);
  }
  for (int64_t i = count; i < padded; ++i) beta[i] = 0.f;
}

// Columns of panels [first, last) of v, to scratch; rows up to the end of the last chunk and columns past V are 0.
template <class S, class Op>
[[gnu::noinline]] void load_values(const Task<Op>& t, int64_t hv, int64_t row, int64_t count, int64_t first,
                                   int64_t last) {
  using Element = const typename S::Element*;
  const auto& pb = t.problem();
  const thalweg_tensor& v = t.args().v;
  int64_t left = pb.V - first * kPanel, columns = left < (last - first) * kPanel ? left : (last - first) * kPanel;
  auto from = reinterpret_cast<Element>(element_at(v, row / pb.T, row % pb.T, hv, first * kPanel));
  float* out = t.x.vo;
  for (int64_t i = 0; i < count; ++i, from += v.stride[1], out += kPanel) {
    float* at = out;
    int64_t col = 0;
    for (; col + kPanel <= columns; col += kPanel, at += kBlock * kPanel) {
      vf x = S::load(from + col), y = S::load(from + col + kLanes);
      store(at, x);
      store(at + kLanes, y);
    }
    if (col == columns) continue;
    int64_t n = columns - col, n0 = n < kLanes ? n : kLanes;
    store(at, S::load_n(from + col, n0));
    store(at + kLanes, n > kLanes ? S::load_n(from + col + kLanes, n - kLanes) : zero());
  }
  for (int64_t panel = first; panel < last; ++panel)
    memset(t.x.vo + ((panel - first) * kBlock + count) * kPanel, 0,
           size_t((round_up(count, C) - count) * kPanel) * sizeof(float));
}

// The other way: o from scratch to storage.
template <class S, class Op>
[[gnu::noinline]] void store_output(const Task<Op>& t, int64_t hv, int64_t row, int64_t count, int64_t first,
                                    int64_t last) {
  using Element = typename S::Element*;
  const auto& pb = t.problem();
  const thalweg_tensor& o = t.args().o;
  int64_t left = pb.V - first * kPanel, columns = left < (last - first) * kPanel ? left : (last - first) * kPanel;
  auto to = reinterpret_cast<Element>(element_at(o, row / pb.T, row % pb.T, hv, first * kPanel));
  const float* in = t.x.vo;
  bool aligned = (reinterpret_cast<uintptr_t>(to) | uintptr_t(o.stride[1]) * sizeof(*to)) % kStreamAlign == 0;
  for (int64_t i = 0; i < count; ++i, to += o.stride[1], in += kPanel) {
    const float* at = in;
    int64_t col = 0;
    for (; col + kPanel <= columns; col += kPanel, at += kBlock * kPanel) {
      vf x = load(at), y = load(at + kLanes);
      if (aligned) {
        S::stream(to + col, x, y);
      } else {
        S::store(to + col, x);
        S::store(to + col + kLanes, y);
      }
    }
    if (col == columns) continue;
    int64_t n = columns - col, n0 = n < kLanes ? n : kLanes;
    S::store_n(to + col, load(at), n0);
    if (n > kLanes) S::store_n(to + col + kLanes, load(at + kLanes), n - kLanes);
  }
}

// ---- rows fetched ahead -------------------------------------------------------------------------------

// First value head of key head h that the task works on, and how many.
template <class Op>
int64_t first_value_head(const Task<Op>& t, int64_t h) {
  return h * t.call->cut.G + t.first / t.call->cut.panels;
}
template <class Op>
int64_t value_heads(const Task<Op>& t) {
  return (t.last - 1) / t.call->cut.panels - t.first / t.call->cut.panels + 1;
}

// Rows of the token at `row` and of `keys` key heads from h on; returns of how many tensors, o the last.
template <class Op>
int64_t rows_of(const Task<Op>& t, int64_t h, int64_t keys, int64_t row, Rows* rows) {
  const auto& pb = t.problem();
  const thalweg_tensor* tensors[kMaxRows];
  int64_t tensors_count = Op::streams(t.args(), tensors);
  for (int64_t j = 0; j < tensors_count; ++j) {
    const thalweg_tensor& x = *tensors[j];
    int64_t bytes = element_bytes(x.dtype);
    rows[j].at = element_at(x, row / pb.T, row % pb.T, j < 2 ? h : first_value_head(t, h));
    rows[j].stride = x.stride[1] * bytes;
    rows[j].head_stride = x.stride[2] * bytes;
    rows[j].heads = j < 2 ? keys : value_heads(t) + (keys - 1) * t.call->cut.G;
    rows[j].bytes = x.shape[3] * bytes;
  }
  return tensors_count;
}

// For the block that starts at `row` and follows one of `chunks` chunks.
template <class Op>
Touch touch_of(const Task<Op>& t, int64_t row, int64_t chunks) {
  int64_t left = t.end - row, keys = t.end_head - t.first_head;
  Touch f{};
  f.steps = keys * chunks * (t.last - t.first);
  if (left <= 0) return f;
  f.tokens = left < kBlock ? left : kBlock;
  f.bursts = (f.tokens + kBurst - 1) / kBurst;
  f.due = f.steps - f.bursts;  // the first burst comes at once
  f.tensors = rows_of(t, t.first_head, keys, row, f.rows);
  return f;
}

// For `count` tokens from `row` of key head h, while one of `chunks` chunks is worked on.
template <class Op>
Fetch fetch_of(const Task<Op>& t, int64_t h, int64_t row, int64_t count, int64_t chunks) {
  Fetch f{};
  f.steps = chunks * (t.last - t.first) * ((t.call->cut.Kp + kUpdateRows - 1) / kUpdateRows);
  if (count <= 0) return f;
  f.tensors = rows_of(t, h, 1, row, f.rows) - 1;
  for (int64_t j = 0; j < f.tensors; ++j) f.count += count * f.rows[j].heads;
  return f;
}

// ---- states in storage --------------------------------------------------------------------------------

template <class Op>
float* unit_state(const Task<Op>& t, int64_t h, int64_t unit) {
  const Cut& cut = t.call->cut;
  return t.x.s + ((h - t.first_head) * cut.units + unit - t.first) * cut.Kp * kPanel;
}

// Columns of a unit of key head h; its value head.
struct Columns {
  int64_t hv, first, count;
};
template <class Op>
Columns columns_of(const Task<Op>& t, int64_t h, int64_t unit) {
  const Cut& cut = t.call->cut;
  int64_t first = unit % cut.panels * kPanel, left = t.problem().V - first;
  return {h * cut.G + unit / cut.panels, first, left < kPanel ? left : kPanel};
}

template <class Op>
void clear_scratch_states(const Task<Op>& t) {
  const Cut& cut = t.call->cut;
  memset(t.x.s, 0, size_t((t.end_head - t.first_head) * cut.units * cut.Kp * kPanel) * sizeof(float));
}

template <class Op>
void read_states(const Task<Op>& t) {
  const thalweg_tensor& from = t.args().initial_state;
  clear_scratch_states(t);
  if (!from.dtype) return;
  for (int64_t h = t.first_head; h < t.end_head; ++h)
    for (int64_t unit = t.first; unit < t.last; ++unit) {
      Columns c = columns_of(t, h, unit);
      read_state(from.dtype, element_at(from, t.n, c.hv, 0, c.first), from.stride[2], from.stride[3], t.problem().K,
                 c.count, unit_state(t, h, unit), kPanel, t.x.line);
    }
}

template <class Op>
void write_states(const Task<Op>& t, const thalweg_tensor& to, int64_t index) {
  if (!to.dtype) return;
  for (int64_t h = t.first_head; h < t.end_head; ++h)
    for (int64_t unit = t.first; unit < t.last; ++unit) {
      Columns c = columns_of(t, h, unit);
      write_state(to.dtype, element_at(to, index, c.hv, 0, c.first), to.stride[2], to.stride[3], t.problem().K,
                  c.count, unit_state(t, h, unit), kPanel, t.x.line);
    }
}

// Zeroes the rows of chunk_states between this sequence's last checkpoint and the next sequence's first.
template <class Op>
void clear_unused(const Task<Op>& t) {
  const auto& pb = t.problem();
  const thalweg_tensor& to = t.args().chunk_states;
  if (!to.dtype) return;
  int64_t length = t.end - t.begin, used = length > 0 ? (length + pb.every - 1) / pb.every : 1;
  int64_t from = t.begin / pb.every + t.n + used;
  int64_t end = t.n + 1 < pb.N ? t.end / pb.every + t.n + 1 : to.shape[0];
  if (from >= end) return;
  clear_scratch_states(t);
  for (int64_t r = from; r < end; ++r) write_states(t, to, r);
}

// ---- a task -------------------------------------------------------------------------------------------

template <class S, class Op>
void run_head(const Task<Op>& t, int64_t row, int64_t count, Ahead* ahead) {
  const Cut& cut = t.call->cut;
  Op::template load_keys<S>(t, row, count);
  int64_t chunks = (count + C - 1) / C;
  for (int64_t unit = t.first; unit < t.last;) {
    int64_t hv = t.h * cut.G + unit / cut.panels, first = unit % cut.panels;
    int64_t last = t.last - unit < cut.panels - first ? first + t.last - unit : cut.panels;
    load_beta(t, hv, row, count);
    load_values<S>(t, hv, row, count, first, last);
    Op::load_head(t, hv, row, count);
    for (int64_t panel = first; panel < last; ++panel, ++unit) {
      for (int64_t c = 0; c < chunks; ++c) {
        typename Op::Chunk chunk;
        chunk.Kp = cut.Kp;
        chunk.rows = count - c * C < C ? count - c * C : C;
        chunk.beta = t.x.beta + c * C;
        chunk.vo = t.x.vo + ((panel - first) * kBlock + c * C) * kPanel;
        chunk.u = t.x.u;
        chunk.s = unit_state(t, t.h, unit);
        Op::set_chunk(t, c, &chunk);
        touch(ahead);
        chunk_rows(chunk);
        update_state(chunk, &ahead->fetch);
      }
    }
    store_output<S>(t, hv, row, count, first, last);
  }
}

// The heads of a task take turns block by block: a token's rows of neighbouring heads share a page.
template <class S, class Op>
void run_block(Task<Op>& t, int64_t row, int64_t count) {
  int64_t chunks = (count + C - 1) / C;
  int64_t left = t.end - row - count, next = left < kBlock ? left : kBlock;
  Ahead ahead;
  ahead.touch = touch_of(t, row + count, chunks);
  for (t.h = t.first_head; t.h < t.end_head; ++t.h) {
    ahead.next_block = t.h + 1 == t.end_head;
    ahead.fetch = ahead.next_block ? fetch_of(t, t.first_head, row + count, next, chunks)
                                   : fetch_of(t, t.h + 1, row, count, chunks);
    ahead.fetch.limit = ahead.next_block ? ahead.touch.touched : count;
    run_head<S>(t, row, count, &ahead);
  }
}

template <class S, class Op>
void run_task(Task<Op>& t) {
  const auto& pb = t.problem();
  const auto& a = t.args();
  read_states(t);
  int64_t length = t.end - t.begin;
  if (length == 0) write_states(t, a.chunk_states, t.begin / pb.every + t.n);
  for (int64_t at = 0; at < length;) {
    int64_t count = length - at < kBlock ? length - at : kBlock;
    if (a.chunk_states.dtype) {
      if (at % pb.every == 0) write_states(t, a.chunk_states, t.begin / pb.every + t.n + at / pb.every);
      if (pb.every - at % pb.every < count) count = pb.every - at % pb.every;
    }
    run_block<S>(t, t.begin + at, count);
    at += count;
  }
  write_states(t, a.final_state, t.n);
  clear_unused(t);
  stream_fence();
}

// chunk_states of a call without sequences.
template <class Problem>
void clear_states(const Problem& pb, const thalweg_tensor& to) {
  const float zeros[kLine] = {};
  for (int64_t r = 0; to.dtype && r < to.shape[0]; ++r)
    for (int64_t hv = 0; hv < pb.HV; ++hv)
      for (int64_t k = 0; k < pb.K; ++k)
        write_strided(to.dtype, element_at(to, r, hv, k), to.stride[3], pb.V, zeros);
}

template <class Op>
void clear_rows(const Call<Op>& call, int64_t begin, int64_t end) {
  const auto& pb = *call.problem;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t hv = 0; hv < pb.HV; ++hv)
      memset(element_at(call.args->o, row / pb.T, row % pb.T, hv), 0, size_t(pb.V * element_bytes(pb.dtype)));
}

template <class Op>
void delta_task(void* arg, int64_t i, int64_t slot) {
  const Call<Op>& call = *static_cast<const Call<Op>*>(arg);
  const auto& pb = *call.problem;
  int64_t parts = call.cut.parts, units = call.cut.G * call.cut.panels;
  int64_t pieces = pb.N * call.cut.groups * parts;
  if (i >= pieces) {
    int64_t begin = call.rows_end + (i - pieces) * kZeroRows, end = pb.B * pb.T;
    clear_rows(call, begin, begin + kZeroRows < end ? begin + kZeroRows : end);
    return;
  }
  Task<Op> t;
  t.call = &call;
  carve<Op>(call.cut, call.slots + slot * call.slot_bytes, &t.own, &t.x);
  int64_t part = i % parts;
  t.first_head = i / parts % call.cut.groups * call.cut.heads;
  t.end_head = t.first_head + call.cut.heads;
  t.h = t.first_head;
  t.n = i / parts / call.cut.groups;
  t.first = units * part / parts;
  t.last = units * (part + 1) / parts;
  auto span = sequence_span(pb, call.args->cu_seqlens, t.n);
  t.begin = span.begin;
  t.end = span.end;
  if (pb.dtype == THALWEG_F32) run_task<F32>(t);
  if (pb.dtype == THALWEG_BF16) run_task<Bf16>(t);
  if (pb.dtype == THALWEG_F16) run_task<F16>(t);
}

// ---- the kernel ---------------------------------------------------------------------------------------

template <class Op>
int64_t delta_forward_slot_bytes(const typename Op::Problem& problem) {
  typename Op::Scratch own;
  DeltaScratch x;
  return carve<Op>(cut_of(problem, kMaxHeads, 1), nullptr, &own, &x);
}

template <class Op>
void delta_forward(const typename Op::Problem& problem, const Plan& plan, const typename Op::Args& args,
                   const Exec& exec) {
  Cut cut = cut_of(problem, heads_of(problem, args), plan.num_slots);
  Call<Op> call{&problem, &args, cut, exec.workspace + plan.shared_bytes, plan.slot_bytes, 0};
  if (!problem.packed) call.rows_end = problem.B * problem.T;
  else if (problem.N == 0) clear_states(problem, args.chunk_states);
  else call.rows_end = sequence_span(problem, args.cu_seqlens, problem.N - 1).end;
  int64_t left = problem.B * problem.T - call.rows_end;
  int64_t tasks = problem.N * call.cut.groups * call.cut.parts + (left + kZeroRows - 1) / kZeroRows;
  parallel_tasks(exec, tasks, plan.num_slots, delta_task<Op>, &call);
}

}  // namespace
}  // namespace thalweg
#endif
