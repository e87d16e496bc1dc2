// cuda_generic – short convolution, forward and decode, any dtype and strides.
//
// Math     pre_t = bias + sum_j weight_j xx_{t-(W-1)+j}    y_t = a(pre_t)
// Shapes   x,y [B T D]  weight [D W]  state [N D W], decode: pool [M D W]
// Takes    anything valid
// Grid     forward: one block per (64 tokens of the flattened [B*T] axis, strip of 128 channels); final_state and
//          decode: per (sequence, strip)
// Tile     one channel a thread; the last inputs in registers
// Smem     none
// Regs     not watched
// Order    bias, then taps from the oldest input on; the same in both passes
// Numerics float32, float64 where x or decode's pool is; states are copies
// Traps    taps past W are skipped, not multiplied by 0: an input there may be infinite. Sequences with wrong borders
//          get NaN, rows past the last border 0; a slot outside the pool is neither read nor written.
// Measured the sm90 rows are the fast ones; see their headers
#include <stddef.h>

#include "thalweg/ops/short_conv/cuda_final_state.cuh"

namespace thalweg::short_conv {
namespace {

constexpr int64_t kTokens = 64;  // of a block

template <class A>
__global__ void __launch_bounds__(kChannels)
    forward_kernel(const Problem p, const thalweg_short_conv_fwd_args args, const cuda::Span* spans, int64_t strips) {
  const int W = int(p.W);
  const int64_t tokens = p.B * p.T, tasks = (tokens + kTokens - 1) / kTokens * strips;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t block = task / strips, d = (task - block * strips) * kChannels + threadIdx.x;
    if (d >= p.D) continue;
    const int64_t end = (block + 1) * kTokens < tokens ? (block + 1) * kTokens : tokens;
    Window<A> window(args.weight, args.bias, W, d);
    Sequence s = {-1, 0, 0, true};
    for (int64_t r = block * kTokens; r < end; ++r) {
      if (r >= s.end) {
        s = sequence_at(p, spans, r);
        for (int64_t i = r - (W - 1); i < r && s.n >= 0; ++i)
          window.push(input_at<A>(p, args.x, args.initial_state, s, i, d));
      }
      A y = s.valid ? A(0) : cuda::nan_of<A>();
      if (s.n >= 0 && s.valid) {
        window.push(input_at<A>(p, args.x, args.initial_state, s, r, d));
        y = window.convolve(W);
        if (p.silu) y = silu(y);
      }
      store_at(args.y, token_at(args.y, p.T, r) + d, y);
    }
  }
}

using Decode = thalweg_short_conv_decode_args;

// A slot, -1 for none, or -2 and a report when it is outside the pool.
__device__ int64_t slot_at(const Problem& p, int64_t slot, int32_t* report, int64_t field, int64_t position) {
  if (slot >= -1 && slot < p.M) return slot;
  cuda::report_fault(report, Fault::kSlot, field, position, slot);
  return -2;
}

template <class A>
__global__ void __launch_bounds__(kChannels)
    decode_kernel(const Problem p, const Decode args, int64_t strips, int32_t* report) {
  const int W = int(p.W);
  for (int64_t task = blockIdx.x; task < p.N * strips; task += gridDim.x) {
    const int64_t n = task / strips, d = (task - n * strips) * kChannels + threadIdx.x;
    if (d >= p.D) continue;
    int64_t slot = n;
    if (is_there(args.read_slots))
      slot = slot_at(p, cuda::int_at(args.read_slots, n), report, offsetof(Decode, read_slots), n);
    Window<A> window(args.weight, args.bias, W, d);
    for (int j = 0; j < W && slot >= 0; ++j) window.push(load_at<A>(args.state, state_at(args.state, slot, d, j)));
    for (int64_t t = 0; t < p.T; ++t) {
      A y = slot == -1 ? A(0) : cuda::nan_of<A>();
      if (slot >= 0) {
        window.push(load_at<A>(args.x, n * args.x.stride[0] + t * args.x.stride[1] + d));
        y = window.convolve(W);
        if (p.silu) y = silu(y);
      }
      store_at(args.y, n * args.y.stride[0] + t * args.y.stride[1] + d, y);
      if (slot < 0) continue;
      int64_t to = t + 1 == p.T ? slot : -1;
      if (is_there(args.write_slots))
        to = slot_at(p, cuda::int_at(args.write_slots, n, t), report, offsetof(Decode, write_slots), n * p.T + t);
#pragma unroll
      for (int j = 0; j < kMaxW; ++j)
        if (to >= 0 && j >= kMaxW - W) store_at(args.state, state_at(args.state, to, d, j - (kMaxW - W)), window.x[j]);
    }
  }
}

}  // namespace

void cuda_generic_fwd(const Problem& p, const Plan&, const thalweg_short_conv_fwd_args& args, const Exec& exec) {
  const cuda::Span* spans = make_spans(p, args.cu_seqlens, offsetof(thalweg_short_conv_fwd_args, cu_seqlens), exec);
  const int64_t strips = strips_of(p), tasks = cuda::ceil_div(p.B * p.T, kTokens) * strips;
  cuda::launch(exec, "short_conv cuda_generic_fwd",
               p.dtype == THALWEG_F64 ? forward_kernel<double> : forward_kernel<float>, {cuda::capped_grid(tasks)},
               kChannels, 0, p, args, spans, strips);
  store_final_states(p, args, spans, INT64_MAX, exec);
}

void cuda_generic_decode(const Problem& p, const Plan&, const thalweg_short_conv_decode_args& args, const Exec& exec) {
  const bool wide = p.dtype == THALWEG_F64 || p.state_f64;
  const int64_t strips = strips_of(p);
  cuda::launch(exec, "short_conv cuda_generic_decode", wide ? decode_kernel<double> : decode_kernel<float>,
               {cuda::capped_grid(p.N * strips)}, kChannels, 0, p, args, strips, exec.report);
}

}  // namespace thalweg::short_conv
