// sm90_vec_bwd – KDA gate, backward, a pack of channels a thread.
//
// Math     softplus form: d_x = -a d_g sigmoid(y)          d_A_log = sum d_g g
//          lower bound:   d_x = lower_bound a d_g s (1-s)  d_A_log = sum d_x y
//          d_dt_bias = sum d_x
// Shapes   x,d_g,d_x [B T L HV K]  A_log,d_A_log [HV]  dt_bias,d_dt_bias [HV K]
// Takes    as sm90_vec_fwd: x and d_g of f32, bf16, f16, each its own, wide rows
// Grid     x: heads; y: blocks of tokens (CudaSums)
// Tile     256 threads as lanes of tokens x packs of 4 channels; kTokens tokens of a lane are loaded at once
// Smem     4 KiB: sums of the lanes; the partial sums of a block go to the workspace, 8 bytes a channel and block
// Regs     90 at most; the test cuda_ptxas prints each
// Order    a lane's tokens ascending, lanes in order, packs of a head in order, then column_sums.cuh over blocks
// Numerics float32 (sm90_gate.cuh); sums float32 over a lane's tokens of a block, then float64
// Traps    d_g = 0 gives 0, of an infinite slope too.
// Measured verified on an H200; not timed in a committed record
#include "thalweg/ops/kda_gate/cuda_sums.cuh"
#include "thalweg/ops/kda_gate/sm90_rows.cuh"

namespace thalweg::kda_gate {
namespace {

constexpr int N = 4;        // channels of a thread; 8 take too many registers
constexpr int kTokens = 4;  // of a thread, loaded at once

// What a thread has summed.
struct Terms {
  float channels[N], head;
};

// d_x in place of d_g.
template <bool kSoftplus>
__device__ __forceinline__ void usual_backward(const HeadGate& gate, const float (&y)[N], float (&d)[N], Terms& terms) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const Slopes slopes = usual_slopes<kSoftplus>(gate, y[j]);
    terms.head += d[j] == 0.f ? 0.f : d[j] * slopes.A_log;
    d[j] = d[j] == 0.f ? 0.f : d[j] * slopes.y;
    terms.channels[j] += d[j];
  }
}

// The same, in turn, the arrays turning round: indices that are known keep them in registers.
template <bool kSoftplus>
__device__ void unusual_backward(const HeadGate& gate, float (&y)[N], float (&d)[N], Terms& terms) {
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
    const Factors f = unusual_gate<kSoftplus>(gate, y[0]);
    const float d_y = d[0] == 0.f ? 0.f : d[0] * f.y * f.y_factor, channel = terms.channels[0] + d_y;
    terms.head += d[0] == 0.f ? 0.f : d[0] * f.A_log * f.A_log_factor;
#pragma unroll
    for (int j = 0; j + 1 < N; ++j) y[j] = y[j + 1], d[j] = d[j + 1], terms.channels[j] = terms.channels[j + 1];
    d[N - 1] = d_y, terms.channels[N - 1] = channel;
  }
}

// The sums of a block: over lanes for each channel, over all for the head.
__device__ void store_partials(const Terms& terms, const Walk& walk, double* out) {
  __shared__ float smem[kThreads * N];
  __shared__ double of_warps[kThreads / 32];
  const int width = walk.packs * N, tid = int(threadIdx.x);
#pragma unroll
  for (int j = 0; j < N; ++j) smem[tid * N + j] = terms.channels[j];
  const double warp = cuda::warp_sum(double(terms.head));
  if (tid % 32 == 0) of_warps[tid / 32] = warp;
  __syncthreads();
  for (int k = tid; k < width; k += kThreads) {
    double sum = 0;
    for (int lane = 0; lane < walk.lanes; ++lane) sum += double(smem[lane * width + k]);
    out[k] = sum;
  }
  if (tid > 0) return;
  double sum = 0;
  for (int i = 0; i < kThreads / 32; ++i) sum += of_warps[i];
  out[width] = sum;
}

template <class X, class G, bool kSoftplus, int kCount>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const Rows x, const Rows d_g, const Rows d_x, const thalweg_tensor A_log,
                    const thalweg_tensor dt_bias, const float lower_bound, const Walk walk, const int64_t block,
                    double* partials) {
  const int lane = int(threadIdx.x) / walk.packs, k = (int(threadIdx.x) - lane * walk.packs) * N;
  const int64_t hv = blockIdx.x, from = int64_t(blockIdx.y) * block;
  const int64_t end = lane >= walk.lanes ? 0 : from + block < walk.tokens ? from + block : walk.tokens;
  int64_t first = from + lane;
  cuda::Pack<X, N> xs[kCount];
  cuda::Pack<G, N> gs[kCount];
  auto load = [&] {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t token = first + i * walk.lanes;
      if (token >= end) break;
      xs[i] = cuda::load_pack<X, N>(row_at<const X>(x, walk, token, hv) + k);
      gs[i] = cuda::load_pack<G, N>(row_at<const G>(d_g, walk, token, hv) + k);
    }
  };
  load();  // before the parameters are waited for
  float bias[N];
  load_bias(dt_bias, hv, lane < walk.lanes ? k : 0, bias);
  const HeadGate gate = head_gate<kSoftplus>(A_log, hv, lower_bound);
  Terms terms = {};
  for (; first < end; first += walk.lanes * kCount, load()) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t token = first + i * walk.lanes;
      if (token >= end) break;
      float y[N], d[N];
      cuda::widen(xs[i], y);
      cuda::widen(gs[i], d);
#pragma unroll
      for (int j = 0; j < N; ++j) y[j] += bias[j];
      if (gate.usual)
        usual_backward<kSoftplus>(gate, y, d, terms);
      else
        unusual_backward<kSoftplus>(gate, y, d, terms);
      if (d_x.data) cuda::store_pack(row_at<X>(d_x, walk, token, hv) + k, cuda::narrow<X>(d));
    }
  }
  if (partials) store_partials(terms, walk, partials + (int64_t(blockIdx.y) * gridDim.x + hv) * (walk.packs * N + 1));
}

template <class X, class G>
void backward(const Problem& p, const thalweg_kda_gate_bwd_args& args, const Exec& exec) {
  const CudaSums at = cuda_sums_of(p);
  const Walk walk = walk_of(p, N);
  cuda::launch(exec, "kda_gate sm90_vec_bwd",
               p.lower_bound == 0 ? backward_kernel<X, G, true, kTokens> : backward_kernel<X, G, false, kTokens>,
               {p.HV, at.num_blocks}, kThreads, 0, rows_of(args.x), rows_of(args.d_g), rows_of(args.d_x), args.A_log,
               args.dt_bias, float(p.lower_bound), walk, at.block, partials_of(p, exec));
  store_cuda_sums(p, args, exec);
}

template <class X>
void backward(const Problem& p, const thalweg_kda_gate_bwd_args& args, const Exec& exec) {
  if (p.g_dtype == THALWEG_F32)
    backward<X, float>(p, args, exec);
  else if (p.g_dtype == THALWEG_BF16)
    backward<X, __nv_bfloat16>(p, args, exec);
  else
    backward<X, __half>(p, args, exec);
}

}  // namespace

void sm90_vec_bwd(const Problem& p, const Plan&, const thalweg_kda_gate_bwd_args& args, const Exec& exec) {
  if (p.dtype == THALWEG_F32)
    backward<float>(p, args, exec);
  else if (p.dtype == THALWEG_BF16)
    backward<__nv_bfloat16>(p, args, exec);
  else
    backward<__half>(p, args, exec);
}

}  // namespace thalweg::kda_gate
