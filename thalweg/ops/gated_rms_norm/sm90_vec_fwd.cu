// sm90_vec_fwd – gated RMS norm, forward, a group of lanes a row.
//
// Math     r = 1 / sqrt(mean(x^2) + eps)    y = x r weight a(gate)
// Shapes   x,gate,y [M D]  weight [D]  rstd [M]
// Takes    x of f32, bf16, f16, gate of the same; rows at multiples of 16 bytes, D a multiple of 8 up to 64 packs of 16
//          bytes (256 in f32, 512 in 16 bits); weight and rstd of any strides
// Grid     tiles of rows, one after another
// Tile     256 threads as groups of lanes (sm90_rows.cuh); a group takes kTile rows at once
// Smem     none
// Regs     64 at most; the test cuda_ptxas prints each
// Order    along a row: a lane's elements ascending, lanes by halves
// Numerics float32, rounded once
// Traps    rows past M take part in the shuffles, with zeros.
// Measured verified on an H200; not timed in a committed record
#include "thalweg/cuda/tensor.cuh"
#include "thalweg/ops/gated_rms_norm/sm90_rows.cuh"

namespace thalweg::gated_rms_norm {
namespace {

template <class E, bool kGated, int kPacks, int kTile>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Shape shape, const Rows<const E> x, const Rows<const E> gate, const Rows<E> y,
                   const thalweg_tensor weight, const thalweg_tensor rstd) {
  constexpr int N = kPack<E>;
  const int lane = int(threadIdx.x) % shape.lanes, group = int(threadIdx.x) / shape.lanes;
  const int groups = kThreads / shape.lanes;
  float w[kPacks][N];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int d = (lane + k * shape.lanes) * N;
    if (d < shape.D) cuda::load_parameters(weight, d * weight.stride[0], weight.stride[0], 1.f, w[k]);
  }
  for (int64_t base = int64_t(blockIdx.x) * groups * kTile; base < shape.M;
       base += int64_t(gridDim.x) * groups * kTile) {
    cuda::Pack<E, N> xs[kTile][kPacks], gates[kTile][kPacks];
#pragma unroll
    for (int i = 0; i < kTile; ++i)
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const int64_t m = base + group + i * groups;
        const int d = (lane + k * shape.lanes) * N;
        const bool there = m < shape.M && d < shape.D;
        xs[i][k] = load_or_zeros<E, N>(x, m, d, there);
        if constexpr (kGated) gates[i][k] = load_or_zeros<E, N>(gate, m, d, there);
      }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const int64_t m = base + group + i * groups;
      float values[kPacks][N], sum = 0;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        cuda::widen(xs[i][k], values[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) sum = fmaf(values[k][j], values[k][j], sum);
      }
      const float r = rsqrtf(group_sum(sum, shape.lanes) / shape.count + shape.eps);
      if (lane == 0 && m < shape.M && cuda::is_there(rstd)) cuda::store_at(rstd, m * rstd.stride[0], r);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const int d = (lane + k * shape.lanes) * N;
        float g[N];
        if constexpr (kGated) cuda::widen(gates[i][k], g);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          values[k][j] *= r * w[k][j];
          if constexpr (kGated) values[k][j] *= activate(shape.silu, g[j]);
        }
        if (m < shape.M && d < shape.D) cuda::store_pack(y.data + m * y.pitch + d, cuda::narrow<E>(values[k]));
      }
    }
  }
}

template <class E, bool kGated, int kPacks>
void forward(const Problem& p, const thalweg_gated_rms_norm_fwd_args& args, const Exec& exec) {
  constexpr int kTile = kPacks == 1 ? 2 : 1;
  const Shape shape = shape_of<E>(p);
  const int64_t tiles = cuda::ceil_div(p.M, kThreads / shape.lanes * kTile);
  cuda::launch(exec, "gated_rms_norm sm90_vec_fwd", forward_kernel<E, kGated, kPacks, kTile>,
               {cuda::capped_grid(tiles)}, kThreads, 0, shape, rows_of<const E>(args.x), rows_of<const E>(args.gate),
               rows_of<E>(args.y), args.weight, args.rstd);
}

template <class E>
void forward(const Problem& p, const thalweg_gated_rms_norm_fwd_args& args, const Exec& exec) {
  const bool one = p.D <= 32 * kPack<E>;
  if (p.gate == kNoGate)
    one ? forward<E, false, 1>(p, args, exec) : forward<E, false, 2>(p, args, exec);
  else
    one ? forward<E, true, 1>(p, args, exec) : forward<E, true, 2>(p, args, exec);
}

}  // namespace

void sm90_vec_fwd(const Problem& p, const Plan&, const thalweg_gated_rms_norm_fwd_args& args, const Exec& exec) {
  if (p.dtype == THALWEG_F32)
    forward<float>(p, args, exec);
  else if (p.dtype == THALWEG_BF16)
    forward<__nv_bfloat16>(p, args, exec);
  else
    forward<__half>(p, args, exec);
}

}  // namespace thalweg::gated_rms_norm
