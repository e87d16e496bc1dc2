// When a CPU kernel's plan writes outputs past the caches.
#ifndef THALWEG_CPU_STREAMS_H
#define THALWEG_CPU_STREAMS_H

#include <algorithm>
#include <cstdint>

#include "thalweg/core/device.h"

namespace thalweg {

// True when `bytes`, inputs and outputs together, are more than the caches keep. A socket's cores share the L3, also
// with other machines: a thread can count on 8 MiB at most.
inline bool outgrow_caches(const Device& device, int64_t num_threads, int64_t bytes) {
  return bytes > std::max(device.l2_bytes, std::min(device.l3_bytes, num_threads << 23));
}

}  // namespace thalweg
#endif
