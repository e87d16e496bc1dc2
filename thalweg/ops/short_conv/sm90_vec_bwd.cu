// sm90_vec_bwd – short convolution, backward, two channels a thread.
//
// Math     dpre_t = d_y_t a'(pre_t)    d_x_s = sum_j weight_j dpre_{s+(W-1)-j} + d_final_state
//          d_weight_j = sum_t dpre_t xx_{t-(W-1)+j}    d_bias = sum_t dpre_t
// Shapes   x,d_y,d_x [B T D]  weight [D W]  state [N D W]
// Takes    as sm90_vec_fwd
// Grid     blocks of (block of tokens of CudaLayout, strip of at most 128 channels)
// Tile     256 threads as lanes x packs of 2 channels; a lane walks over its part of the block's tokens and W-1 more,
//          whose dpre its last d_x need
// Smem     2 KiB: sums of the lanes, one row of d_weight at a time; a block's go to the workspace as float32
// Regs     128 at most; the test cuda_ptxas prints each
// Order    a lane's tokens ascending, lanes in order, then column_sums.cuh over blocks
// Numerics float32 (sm90/sigmoid.cuh), rounded once; sums float32 over a lane's tokens, then float64
// Traps    rows before a sequence are d_initial_state, which may have another dtype than d_x.
// Measured verified on an H200; not timed in a committed record
#include <stddef.h>

#include "thalweg/ops/short_conv/cuda_sums.cuh"
#include "thalweg/ops/short_conv/sm90_packs.cuh"

namespace thalweg::short_conv {
namespace {

using Bwd = thalweg_short_conv_bwd_args;

constexpr int kAhead = 4;  // tokens loaded at once

template <class E, int W>
struct Walker {
  const Problem& p;
  const Bwd& args;
  const Taps<W>& taps;
  int64_t d;
  float sums[W + 1][N];  // of d_weight; last: d_bias
  Inputs<W> inputs;
  float slopes[W][N];  // dpre of the last tokens, the newest first

  // dpre of a token whose input is pushed already, from d_y in place.
  __device__ __forceinline__ void slope_of(float (&d_y)[N]) const {
    if (!p.silu) return;
    float pre[N], y;
    inputs.convolve(taps, pre);
#pragma unroll
    for (int i = 0; i < N; ++i) d_y[i] *= cuda::fast_silu_slope(pre[i], &y);
  }

  __device__ __forceinline__ void push_slope(const float (&next)[N]) {
#pragma unroll
    for (int j = W - 1; j > 0; --j)
#pragma unroll
      for (int i = 0; i < N; ++i) slopes[j][i] = slopes[j - 1][i];
#pragma unroll
    for (int i = 0; i < N; ++i) slopes[0][i] = next[i];
  }

  __device__ __forceinline__ void add() {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < W; ++j) sums[j][i] = fmaf(slopes[0][i], inputs.x[j][i], sums[j][i]);
      sums[W][i] += slopes[0][i];
    }
  }

  // The gradient of input r, W-1 tokens ago: a token or, before the sequence, a slot of its initial state.
  __device__ __forceinline__ void store_input_gradient(const Sequence& s, int64_t r, E* d_x) {
    float out[N];
    const int64_t slot = r - (s.end - W);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out[i] = 0.f;
      if (slot >= 0 && is_there(args.d_final_state))
        out[i] = load_at<float>(args.d_final_state, state_at(args.d_final_state, s.n, d + i, slot));
#pragma unroll
      for (int j = 0; j < W; ++j) out[i] = fmaf(taps.weight[j][i], slopes[j][i], out[i]);
    }
    if (r >= s.begin) {
      if (args.d_x.data) cuda::store_pack(d_x, cuda::narrow<E>(out));
      return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (is_there(args.d_initial_state))
        store_at(args.d_initial_state, state_at(args.d_initial_state, s.n, d + i, W + r - s.begin), out[i]);
  }

  // Tokens first to last of one sequence.
  __device__ void piece(const Sequence& s, int64_t first, int64_t last) {
    inputs.template start<E>(p, args.x, args.initial_state, s, first, d);
#pragma unroll
    for (int j = 0; j < W; ++j)
#pragma unroll
      for (int i = 0; i < N; ++i) slopes[j][i] = 0.f;
    const bool starts = first == s.begin;
    if (starts && is_there(args.d_initial_state))  // slot 0 is kept by no token
#pragma unroll
      for (int i = 0; i < N; ++i) store_at(args.d_initial_state, state_at(args.d_initial_state, s.n, d + i, 0), 0.f);
    const E* x = static_cast<const E*>(args.x.data) + token_at(args.x, p.T, first) + d;
    const E* d_y = static_cast<const E*>(args.d_y.data) + token_at(args.d_y, p.T, first) + d;
    E* d_x = static_cast<E*>(args.d_x.data) + token_at(args.d_x, p.T, first) + d;
    const int count = int(last - first);
    // Tokens past the sequence have dpre 0; those past `last` are another lane's for the sums.
    const int readable = int(s.end - first < count + W - 1 ? s.end - first : count + W - 1);
    for (int t = 0; t < count + W - 1; t += kAhead) {
      cuda::Pack<E, N> xs[kAhead], ys[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (t + i >= readable) break;
        xs[i] = cuda::load_pack<E, N>(x + (t + i) * args.x.stride[1]);
        if (args.d_y.data) ys[i] = cuda::load_pack<E, N>(d_y + (t + i) * args.d_y.stride[1]);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = t + i, done = at - (W - 1);
        if (at >= count + W - 1) break;
        float next[N] = {};
        if (at < readable) {
          cuda::widen(xs[i], next);
          inputs.push(next);
#pragma unroll
          for (int c = 0; c < N; ++c) next[c] = 0.f;
          if (args.d_y.data) {
            cuda::widen(ys[i], next);
            slope_of(next);
          }
        }
        push_slope(next);
        if (at < count) add();
        if (done >= 0 || starts) store_input_gradient(s, first + done, d_x + done * args.d_x.stride[1]);
      }
    }
  }
};

// Sums over the lanes of a block to its rows of the partial sums, [W + 1][D].
template <int W>
__device__ void store_partials(const float (&sums)[W + 1][N], const Cut& cut, int64_t first_channel, int64_t D,
                               float* out) {
  __shared__ float smem[kThreads * N];
  const int width = cut.packs * N;
  for (int j = 0; j <= W; ++j) {
#pragma unroll
    for (int k = 0; k <= W; ++k)
      if (k == j)
#pragma unroll
        for (int i = 0; i < N; ++i) smem[threadIdx.x * N + i] = sums[k][i];
    __syncthreads();
    for (int c = int(threadIdx.x); c < width && first_channel + c < D; c += kThreads) {
      double sum = 0;
      for (int lane = 0; lane < cut.lanes; ++lane) sum += double(smem[lane * width + c]);
      out[j * D + first_channel + c] = float(sum);
    }
    __syncthreads();
  }
}

template <class E, int W>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const Problem p, const Bwd args, const Cut cut, const CudaLayout at, const cuda::Span* spans,
                    float* partials) {
  const int pack = int(threadIdx.x) % cut.packs, lane = int(threadIdx.x) / cut.packs;
  const int64_t tokens = p.B * p.T, run = (at.block + cut.lanes - 1) / cut.lanes;
  for (int64_t task = blockIdx.x; task < at.num_blocks * cut.strips; task += gridDim.x) {
    const int64_t block = task / cut.strips, channel = (task - block * cut.strips) * cut.packs * N;
    const int64_t d = channel + pack * N, limit = (block + 1) * at.block < tokens ? (block + 1) * at.block : tokens;
    const int64_t from = block * at.block + lane * run, end = from + run < limit ? from + run : limit;
    const Taps<W> taps(args.weight, args.bias, d < p.D ? d : 0);
    Walker<E, W> walker{p, args, taps, d, {}, {}, {}};
    for (int64_t r = from; r < end && d < p.D;) {
      const Sequence s = sequence_at(p, spans, r);
      const int64_t last = s.end < end ? s.end : end;
      if (s.n >= 0 && s.valid) {
        walker.piece(s, r, last);
      } else {
        if (args.d_x.data) fill_rows<E>(args.d_x, p.T, r, last, d, s.valid ? 0.f : cuda::nan_of<float>());
#pragma unroll
        for (int j = 0; j <= W; ++j)
#pragma unroll
          for (int i = 0; i < N; ++i)
            if (!s.valid) walker.sums[j][i] = cuda::nan_of<float>();
      }
      r = last;
    }
    if (partials) store_partials<W>(walker.sums, cut, channel, p.D, partials + block * (W + 1) * p.D);
  }
}

template <class E, int W>
void backward(const Problem& p, const Bwd& args, const Exec& exec) {
  const cuda::Span* spans = make_spans(p, args.cu_seqlens, offsetof(Bwd, cu_seqlens), exec);
  const CudaLayout at = cuda_layout_of(p);
  const Cut cut = cut_of(p);
  float* partials = p.sums ? reinterpret_cast<float*>(exec.workspace + at.partials) : nullptr;
  cuda::launch(exec, "short_conv sm90_vec_bwd", backward_kernel<E, W>, {cuda::capped_grid(at.num_blocks * cut.strips)},
               kThreads, 0, p, args, cut, at, spans, partials);
  store_empty_sequences(p, args, spans, exec);
  store_cuda_sums<float>(p, args, exec);
}

template <class E>
void backward(const Problem& p, const Bwd& args, const Exec& exec) {
  if (p.W == 4)
    backward<E, 4>(p, args, exec);
  else if (p.W == 3)
    backward<E, 3>(p, args, exec);
  else
    backward<E, 2>(p, args, exec);
}

}  // namespace

void sm90_vec_bwd(const Problem& p, const Plan&, const Bwd& args, const Exec& exec) {
  if (p.dtype == THALWEG_F32)
    backward<float>(p, args, exec);
  else if (p.dtype == THALWEG_BF16)
    backward<__nv_bfloat16>(p, args, exec);
  else
    backward<__half>(p, args, exec);
}

}  // namespace thalweg::short_conv
