// What the machine is: instruction set, threads, caches.
#ifndef THALWEG_CORE_DEVICE_H
#define THALWEG_CORE_DEVICE_H

#include <stdint.h>

#include "thalweg/core/types.h"

namespace thalweg {

// Instruction sets in ascending order; a row needs its own or a higher one.
enum class Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

struct Device {
  thalweg_backend backend;
  Isa isa;              // what kernels may use
  Isa isa_of_machine;   // what cpuid and XCR0 allow, before THALWEG_ISA lowers it
  int64_t num_threads;  // default for a call
  int64_t num_cpus;     // that the process may run on
  int64_t l1_bytes, l2_bytes, l3_bytes;
};

const char* isa_name(Isa isa);

// The host, read once. An unknown THALWEG_ISA is an Error that names it.
const Device& cpu_device();

}  // namespace thalweg
#endif
