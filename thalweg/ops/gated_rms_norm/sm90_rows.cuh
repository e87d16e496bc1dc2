// What the sm90 rows of gated_rms_norm share: how rows lie on threads, the gate's activation in float32.
//
// A row is taken by a group of lanes, a power of two of them in one warp; lane i has the packs of N elements
// i, i + lanes, ..., kPacks of them.
#ifndef THALWEG_OPS_GATED_RMS_NORM_SM90_ROWS_CUH
#define THALWEG_OPS_GATED_RMS_NORM_SM90_ROWS_CUH

#include <float.h>

#include "thalweg/cuda/launch.h"
#include "thalweg/cuda/packs.cuh"
#include "thalweg/cuda/sm90/sigmoid.cuh"
#include "thalweg/ops/gated_rms_norm/problem.h"

namespace thalweg::gated_rms_norm {
namespace {

constexpr int kThreads = 256;

template <class E>
constexpr int kPack = 16 / sizeof(E);

// A tensor [M D] whose rows are contiguous.
template <class E>
struct Rows {
  E* data;
  int64_t pitch;
};
template <class E>
Rows<E> rows_of(const thalweg_tensor& t) {
  return {static_cast<E*>(t.data), t.stride[0]};
}

struct Shape {
  int64_t M;
  int D, lanes;
  float count;  // D, or 1 where it is 0
  float eps;
  bool silu;
};
template <class E>
Shape shape_of(const Problem& p) {
  int lanes = 1;
  while (lanes < 32 && lanes * kPack<E> < p.D) lanes *= 2;
  return {p.M,
          int(p.D),
          lanes,
          p.D > 0 ? float(p.D) : 1.f,
          float(p.eps) > FLT_MIN ? float(p.eps) : FLT_MIN,
          p.gate == kSilu};
}

template <class E, int N>
__device__ __forceinline__ cuda::Pack<E, N> load_or_zeros(const Rows<const E>& rows, int64_t m, int d, bool there) {
  return there ? cuda::load_pack<E, N>(rows.data + m * rows.pitch + d) : cuda::Pack<E, N>{};
}

// The sum over a group of lanes; the whole warp takes part.
__device__ __forceinline__ float group_sum(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float activate(bool silu, float g) {
  return silu ? cuda::fast_silu(g) : cuda::fast_sigmoid(g);
}
// a(gate), and a'(gate) through the pointer.
__device__ __forceinline__ float activate(bool silu, float g, float* slope) {
  float a;
  *slope = silu ? cuda::fast_silu_slope(g, &a) : cuda::fast_sigmoid_slope(g, &a);
  return a;
}

}  // namespace
}  // namespace thalweg::gated_rms_norm
#endif
