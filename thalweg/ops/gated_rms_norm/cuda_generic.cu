// cuda_generic – gated RMS norm, forward and backward, any dtype and strides.
//
// Math     r = 1 / sqrt(mean(x^2) + eps)    xh = x r    y = xh weight a(gate)
//          d_gate = d_y xh weight a'    d_weight = sum d_y a xh    z = d_y a weight
//          d_x = r (z - xh mean(xh z))
// Shapes   x,gate,y [M D]  weight [D]  rstd [M]
// Takes    anything valid
// Grid     blocks walk over rows; d_weight: one block per (block of rows, 256 columns)
// Tile     256 threads: a warp a row, eight rows, or where rows are long, one row
// Smem     under 3 KiB
// Regs     not watched
// Order    along a row: a lane's elements ascending, lanes by halves, warps in order. d_weight: a lane's rows
//          ascending, lanes in order, then column_sums.cuh over blocks
// Numerics float32, float64 where x is float64; all sums in float64
// Traps    a(gate) at minus infinity is silu's limit 0, not inf * 0. eps below the smallest normal float32
//          counts as that number, so that a row of zeros stays finite.
// Measured the sm90 rows are the fast ones; see their headers
#include <float.h>

#include "thalweg/ops/gated_rms_norm/cuda_sums.cuh"

namespace thalweg::gated_rms_norm {
namespace {

using cuda::is_there;
using cuda::load_at;
using cuda::store_at;
using cuda::Tile;

constexpr int kThreads = 256;
constexpr int64_t kLongRow = 1024;  // elements above which a block takes a row, not a warp

template <class A>
__device__ A largest() {
  return sizeof(A) == 8 ? A(DBL_MAX) : A(FLT_MAX);
}
template <class A>
__device__ A smallest() {
  return sizeof(A) == 8 ? A(DBL_MIN) : A(FLT_MIN);
}

// a(gate), and a'(gate) when `slope` is given.
template <class A>
__device__ A activate(Gate gate, A g, A* slope) {
  if (gate == kNoGate) {
    if (slope) *slope = 0;
    return 1;
  }
  const A s = 1 / (1 + exp(-g)), low = g < -largest<A>() ? -largest<A>() : g;
  if (slope) *slope = gate == kSigmoid ? s * (1 - s) : s * (1 + (low > largest<A>() ? largest<A>() : low) * (1 - s));
  return gate == kSigmoid ? s : low * s;
}

template <class A>
__device__ A gate_at(const Problem& p, const thalweg_tensor& gate, int64_t m, int64_t d) {
  return p.gate == kNoGate ? A(0) : load_at<A>(gate, m * gate.stride[0] + d);
}
template <class A>
__device__ A weight_at(const thalweg_tensor& weight, int64_t d) {
  return is_there(weight) ? load_at<A>(weight, d * weight.stride[0]) : A(1);
}

// The sum over the threads of a row: 32 or kThreads of them.
__device__ double row_sum(double x, int threads_of_row, double* smem) {
  x = cuda::warp_sum(x);
  if (threads_of_row == 32) return x;
  if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int i = 0; i < kThreads / 32; ++i) sum += smem[i];
  __syncthreads();
  return sum;
}

template <class A>
__device__ A reciprocal_rms(const Problem& p, const thalweg_tensor& x, int64_t m, int lane, int lanes, double* smem) {
  double sum = 0;
  for (int64_t d = lane; d < p.D; d += lanes) {
    const double v = load_at<double>(x, m * x.stride[0] + d);
    sum += v * v;
  }
  const A mean = A(row_sum(sum, lanes, smem) / double(p.D > 0 ? p.D : 1));
  return 1 / sqrt(mean + (A(p.eps) > smallest<A>() ? A(p.eps) : smallest<A>()));
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Problem p, const thalweg_gated_rms_norm_fwd_args args, const int lanes) {
  __shared__ double smem[kThreads / 32];
  const int lane = int(threadIdx.x) % lanes, rows = kThreads / lanes;
  for (int64_t m = int64_t(blockIdx.x) * rows + threadIdx.x / lanes; m < p.M; m += int64_t(gridDim.x) * rows) {
    const A r = reciprocal_rms<A>(p, args.x, m, lane, lanes, smem);
    for (int64_t d = lane; d < p.D; d += lanes) {
      const A x = load_at<A>(args.x, m * args.x.stride[0] + d),
              a = activate<A>(p.gate, gate_at<A>(p, args.gate, m, d), nullptr);
      store_at(args.y, m * args.y.stride[0] + d, x * r * weight_at<A>(args.weight, d) * a);
    }
    if (lane == 0 && is_there(args.rstd)) store_at(args.rstd, m * args.rstd.stride[0], r);
  }
}

// d_x, d_gate, and rstd [M] for the sums.
template <class A>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const Problem p, const thalweg_gated_rms_norm_bwd_args args, const int lanes, A* rstd) {
  __shared__ double smem[kThreads / 32];
  const int lane = int(threadIdx.x) % lanes, rows = kThreads / lanes;
  for (int64_t m = int64_t(blockIdx.x) * rows + threadIdx.x / lanes; m < p.M; m += int64_t(gridDim.x) * rows) {
    const A r = reciprocal_rms<A>(p, args.x, m, lane, lanes, smem);
    if (lane == 0 && p.sums) rstd[m] = r;
    double dot = 0;
    for (int64_t d = lane; d < p.D; d += lanes) {
      A slope;
      const A a = activate(p.gate, gate_at<A>(p, args.gate, m, d), &slope);
      const A xh = load_at<A>(args.x, m * args.x.stride[0] + d) * r;
      const A scaled = load_at<A>(args.d_y, m * args.d_y.stride[0] + d) * weight_at<A>(args.weight, d);
      dot += double(xh * (scaled * a));
      if (is_there(args.d_gate)) store_at(args.d_gate, m * args.d_gate.stride[0] + d, scaled * xh * slope);
    }
    if (!is_there(args.d_x)) continue;
    const A mean = A(row_sum(dot, lanes, smem) / double(p.D > 0 ? p.D : 1));
    for (int64_t d = lane; d < p.D; d += lanes) {
      const A xh = load_at<A>(args.x, m * args.x.stride[0] + d) * r;
      const A a = activate<A>(p.gate, gate_at<A>(p, args.gate, m, d), nullptr);
      const A z = load_at<A>(args.d_y, m * args.d_y.stride[0] + d) * weight_at<A>(args.weight, d) * a;
      store_at(args.d_x, m * args.d_x.stride[0] + d, r * (z - xh * mean));
    }
  }
}

// Partial sums of d_weight.
template <class A>
__global__ void __launch_bounds__(cuda::kTileThreads)
    columns_kernel(const Problem p, const thalweg_gated_rms_norm_bwd_args args, const Tile tile, const CudaSums at,
                   const A* rstd, double* partials) {
  __shared__ double terms[cuda::kTileThreads];
  const int column = int(threadIdx.x) % tile.columns, lane = int(threadIdx.x) / tile.columns;
  const int64_t chunks = (p.D + tile.columns - 1) / tile.columns;
  for (int64_t task = blockIdx.x; task < at.num_blocks * chunks; task += gridDim.x) {
    const int64_t block = task / chunks, d = (task - block * chunks) * tile.columns + column;
    const int64_t end = (block + 1) * at.block < p.M ? (block + 1) * at.block : p.M;
    double sum = 0;
    for (int64_t m = block * at.block + lane; m < end && d < p.D; m += tile.lanes) {
      const A a = activate<A>(p.gate, gate_at<A>(p, args.gate, m, d), nullptr);
      const A xh = load_at<A>(args.x, m * args.x.stride[0] + d) * rstd[m];
      sum += double(load_at<A>(args.d_y, m * args.d_y.stride[0] + d) * a * xh);
    }
    terms[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && d < p.D) {
      for (int i = 1; i < tile.lanes; ++i) sum += terms[i * tile.columns + column];
      partials[block * p.D + d] = sum;
    }
    __syncthreads();
  }
}

int lanes_of(const Problem& p) { return p.D > kLongRow ? kThreads : 32; }

cuda::Grid rows_grid(const Problem& p) { return {cuda::capped_grid(cuda::ceil_div(p.M, kThreads / lanes_of(p)))}; }

template <class A>
void backward(const Problem& p, const thalweg_gated_rms_norm_bwd_args& args, const Exec& exec) {
  const CudaSums at = cuda_sums_of(p);
  double* partials = reinterpret_cast<double*>(exec.workspace);
  A* rstd = reinterpret_cast<A*>(exec.workspace + at.rstd);
  cuda::launch(exec, "gated_rms_norm cuda_generic_bwd", rows_kernel<A>, rows_grid(p), kThreads, 0, p, args, lanes_of(p),
               rstd);
  if (!p.sums) return;
  const Tile tile = cuda::tile_of(p.D);
  cuda::launch(exec, "gated_rms_norm cuda_generic_bwd sums", columns_kernel<A>,
               {cuda::capped_grid(at.num_blocks * cuda::ceil_div(p.D, tile.columns))}, cuda::kTileThreads, 0, p, args,
               tile, at, rstd, partials);
  store_cuda_sums(p, args, exec);
}

}  // namespace

void cuda_generic_fwd(const Problem& p, const Plan&, const thalweg_gated_rms_norm_fwd_args& args, const Exec& exec) {
  cuda::launch(exec, "gated_rms_norm cuda_generic_fwd",
               p.dtype == THALWEG_F64 ? forward_kernel<double> : forward_kernel<float>, rows_grid(p), kThreads, 0, p,
               args, lanes_of(p));
}

void cuda_generic_bwd(const Problem& p, const Plan&, const thalweg_gated_rms_norm_bwd_args& args, const Exec& exec) {
  if (p.dtype == THALWEG_F64)
    backward<double>(p, args, exec);
  else
    backward<float>(p, args, exec);
}

}  // namespace thalweg::gated_rms_norm
