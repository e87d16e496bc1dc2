// cuda_generic – short convolution, backward, any dtype and strides.
//
// Math     dpre_t = d_y_t a'(pre_t)    d_x_s = sum_j weight_j dpre_{s+(W-1)-j} + d_final_state
//          d_weight_j = sum_t dpre_t xx_{t-(W-1)+j}    d_bias = sum_t dpre_t
// Shapes   x,y [B T D]  weight [D W]  state [N D W]
// Takes    anything valid
// Grid     one block per (block of tokens of the flattened [B*T] axis, strip of 128 channels). It starts with the W-1
//          inputs before its tokens and runs W-1 tokens past their end, whose dpre its last d_x need.
// Tile     one channel a thread; the last inputs and the last dpre in registers
// Smem     none
// Regs     not watched
// Order    a thread's tokens ascending, then column_sums.cuh over blocks
// Numerics float32, float64 where x is; sums over tokens in float64, a block's stored as x's arithmetic
// Traps    rows before a sequence are d_initial_state, which may have another dtype than d_x. Sequences with wrong
//          borders get NaN, in the sums too; rows past the last border 0.
// Measured the sm90 rows are the fast ones; see their headers
#include <stddef.h>

#include "thalweg/ops/short_conv/cuda_sums.cuh"

namespace thalweg::short_conv {
namespace {

using Bwd = thalweg_short_conv_bwd_args;

// A channel of a block of tokens: what it carries from token to token.
template <class A>
struct Channel {
  const Problem& p;
  const Bwd& args;
  int64_t d;
  Window<A> window;
  A taps[kMaxW];           // weight again, from the first tap on
  A slopes[kMaxW];         // dpre of the last tokens, the newest first
  double sums[kMaxW + 1];  // of d_weight, aligned as the window; last: d_bias

  __device__ Channel(const Problem& problem, const Bwd& a, int64_t channel)
      : p(problem), args(a), d(channel), window(a.weight, a.bias, int(problem.W), channel) {
    for (double& sum : sums) sum = 0;
#pragma unroll
    for (int j = 0; j < kMaxW; ++j) {
      taps[j] = j < p.W ? load_at<A>(args.weight, d * args.weight.stride[0] + j * args.weight.stride[1]) : A(0);
      slopes[j] = 0;
    }
  }

  __device__ void push_slope(A next) {
#pragma unroll
    for (int j = kMaxW - 1; j > 0; --j) slopes[j] = slopes[j - 1];
    slopes[0] = next;
  }

  // dpre of token r, whose input joins the window; 0 past the sequence.
  __device__ A slope_of(const Sequence& s, int64_t r) {
    if (r >= s.end) return 0;
    window.push(input_at<A>(p, args.x, args.initial_state, s, r, d));
    if (!is_there(args.d_y)) return 0;
    const A d_y = load_at<A>(args.d_y, token_at(args.d_y, p.T, r) + d);
    return p.silu ? d_y * silu_slope(window.convolve(int(p.W))) : d_y;
  }

  __device__ void add(A slope) {
#pragma unroll
    for (int j = 0; j < kMaxW; ++j)
      if (j >= kMaxW - p.W) sums[j] += double(slope) * double(window.x[j]);
    sums[kMaxW] += double(slope);
  }

  // The gradient of input r, W-1 tokens ago: a token or, before the sequence, a slot of its initial state.
  __device__ void store_input_gradient(const Sequence& s, int64_t r) {
    if (r >= s.begin ? !is_there(args.d_x) : !is_there(args.d_initial_state)) return;
    A sum = 0;
    const int64_t slot = r - (s.end - p.W);
    if (slot >= 0 && is_there(args.d_final_state))
      sum = load_at<A>(args.d_final_state, state_at(args.d_final_state, s.n, d, slot));
#pragma unroll
    for (int j = 0; j < kMaxW; ++j)
      if (j < p.W) sum = fma(taps[j], slopes[j], sum);
    if (r >= s.begin)
      store_at(args.d_x, token_at(args.d_x, p.T, r) + d, sum);
    else
      store_at(args.d_initial_state, state_at(args.d_initial_state, s.n, d, p.W + r - s.begin), sum);
  }

  __device__ void store_all(int64_t first, int64_t last, A value) {
    for (int64_t r = first; r < last && is_there(args.d_x); ++r)
      store_at(args.d_x, token_at(args.d_x, p.T, r) + d, value);
  }

  // Tokens first to last of one sequence.
  __device__ void piece(const Sequence& s, int64_t first, int64_t last) {
    if (!s.valid) {
      for (double& sum : sums) sum = cuda::nan_of<double>();
      return store_all(first, last, cuda::nan_of<A>());
    }
    if (s.n < 0) return store_all(first, last, A(0));
    for (int64_t r = first - (p.W - 1); r < first; ++r) {
      window.push(input_at<A>(p, args.x, args.initial_state, s, r, d));
      push_slope(A(0));
    }
    if (first == s.begin && is_there(args.d_initial_state))  // slot 0 is kept by no token
      store_at(args.d_initial_state, state_at(args.d_initial_state, s.n, d, 0), A(0));
    for (int64_t r = first; r < last + (p.W - 1); ++r) {
      const A slope = slope_of(s, r);
      push_slope(slope);
      if (r < last && p.sums) add(slope);
      const int64_t done = r - (p.W - 1);  // all tokens that read this input are known
      if (done >= first || first == s.begin) store_input_gradient(s, done);
    }
  }
};

template <class A>
__global__ void __launch_bounds__(kChannels) backward_kernel(const Problem p, const Bwd args, const CudaLayout at,
                                                             const cuda::Span* spans, int64_t strips, A* partials) {
  const int64_t tokens = p.B * p.T;
  for (int64_t task = blockIdx.x; task < at.num_blocks * strips; task += gridDim.x) {
    const int64_t block = task / strips, d = (task - block * strips) * kChannels + threadIdx.x;
    if (d >= p.D) continue;
    const int64_t end = (block + 1) * at.block < tokens ? (block + 1) * at.block : tokens;
    Channel<A> channel(p, args, d);
    for (int64_t r = block * at.block; r < end;) {
      const Sequence s = sequence_at(p, spans, r);
      const int64_t last = s.end < end ? s.end : end;
      channel.piece(s, r, last);
      r = last;
    }
    if (!p.sums) continue;
    A* out = partials + block * (p.W + 1) * p.D + d;
#pragma unroll
    for (int j = 0; j < kMaxW; ++j)
      if (j >= kMaxW - p.W) out[(j - (kMaxW - p.W)) * p.D] = A(channel.sums[j]);
    out[p.W * p.D] = A(channel.sums[kMaxW]);
  }
}

template <class A>
void backward(const Problem& p, const Bwd& args, const Exec& exec) {
  const cuda::Span* spans = make_spans(p, args.cu_seqlens, offsetof(Bwd, cu_seqlens), exec);
  const CudaLayout at = cuda_layout_of(p);
  const int64_t strips = strips_of(p);
  A* partials = reinterpret_cast<A*>(exec.workspace + at.partials);
  cuda::launch(exec, "short_conv cuda_generic_bwd", backward_kernel<A>, {cuda::capped_grid(at.num_blocks * strips)},
               kChannels, 0, p, args, at, spans, strips, partials);
  store_empty_sequences(p, args, spans, exec);
  store_cuda_sums<A>(p, args, exec);
}

}  // namespace

void cuda_generic_bwd(const Problem& p, const Plan&, const Bwd& args, const Exec& exec) {
  if (p.dtype == THALWEG_F64)
    backward<double>(p, args, exec);
  else
    backward<float>(p, args, exec);
}

}  // namespace thalweg::short_conv
