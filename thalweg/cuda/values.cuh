// Values inside device tensors: checked and contained on the device, since nothing is read back. A fault is
// written to ctx.report once (the first that is found), and thalweg_report_text() turns it into words.
#ifndef THALWEG_CUDA_VALUES_CUH
#define THALWEG_CUDA_VALUES_CUH

#include "thalweg/core/report.h"
#include "thalweg/cuda/launch.h"
#include "thalweg/cuda/sm90/ptx.cuh"
#include "thalweg/cuda/tensor.cuh"

namespace thalweg::cuda {

// `field` is the argument's offset in the args struct: offsetof(Args, cu_seqlens).
__device__ inline void report_fault(int32_t* report, Fault fault, int64_t field, int64_t position, int64_t value) {
  if (!report || atomicCAS(report, 0, int32_t(fault)) != 0) return;
  auto clamp = [](int64_t x) { return int32_t(x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x); };
  report[1] = int32_t(field), report[2] = clamp(position), report[3] = clamp(value);
}

// Where packed sequences lie, as far as the borders can be trusted: spans never overlap and stay inside [0, size].
struct Span {
  int64_t begin, end;
  int64_t valid;  // 0: its borders are wrong; rows [begin, end) get NaN, and so does its state
};
inline int64_t spans_bytes(int64_t N) { return (N * int64_t(sizeof(Span)) + 63) / 64 * 64; }

// One block: spans [N] of borders [N+1], whose entries start at 0, do not fall and do not pass `size`. Borders are
// replaced by the largest one so far, clamped; a sequence whose own borders were changed by that is not valid.
// `order` [N], if given: the sequences, longest first; as they come where there are more than a block has threads.
static __global__ void check_borders_kernel(thalweg_tensor borders, int64_t N, int64_t size, Span* spans,
                                            int32_t* order, int32_t* report, int64_t field) {
  sm90::grid_let_next_start();
  __shared__ int64_t highest[1024];
  int64_t carried = 0;  // the largest border before this round
  for (int64_t first = 0; first <= N; first += blockDim.x) {
    const int64_t i = first + threadIdx.x;
    int64_t got = 0;
    if (i <= N) got = int_at(borders, i);
    int64_t inside = i > N || got < 0 ? 0 : got > size ? size : got;
    if (i == 0) inside = 0;
    highest[threadIdx.x] = inside > carried ? inside : carried;
    __syncthreads();
    for (int step = 1; step < int(blockDim.x); step *= 2) {
      const int64_t other = int(threadIdx.x) >= step ? highest[threadIdx.x - step] : 0;
      __syncthreads();
      if (other > highest[threadIdx.x]) highest[threadIdx.x] = other;
      __syncthreads();
    }
    const int64_t mine = highest[threadIdx.x];
    if (i <= N) {
      const bool right = got == mine;
      if (!right) report_fault(report, Fault::kBorder, field, i, got);
      // Each border belongs to two spans; the halves of `valid` are joined by the reader (see span_at).
      if (i < N) spans[i].begin = right ? mine : ~mine;
      if (i > 0) spans[i - 1].end = right ? mine : ~mine;
    }
    carried = highest[blockDim.x - 1];
    __syncthreads();
  }
  for (int64_t n = threadIdx.x; order && n < N; n += blockDim.x) {
    int rank = int(n);
    if (N < blockDim.x) {  // highest has all borders
      const auto length_of = [&](int m) { return highest[m + 1] - highest[m]; };
      rank = 0;
      for (int m = 0; m < N; ++m) rank += length_of(m) > length_of(n) || (length_of(m) == length_of(n) && m < n);
    }
    order[rank] = int32_t(n);
  }
}

__device__ inline Span span_at(const Span* spans, int64_t n) {
  Span s = spans[n];
  s.valid = s.begin >= 0 && s.end >= 0;
  if (s.begin < 0) s.begin = ~s.begin;
  if (s.end < 0) s.end = ~s.end;
  return s;
}

inline void check_borders(const Exec& exec, const thalweg_tensor& borders, int64_t N, int64_t size, Span* spans,
                          int64_t field, int32_t* order = nullptr) {
  const int64_t threads = N + 1 < 1024 ? ceil_div(N + 1, 32) * 32 : 1024;
  launch(exec, "check_borders", check_borders_kernel, {1}, threads, 0, borders, N, size, spans, order, exec.report,
         field);
}

}  // namespace thalweg::cuda
#endif
