// The slots of a state pool, checked on the device: -1 or in range, nothing written twice, nothing read by one
// sequence and written by another. Every sequence that has part in a fault is to be left alone: its outputs are NaN,
// no state of it is touched. Args has read_slots [N] and write_slots [N T], as the passes named decode.
#ifndef THALWEG_CUDA_SLOTS_CUH
#define THALWEG_CUDA_SLOTS_CUH

#include <stddef.h>

#include "thalweg/cuda/slot_uses.h"
#include "thalweg/cuda/values.cuh"

namespace thalweg::cuda {

struct PoolSizes {
  int64_t N, T, M;  // sequences, their tokens, slots
};

// The slot that sequence n starts from; below 0: none.
template <class Args>
__device__ int64_t read_slot(const Args& a, int64_t n) {
  return is_there(a.read_slots) ? int_at(a.read_slots, n) : n;
}
// The slot that keeps the state after token t of a sequence that started from `from`, or -1.
template <class Args>
__device__ int64_t write_slot(const PoolSizes& p, const Args& a, int64_t n, int64_t t, int64_t from) {
  if (is_there(a.write_slots)) return int_at(a.write_slots, n, t);
  return t + 1 == p.T ? from : -1;
}

static __global__ void clear_slot_uses_kernel(SlotUse* uses, int64_t M) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t m = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; m < M; m += stride) uses[m] = {0, INT32_MAX, -1};
}

template <class Args>
__global__ void mark_slot_uses_kernel(const PoolSizes p, const Args a, SlotUse* uses) {
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

// uses [M] of the slots that a call names.
template <class Args>
void count_slot_uses(const Exec& exec, const PoolSizes& p, const Args& a, SlotUse* uses) {
  constexpr int64_t kThreads = 256;
  launch(exec, "clear_slot_uses", clear_slot_uses_kernel, {capped_grid(ceil_div(p.M, kThreads))}, kThreads, 0, uses,
         p.M);
  launch(exec, "mark_slot_uses", mark_slot_uses_kernel<Args>, {capped_grid(ceil_div(p.N, kThreads))}, kThreads, 0, p, a,
         uses);
}

// Whether sequence n must be left alone; says so in the report, which the caller leaves null but for one thread.
template <class Args>
__device__ bool slots_are_wrong(const PoolSizes& p, const Args& a, const SlotUse* uses, int64_t n, int32_t* report) {
  const int64_t from = read_slot(a, n);
  bool wrong = false;
  auto look = [&](int64_t slot, int64_t field, int64_t position) {
    Fault fault = Fault::kNone;
    if (slot < -1 || slot >= p.M) {
      fault = Fault::kSlot;
    } else if (slot >= 0 && from >= 0) {
      const SlotUse u = uses[slot];
      if (u.writes > 1 || (u.writes == 1 && u.first != u.last)) fault = Fault::kSlotTwice;
    }
    if (fault == Fault::kNone) return;
    wrong = true;
    report_fault(report, fault, field, position, slot);
  };
  look(from, offsetof(Args, read_slots), n);
  if (is_there(a.write_slots))
    for (int64_t t = 0; t < p.T; ++t) look(write_slot(p, a, n, t, from), offsetof(Args, write_slots), n * p.T + t);
  return wrong;
}

// The same without a table, where has_few_slots(): asked by a whole block, whose threads share the other sequences.
template <class Args>
__device__ bool slots_are_wrong(const PoolSizes& p, const Args& a, int64_t n, int32_t* report) {
  const int64_t from = read_slot(a, n), writes = is_there(a.write_slots) ? p.T : 0;
  bool wrong = false;
  auto look = [&](bool fault, Fault kind, int64_t field, int64_t position, int64_t slot) {
    if (fault) report_fault(report, kind, field, position, slot);
    wrong = wrong || fault;
  };
  constexpr int64_t kRead = offsetof(Args, read_slots), kWrite = offsetof(Args, write_slots);
  for (int64_t t = int64_t(threadIdx.x) - 1; t < writes; t += blockDim.x) {
    const int64_t slot = t < 0 ? from : int_at(a.write_slots, n, t);
    look(slot < -1 || slot >= p.M, Fault::kSlot, t < 0 ? kRead : kWrite, t < 0 ? n : n * p.T + t, slot);
  }
  for (int64_t i = threadIdx.x; i < p.N * (writes + 1) && from >= 0; i += blockDim.x) {
    const int64_t other = i / (writes + 1), t = i - other * (writes + 1) - 1;  // t = -1: what it reads
    const int64_t read = read_slot(a, other), theirs = t < 0 ? read : int_at(a.write_slots, other, t);
    if (read < 0 || theirs < 0) continue;
    const bool other_writes = t >= 0 || (!is_there(a.write_slots) && p.T > 0);
    for (int64_t own = -1; own < writes; ++own) {
      const int64_t slot = own < 0 ? from : int_at(a.write_slots, n, own);
      const bool own_writes = own >= 0 || (!is_there(a.write_slots) && p.T > 0);
      if (slot != theirs || (other == n && (own < 0 || t < 0 || own == t))) continue;
      look(own_writes || other_writes, Fault::kSlotTwice, own < 0 ? kRead : kWrite, own < 0 ? n : n * p.T + own, slot);
    }
  }
  return __syncthreads_or(wrong) != 0;
}

}  // namespace thalweg::cuda
#endif
