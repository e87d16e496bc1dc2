#include "tools/thalweg/npy.h"

#include <cstring>
#include <optional>
#include <string_view>

namespace thalweg::files {
namespace {

struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

// The header's grammar, which is a small part of Python's: {'name': value, …} with texts, True, False
// and tuples of numbers as values.
class Reader {
 public:
  Reader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  Header header() {
    Header out;
    expect('{');
    while (!take('}')) {
      std::string name = text();
      expect(':');
      bool again = (name == "descr" && out.descr) || (name == "fortran_order" && out.fortran_order) ||
                   (name == "shape" && out.shape);
      if (again) fail("got " + name + " twice");
      if (name == "descr") {
        if (look() != '\'' && look() != '"') fail("descr: got a record or nested type, expected a plain one like '<f4'");
        out.descr = text();
      } else if (name == "fortran_order") {
        out.fortran_order = truth();
      } else if (name == "shape") {
        out.shape = tuple();
      } else {
        fail("got member '" + name + "', expected descr, fortran_order, shape");
      }
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip();
    if (at_ != text_.size()) fail("expected its end after }");
    if (!out.descr || !out.fortran_order || !out.shape) fail("expected descr, fortran_order and shape");
    return out;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw FileError(file_ + ": header, byte " + std::to_string(at_) + ": " + what);
  }
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  char look() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (look() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("expected ") + c);
  }
  std::string text() {
    char quote = look();
    if (quote != '\'' && quote != '"') fail("expected a text in quotes");
    size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos || end - at_ > 100) fail("expected the closing quote");
    std::string out(text_.substr(at_ + 1, end - at_ - 1));
    for (char c : out)
      if (c == '\\' || static_cast<unsigned char>(c) < 32 || static_cast<unsigned char>(c) > 126)
        fail("expected a text of printable letters");
    at_ = end + 1;
    return out;
  }
  bool word(std::string_view w) {
    skip();
    if (text_.substr(at_, w.size()) != w) return false;
    at_ += w.size();
    return true;
  }
  bool truth() {
    if (word("True")) return true;
    if (word("False")) return false;
    fail("fortran_order: expected True or False");
  }
  int64_t number() {
    int64_t value = 0;
    skip();
    size_t start = at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_)
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, text_[at_] - '0', &value))
        fail("shape: expected a number below 2^63");
    if (at_ == start) fail("shape: expected a whole number of 0 or more");
    return value;
  }
  std::vector<int64_t> tuple() {
    std::vector<int64_t> out;
    expect('(');
    while (!take(')')) {
      if (out.size() == 32) fail("shape: expected at most 32 axes");
      out.push_back(number());
      if (!take(',')) {
        if (out.size() == 1) fail("shape: expected a comma after the only axis");
        expect(')');
        break;
      }
    }
    return out;
  }

  std::string_view text_;
  const std::string& file_;
  size_t at_ = 0;
};

const FileDtype& dtype_of(const std::string& descr, const std::string& file) {
  if (const FileDtype* d = find_npy_dtype(descr)) return *d;
  std::string hint;
  if (!descr.empty() && descr[0] == '>') hint = " (big-endian is not read)";
  if (descr.find("V2") != std::string::npos || descr.find("bfloat16") != std::string::npos)
    hint = " (.npy cannot name bfloat16: use safetensors)";
  throw FileError(file + ": descr, got '" + descr + "', expected one of <f8 <f4 <f2 <i8 <i4 |i1 |u1 |b1" + hint);
}

}  // namespace

Array parse_npy(Bytes file, const std::string& name) {
  constexpr char kMagic[] = "\x93NUMPY";
  if (file.size() < 10 || std::memcmp(file.data(), kMagic, 6) != 0)
    throw FileError(name + ": expected a .npy file (it starts with \\x93NUMPY)");
  unsigned major = unsigned(file[6]), minor = unsigned(file[7]);
  if ((major != 1 && major != 2) || minor != 0)
    throw FileError(name + ": version, got " + std::to_string(major) + "." + std::to_string(minor) + ", expected 1.0 or 2.0");
  size_t length_bytes = major == 1 ? 2 : 4, start = 8 + length_bytes, length = 0;
  if (file.size() < start) throw FileError(name + ": size, got " + std::to_string(file.size()) + " bytes, expected a header");
  for (size_t i = 0; i < length_bytes; ++i) length |= size_t(file[8 + i]) << (8 * i);
  if (length > file.size() - start)
    throw FileError(name + ": header length, got " + std::to_string(length) + ", expected at most " + std::to_string(file.size() - start));
  Header header = Reader({reinterpret_cast<const char*>(file.data()) + start, length}, name).header();
  Array array;
  const FileDtype& row = dtype_of(*header.descr, name);
  array.dtype = row.dtype;
  array.shape = *header.shape;
  int64_t bytes = 0;
  if (!array_bytes(array.shape, row.bytes, &bytes))
    throw FileError(name + ": shape, got " + shape_text(array.shape) + ", expected fewer than 2^63 bytes");
  array.data = file.subspan(start + length);
  if (array.data.size() != uint64_t(bytes))
    throw FileError(name + ": size, got " + std::to_string(array.data.size()) + " bytes after the header, expected " +
                    std::to_string(bytes) + " (" + row.name + " " + shape_text(array.shape) + ")");
  if (*header.fortran_order && array.shape.size() > 1) {
    int64_t stride = 1;  // cannot overflow where the array has elements; empty ones have no addresses
    for (int64_t n : array.shape) {
      array.stride.push_back(stride);
      stride = bytes ? stride * n : 1;
    }
  }
  return array;
}

NpyFile read_npy(const std::string& path) {
  NpyFile file;
  file.bytes = read_file(path);
  file.array = parse_npy(file.bytes, path);
  return file;
}

void write_npy(const std::string& path, const Array& array) {
  const FileDtype* row = find_dtype(array.dtype);
  if (!row || !*row->npy)
    throw FileError(path + ": dtype, got " + dtype_text(array.dtype) + ", expected one that .npy can name (use safetensors)");
  int64_t bytes = 0;
  if (!array.stride.empty() || !array_bytes(array.shape, row->bytes, &bytes) || uint64_t(bytes) != array.data.size())
    throw FileError(path + ": size, got " + std::to_string(array.data.size()) + " bytes, expected a row-major " + shape_text(array.shape));
  std::string text = std::string("{'descr': '") + row->npy + "', 'fortran_order': False, 'shape': (";
  for (size_t i = 0; i < array.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(array.shape[i]);
  text += array.shape.size() == 1 ? ",), }" : "), }";
  text.append((64 - (10 + text.size() + 1) % 64) % 64, ' ');
  text += '\n';
  if (text.size() > 65535) throw FileError(path + ": shape, got " + std::to_string(array.shape.size()) + " axes, expected at most 32");
  std::string front = "\x93NUMPY\x01" + std::string(1, '\0') + char(text.size() & 0xff) + char(text.size() >> 8) + text;
  write_file(path, {std::as_bytes(std::span(front)), array.data});
}

}  // namespace thalweg::files
