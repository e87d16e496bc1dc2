// sm90_vec_fwd – short convolution, forward, two channels a thread.
//
// Math     pre_t = bias + sum_j weight_j xx_{t-(W-1)+j}    y_t = a(pre_t)
// Shapes   x,y [B T D]  weight [D W]  state [N D W]
// Takes    x of f32, bf16, f16, rows at multiples of 16 bytes, D a multiple of 8, W 2 to 4; packed or not; states and
//          parameters of any dtype and strides
// Grid     blocks of (runs of tokens, strip of at most 128 channels); final_state of short sequences on its own
// Tile     256 threads as lanes x packs of 2 channels; a lane walks over its run of tokens, kTokens at a time
// Smem     none
// Regs     80 at most; the test cuda_ptxas prints each
// Order    bias, then taps from the oldest input on
// Numerics float32 (sm90/sigmoid.cuh), rounded once; states are copies
// Traps    final_state comes from the registers only where all of it is inputs of this call; otherwise from
//          final_state_kernel, through float64. The lengths of packed sequences are known on the device alone.
// Measured verified on an H200; not timed in a committed record
#include <stddef.h>

#include "thalweg/ops/short_conv/cuda_final_state.cuh"
#include "thalweg/ops/short_conv/sm90_packs.cuh"

namespace thalweg::short_conv {
namespace {

using Fwd = thalweg_short_conv_fwd_args;

template <class E>
constexpr int kTokens = 16 / sizeof(E);  // loaded at once

template <int W>
__device__ void store_final_state(const thalweg_tensor& state, const Inputs<W>& inputs, int64_t n, int64_t d) {
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int j = 0; j < W; ++j) store_at(state, state_at(state, n, d + i, j), inputs.x[j][i]);
}

// Tokens first to last of one sequence.
template <class E, int W>
__device__ __forceinline__ void forward_piece(const Problem& p, const Fwd& args, const Taps<W>& taps, const Sequence& s,
                                              int64_t first, int64_t last, int64_t d) {
  constexpr int kAhead = kTokens<E>;
  Inputs<W> inputs;
  inputs.template start<E>(p, args.x, args.initial_state, s, first, d);
  const E* x = static_cast<const E*>(args.x.data) + token_at(args.x, p.T, first) + d;
  E* y = static_cast<E*>(args.y.data) + token_at(args.y, p.T, first) + d;
  for (int left = int(last - first); left > 0; left -= kAhead) {
    cuda::Pack<E, N> packs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < left) packs[i] = cuda::load_pack<E, N>(x + i * args.x.stride[1]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i >= left) break;
      float next[N], out[N];
      cuda::widen(packs[i], next);
      inputs.push(next);
      inputs.convolve(taps, out);
      if (p.silu) {
#pragma unroll
        for (int c = 0; c < N; ++c) out[c] = cuda::fast_silu(out[c]);
      }
      cuda::store_pack(y + i * args.y.stride[1], cuda::narrow<E>(out));
    }
    x += kAhead * args.x.stride[1];
    y += kAhead * args.y.stride[1];
  }
  if (last == s.end && s.end - s.begin >= W && is_there(args.final_state))
    store_final_state(args.final_state, inputs, s.n, d);
}

template <class E, int W>
__global__ void __launch_bounds__(kThreads, 3)
    forward_kernel(const Problem p, const Fwd args, const Cut cut, const int64_t run, const cuda::Span* spans) {
  const int pack = int(threadIdx.x) % cut.packs, lane = int(threadIdx.x) / cut.packs;
  const int64_t tokens = p.B * p.T, runs = (tokens + run - 1) / run;
  const int64_t tasks = (runs + cut.lanes - 1) / cut.lanes * cut.strips;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t tile = task / cut.strips, d = ((task - tile * cut.strips) * cut.packs + pack) * N;
    const int64_t from = (tile * cut.lanes + lane) * run, end = from + run < tokens ? from + run : tokens;
    if (d >= p.D || from >= end) continue;
    const Taps<W> taps(args.weight, args.bias, d);
    for (int64_t r = from; r < end;) {
      const Sequence s = sequence_at(p, spans, r);
      const int64_t last = s.end < end ? s.end : end;
      if (s.n < 0 || !s.valid)
        fill_rows<E>(args.y, p.T, r, last, d, s.valid ? 0.f : cuda::nan_of<float>());
      else
        forward_piece<E, W>(p, args, taps, s, r, last, d);
      r = last;
    }
  }
}

template <class E, int W>
void forward(const Problem& p, const Plan& plan, const Fwd& args, const Exec& exec) {
  const cuda::Span* spans = make_spans(p, args.cu_seqlens, offsetof(Fwd, cu_seqlens), exec);
  const Cut cut = cut_of(p);
  const int64_t run = plan.values[kBlock], runs = cuda::ceil_div(p.B * p.T, run);
  cuda::launch(exec, "short_conv sm90_vec_fwd", forward_kernel<E, W>,
               {cuda::capped_grid(cuda::ceil_div(runs, cut.lanes) * cut.strips)}, kThreads, 0, p, args, cut, run,
               spans);
  if (p.packed || p.T < W) store_final_states(p, args, spans, W, exec);
}

template <class E>
void forward(const Problem& p, const Plan& plan, const Fwd& args, const Exec& exec) {
  if (p.W == 4)
    forward<E, 4>(p, plan, args, exec);
  else if (p.W == 3)
    forward<E, 3>(p, plan, args, exec);
  else
    forward<E, 2>(p, plan, args, exec);
}

}  // namespace

void sm90_vec_fwd(const Problem& p, const Plan& plan, const Fwd& args, const Exec& exec) {
  if (p.dtype == THALWEG_F32)
    forward<float>(p, plan, args, exec);
  else if (p.dtype == THALWEG_BF16)
    forward<__nv_bfloat16>(p, plan, args, exec);
  else
    forward<__half>(p, plan, args, exec);
}

}  // namespace thalweg::short_conv
