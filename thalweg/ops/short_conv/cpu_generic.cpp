// cpu_generic – short convolution, forward, backward and decode, any dtype and strides.
//
// Math     pre_t = bias + sum_j weight_j xx_{t-(W-1)+j}    y_t = a(pre_t)
//          dpre_t = d_y_t a'(pre_t)    d_x_s = sum_j weight_j dpre_{s+(W-1)-j} + d_final_state
//          d_weight_j = sum_t dpre_t xx_{t-(W-1)+j}    d_bias = sum_t dpre_t
// Shapes   x,y [B T D]  weight [D W]  state [N D W]
// Takes    anything valid
// Threads  one task per (block of tokens of the flattened [B*T] axis, strip of 256 channels); decode:
//          per (sequence, strip). A task starts with the W-1 inputs before its block and, backward, runs
//          W-1 tokens past its end, whose dpre its last d_x need.
// Vectors  whatever the compiler makes of the loops over channels
// Tile     64 tokens forward, backward_block() tokens backward
// Scratch  43 rows of 256 numbers a slot; backward: partial sums [blocks][W+1][D], shared
// Numerics float32, float64 where x (or decode's state) is float64. Sums over tokens: 64 at a time, these
//          per block, blocks in order in float64; partitioned by size only.
// Traps    rows before a sequence are d_initial_state, which may have another dtype than d_x;
//          silu at minus infinity is its limit 0, not inf * 0.
// Measured the vector rows are the fast ones; see their headers
#include <algorithm>
#include <cmath>
#include <limits>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"
#include "thalweg/ops/short_conv/problem.h"

namespace thalweg::short_conv {
namespace {

constexpr int64_t kChannels = 256;
constexpr int64_t kForwardBlock = 64;
constexpr int64_t kSumTokens = 64;
constexpr int64_t kScratchRows = 3 * (kMaxW + 1) + 2 * kMaxW;

template <class A>
A finite(A x) {
  constexpr A limit = std::numeric_limits<A>::max();
  return x < -limit ? -limit : x > limit ? limit : x;
}

template <class A>
void apply_silu(A* x, int64_t count) {
  constexpr A limit = std::numeric_limits<A>::max();
  for (int64_t i = 0; i < count; ++i) x[i] = (x[i] < -limit ? -limit : x[i]) / (1 + std::exp(-x[i]));
}

template <class A>
A silu_slope(A pre) {
  A s = 1 / (1 + std::exp(-pre));
  return s * (1 + finite(pre) * (1 - s));
}

// A strip of channels of one task, and its scratch rows.
template <class A>
struct Strip {
  int64_t W, d0, count;
  A* weight;   // [W + 1], bias last
  A* input;    // [W] ring: token r is row r mod W
  A* slope;    // [W] ring of dpre
  A* sums;     // [W + 1]
  A* d_final;  // [W]
  A* row;      // [1]

  Strip(const Problem& p, int64_t strip, char* scratch)
      : W(p.W), d0(strip * kChannels), count(std::min(kChannels, p.D - strip * kChannels)) {
    weight = reinterpret_cast<A*>(scratch);
    input = weight + (W + 1) * kChannels;
    slope = input + W * kChannels;
    sums = slope + W * kChannels;
    d_final = sums + (W + 1) * kChannels;
    row = d_final + W * kChannels;
  }
  A* ring(A* base, int64_t r) const { return base + ((r % W) + W) % W * kChannels; }
};

template <class A, class Args>
void load_input(const Problem& p, const Args& args, const Strip<A>& s, const Span& span, int64_t r) {
  A* out = s.ring(s.input, r);
  const thalweg_tensor& state = args.initial_state;
  if (r >= span.begin)
    load_row(args.x, token_offset(args.x, p.T, r) + s.d0, 1, s.count, out);
  else if (present(state))
    load_row(state, span.n * state.stride[0] + s.d0 * state.stride[1] + (s.W + r - span.begin) * state.stride[2],
             state.stride[1], s.count, out);
  else
    std::fill_n(out, s.count, A(0));
}

template <class A>
void convolve(const Strip<A>& s, int64_t r, A* pre) {
  std::copy_n(s.weight + s.W * kChannels, s.count, pre);
  for (int64_t j = 0; j < s.W; ++j) {
    const A* w = s.weight + j * kChannels;
    const A* x = s.ring(s.input, r - (s.W - 1) + j);
    for (int64_t c = 0; c < s.count; ++c) pre[c] += w[c] * x[c];
  }
}

template <class Args>
struct Call {
  const Problem& p;
  const Args& args;
  char* scratch;  // slot_bytes a slot
  int64_t slot_bytes;
  void* partials;
  int64_t block, num_strips;
};

// Calls body(span, first, last) for the pieces of sequences in block i.
template <class Args, class Body>
void for_pieces(const Call<Args>& call, int64_t i, Body body) {
  const int64_t end = std::min((i + 1) * call.block, call.p.B * call.p.T);
  for (int64_t r = i * call.block; r < end;) {
    const Span span = span_at(call.p, call.args.cu_seqlens, r);
    const int64_t last = std::min(span.end, end);
    body(span, r, last);
    r = last;
  }
}

template <class A>
void forward_task(void* arg, int64_t i, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_short_conv_fwd_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  Strip<A> s(p, i % call.num_strips, call.scratch + slot * call.slot_bytes);
  load_weight(args.weight, args.bias, s.d0, s.count, kChannels, s.weight);
  for_pieces(call, i / call.num_strips, [&](const Span& span, int64_t first, int64_t last) {
    for (int64_t r = first - (p.W - 1); r < first && span.n >= 0; ++r) load_input(p, args, s, span, r);
    for (int64_t r = first; r < last; ++r) {
      if (span.n >= 0) {
        load_input(p, args, s, span, r);
        convolve(s, r, s.row);
        if (p.silu) apply_silu(s.row, s.count);
      } else {
        std::fill_n(s.row, s.count, A(0));
      }
      store_row(args.y, token_offset(args.y, p.T, r) + s.d0, 1, s.count, s.row);
    }
  });
}

// dpre of token r into its ring row; 0 past the sequence.
template <class A>
void load_slope(const Problem& p, const thalweg_short_conv_bwd_args& args, const Strip<A>& s, const Span& span,
                int64_t r) {
  A* out = s.ring(s.slope, r);
  if (r >= span.end || !present(args.d_y)) {
    if (r < span.end) load_input(p, args, s, span, r);
    std::fill_n(out, s.count, A(0));
    return;
  }
  load_input(p, args, s, span, r);
  load_row(args.d_y, token_offset(args.d_y, p.T, r) + s.d0, 1, s.count, out);
  if (!p.silu) return;
  convolve(s, r, s.row);
  for (int64_t c = 0; c < s.count; ++c) out[c] *= silu_slope(s.row[c]);
}

// The gradient of input r, a token or, before the sequence, a slot of its initial state.
template <class A>
void store_input_gradient(const Problem& p, const thalweg_short_conv_bwd_args& args, const Strip<A>& s,
                          const Span& span, int64_t r) {
  const thalweg_tensor& state = args.d_initial_state;
  if (r >= span.begin ? !present(args.d_x) : !present(state)) return;
  const int64_t slot = r - (span.end - s.W);
  if (slot >= 0)
    std::copy_n(s.d_final + slot * kChannels, s.count, s.row);
  else
    std::fill_n(s.row, s.count, A(0));
  for (int64_t j = 0; j < s.W; ++j) {
    const A* w = s.weight + j * kChannels;
    const A* g = s.ring(s.slope, r + (s.W - 1) - j);
    for (int64_t c = 0; c < s.count; ++c) s.row[c] += w[c] * g[c];
  }
  if (r >= span.begin)
    store_row(args.d_x, token_offset(args.d_x, p.T, r) + s.d0, 1, s.count, s.row);
  else
    store_slot(s.row, state, span.n, s.W + r - span.begin, s.d0, s.count);
}

template <class A>
void add_sums(const Strip<A>& s, int64_t r) {
  const A* g = s.ring(s.slope, r);
  for (int64_t j = 0; j <= s.W; ++j) {
    A* sum = s.sums + j * kChannels;
    const A* x = s.ring(s.input, r - (s.W - 1) + j);
    if (j == s.W)
      for (int64_t c = 0; c < s.count; ++c) sum[c] += g[c];
    else
      for (int64_t c = 0; c < s.count; ++c) sum[c] += g[c] * x[c];
  }
}

// Adds sums to the block's partial sums (or starts them) and clears them.
template <class A>
void flush_sums(const Problem& p, const Strip<A>& s, A* partial) {
  for (int64_t j = 0; j <= s.W; ++j)
    for (int64_t c = 0; c < s.count; ++c) {
      partial[j * p.D + c] += s.sums[j * kChannels + c];
      s.sums[j * kChannels + c] = 0;
    }
}

template <class A>
void backward_piece(const Problem& p, const thalweg_short_conv_bwd_args& args, const Strip<A>& s, const Span& span,
                    int64_t first, int64_t last, A* partial) {
  if (span.n < 0) {
    std::fill_n(s.row, s.count, A(0));
    for (int64_t r = first; r < last && present(args.d_x); ++r)
      store_row(args.d_x, token_offset(args.d_x, p.T, r) + s.d0, 1, s.count, s.row);
    return;
  }
  load_state(args.d_final_state, p.W, span.n, s.d0, s.count, kChannels, s.d_final);
  for (int64_t r = first - (p.W - 1); r < first; ++r) {
    load_input(p, args, s, span, r);
    std::fill_n(s.ring(s.slope, r), s.count, A(0));
  }
  if (first == span.begin && present(args.d_initial_state)) {  // slot 0 is kept by no token
    std::fill_n(s.row, s.count, A(0));
    store_slot(s.row, args.d_initial_state, span.n, 0, s.d0, s.count);
  }
  for (int64_t r = first; r < last + (p.W - 1); ++r) {
    load_slope(p, args, s, span, r);
    if (r < last && p.sums) {
      add_sums(s, r);
      if ((r - first + 1) % kSumTokens == 0 || r + 1 == last) flush_sums(p, s, partial);
    }
    const int64_t done = r - (p.W - 1);  // all tokens that read this input are known
    if (done >= first || first == span.begin) store_input_gradient(p, args, s, span, done);
  }
}

template <class A>
void backward_task(void* arg, int64_t i, int64_t slot) {
  const auto& call = *static_cast<const Call<thalweg_short_conv_bwd_args>*>(arg);
  const Problem& p = call.p;
  Strip<A> s(p, i % call.num_strips, call.scratch + slot * call.slot_bytes);
  const int64_t block = i / call.num_strips;
  A* partial = p.sums ? static_cast<A*>(call.partials) + block * (p.W + 1) * p.D + s.d0 : nullptr;
  if (p.sums)
    for (int64_t j = 0; j <= p.W; ++j) {
      std::fill_n(partial + j * p.D, s.count, A(0));
      std::fill_n(s.sums + j * kChannels, s.count, A(0));
    }
  load_weight(call.args.weight, call.args.bias, s.d0, s.count, kChannels, s.weight);
  for_pieces(call, block, [&](const Span& span, int64_t first, int64_t last) {
    backward_piece(p, call.args, s, span, first, last, partial);
  });
}

template <class A>
void decode_task(void* arg, int64_t i, int64_t slot_of_thread) {
  const auto& call = *static_cast<const Call<thalweg_short_conv_decode_args>*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const int64_t n = i / call.num_strips;
  Strip<A> s(p, i % call.num_strips, call.scratch + slot_of_thread * call.slot_bytes);
  const int64_t slot = present(args.read_slots) ? int_at(args.read_slots, n) : n;
  load_weight(args.weight, args.bias, s.d0, s.count, kChannels, s.weight);
  // Token t of this call is row t of the ring; slot j of the state it started from is row j - W.
  if (slot >= 0) load_state(args.state, p.W, slot, s.d0, s.count, kChannels, s.input);
  for (int64_t t = 0; t < p.T; ++t) {
    const int64_t y_offset = n * args.y.stride[0] + t * args.y.stride[1] + s.d0;
    if (slot < 0) {
      std::fill_n(s.row, s.count, A(0));
      store_row(args.y, y_offset, 1, s.count, s.row);
      continue;
    }
    load_row(args.x, n * args.x.stride[0] + t * args.x.stride[1] + s.d0, 1, s.count, s.ring(s.input, t));
    convolve(s, t, s.row);
    if (p.silu) apply_silu(s.row, s.count);
    store_row(args.y, y_offset, 1, s.count, s.row);
    const int64_t to = present(args.write_slots) ? int_at(args.write_slots, n, t) : t + 1 == p.T ? slot : -1;
    for (int64_t j = 0; j < p.W && to >= 0; ++j)
      store_slot(s.ring(s.input, t - (p.W - 1) + j), args.state, to, j, s.d0, s.count);
  }
}

template <class Args>
Call<Args> make_call(const Problem& p, const Plan& plan, const Args& args, const Exec& exec, int64_t block) {
  return {p,
          args,
          exec.workspace + plan.shared_bytes,
          plan.slot_bytes,
          exec.workspace,
          block,
          (p.D + kChannels - 1) / kChannels};
}

int64_t num_blocks(const Problem& p, int64_t block) { return (p.B * p.T + block - 1) / block; }

}  // namespace

int64_t cpu_generic_slot_bytes(const Problem& p) {
  const bool wide = p.dtype == THALWEG_F64 || p.state_f64;
  return kScratchRows * kChannels * int64_t(wide ? sizeof(double) : sizeof(float));
}

void cpu_generic_fwd(const Problem& p, const Plan& plan, const thalweg_short_conv_fwd_args& args, const Exec& exec) {
  auto call = make_call(p, plan, args, exec, kForwardBlock);
  parallel_tasks(exec, num_blocks(p, kForwardBlock) * call.num_strips, plan.num_slots,
                 p.dtype == THALWEG_F64 ? forward_task<double> : forward_task<float>, &call);
  write_final_states(p, args, exec);
}

void cpu_generic_bwd(const Problem& p, const Plan& plan, const thalweg_short_conv_bwd_args& args, const Exec& exec) {
  const bool wide = p.dtype == THALWEG_F64;
  auto call = make_call(p, plan, args, exec, backward_block(p));
  const int64_t blocks = num_blocks(p, call.block);
  parallel_tasks(exec, blocks * call.num_strips, plan.num_slots, wide ? backward_task<double> : backward_task<float>,
                 &call);
  write_empty_sequences(p, args);
  if (wide)
    sum_partials(p, args, static_cast<const double*>(call.partials), blocks, exec);
  else
    sum_partials(p, args, static_cast<const float*>(call.partials), blocks, exec);
}

void cpu_generic_decode(const Problem& p, const Plan& plan, const thalweg_short_conv_decode_args& args,
                        const Exec& exec) {
  auto call = make_call(p, plan, args, exec, 1);
  parallel_tasks(exec, p.N * call.num_strips, plan.num_slots,
                 p.dtype == THALWEG_F64 || p.state_f64 ? decode_task<double> : decode_task<float>, &call);
}

}  // namespace thalweg::short_conv
