// sm90_vec_bwd – gated RMS norm, backward, a group of lanes a row.
//
// Math     xh = x r    d_gate = d_y xh weight a'    d_weight = sum d_y a xh    z = d_y a weight
//          d_x = r (z - xh mean(xh z))
// Shapes   x,gate,d_y,d_x,d_gate [M D]  weight,d_weight [D]
// Takes    as sm90_vec_fwd
// Grid     blocks of rows (CudaSums)
// Tile     256 threads as groups of lanes (sm90_rows.cuh); a group takes kTile rows at once
// Smem     8 KiB a pack of a lane: sums of the groups; those of a block go to the workspace, 8 bytes a column and block
// Regs     110 at most; the test cuda_ptxas prints each
// Order    along a row: a lane's elements ascending, lanes by halves. d_weight: a group's rows ascending, groups in
//          order, then column_sums.cuh over blocks
// Numerics float32, rounded once; d_weight float32 over a group's rows of a block, then float64
// Traps    rows past M take part in the shuffles, with zeros.
// Measured verified on an H200; not timed in a committed record
#include "thalweg/ops/gated_rms_norm/cuda_sums.cuh"
#include "thalweg/ops/gated_rms_norm/sm90_rows.cuh"

namespace thalweg::gated_rms_norm {
namespace {

template <class E>
struct Tensors {
  Rows<const E> x, gate, d_y;
  Rows<E> d_x, d_gate;  // absent: null
};

// A lane's packs of one row, as stored.
template <class E, int kPacks>
struct RowPacks {
  cuda::Pack<E, kPack<E>> x[kPacks], gate[kPacks], d_y[kPacks];
};

template <class E, bool kGated, int kPacks>
__device__ __forceinline__ void load_row(const Shape& shape, const Tensors<E>& t, int64_t m, bool there, int lane,
                                         RowPacks<E, kPacks>& row) {
  constexpr int N = kPack<E>;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int d = (lane + k * shape.lanes) * N;
    row.x[k] = load_or_zeros<E, N>(t.x, m, d, there && d < shape.D);
    row.d_y[k] = load_or_zeros<E, N>(t.d_y, m, d, there && d < shape.D);
    if constexpr (kGated) row.gate[k] = load_or_zeros<E, N>(t.gate, m, d, there && d < shape.D);
  }
}

// One row: d_gate and d_x are stored, the terms of d_weight added to sums.
template <class E, bool kGated, int kPacks>
__device__ __forceinline__ void backward_row(const Shape& shape, const Tensors<E>& t, int64_t m, bool there, int lane,
                                             const RowPacks<E, kPacks>& row, const float (&w)[kPacks][kPack<E>],
                                             float (&sums)[kPacks][kPack<E>]) {
  constexpr int N = kPack<E>;
  float xh[kPacks][N], z[kPacks][N], squares = 0, dot = 0;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    cuda::widen(row.x[k], xh[k]);
#pragma unroll
    for (int j = 0; j < N; ++j) squares = fmaf(xh[k][j], xh[k][j], squares);
  }
  const float r = rsqrtf(group_sum(squares, shape.lanes) / shape.count + shape.eps);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int d = (lane + k * shape.lanes) * N;
    float g[N], d_gate[N];
    cuda::widen(row.d_y[k], z[k]);
    if constexpr (kGated) cuda::widen(row.gate[k], g);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float a = 1.f, slope = 0.f;
      if constexpr (kGated) a = activate(shape.silu, g[j], &slope);
      xh[k][j] *= r;
      d_gate[j] = z[k][j] * w[k][j] * xh[k][j] * slope;
      z[k][j] *= a;
      sums[k][j] = fmaf(z[k][j], xh[k][j], sums[k][j]);
      z[k][j] *= w[k][j];
      dot = fmaf(z[k][j], xh[k][j], dot);
    }
    if constexpr (kGated)
      if (t.d_gate.data && there && d < shape.D)
        cuda::store_pack(t.d_gate.data + m * t.d_gate.pitch + d, cuda::narrow<E>(d_gate));
  }
  const float mean = group_sum(dot, shape.lanes) / shape.count;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int d = (lane + k * shape.lanes) * N;
#pragma unroll
    for (int j = 0; j < N; ++j) z[k][j] = r * fmaf(-mean, xh[k][j], z[k][j]);
    if (t.d_x.data && there && d < shape.D) cuda::store_pack(t.d_x.data + m * t.d_x.pitch + d, cuda::narrow<E>(z[k]));
  }
}

// Sums over the groups of a block to its row of the partial sums.
template <int kPacks, int N>
__device__ void store_partials(const Shape& shape, const float (&sums)[kPacks][N], double* out) {
  __shared__ float smem[kPacks][kThreads * N];
  const int width = shape.lanes * N, groups = kThreads / shape.lanes;
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
#pragma unroll
    for (int j = 0; j < N; ++j) smem[k][threadIdx.x * N + j] = sums[k][j];
  __syncthreads();
  for (int d = int(threadIdx.x); d < shape.D; d += kThreads) {
    const int k = d / width, at = d - k * width;
    double sum = 0;
    for (int group = 0; group < groups; ++group) sum += double(smem[k][group * width + at]);
    out[d] = sum;
  }
}

template <class E, bool kGated, int kPacks, int kTile>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const Shape shape, const Tensors<E> t, const thalweg_tensor weight, const int64_t block,
                    double* partials) {
  constexpr int N = kPack<E>;
  const int lane = int(threadIdx.x) % shape.lanes, group = int(threadIdx.x) / shape.lanes;
  const int groups = kThreads / shape.lanes;
  float w[kPacks][N], sums[kPacks][N] = {};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int d = (lane + k * shape.lanes) * N;
    if (d < shape.D) cuda::load_parameters(weight, d * weight.stride[0], weight.stride[0], 1.f, w[k]);
  }
  const int64_t first = int64_t(blockIdx.x) * block, end = first + block < shape.M ? first + block : shape.M;
  for (int64_t base = first; base < end; base += groups * kTile) {
    RowPacks<E, kPacks> rows[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const int64_t m = base + group + i * groups;
      load_row<E, kGated, kPacks>(shape, t, m, m < end, lane, rows[i]);
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const int64_t m = base + group + i * groups;
      backward_row<E, kGated, kPacks>(shape, t, m, m < end, lane, rows[i], w, sums);
    }
  }
  if (partials) store_partials(shape, sums, partials + int64_t(blockIdx.x) * shape.D);
}

template <class E, bool kGated, int kPacks>
void backward(const Problem& p, const thalweg_gated_rms_norm_bwd_args& args, const Exec& exec) {
  constexpr int kTile = kPacks == 1 ? 2 : 1;
  const CudaSums at = cuda_sums_of(p);
  const Tensors<E> tensors = {rows_of<const E>(args.x), rows_of<const E>(args.gate), rows_of<const E>(args.d_y),
                              rows_of<E>(args.d_x), rows_of<E>(args.d_gate)};
  double* partials = p.sums ? reinterpret_cast<double*>(exec.workspace) : nullptr;
  cuda::launch(exec, "gated_rms_norm sm90_vec_bwd", backward_kernel<E, kGated, kPacks, kTile>, {at.num_blocks},
               kThreads, 0, shape_of<E>(p), tensors, args.weight, at.block, partials);
  if (p.sums) store_cuda_sums(p, args, exec);
}

template <class E>
void backward(const Problem& p, const thalweg_gated_rms_norm_bwd_args& args, const Exec& exec) {
  const bool one = p.D <= 32 * kPack<E>;
  if (p.gate == kNoGate)
    one ? backward<E, false, 1>(p, args, exec) : backward<E, false, 2>(p, args, exec);
  else
    one ? backward<E, true, 1>(p, args, exec) : backward<E, true, 2>(p, args, exec);
}

}  // namespace

void sm90_vec_bwd(const Problem& p, const Plan&, const thalweg_gated_rms_norm_bwd_args& args, const Exec& exec) {
  if (p.dtype == THALWEG_F32)
    backward<float>(p, args, exec);
  else if (p.dtype == THALWEG_BF16)
    backward<__nv_bfloat16>(p, args, exec);
  else
    backward<__half>(p, args, exec);
}

}  // namespace thalweg::gated_rms_norm
