// Counter-based random numbers: a value depends on its key and index alone, so that a resumed run draws
// what an uninterrupted one would have drawn, whatever the threads.
#ifndef LANGUAGE_MODEL_RANDOM_H
#define LANGUAGE_MODEL_RANDOM_H

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace language_model {

// splitmix64's finaliser: every bit of x changes half of the result's.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// One key from several parts, e.g. {seed, step, layer}.
inline uint64_t key_of(std::initializer_list<uint64_t> parts) {
  uint64_t key = 0;
  for (uint64_t part : parts) key = mix(key ^ part);
  return key;
}

// 32 well-mixed bits for an element of a tensor; cheap enough for dropout, and loops of it vectorise.
inline uint32_t element_bits(uint32_t key, uint32_t index) {
  uint32_t x = index * 0x9e3779b9u ^ key;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

class Random {
 public:
  explicit Random(uint64_t key) : key_(key) {}
  uint64_t bits() { return mix(key_ + 0x632be59bd9b4e019u * ++count_); }
  double uniform() { return double(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double normal() {
    double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  uint64_t key_, count_ = 0;
};

}  // namespace language_model
#endif
