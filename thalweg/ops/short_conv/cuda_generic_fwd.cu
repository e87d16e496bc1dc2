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
//          get NaN, rows past the last border 0; sequences with wrong slots get NaN, and their states are left alone.
// Measured the sm90 rows are the fast ones; see their headers
#include <stddef.h>

#include "thalweg/cuda/slots.cuh"
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

template <class A>
__global__ void __launch_bounds__(kChannels)
    decode_kernel(const Problem p, const Decode args, int64_t strips, const cuda::SlotUse* uses, int32_t* report) {
  const int W = int(p.W);
  const cuda::PoolSizes pool = {p.N, p.T, p.M};
  for (int64_t task = blockIdx.x; task < p.N * strips; task += gridDim.x) {
    const int64_t n = task / strips, d = (task - n * strips) * kChannels + threadIdx.x;
    if (d >= p.D) continue;
    const int64_t from = cuda::read_slot(args, n);
    const bool wrong = uses && cuda::slots_are_wrong(pool, args, uses, n, d == 0 ? report : nullptr);
    const bool runs = from >= 0 && !wrong;
    Window<A> window(args.weight, args.bias, W, d);
    for (int j = 0; j < W && runs; ++j) window.push(load_at<A>(args.state, state_at(args.state, from, d, j)));
    for (int64_t t = 0; t < p.T; ++t) {
      A y = wrong ? cuda::nan_of<A>() : A(0);
      if (runs) {
        window.push(load_at<A>(args.x, n * args.x.stride[0] + t * args.x.stride[1] + d));
        y = window.convolve(W);
        if (p.silu) y = silu(y);
      }
      store_at(args.y, n * args.y.stride[0] + t * args.y.stride[1] + d, y);
      const int64_t to = runs ? cuda::write_slot(pool, args, n, t, from) : -1;
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
  auto* uses = p.slots ? reinterpret_cast<cuda::SlotUse*>(exec.workspace) : nullptr;
  if (uses) cuda::count_slot_uses(exec, {p.N, p.T, p.M}, args, uses);
  cuda::launch(exec, "short_conv cuda_generic_decode", wide ? decode_kernel<double> : decode_kernel<float>,
               {cuda::capped_grid(p.N * strips)}, kChannels, 0, p, args, strips, uses, exec.report);
}

}  // namespace thalweg::short_conv
