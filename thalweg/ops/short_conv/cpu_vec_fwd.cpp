// cpu_vec_fwd – short convolution, forward, vectors over channels.
//
// Math     pre_t = bias + sum_j weight_j xx_{t-(W-1)+j}    y_t = silu(pre_t), or pre_t
// Shapes   x,y [B T D]  weight [D W]  bias [D]  initial_state,final_state [N D W]
// Takes    x of f32, bf16, f16, rows any stride apart; W 1 to 8; weight, bias and states of any float dtype
// Threads  one task per (block of tokens of the flattened [B*T] axis, strip of channels). A block walks the
//          sequences in it; each piece starts with the W-1 inputs before it, read again from x or the state.
// Vectors  over channels. Eight tokens of one vector of channels at a time: W weights and W-1 inputs from
//          scratch, 8 rows of x, 8 outputs; what is left of a piece goes token by token through the same code,
//          so that y does not depend on where blocks end.
// Tile     block 16 to 256 tokens (Plan.values[kBlock]), strip about 1024 channels (kStrip)
// Scratch  per slot (2 W + 1) rows of a strip: weight and bias as floats, the last W inputs as floats
// Numerics float32; taps in order of j from the bias up, by FMA; sigmoid.h for SiLU; rounded once, to y
// Traps    At 8192 channels the rows of x are 32 KiB apart and fall into the same L1 sets: history is kept in
//          scratch, never read from x a second time. Streamed stores need whole lines: where a vector is less
//          than 64 bytes of y (AVX2, 16-bit storage), 8 lines are put together in a tile first. Prefetches run
//          8 tokens ahead, past the block's end too; a prefetch cannot fault.
// Measured prediction: bound by memory on AVX-512 (12 cycles a vector of SiLU against 20 of traffic), by
//          SiLU on AVX2. Zen 5, B1 T4096 D8192 W4 f32, 2 threads, machine idle: 1.29 times a non-temporal copy
//          of x on AVX-512, 1.70 on AVX2, with simd.h's exp and a division. One thread's CPU time, T2048, other
//          work beside it: AVX-512 5.3 ms with SiLU and 5.5 without (memory), 6.1 with exp and division; AVX2
//          10.8 ms, 14.2 before sigmoid.h; copy 3.0.
#include "thalweg/ops/short_conv/problem.h"
#include "thalweg/ops/short_conv/vec.h"

namespace thalweg::short_conv {
namespace {

constexpr int kGroup = 8;  // tokens of a column at a time

struct Call {
  const Problem& p;
  const thalweg_short_conv_fwd_args& args;
  char* scratch;
  int64_t slot_bytes;
  int64_t block, strip, num_strips;
  bool stream;
};

// Rows of x and y of a group of tokens, at the strip's first channel, and the strip's scratch.
template <class S>
struct Group {
  const typename S::Element* x;
  typename S::Element* y;
  int64_t x_stride, y_stride;
  const float* weight;  // [W + 1][pitch], bias last
  float* history;       // [W - 1][pitch] inputs before the group, oldest first; left as those before the next
  int64_t pitch;
  bool silu;
};

// One vector of channels, G tokens.
template <class S, int W, int G, bool whole>
[[gnu::always_inline]] inline void column(const Group<S>& g, int64_t c, typename S::Element* y, int64_t y_stride,
                                          int64_t n) {
  vf w[W], x[W - 1 + G];
  const vf bias = load(g.weight + W * g.pitch + c);
#pragma GCC unroll 8
  for (int j = 0; j < W; ++j) w[j] = load(g.weight + j * g.pitch + c);
#pragma GCC unroll 8
  for (int j = 0; j < W - 1; ++j) x[j] = load(g.history + j * g.pitch + c);
#pragma GCC unroll 8
  for (int i = 0; i < G; ++i) {
    x[W - 1 + i] = get<S, whole>(g.x + i * g.x_stride + c, n);
    prefetch(g.x + (i + G) * g.x_stride + c);
  }
#pragma GCC unroll 8
  for (int i = 0; i < G; ++i) {
    vf pre = bias;
#pragma GCC unroll 8
    for (int j = 0; j < W; ++j) pre = fma(w[j], x[i + j], pre);
    put<S, whole>(y + i * y_stride, g.silu ? fast_silu(pre) : pre, n);
  }
#pragma GCC unroll 8
  for (int j = 0; j < W - 1; ++j) store(g.history + j * g.pitch + c, x[G + j]);
}

template <class S, int W, int G, bool kStreams>
void convolve(const Group<S>& g, int64_t count) {
  constexpr int64_t line = kLineBytes / int64_t(sizeof(typename S::Element));
  int64_t c = 0;
  if constexpr (kStreams) {
    alignas(64) typename S::Element tile[G * line];
    for (; c + line <= count; c += line) {
      for (int64_t v = 0; v < line; v += kLanes) column<S, W, G, true>(g, c + v, tile + v, line, kLanes);
      for (int i = 0; i < G; ++i) stream_line(g.y + i * g.y_stride + c, tile + i * line);
    }
  }
  for (; c + kLanes <= count; c += kLanes) column<S, W, G, true>(g, c, g.y + c, g.y_stride, kLanes);
  if (c < count) column<S, W, G, false>(g, c, g.y + c, g.y_stride, count - c);
}

template <class S, int W>
void forward_task(void* arg, int64_t i, int64_t slot) {
  using Element = typename S::Element;
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const thalweg_tensor &tx = call.args.x, &ty = call.args.y;
  const int64_t d0 = i % call.num_strips * call.strip;
  const int64_t count = p.D - d0 < call.strip ? p.D - d0 : call.strip;
  float* weight = reinterpret_cast<float*>(call.scratch + slot * call.slot_bytes);
  float* history = weight + (W + 1) * call.strip;
  load_weight(call.args.weight, call.args.bias, d0, count, call.strip, weight);
  const int64_t begin = i / call.num_strips * call.block;
  const int64_t end = begin + call.block < p.B * p.T ? begin + call.block : p.B * p.T;
  for (int64_t r = begin; r < end;) {
    const Span span = span_at(p, call.args.cu_seqlens, r);
    const int64_t last = span.end < end ? span.end : end;
    Element* y = row_at<Element>(ty, p.T, r, d0);
    if (span.n < 0) {
      for (; r < last; ++r, y += ty.stride[1]) memset(y, 0, size_t(count) * sizeof(Element));
      continue;
    }
    load_history(p, tx, call.args.initial_state, span, r, d0, count, call.strip, history);
    const Element* x = row_at<const Element>(tx, p.T, r, d0);
    Group<S> g{x, y, tx.stride[1], ty.stride[1], weight, history + call.strip, call.strip, p.silu};
    if constexpr (is_usual(W))
      for (; r + kGroup <= last; r += kGroup, g.x += kGroup * g.x_stride, g.y += kGroup * g.y_stride) {
        if (call.stream) convolve<S, W, kGroup, true>(g, count);
        else convolve<S, W, kGroup, false>(g, count);
      }
    for (; r < last; ++r, g.x += g.x_stride, g.y += g.y_stride) convolve<S, W, 1, false>(g, count);
  }
  if (call.stream) stream_fence();
}

using Task = void (*)(void*, int64_t, int64_t);

template <class S>
Task task_of(int64_t W) {
  constexpr Task tasks[] = {forward_task<S, 1>, forward_task<S, 2>, forward_task<S, 3>, forward_task<S, 4>,
                            forward_task<S, 5>, forward_task<S, 6>, forward_task<S, 7>, forward_task<S, 8>};
  return tasks[W - 1];
}

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_fwd(const Problem& p, const Plan& plan, const thalweg_short_conv_fwd_args& args, const Exec& exec) {
  Call call{p,
            args,
            exec.workspace + plan.shared_bytes,
            plan.slot_bytes,
            plan.values[kBlock],
            plan.values[kStrip],
            (p.D + plan.values[kStrip] - 1) / plan.values[kStrip],
            plan.values[kStream] && rows_are_lines(args.y)};
  const int64_t num_blocks = (p.B * p.T + call.block - 1) / call.block;
  const Task task = p.dtype == THALWEG_F32    ? task_of<F32>(p.W)
                    : p.dtype == THALWEG_BF16 ? task_of<Bf16>(p.W)
                                              : task_of<F16>(p.W);
  parallel_tasks(exec, num_blocks * call.num_strips, plan.num_slots, task, &call);
  write_final_states(p, args, exec);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::short_conv
