// cpu_vec_bwd – short convolution, backward, vectors over channels.
//
// Math     dpre_t = d_y_t silu'(pre_t)                d_weight_j = sum_t dpre_t xx_{t-(W-1)+j}
//          d_x_s = sum_j weight_j dpre_{s+(W-1)-j}    d_bias = sum_t dpre_t
//          and d_final_state joins the last W inputs; d_x_s of s before the sequence is d_initial_state.
// Shapes   x,d_y,d_x [B T D]  weight,d_weight [D W]  bias,d_bias [D]  states [N D W]
// Takes    x of f32, bf16, f16, rows any stride apart; W 1 to 8; the other tensors of any float dtype
// Threads  one task per (block of tokens of the flattened [B*T] axis, strip of channels); blocks by size alone
//          (backward_block). A task runs W-1 tokens past its block, whose dpre its last d_x need; the next
//          task computes these again rather than wait.
// Vectors  over channels. Eight tokens of one vector of channels at a time; d_x of a token leaves the registers
//          W-1 tokens later, when the last dpre that it needs is known. Sequence borders, d_final_state,
//          d_initial_state and what is left of a piece go token by token through the same code (single()).
// Tile     strip about 512 channels: its 4 W rows of scratch stay in L1
// Scratch  per slot (5 W + 2) rows of a strip: weight, the last inputs and dpre, sums, d_final_state, a row.
//          Shared: partial sums [blocks][W + 1][D], at most 64 blocks
// Numerics float32; sums over 64 tokens, these per block, blocks in order in float64 (sum_partials)
// Traps    1 - sigmoid is taken as sigmoid times e: the difference, times x, is wrong by 1e-5 where silu
//          saturates. Slot 0 of d_initial_state is 0 when the sequence has a token: nothing reads that slot.
// Measured prediction: traffic of x, d_y and d_x is 1.5 copies; the arithmetic, twice the forward's, about hides
//          behind it on AVX-512. Zen 5, T2048 D8192 W4 f32, one thread's CPU time with other work beside it:
//          AVX-512 9.6 ms = 2.0 times 1.5 copies (2.75 with exp and a division), AVX2 19.2 ms = 4.1 times.
#include "thalweg/ops/short_conv/problem.h"
#include "thalweg/ops/short_conv/vec.h"

namespace thalweg::short_conv {
namespace {

constexpr int kGroup = 8;           // tokens of a column at a time
constexpr int64_t kSumTokens = 64;  // float32 sums before they join the block's

struct Call {
  const Problem& p;
  const thalweg_short_conv_bwd_args& args;
  char* scratch;
  int64_t slot_bytes;
  float* partials;  // [blocks][W + 1][D]
  int64_t block, strip, num_strips;
  bool stream;
};

// The strip of a task: its channels and its scratch, rows of `pitch` floats.
struct Strip {
  int64_t d0, count, pitch;
  bool silu;
  float* weight;   // [W + 1], bias last
  float* inputs;   // [W - 1] before the next token, oldest first
  float* slopes;   // [W - 1] dpre before the next token
  float* sums;     // [W + 1], null when not wanted
  float* d_final;  // [W]
  float* row;      // [1]
};

// G tokens. d_x[i] belongs to the input W - 1 tokens before token i, the last that reads it.
template <class S>
struct Group {
  const typename S::Element* x;    // null past the sequence, where dpre is 0
  const typename S::Element* d_y;  // null: 0
  typename S::Element* d_x;        // not stored where skip covers it
  int64_t x_stride, d_y_stride, d_x_stride;
  int skip;              // leading rows of d_x that are not stored
  float* d_x_row;        // where a single token's d_x goes as floats instead, or null
  const float* d_final;  // added to a single token's d_x, or null
  bool add;              // to the sums
};

// One vector of channels, G tokens; d_x goes to `d_x` with its own stride.
template <class S, int W, int G, bool whole>
[[gnu::always_inline]] inline void column(const Strip& s, const Group<S>& g, int64_t c, typename S::Element* d_x,
                                          int64_t d_x_stride, int64_t n) {
  vf w[W], x[W - 1 + G], slope[W - 1 + G];
#pragma GCC unroll 8
  for (int j = 0; j < W; ++j) w[j] = load(s.weight + j * s.pitch + c);
#pragma GCC unroll 8
  for (int j = 0; j < W - 1; ++j) {
    x[j] = load(s.inputs + j * s.pitch + c);
    slope[j] = load(s.slopes + j * s.pitch + c);
  }
#pragma GCC unroll 8
  for (int i = 0; i < G; ++i) {
    x[W - 1 + i] = g.x ? get<S, whole>(g.x + i * g.x_stride + c, n) : zero();
    slope[W - 1 + i] = g.d_y && g.x ? get<S, whole>(g.d_y + i * g.d_y_stride + c, n) : zero();
    if (G > 1) prefetch(g.x + (i + G) * g.x_stride + c);
    if (G > 1 && g.d_y) prefetch(g.d_y + (i + G) * g.d_y_stride + c);
  }
  if (s.silu) {
    const vf bias = load(s.weight + W * s.pitch + c);
#pragma GCC unroll 8
    for (int i = 0; i < G; ++i) {
      vf pre = bias;
#pragma GCC unroll 8
      for (int j = 0; j < W; ++j) pre = fma(w[j], x[i + j], pre);
      vf silu;
      slope[W - 1 + i] = g.x ? slope[W - 1 + i] * fast_silu_slope(pre, &silu) : zero();
    }
  }
  if (g.add) {
#pragma GCC unroll 9
    for (int j = 0; j <= W; ++j) {
      vf sum = load(s.sums + j * s.pitch + c);
#pragma GCC unroll 8
      for (int i = 0; i < G; ++i) sum = j < W ? fma(slope[W - 1 + i], x[i + j], sum) : sum + slope[W - 1 + i];
      store(s.sums + j * s.pitch + c, sum);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < G; ++i) {
    vf sum = G == 1 && g.d_final ? load(g.d_final + c) : zero();
#pragma GCC unroll 8
    for (int j = 0; j < W; ++j) sum = fma(w[j], slope[W - 1 + i - j], sum);
    if (i >= g.skip) put<S, whole>(d_x + i * d_x_stride, sum, n);
    if (G == 1 && g.d_x_row) store(g.d_x_row + c, sum);
  }
#pragma GCC unroll 8
  for (int j = 0; j < W - 1; ++j) {
    store(s.inputs + j * s.pitch + c, x[G + j]);
    store(s.slopes + j * s.pitch + c, slope[G + j]);
  }
}

template <class S, int W, int G, bool kStreams>
void columns(const Strip& s, const Group<S>& g) {
  constexpr int64_t line = kLineBytes / int64_t(sizeof(typename S::Element));
  int64_t c = 0;
  if constexpr (kStreams) {
    alignas(64) typename S::Element tile[G * line];
    for (; c + line <= s.count; c += line) {
      for (int64_t v = 0; v < line; v += kLanes) column<S, W, G, true>(s, g, c + v, tile + v, line, kLanes);
      for (int i = g.skip; i < G; ++i) stream_line(g.d_x + i * g.d_x_stride + c, tile + i * line);
    }
  }
  for (; c + kLanes <= s.count; c += kLanes) column<S, W, G, true>(s, g, c, g.d_x + c, g.d_x_stride, kLanes);
  if (c < s.count) column<S, W, G, false>(s, g, c, g.d_x + c, g.d_x_stride, s.count - c);
}

inline void clear(float* row, int64_t count) { memset(row, 0, size_t(count) * sizeof(float)); }

// Adds the sums to the block's and clears them.
template <int W>
void flush_sums(const Strip& s, float* partial, int64_t D) {
  for (int j = 0; j <= W; ++j) {
    float *sum = s.sums + j * s.pitch, *to = partial + j * D;
    int64_t c = 0;
    for (; c + kLanes <= s.count; c += kLanes) store(to + c, load(to + c) + load(sum + c));
    if (c < s.count) store_n(to + c, load_n(to + c, s.count - c) + load(sum + c), s.count - c);
    clear(sum, s.count);
  }
}

// One token, or one row past the sequence: every special case.
template <class S, int W>
void single(const Call& call, const Strip& s, const Span& span, int64_t r, int64_t first, int64_t last) {
  using Element = typename S::Element;
  const Problem& p = call.p;
  const auto& args = call.args;
  const int64_t done = r - (W - 1);  // the input whose gradient is complete
  const bool inside = r < span.end;
  Group<S> g{};
  g.x = inside ? row_at<const Element>(args.x, p.T, r, s.d0) : nullptr;
  g.d_y = inside ? row_at<const Element>(args.d_y, p.T, r, s.d0) : nullptr;
  g.add = s.sums && r < last;
  const bool stored = done >= first && args.d_x.dtype;
  g.d_x = stored ? row_at<Element>(args.d_x, p.T, done, s.d0) : reinterpret_cast<Element*>(s.row);
  g.skip = stored ? 0 : 1;
  const bool in_state = done < span.begin && first == span.begin && args.d_initial_state.dtype;
  if (in_state) g.d_x_row = s.row;
  if (args.d_final_state.dtype && done >= span.end - W) g.d_final = s.d_final + (done - (span.end - W)) * s.pitch;
  columns<S, W, 1, false>(s, g);
  if (in_state) store_slot(s.row, args.d_initial_state, span.n, W + done - span.begin, s.d0, s.count);
}

// Rows [first, last) of a sequence.
template <class S, int W>
void piece(const Call& call, const Strip& s, const Span& span, int64_t first, int64_t last, float* partial) {
  using Element = typename S::Element;
  const Problem& p = call.p;
  const auto& args = call.args;
  const bool has_final = args.d_final_state.dtype != THALWEG_NONE;
  const bool to_state = first == span.begin && args.d_initial_state.dtype != THALWEG_NONE;
  if (has_final) load_state(args.d_final_state, W, span.n, s.d0, s.count, s.pitch, s.d_final);
  load_history(p, args.x, args.initial_state, span, first, s.d0, s.count, s.pitch, s.inputs - s.pitch);
  for (int j = 0; j < W - 1; ++j) clear(s.slopes + j * s.pitch, s.count);
  if (to_state) {  // slot 0 is read by no token
    clear(s.row, s.count);
    store_slot(s.row, args.d_initial_state, span.n, 0, s.d0, s.count);
  }
  int64_t r = first, in_sums = 0;
  while (r < last + (W - 1)) {
    // A group has all its tokens in the piece and the gradients it completes in d_x, d_final apart.
    const bool grouped = is_usual(W) && r + kGroup <= last && (r - (W - 1) >= first || (r == first && !to_state)) &&
                         (!has_final || r + kGroup < span.end);
    const int64_t tokens = grouped ? kGroup : 1;
    if (grouped) {
      Group<S> g{};
      g.x = row_at<const Element>(args.x, p.T, r, s.d0);
      g.d_y = row_at<const Element>(args.d_y, p.T, r, s.d0);
      g.x_stride = args.x.stride[1], g.d_y_stride = args.d_y.stride[1], g.d_x_stride = args.d_x.stride[1];
      g.skip = !args.d_x.dtype ? kGroup : r == first ? W - 1 : 0;
      g.d_x = args.d_x.dtype ? row_at<Element>(args.d_x, p.T, r, s.d0) - (W - 1) * g.d_x_stride
                             : reinterpret_cast<Element*>(s.row);
      g.add = s.sums != nullptr;
      if constexpr (is_usual(W)) {
        if (call.stream) columns<S, W, kGroup, true>(s, g);
        else columns<S, W, kGroup, false>(s, g);
      }
    } else {
      single<S, W>(call, s, span, r, first, last);
    }
    r += tokens;
    in_sums += tokens;
    if (s.sums && (in_sums >= kSumTokens || r >= last)) {
      flush_sums<W>(s, partial, p.D);
      in_sums = 0;
    }
  }
}

template <class S, int W>
void backward_task(void* arg, int64_t i, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  Strip s;
  s.d0 = i % call.num_strips * call.strip;
  s.count = p.D - s.d0 < call.strip ? p.D - s.d0 : call.strip;
  s.pitch = call.strip;
  s.silu = p.silu;
  s.weight = reinterpret_cast<float*>(call.scratch + slot * call.slot_bytes);
  s.inputs = s.weight + (W + 2) * s.pitch;  // one row more in front, the unused oldest input
  s.slopes = s.inputs + (W - 1) * s.pitch;
  s.sums = p.sums ? s.slopes + (W - 1) * s.pitch : nullptr;
  s.d_final = s.slopes + 2 * W * s.pitch;
  s.row = s.d_final + W * s.pitch;
  load_weight(call.args.weight, call.args.bias, s.d0, s.count, s.pitch, s.weight);
  const int64_t block = i / call.num_strips, begin = block * call.block;
  const int64_t end = begin + call.block < p.B * p.T ? begin + call.block : p.B * p.T;
  float* partial = p.sums ? call.partials + block * (W + 1) * p.D + s.d0 : nullptr;
  for (int j = 0; j <= W && p.sums; ++j) {
    clear(partial + j * p.D, s.count);
    clear(s.sums + j * s.pitch, s.count);
  }
  for (int64_t r = begin; r < end;) {
    const Span span = span_at(p, call.args.cu_seqlens, r);
    const int64_t last = span.end < end ? span.end : end;
    if (span.n >= 0)
      piece<S, W>(call, s, span, r, last, partial);
    else if (call.args.d_x.dtype)
      for (int64_t t = r; t < last; ++t)
        memset(row_at<typename S::Element>(call.args.d_x, p.T, t, s.d0), 0,
               size_t(s.count) * sizeof(typename S::Element));
    r = last;
  }
  if (call.stream) stream_fence();
}

using Task = void (*)(void*, int64_t, int64_t);

template <class S>
Task task_of(int64_t W) {
  constexpr Task tasks[] = {backward_task<S, 1>, backward_task<S, 2>, backward_task<S, 3>, backward_task<S, 4>,
                            backward_task<S, 5>, backward_task<S, 6>, backward_task<S, 7>, backward_task<S, 8>};
  return tasks[W - 1];
}

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_bwd(const Problem& p, const Plan& plan, const thalweg_short_conv_bwd_args& args, const Exec& exec) {
  const bool aligned = args.d_x.dtype && rows_are_lines(args.d_x);
  Call call{p,
            args,
            exec.workspace + plan.shared_bytes,
            plan.slot_bytes,
            reinterpret_cast<float*>(exec.workspace),
            plan.values[kBlock],
            plan.values[kStrip],
            (p.D + plan.values[kStrip] - 1) / plan.values[kStrip],
            plan.values[kStream] && aligned};
  const int64_t num_blocks = (p.B * p.T + call.block - 1) / call.block;
  const Task task = p.dtype == THALWEG_F32    ? task_of<F32>(p.W)
                    : p.dtype == THALWEG_BF16 ? task_of<Bf16>(p.W)
                                              : task_of<F16>(p.W);
  parallel_tasks(exec, num_blocks * call.num_strips, plan.num_slots, task, &call);
  write_empty_sequences(p, args);
  sum_partials(p, args, call.partials, num_blocks, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::short_conv
