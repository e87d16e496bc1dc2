#include "testing/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <utility>

namespace thalweg::testing {
namespace {

constexpr size_t kCanaryBytes = 512;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

bool is_canary(const char* at, bool sparse) {
  if (sparse) return *at == 0;
  return *at == (reinterpret_cast<uintptr_t>(at) % 2 == 0 ? char(0xff) : char(0x7f));
}

}  // namespace

void poison(void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  for (; bytes > 0 && reinterpret_cast<uintptr_t>(at) % 2 != 0; --bytes) *at++ = char(0x7f);
  uint16_t word = 0x7fff;
  for (; bytes >= 2; bytes -= 2, at += 2) std::memcpy(at, &word, 2);
  if (bytes) *at = char(0xff);
}

Buffer::Buffer(size_t bytes, size_t misalign, Guard guard) : bytes_(bytes) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  bool sparse_memory = bytes > kSparseBytes;
  size_t body = round_up(bytes + misalign + 2 * kCanaryBytes, page);
  mapped_ = body + 2 * page;
  void* mapping = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | (sparse_memory ? MAP_NORESERVE : 0), -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(mapping);
  mprotect(mapping_, page, PROT_NONE);
  mprotect(mapping_ + page + body, page, PROT_NONE);
  low_ = mapping_ + page;
  high_ = low_ + body;
  if (guard == Guard::kCanary) data_ = low_ + kCanaryBytes + misalign;
  if (guard == Guard::kPageAfter) data_ = high_ - bytes;
  if (guard == Guard::kPageBefore) data_ = low_;
  if (!sparse_memory) poison(low_, body);
}

Buffer::~Buffer() {
  if (mapping_) munmap(mapping_, mapped_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(low_, other.low_);
  std::swap(high_, other.high_);
  return *this;
}

std::string Buffer::check_outside() const {
  if (!mapping_) return "";
  const char* first = sparse() && data_ - low_ > 4096 ? data_ - 4096 : low_;
  for (const char* at = data_ - 1; at >= first; --at)
    if (!is_canary(at, sparse())) return "byte " + std::to_string(data_ - at) + " before its start was written";
  const char* end = data_ + bytes_;
  for (const char* at = end; at < high_; ++at)
    if (!is_canary(at, sparse())) return "byte " + std::to_string(at - end) + " past its end was written";
  return "";
}

}  // namespace thalweg::testing
