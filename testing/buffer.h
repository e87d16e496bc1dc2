// Guarded memory for one tensor or workspace.
#ifndef THALWEG_TESTING_BUFFER_H
#define THALWEG_TESTING_BUFFER_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace thalweg::testing {

enum class Guard {
  kCanary,     // canaries on both sides
  kPageAfter,  // the byte behind the last lies in an unreadable page
  kPageBefore  // the byte before the first lies in an unreadable page
};

// Fills `bytes` of memory with 0x7fff words: NaN in every float dtype, large in every integer one.
void poison(void* data, size_t bytes);

// A mapping of its own, all of it 0x7fff words at first. Above kSparseBytes only the pages touched exist
// (offsets beyond 2^31 by stride), and canaries there are zeros.
class Buffer {
 public:
  static constexpr size_t kSparseBytes = size_t(1) << 30;

  Buffer() = default;
  // `misalign` bytes off a 64-byte boundary (canaries only; pages decide by themselves).
  Buffer(size_t bytes, size_t misalign, Guard guard);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // All that is readable, canaries included.
  char* low() const { return low_; }
  size_t readable_bytes() const { return size_t(high_ - low_); }
  bool sparse() const { return bytes_ > kSparseBytes; }
  // "" or "byte <i> before its start|past its end was written".
  std::string check_outside() const;

 private:
  char* mapping_ = nullptr;
  size_t mapped_ = 0;  // bytes, unreadable pages included
  char* data_ = nullptr;
  size_t bytes_ = 0;
  char* low_ = nullptr;  // first and one past last readable byte
  char* high_ = nullptr;
};

}  // namespace thalweg::testing
#endif
