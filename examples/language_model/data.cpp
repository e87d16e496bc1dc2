#include "data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "random.h"

namespace language_model {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMeasured = size_t(1) << 20, kValidation = size_t(1) << 16;

Bytes read_text(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) throw UserError(fmt::format("{}: is a directory, expected a text file", path.string()));
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) throw UserError(fmt::format("{}: cannot be read ({})", path.string(), std::strerror(errno)));
  Bytes bytes;
  uint8_t block[65536];
  size_t got;
  while ((got = std::fread(block, 1, sizeof block, file.get())) > 0) bytes.insert(bytes.end(), block, block + got);
  if (std::ferror(file.get())) throw UserError(fmt::format("{}: cannot be read ({})", path.string(), std::strerror(errno)));
  if (bytes.empty()) throw UserError(fmt::format("{}: is empty, expected text", path.string()));
  return bytes;
}

}  // namespace

std::string Corpus::fingerprint() const {
  uint64_t hash = 0;
  for (const Bytes* part : {&training, &validation}) {
    for (uint8_t byte : *part) hash = mix(hash ^ byte);
    hash = mix(hash ^ 0x100);
  }
  return fmt::format("{:016x}", hash);
}

Corpus licenses(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.is_regular_file() && !entry.is_symlink()) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  Corpus corpus;
  std::vector<Bytes> seen;
  for (const auto& path : paths) {
    std::string name = path.filename();
    if (name == "MPL-1.1") continue;
    Bytes text = read_text(path);
    if (std::find(seen.begin(), seen.end(), text) != seen.end()) continue;
    seen.push_back(text);
    if (name == "MPL-2.0") {
      corpus.held_out = std::move(text);
      corpus.held_out_name = name;
    } else if (name == "Artistic") {
      corpus.validation = std::move(text);
      corpus.validation_name = name;
    } else {
      corpus.training.insert(corpus.training.end(), text.begin(), text.end());
      corpus.training_name += (corpus.training_name.empty() ? "" : ", ") + name;
    }
  }
  if (corpus.held_out.empty() || corpus.validation.empty() || corpus.training.empty())
    throw UserError(folder + ": expected MPL-2.0, Artistic and other license texts there; name a text with --text FILE");
  return corpus;
}

Corpus corpus_of_file(const std::string& path) {
  Bytes text = read_text(path);
  size_t held_out = text.size() / 10, validation = std::min(text.size() / 20, kValidation);
  auto end = text.end(), middle = end - std::ptrdiff_t(held_out), start = middle - std::ptrdiff_t(validation);
  Corpus corpus;
  corpus.training.assign(text.begin(), start);
  corpus.validation.assign(start, middle);
  corpus.held_out.assign(middle, middle + std::ptrdiff_t(std::min(held_out, kMeasured)));
  corpus.training_name = "the first part of " + path;
  corpus.validation_name = "the twentieth before its last tenth";
  corpus.held_out_name = held_out > kMeasured ? "the first MiB of its last tenth" : "its last tenth";
  return corpus;
}

void check_length(const Corpus& corpus, int64_t T) {
  if (int64_t(corpus.training.size()) <= T)
    throw UserError(fmt::format("{}: has {} bytes to learn from, expected more than one crop of {} (shorter crops: --crop)",
                                corpus.training_name, grouped(int64_t(corpus.training.size())), T));
  if (corpus.validation.empty() || corpus.held_out.empty())
    throw UserError(corpus.training_name + ": is too short to hold out a part of it");
}

void crop(const Bytes& training, int64_t B, int64_t T, uint64_t seed, int64_t step, Batch& batch) {
  batch.inputs.resize(size_t(B * T));
  batch.targets.resize(size_t(B * T));
  uint64_t places = training.size() - size_t(T);
  for (int64_t b = 0; b < B; ++b) {
    const uint8_t* from = training.data() + key_of({seed, 0xc409, uint64_t(step), uint64_t(b)}) % places;
    std::memcpy(batch.inputs.data() + b * T, from, size_t(T));
    std::memcpy(batch.targets.data() + b * T, from + 1, size_t(T));
  }
}

std::string grouped(int64_t n) {
  std::string text = std::to_string(n);
  for (size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return text;
}

}  // namespace language_model
