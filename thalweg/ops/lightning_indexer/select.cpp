// Radix selection and radix sort on keys that order as the scores do. Both are stable and look at bits alone, so
// the result is one list, whatever the threads or the instruction set.
#include "thalweg/ops/lightning_indexer/select.h"

#include <algorithm>
#include <bit>

namespace thalweg::lightning_indexer {
namespace {

// Unsigned numbers that order as the scores do. Adding 0 makes -0 a 0.
uint32_t key_of(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x == x ? x + 0.0f : -__builtin_inff());
  return u >> 31 ? ~u : u | 0x80000000u;
}
uint64_t key_of(double x) {
  const uint64_t u = std::bit_cast<uint64_t>(x == x ? x + 0.0 : -__builtin_inf());
  return u >> 63 ? ~u : u | 0x8000000000000000u;
}

// The E-th largest of more than E keys, digit by digit from the top; `ties` gets how many of its equals belong to the
// E. Keys that may still be it move to the front of `left`, [n], after each digit.
template <class Key>
Key threshold(const Key* keys, int64_t n, int64_t E, Key* left, int64_t* ties) {
  constexpr int kDigit = 11;  // the first one: sign, exponent, two bits more
  Key found = 0;
  int32_t rank = int32_t(E);
  for (int high = int(sizeof(Key)) * 8; high > 0; high -= kDigit) {
    const int shift = std::max(high - kDigit, 0);
    const Key digits = (Key(1) << (high - shift)) - 1;
    int32_t count[1 << kDigit] = {};
    for (int64_t i = 0; i < n; ++i) ++count[keys[i] >> shift & digits];
    Key digit = digits;
    while (count[digit] < rank) rank -= count[digit--];
    found |= digit << shift;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const Key key = keys[i];
      left[kept] = key;
      kept += (key >> shift & digits) == digit;
    }
    keys = left;
    n = kept;
  }
  *ties = rank;
  return found;
}

// Positions in ascending order to positions by key descending; least digit first.
template <class Key, class Score>
void sort_by_score(const Score* scores, int64_t n, void* scratch, int32_t* positions) {
  Key *keys = static_cast<Key*>(scratch), *other_keys = keys + n;
  int32_t *from = positions, *to = reinterpret_cast<int32_t*>(other_keys + n);
  for (int64_t i = 0; i < n; ++i) keys[i] = Key(~key_of(scores[positions[i]]));
  for (size_t shift = 0; shift < sizeof(Key) * 8; shift += 8) {
    int64_t place[257] = {};
    for (int64_t i = 0; i < n; ++i) ++place[(keys[i] >> shift & 255) + 1];
    for (int digit = 0; digit < 256; ++digit) place[digit + 1] += place[digit];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = place[keys[i] >> shift & 255]++;
      other_keys[at] = keys[i];
      to[at] = from[i];
    }
    std::swap(keys, other_keys);
    std::swap(from, to);  // an even number of times: the result ends in `positions`
  }
}

template <class Key, class Score>
int64_t select(const Score* scores, int64_t n, int64_t E, bool by_position, void* scratch, int32_t* positions) {
  int64_t count = std::min(n, E);
  if (n <= E) {
    for (int64_t i = 0; i < n; ++i) positions[i] = int32_t(i);
  } else if (E > 0) {
    Key *keys = static_cast<Key*>(scratch), *left = keys + n;
    for (int64_t i = 0; i < n; ++i) keys[i] = key_of(scores[i]);
    int64_t ties;
    const Key least = threshold(keys, n, E, left, &ties);
    count = 0;
    for (int64_t i = 0; i < n && count < E; ++i) {  // without branches on the scores
      const int64_t equal = keys[i] == least;
      positions[count] = int32_t(i);
      count += int64_t(keys[i] > least) | (equal & int64_t(ties > 0));
      ties -= equal;
    }
  }
  if (!by_position && count > 1) sort_by_score<Key>(scores, count, scratch, positions);
  return count;
}

}  // namespace

int64_t select_bytes(int64_t n, int64_t E, int64_t score_bytes) {
  return 2 * n * score_bytes + E * (2 * score_bytes + 4);
}

int64_t select_largest(const float* scores, int64_t n, int64_t E, bool by_position, void* scratch, int32_t* positions) {
  return select<uint32_t>(scores, n, E, by_position, scratch, positions);
}
int64_t select_largest(const double* scores, int64_t n, int64_t E, bool by_position, void* scratch,
                       int32_t* positions) {
  return select<uint64_t>(scores, n, E, by_position, scratch, positions);
}

}  // namespace thalweg::lightning_indexer
