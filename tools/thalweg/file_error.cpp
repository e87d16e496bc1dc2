#include "tools/thalweg/file_error.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace thalweg::files {
namespace {

[[noreturn]] void fail_system(const std::string& path, const char* what) {
  throw FileError(path + ": " + what + ": " + std::strerror(errno));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  int release() {
    int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

void write_all(int fd, Bytes part, const std::string& path) {
  for (size_t at = 0; at < part.size();) {
    ssize_t n = ::write(fd, part.data() + at, part.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_system(path, "cannot be written");
    at += size_t(n);
  }
}

constexpr FileDtype kDtypes[] = {
    {THALWEG_F64, 8, "f64", "F64", "<f8"}, {THALWEG_F32, 4, "f32", "F32", "<f4"}, {THALWEG_F16, 2, "f16", "F16", "<f2"},
    {THALWEG_BF16, 2, "bf16", "BF16", ""}, {THALWEG_I64, 8, "i64", "I64", "<i8"}, {THALWEG_I32, 4, "i32", "I32", "<i4"},
    {THALWEG_I8, 1, "i8", "I8", "|i1"},    {THALWEG_U8, 1, "u8", "U8", "|u1"},    {THALWEG_BOOL, 1, "bool", "BOOL", "|b1"}};

}  // namespace

const FileDtype* find_dtype(thalweg_dtype dtype) {
  for (const FileDtype& d : kDtypes)
    if (d.dtype == dtype) return &d;
  return nullptr;
}
const FileDtype* find_safetensors_dtype(const std::string& name) {
  for (const FileDtype& d : kDtypes)
    if (d.safetensors == name) return &d;
  return nullptr;
}
const FileDtype* find_npy_dtype(const std::string& name) {
  for (const FileDtype& d : kDtypes)
    if (*d.npy && d.npy == name) return &d;
  return nullptr;
}
std::string dtype_text(thalweg_dtype dtype) {
  const FileDtype* d = find_dtype(dtype);
  return d ? d->name : "none";
}

bool array_bytes(const std::vector<int64_t>& shape, size_t element_bytes, int64_t* bytes) {
  int64_t product = int64_t(element_bytes);
  bool empty = false;
  for (int64_t n : shape) {
    if (n < 0) return false;
    if (n == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, n, &product)) {
      return false;
    }
  }
  *bytes = empty ? 0 : product;
  return true;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i) text += ' ';
    text += std::to_string(shape[i]);
  }
  text += ']';
  return text;
}

std::vector<std::byte> read_file(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) fail_system(path, "cannot be opened");
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) fail_system(path, "cannot be read");
  if (S_ISDIR(info.st_mode)) throw FileError(path + ": got a directory, expected a file");
  std::vector<std::byte> bytes(S_ISREG(info.st_mode) ? size_t(info.st_size) + 1 : 0);  // one more tells the end
  for (size_t at = 0;;) {
    if (at == bytes.size()) bytes.resize(at + at / 2 + 65536);  // pipes
    ssize_t n = ::read(file.get(), bytes.data() + at, bytes.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_system(path, "cannot be read");
    at += size_t(n);
    if (n == 0) {
      bytes.resize(at);
      return bytes;
    }
  }
}

void write_file(const std::string& path, const std::vector<Bytes>& parts) {
  struct stat info {};
  bool direct = ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode);  // /dev/stdout and the like
  std::string target = direct ? path : path + ".partial";
  Descriptor file(::open(target.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.get() < 0) fail_system(path, "cannot be written");
  try {
    for (Bytes part : parts) write_all(file.get(), part, path);
    if (direct) return;
    if (::fsync(file.get()) != 0) fail_system(path, "cannot be written");
    if (::close(file.release()) != 0) fail_system(path, "cannot be written");
    if (std::rename(target.c_str(), path.c_str()) != 0) fail_system(path, "cannot be written");
  } catch (...) {
    if (!direct) ::unlink(target.c_str());
    throw;
  }
}

}  // namespace thalweg::files
