// Decays of many channels, for files compiled per instruction set.
#ifndef THALWEG_CPU_BLOCKS_DECAY_H
#define THALWEG_CPU_BLOCKS_DECAY_H

#include "thalweg/cpu/blocks/channel_gate.h"

namespace thalweg {
namespace {

// e^x in about half the instructions of simd.h's exp: to 2 ulp and 1.3e-8 |x|, 0 where it is below 2^-126.
// e^0 = 1 and e^-inf = 0 exactly, infinity from x = 88.4 on, NaN stays NaN.
[[gnu::always_inline]] inline vf exp_decay(vf x) {
  return power(min(set1(89.f), max(set1(-88.f), x)), set1(kLog2E));
}

}  // namespace
}  // namespace thalweg
#endif
