// The slots of a state pool, checked on the device: -1 or in range, nothing written twice, nothing read by one
// sequence and written by another. Every sequence that has part in a fault is left alone: its o is NaN, no state of
// it is touched.
#ifndef THALWEG_DELTA_RULE_CUDA_SLOTS_CUH
#define THALWEG_DELTA_RULE_CUDA_SLOTS_CUH

#include <cstddef>

#include "thalweg/cuda/values.cuh"
#include "thalweg/delta_rule/cuda_plan.h"

namespace thalweg::delta_rule {
namespace {

// The slot that sequence n starts from; below 0: none.
template <class Args>
__device__ int64_t read_slot(const Args& a, int64_t n) {
  return cuda::is_there(a.read_slots) ? cuda::int_at(a.read_slots, n) : n;
}
// The slot that keeps the state after token t of a sequence that started from `from`, or -1.
template <class Args>
__device__ int64_t write_slot(const Problem& p, const Args& a, int64_t n, int64_t t, int64_t from) {
  if (cuda::is_there(a.write_slots)) return cuda::int_at(a.write_slots, n, t);
  return t + 1 == p.T ? from : -1;
}

static __global__ void clear_slot_uses(SlotUse* uses, int64_t M) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t m = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; m < M; m += stride) uses[m] = {0, INT32_MAX, -1};
}

template <class Args>
__global__ void mark_slot_uses(const __grid_constant__ Problem p, const __grid_constant__ Args a, SlotUse* uses) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  auto use = [&](int64_t slot, int64_t n, bool writes) {
    if (slot < 0 || slot >= p.M) return;
    if (writes) atomicAdd(&uses[slot].writes, 1);
    atomicMin(&uses[slot].first, int32_t(n));
    atomicMax(&uses[slot].last, int32_t(n));
  };
  for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < p.N; n += stride) {
    const int64_t from = read_slot(a, n);
    if (from < 0) continue;  // a padding row, or wrong: writes nothing
    use(from, n, false);
    for (int64_t t = 0; t < p.T; ++t) use(write_slot(p, a, n, t, from), n, true);
  }
}

template <class Args>
void count_slot_uses(const Problem& p, const Args& a, const Exec& exec, SlotUse* uses) {
  constexpr int64_t kThreads = 256;
  cuda::launch(exec, "clear_slot_uses", clear_slot_uses, {cuda::capped_grid(cuda::ceil_div(p.M, kThreads))}, kThreads,
               0, uses, p.M);
  cuda::launch(exec, "mark_slot_uses", mark_slot_uses<Args>, {cuda::capped_grid(cuda::ceil_div(p.N, kThreads))},
               kThreads, 0, p, a, uses);
}

// Whether sequence n must be left alone; says so in the report.
template <class Args>
__device__ __noinline__ bool slots_are_wrong(const Problem& p, const Args& a, const SlotUse* uses, int64_t n,
                                             int32_t* report) {
  const int64_t from = read_slot(a, n);
  bool wrong = false;
  auto look = [&](int64_t slot, int64_t field, int64_t position) {
    Fault fault = Fault::kNone;
    if (slot < -1 || slot >= p.M)
      fault = Fault::kSlot;
    else if (slot >= 0 && from >= 0) {
      const SlotUse u = uses[slot];
      if (u.writes > 1 || (u.writes == 1 && u.first != u.last)) fault = Fault::kSlotTwice;
    }
    if (fault == Fault::kNone) return;
    wrong = true;
    if (threadIdx.x == 0) cuda::report_fault(report, fault, field, position, slot);
  };
  look(from, offsetof(Args, read_slots), n);
  if (cuda::is_there(a.write_slots))
    for (int64_t t = 0; t < p.T; ++t) look(write_slot(p, a, n, t, from), offsetof(Args, write_slots), n * p.T + t);
  return wrong;
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
