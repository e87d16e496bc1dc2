// Decays of many channels, for files compiled per instruction set.
#ifndef THALWEG_CPU_BLOCKS_DECAY_H
#define THALWEG_CPU_BLOCKS_DECAY_H

#include "thalweg/cpu/blocks/channel_gate.h"

namespace thalweg {
namespace {

// e^x in about half the instructions of simd.h's exp: to 2 ulp and 1.3e-8 |x|, 0 where it is below 2^-126.
// e^0 = 1 and e^-inf = 0 exactly, infinity from x = 88.4 on, NaN stays NaN. Of N vectors side by side, as one of them
// is a chain of instructions that wait for each other.
template <int64_t N>
[[gnu::always_inline]] inline void exp_decay(vf (&x)[N]) {
  each<N>([&](int64_t i) { x[i] = min(set1(89.f), max(set1(-88.f), x[i])); });
  power(x, set1(kLog2E), x);
}

}  // namespace
}  // namespace thalweg
#endif
