// NumPy's .npy files, versions 1.0 and 2.0.
#ifndef THALWEG_TOOLS_NPY_H
#define THALWEG_TOOLS_NPY_H

#include <string>
#include <vector>

#include "tools/thalweg/file_error.h"

namespace thalweg::files {

// Little-endian f8 f4 f2 i8 i4 i1 u1 b1, C order, or Fortran order as strides. Refuses by name big-endian
// numbers, other types (also bfloat16, which .npy cannot name), other versions, a header that is not
// the three members, and a file of another size than its shape says. The array's name is empty.
Array parse_npy(Bytes file, const std::string& name);

struct NpyFile {
  std::vector<std::byte> bytes;
  Array array;
};
NpyFile read_npy(const std::string& path);

// A row-major array, as version 1.0.
void write_npy(const std::string& path, const Array& array);

}  // namespace thalweg::files
#endif
