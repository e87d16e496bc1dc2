#include "tests/fuzz_files.h"

#include <cstdio>
#include <cstring>
#include <string>

#include "tools/thalweg/safetensors.h"

namespace thalweg::tests {
namespace {

using testing::Random;

// A valid file of up to four arrays, written out here by hand.
std::string whole_file(Random& random) {
  const char* dtypes[] = {"F32", "BF16", "F64", "I64", "U8"};
  const int64_t bytes[] = {4, 2, 8, 8, 1};
  std::string header = "{", data;
  if (random.below(2)) header += "\"__metadata__\":{\"format\":\"pt\"},";
  for (int64_t i = 0, n = random.below(4); i <= n; ++i) {
    int64_t kind = random.below(5), rows = random.below(4), columns = 1 + random.below(5);
    std::string name = "t" + std::to_string(i), begin = std::to_string(data.size());
    data.append(size_t(rows * columns * bytes[kind]), char('a' + i));
    header += (i ? ",\"" : "\"") + name + "\":{\"dtype\":\"" + dtypes[kind] + "\",\"shape\":[" + std::to_string(rows) + "," + std::to_string(columns) +
              "],\"data_offsets\":[" + begin + "," + std::to_string(data.size()) + "]}";
  }
  header += "}";
  while (header.size() % 8) header += ' ';
  uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

void damage(Random& random, std::string* file) {
  for (int64_t n = random.below(4); n >= 0 && !file->empty(); --n) {
    size_t at = size_t(random.below(int64_t(file->size())));
    switch (random.below(8)) {
      case 0: file->resize(at); break;
      case 1: file->insert(at, std::string(size_t(1 + random.below(9)), char(random.bits()))); break;
      case 2: file->erase(at, size_t(1 + random.below(9))); break;
      case 3: (*file)[at] = char(random.bits()); break;
      case 4: (*file)[at] = char((*file)[at] ^ (1 << random.below(8))); break;
      case 5: (*file)[size_t(random.below(std::min<int64_t>(8, int64_t(file->size()))))] = char(random.bits()); break;  // header length
      case 6: {  // a number of the header becomes large, negative or long
        size_t digit = file->find_first_of("0123456789", std::min<size_t>(at, file->size()));
        const char* numbers[] = {"-1", "9223372036854775807", "18446744073709551616", "1e3", "00", "4294967296"};
        if (digit != std::string::npos) file->replace(digit, 1, numbers[random.below(6)]);
        break;
      }
      default: {  // structure
        const char* pieces[] = {"{", "}", "[", "]", "\"", ",", ":", "null", "{{{{{{{{", "\\u0000", "\xff\xfe"};
        file->insert(at, pieces[random.below(11)]);
      }
    }
  }
}

}  // namespace

bool survive_damaged_file(Random& random) {
  std::string file = whole_file(random);
  auto parse = [](const std::string& text) {
    return files::parse_safetensors(files::Bytes(reinterpret_cast<const std::byte*>(text.data()), text.size()), "test.safetensors");
  };
  try {
    parse(file);
  } catch (const std::exception& e) {
    std::printf("failed: a whole safetensors file was refused: %s\n", e.what());
    return false;
  }
  damage(random, &file);
  try {
    files::Safetensors content = parse(file);
    const std::byte* begin = reinterpret_cast<const std::byte*>(file.data());
    unsigned sum = 0;
    for (const files::Array& array : content.arrays) {
      int64_t bytes = 0;
      bool counted = files::array_bytes(array.shape, thalweg_dtype_bytes(array.dtype), &bytes);
      if (!counted || size_t(bytes) != array.data.size() || array.data.data() < begin || array.data.data() + array.data.size() > begin + file.size()) {
        std::printf("failed: safetensors: array %s lies outside its file\n", array.name.c_str());
        return false;
      }
      for (std::byte b : array.data) sum += unsigned(b);
    }
    return sum != 0xffffffffu;
  } catch (const files::FileError&) {
    return true;
  } catch (const std::exception& e) {
    std::printf("failed: safetensors: an exception that is no FileError: %s\n", e.what());
    return false;
  }
}

}  // namespace thalweg::tests
