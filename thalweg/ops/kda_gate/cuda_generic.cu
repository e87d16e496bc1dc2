// cuda_generic – KDA gate, forward and backward, any dtype and strides.
//
// Math     as cpu_generic: y = x + dt_bias   a = exp(A_log)
//          softplus form: g = -a softplus(y)   dg/dx = -a sigmoid(y)   dg/dA_log = g
//          lower bound:   z = a y   s = sigmoid(z)   g = lower_bound s   dg/dx = lower_bound a s (1 - s)
//                         dg/dA_log = lower_bound s (1 - s) z
// Shapes   x,g,d_g,d_x [B T L HV K]  A_log [HV]  dt_bias [HV K]
// Takes    anything valid
// Grid     forward: blocks walk over rows (token, hv); backward: one block per (block of tokens, hv)
// Tile     256 threads as lanes of rows x a power of two of channels that covers K, at most 256
// Smem     backward: 2 KiB, sums over the lanes
// Regs     not watched
// Order    backward: a lane adds its tokens ascending, lanes in order, chunks of 256 channels in order, then
//          column_sums.cuh over blocks
// Numerics float64 for every dtype, rounded at the store
// Traps    a may be infinite or 0 where its product with a tiny softplus or slope is not: such products are
//          exponentials of sums of logarithms. 0 times an infinite slope is 0.
// Measured the sm90 rows are the fast ones; see their headers
#include "thalweg/ops/kda_gate/cuda_sums.cuh"

namespace thalweg::kda_gate {
namespace {

using cuda::is_there;
using cuda::load_at;
using cuda::store_at;
using cuda::Tile;

struct Slopes {
  double x, A_log;
};

// g, and its slopes when `slopes` is given.
__device__ double gate_at(double lower_bound, double A_log, double y, Slopes* slopes) {
  if (lower_bound == 0) {
    // e^y is taken out of a small softplus and sigmoid, and joins a.
    const double t = exp(-fabs(y)), common = exp(A_log + (y > 0 ? 0 : y));
    const double softplus = y > 20 ? y : y > 0 ? y + log1p(t) : t > 1e-300 ? log1p(t) / t : 1;
    if (slopes) *slopes = {-common / (y > 20 ? 1 : 1 + t), -common * softplus};
    return -common * softplus;
  }
  const double z = y == 0 ? 0 : exp(A_log) * y, t = exp(-fabs(z));
  if (slopes) {
    const double part = lower_bound / ((1 + t) * (1 + t));
    *slopes = {part * exp(A_log - fabs(z)), t == 0 ? 0 : part * t * z};
  }
  return lower_bound * (z < 0 ? t : 1) / (1 + t);
}

// Element 0 of row (token, hv) of t.
__device__ int64_t row_of(const Problem& p, const thalweg_tensor& t, int64_t token, int64_t hv) {
  const int64_t bt = token / p.L, b = bt / p.T;
  return b * t.stride[0] + (bt - b * p.T) * t.stride[1] + (token - bt * p.L) * t.stride[2] + hv * t.stride[3];
}

__device__ int64_t tokens_of(const Problem& p) { return p.B * p.T * p.L; }
__device__ double A_log_at(const thalweg_tensor& A_log, int64_t hv) {
  return is_there(A_log) ? load_at<double>(A_log, hv * A_log.stride[0]) : 0;
}
__device__ double dt_bias_at(const thalweg_tensor& dt_bias, int64_t hv, int64_t k) {
  return is_there(dt_bias) ? load_at<double>(dt_bias, hv * dt_bias.stride[0] + k * dt_bias.stride[1]) : 0;
}

__global__ void __launch_bounds__(cuda::kTileThreads)
    forward_kernel(const Problem p, const thalweg_kda_gate_fwd_args args, const Tile tile) {
  const int64_t rows = tokens_of(p) * p.HV, column = threadIdx.x % tile.columns;
  const int64_t first = int64_t(blockIdx.x) * tile.lanes + threadIdx.x / tile.columns;
  for (int64_t row = first; row < rows; row += int64_t(gridDim.x) * tile.lanes) {
    const int64_t token = row / p.HV, hv = row - token * p.HV;
    const int64_t x = row_of(p, args.x, token, hv), g = row_of(p, args.g, token, hv);
    const double A_log = A_log_at(args.A_log, hv);
    for (int64_t k = column; k < p.K; k += tile.columns) {
      const double y = load_at<double>(args.x, x + k * args.x.stride[4]) + dt_bias_at(args.dt_bias, hv, k);
      store_at(args.g, g + k * args.g.stride[4], gate_at(p.lower_bound, A_log, y, nullptr));
    }
  }
}

// What a thread adds up over its tokens.
struct Terms {
  double channel, head;
};

// Channel k of the tokens first, first + step, ... below last: d_x is stored, the sums are returned.
__device__ Terms backward_channel(const Problem& p, const thalweg_kda_gate_bwd_args& args, int64_t hv, int64_t k,
                                  int64_t first, int64_t last, int64_t step) {
  const double A_log = A_log_at(args.A_log, hv), dt_bias = dt_bias_at(args.dt_bias, hv, k);
  Terms sums = {0, 0};
  for (int64_t token = first; token < last; token += step) {
    const double d_g = load_at<double>(args.d_g, row_of(p, args.d_g, token, hv) + k * args.d_g.stride[4]);
    const double y = load_at<double>(args.x, row_of(p, args.x, token, hv) + k * args.x.stride[4]) + dt_bias;
    Slopes slopes;
    gate_at(p.lower_bound, A_log, y, &slopes);
    const double d_x = d_g == 0 ? 0 : d_g * slopes.x;
    sums.channel += d_x;
    sums.head += d_g == 0 ? 0 : d_g * slopes.A_log;
    if (is_there(args.d_x)) store_at(args.d_x, row_of(p, args.d_x, token, hv) + k * args.d_x.stride[4], d_x);
  }
  return sums;
}

// The sum over a block's threads, in thread 0.
__device__ double block_sum(double x, double* terms) {
  terms[threadIdx.x] = x;
  __syncthreads();
  for (int half = cuda::kTileThreads / 2; half > 0; half /= 2) {
    if (int(threadIdx.x) < half) terms[threadIdx.x] += terms[threadIdx.x + half];
    __syncthreads();
  }
  return terms[0];
}

__global__ void __launch_bounds__(cuda::kTileThreads)
    backward_kernel(const Problem p, const thalweg_kda_gate_bwd_args args, const Tile tile, const CudaSums at,
                    double* partials) {
  __shared__ double terms[cuda::kTileThreads];
  const int column = int(threadIdx.x) % tile.columns, lane = int(threadIdx.x) / tile.columns;
  const int64_t tokens = tokens_of(p), tasks = at.num_blocks * p.HV;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t block = task / p.HV, hv = task - block * p.HV;
    const int64_t first = block * at.block + lane,
                  end = (block + 1) * at.block < tokens ? (block + 1) * at.block : tokens;
    double* out = partials + task * (p.K + 1);
    double head = 0;
    for (int64_t base = 0; base < p.K; base += tile.columns) {
      const int64_t k = base + column;
      Terms sums = {0, 0};
      if (k < p.K) sums = backward_channel(p, args, hv, k, first, end, tile.lanes);
      head += sums.head;
      if (!partials) continue;
      terms[threadIdx.x] = sums.channel;
      __syncthreads();
      if (lane == 0 && k < p.K) {
        for (int i = 1; i < tile.lanes; ++i) sums.channel += terms[i * tile.columns + column];
        out[k] = sums.channel;
      }
      __syncthreads();
    }
    if (!partials) continue;
    head = block_sum(head, terms);
    if (threadIdx.x == 0) out[p.K] = head;
    __syncthreads();
  }
}

}  // namespace

void cuda_generic_fwd(const Problem& p, const Plan&, const thalweg_kda_gate_fwd_args& args, const Exec& exec) {
  const Tile tile = cuda::tile_of(p.K);
  const int64_t blocks = p.K == 0 ? 0 : ceil_div(num_tokens(p) * p.HV, tile.lanes);
  cuda::launch(exec, "kda_gate cuda_generic_fwd", forward_kernel, {cuda::capped_grid(blocks)}, cuda::kTileThreads, 0, p,
               args, tile);
}

void cuda_generic_bwd(const Problem& p, const Plan&, const thalweg_kda_gate_bwd_args& args, const Exec& exec) {
  const CudaSums at = cuda_sums_of(p);
  cuda::launch(exec, "kda_gate cuda_generic_bwd", backward_kernel, {cuda::capped_grid(at.num_blocks * p.HV)},
               cuda::kTileThreads, 0, p, args, cuda::tile_of(p.K), at, partials_of(p, exec));
  store_cuda_sums(p, args, exec);
}

}  // namespace thalweg::kda_gate
