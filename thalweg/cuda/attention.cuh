// What the generic rows of the attention operators share behind their products.
#ifndef THALWEG_CUDA_ATTENTION_CUH
#define THALWEG_CUDA_ATTENTION_CUH

#include "thalweg/cuda/launch.h"
#include "thalweg/cuda/products.cuh"

namespace thalweg::cuda {

// What the backward knows of a query and head: P_j = exp(s_j - L), dS_j = P_j (<d_o, v_j> - delta). L is +inf where it
// sees nothing; delta is 0 there, and NaN where its sequence is not valid.
template <class A>
struct Statistic {
  A L, delta;
};

// d_sink [H] = -sum exp(sink - L) delta over the rows of statistics [rows H]: 256 sums of every 256th row, as a tree.
template <class A>
__global__ void sum_sink_kernel(const Statistic<A>* statistics, int64_t rows, int64_t H, thalweg_tensor sink,
                                thalweg_tensor d_sink) {
  __shared__ double scratch[kThreads];
  for (int64_t h = blockIdx.x; h < H; h += gridDim.x) {
    const double z = load_at<double>(sink, h * sink.stride[0]);
    double sum = 0;
    for (int64_t r = threadIdx.x; r < rows; r += kThreads) {
      const Statistic<A> s = statistics[r * H + h];
      sum += isinf(s.L) ? double(s.delta) : -exp(z - double(s.L)) * double(s.delta);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) store_at(d_sink, h * d_sink.stride[0], sum);
  }
}

template <class A>
void sum_sink(const Exec& exec, const Statistic<A>* statistics, int64_t rows, int64_t H, const thalweg_tensor& sink,
              const thalweg_tensor& d_sink) {
  launch(exec, "sum_sink", sum_sink_kernel<A>, {capped_grid(H)}, kThreads, 0, statistics, rows, H, sink, d_sink);
}

}  // namespace thalweg::cuda
#endif
