#include "testing/testing.h"

namespace thalweg::testing {

// SplitMix64: a counter and a mixing function.
uint64_t Random::bits() {
  uint64_t x = state_ += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

double Random::uniform() { return double(bits() >> 11) * 0x1p-53; }

// The sum of eight 16-bit uniforms, scaled to variance 1: near enough to normal, within +-4.9, and exact
// arithmetic, so the same on every machine (a library's log and cos need not be).
double Random::normal() {
  int64_t sum = 0;
  for (int draw = 0; draw < 2; ++draw) {
    uint64_t x = bits();
    sum += int64_t((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48));
  }
  return double(sum - 4 * 0xffff) * (1.224744871391589 / 0x10000);
}

int64_t Random::below(int64_t n) { return n <= 0 ? 0 : int64_t(bits() % uint64_t(n)); }

}  // namespace thalweg::testing
