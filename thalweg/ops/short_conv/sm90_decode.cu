// sm90_decode – short convolution, decode, a pack of a state's rows a thread.
//
// Math     pre_t = bias + sum_j weight_j xx_{t-(W-1)+j}    y_t = a(pre_t)
// Shapes   x,y [N T D]  weight [D W]  state [M D W], a pool
// Takes    W = 4; a pool of f32, bf16, f16 whose [D W] are contiguous, at multiples of 16 bytes; x and y of f32, bf16,
//          f16, D a multiple of 2
// Grid     x: strips of channels; y: sequences, walked with a stride
// Tile     128 threads; a thread has 16 bytes of a state: one channel of f32, two of 16 bits
// Smem     none
// Regs     85 at most; the test cuda_ptxas prints each
// Order    bias, then taps from the oldest input on, as in the forward
// Numerics float32 (sm90/sigmoid.cuh); states are copies
// Traps    with few slots a block looks for faults itself, every sequence against every other: two launches less than
//          the table of uses (cuda/slots.cuh), which is for many.
// Measured verified on an H200; not timed in a committed record
#include <stddef.h>

#include "thalweg/cuda/packs.cuh"
#include "thalweg/cuda/slots.cuh"
#include "thalweg/cuda/sm90/sigmoid.cuh"
#include "thalweg/ops/short_conv/problem.h"

namespace thalweg::short_conv {
namespace {

using Decode = thalweg_short_conv_decode_args;

constexpr int kThreads = 128, W = 4;

template <class S>
constexpr int kChannels = 16 / (W * int(sizeof(S)));  // of a thread

// A thread's channels: their last inputs, oldest first, and their taps.
template <class S>
struct Lane {
  float x[kChannels<S>][W], weight[kChannels<S>][W], bias[kChannels<S>];

  __device__ void load_taps(const Decode& args, int64_t d) {
#pragma unroll
    for (int c = 0; c < kChannels<S>; ++c)
      cuda::load_parameters(args.weight, (d + c) * args.weight.stride[0], args.weight.stride[1], 0.f, weight[c]);
    cuda::load_parameters(args.bias, d * args.bias.stride[0], args.bias.stride[0], 0.f, bias);
  }

  __device__ void load_state(const S* state) {
    float all[kChannels<S> * W];
    cuda::widen(cuda::load_pack<S, kChannels<S> * W>(state), all);
#pragma unroll
    for (int c = 0; c < kChannels<S>; ++c)
#pragma unroll
      for (int j = 0; j < W; ++j) x[c][j] = all[c * W + j];
  }

  __device__ void store_state(S* state) const {
    float all[kChannels<S> * W];
#pragma unroll
    for (int c = 0; c < kChannels<S>; ++c)
#pragma unroll
      for (int j = 0; j < W; ++j) all[c * W + j] = x[c][j];
    cuda::store_pack(state, cuda::narrow<S>(all));
  }

  __device__ float step(int c, float next, bool silu) {
    x[c][0] = x[c][1], x[c][1] = x[c][2], x[c][2] = x[c][3], x[c][3] = next;
    float pre = bias[c];
#pragma unroll
    for (int j = 0; j < W; ++j) pre = fmaf(weight[c][j], x[c][j], pre);
    return silu ? cuda::fast_silu(pre) : pre;
  }
};

template <class S>
__global__ void __launch_bounds__(kThreads, 4)
    decode_kernel(const Problem p, const Decode args, const cuda::SlotUse* uses, int32_t* report) {
  const cuda::PoolSizes pool = {p.N, p.T, p.M};
  const int64_t d = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kChannels<S>;
  const bool there = d < p.D;
  Lane<S> lane;
  if (there) lane.load_taps(args, d);
  S* states = static_cast<S*>(args.state.data) + d * W;
  for (int64_t n = blockIdx.y; n < p.N; n += gridDim.y) {
    const int64_t from = cuda::read_slot(args, n);
    if (there && from >= 0 && from < p.M) lane.load_state(states + from * args.state.stride[0]);
    int32_t* mine = blockIdx.x == 0 && threadIdx.x == 0 ? report : nullptr;
    bool wrong = false;
    if (uses)
      wrong = cuda::slots_are_wrong(pool, args, uses, n, mine);
    else if (p.slots)
      wrong = cuda::slots_are_wrong(pool, args, n, blockIdx.x == 0 ? report : nullptr);
    if (!there) continue;
    for (int64_t t = 0; t < p.T; ++t) {
      const int64_t x = n * args.x.stride[0] + t * args.x.stride[1] + d;
      const int64_t y = n * args.y.stride[0] + t * args.y.stride[1] + d;
#pragma unroll
      for (int c = 0; c < kChannels<S>; ++c) {
        float out = wrong ? cuda::nan_of<float>() : 0.f;
        if (from >= 0 && !wrong) out = lane.step(c, cuda::load_at<float>(args.x, x + c), p.silu);
        cuda::store_at(args.y, y + c, out);
      }
      const int64_t to = from >= 0 && !wrong ? cuda::write_slot(pool, args, n, t, from) : -1;
      if (to >= 0) lane.store_state(states + to * args.state.stride[0]);
    }
  }
}

template <class S>
void decode(const Problem& p, const Decode& args, const Exec& exec) {
  auto* uses = p.slots && !cuda::has_few_slots(p.N, p.T) ? reinterpret_cast<cuda::SlotUse*>(exec.workspace) : nullptr;
  if (uses) cuda::count_slot_uses(exec, {p.N, p.T, p.M}, args, uses);
  const int64_t strips = cuda::ceil_div(p.D, kThreads * kChannels<S>);
  cuda::launch(exec, "short_conv sm90_decode", decode_kernel<S>,
               {strips, p.N < cuda::kMaxGridYZ ? p.N : cuda::kMaxGridYZ}, kThreads, 0, p, args, uses, exec.report);
}

}  // namespace

void sm90_decode(const Problem& p, const Plan&, const Decode& args, const Exec& exec) {
  if (args.state.dtype == THALWEG_F32)
    decode<float>(p, args, exec);
  else if (args.state.dtype == THALWEG_BF16)
    decode<__nv_bfloat16>(p, args, exec);
  else
    decode<__half>(p, args, exec);
}

}  // namespace thalweg::short_conv
