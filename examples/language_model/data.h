// The text: what to learn from, what to choose the best weights by, and what to be judged by.
#ifndef LANGUAGE_MODEL_DATA_H
#define LANGUAGE_MODEL_DATA_H

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace language_model {

// Something the user can put right; what() says what is wrong and what to do. Ends the program with 2.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using Bytes = std::vector<uint8_t>;

struct Corpus {
  std::string training_name, validation_name, held_out_name;
  Bytes training, validation, held_out;
  // Of the training and validation bytes, so that a checkpoint is not resumed on another text.
  std::string fingerprint() const;
};

// The distinct texts of `folder` (links and repeated contents skipped): MPL-2.0 held out whole, MPL-1.1 left
// out because it is too close to it, Artistic for validation, the others to learn from.
Corpus licenses(const std::string& folder = "/usr/share/common-licenses");

// `path` cut in three: the last tenth is held out (at most its first MiB is measured), the twentieth before
// it (at most 64 KiB) is for validation, the rest to learn from.
Corpus corpus_of_file(const std::string& path);

// Throws UserError when the corpus is too short for crops of T bytes.
void check_length(const Corpus&, int64_t T);

// Bytes and their successors, B crops of T at places that follow from the seed and the step alone.
struct Batch {
  Bytes inputs, targets;  // [B, T]
};
void crop(const Bytes& training, int64_t B, int64_t T, uint64_t seed, int64_t step, Batch& batch);
std::string grouped(int64_t n);  // "16,726"

}  // namespace language_model
#endif
