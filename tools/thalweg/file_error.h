// What the readers and writers of files throw, and what they share.
#ifndef THALWEG_TOOLS_FILE_ERROR_H
#define THALWEG_TOOLS_FILE_ERROR_H

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "thalweg/core/types.h"

namespace thalweg::files {

// what() is "<file>: <what>, got <value>, expected <value>".
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using Bytes = std::span<const std::byte>;

// An array in a file or for one. `data` is borrowed and has no alignment.
struct Array {
  std::string name;
  thalweg_dtype dtype = THALWEG_NONE;
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;  // in elements; empty: row-major
  Bytes data;
};

// The element types that files have here, by the names of each format; npy is "" where it has none.
struct FileDtype {
  thalweg_dtype dtype;
  size_t bytes;
  const char* name;         // "f32"
  const char* safetensors;  // "F32"
  const char* npy;          // "<f4"
};
const FileDtype* find_dtype(thalweg_dtype dtype);  // nullptr when it is none of them
const FileDtype* find_safetensors_dtype(const std::string& name);
const FileDtype* find_npy_dtype(const std::string& name);
std::string dtype_text(thalweg_dtype dtype);

// Product of the axes times the element's bytes. False when an axis is negative or the product, also
// of the axes that are not 0, exceeds int64.
bool array_bytes(const std::vector<int64_t>& shape, size_t element_bytes, int64_t* bytes);
// "[2 3]"
std::string shape_text(const std::vector<int64_t>& shape);

// The whole file.
std::vector<std::byte> read_file(const std::string& path);
// Writes beside `path` and renames, so that `path` is never half written.
void write_file(const std::string& path, const std::vector<Bytes>& parts);

}  // namespace thalweg::files
#endif
