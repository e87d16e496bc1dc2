// Parts of the case grammar shared inside testing/.
#ifndef THALWEG_TESTING_CASE_H
#define THALWEG_TESTING_CASE_H

#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "testing/testing.h"

namespace thalweg::testing {

// The tokens behind "<op>.<pass>:". In a shared line (for every pass of an operator) a token that only
// other passes know is left out, and B stands for N where a pass has no B.
Case parse_tokens(const thalweg_pass& pass, std::string_view tokens, bool shared);
// Lengths of packed sequences: of queries (or the only tokens), or of keys where these have an axis S of their own.
std::vector<int64_t> lengths_of(const Case& c);
std::vector<int64_t> key_lengths_of(const Case& c);

// A case that this machine's memory cannot hold: nothing is known of the kernel, so it is no failed verdict.
class TooLarge : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace thalweg::testing
#endif
