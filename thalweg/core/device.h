// What the machine is: instruction set, threads, caches.
#ifndef THALWEG_CORE_DEVICE_H
#define THALWEG_CORE_DEVICE_H

#include <stdint.h>

#include "thalweg/core/types.h"

namespace thalweg {

// Instruction sets in ascending order; a row needs its own or a higher one.
enum class Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

struct Device {
  thalweg_backend backend;
  Isa isa;              // what kernels may use
  Isa isa_of_machine;   // what cpuid, XCR0 and the system allow, before THALWEG_ISA lowers it
  int64_t num_threads;  // default for a call
  int64_t num_cpus;     // that the process may run on
  int64_t l1_bytes, l2_bytes, l3_bytes;
  int32_t id;                   // CUDA: the device; the fields below are zero on the CPU
  int64_t num_sms, smem_bytes;  // CUDA: multiprocessors; shared memory a block may have
};

const char* isa_name(Isa isa);

// The host, read once. An unknown THALWEG_ISA is an Error that names it.
const Device& cpu_device();

// A CUDA device of compute capability 9.0, read once. Throws a device error that says what is missing: a build without
// CUDA (cuda/none.cpp), a driver, the device, a Hopper GPU.
const Device& cuda_device(int32_t id);
// What CUDA rows do in a build without CUDA, where no call reaches them.
[[noreturn]] void fail_no_cuda();
// Makes `id` the calling thread's device while it lives; the one before comes back after.
class CudaDeviceScope {
 public:
  explicit CudaDeviceScope(int32_t id);
  ~CudaDeviceScope();
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

 private:
  int before_ = -1;
};

}  // namespace thalweg
#endif
