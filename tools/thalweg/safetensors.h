// safetensors files: eight bytes of header length, a JSON header, the tensors' bytes one after another.
#ifndef THALWEG_TOOLS_SAFETENSORS_H
#define THALWEG_TOOLS_SAFETENSORS_H

#include <map>
#include <string>
#include <vector>

#include "tools/thalweg/file_error.h"

namespace thalweg::files {

struct Safetensors {
  std::vector<Array> arrays;  // row-major, in the order of their bytes; data points into the parsed bytes
  std::map<std::string, std::string> metadata;
  const Array* find(const std::string& name) const;
  const Array& at(const std::string& name) const;  // throws FileError that lists the names
  std::string file;                                // for error texts
};

// Checks everything before anything is used: header length, JSON, names given twice, members, dtypes
// (F64 F32 F16 BF16 I64 I32 I8 U8 BOOL), shapes, offsets, that arrays neither overlap nor leave holes, and
// that the file ends where they do. `name` is for error texts.
Safetensors parse_safetensors(Bytes file, const std::string& name);

// A file and the bytes that its arrays point into.
struct SafetensorsFile {
  std::vector<std::byte> bytes;
  Safetensors content;
};
SafetensorsFile read_safetensors(const std::string& path);

// Row-major arrays only. Wider elements come first, so that every array is aligned in the file.
std::vector<std::byte> safetensors_header(std::vector<Array>& arrays,
                                          const std::map<std::string, std::string>& metadata);
void write_safetensors(const std::string& path, std::vector<Array> arrays,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace thalweg::files
#endif
