#include "thalweg/ascend/device.h"

#include <cctype>

namespace thalweg::ascend {
namespace {

constexpr int64_t kKiB = 1024;

constexpr Target c220(const char* name, int32_t aic) {
  return {name, aic, 2 * aic, 192 * kKiB, 512 * kKiB, 64 * kKiB, 64 * kKiB, 128 * kKiB, false};
}
constexpr Target c310(const char* name, int32_t aic) {
  return {name, aic, 2 * aic, 248 * kKiB, 512 * kKiB, 64 * kKiB, 64 * kKiB, 256 * kKiB, true};
}

bool same_name(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (std::tolower(static_cast<unsigned char>(a[i])) != std::tolower(static_cast<unsigned char>(b[i]))) return false;
  return true;
}

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all = {
      c220("Ascend910B1", 24), c220("Ascend910B2", 24), c220("Ascend910B2C", 24),
      c220("Ascend910B3", 20), c220("Ascend910B4", 20), c220("Ascend910B4-1", 20),
      c220("Ascend910_9362", 20), c220("Ascend910_9372", 20), c220("Ascend910_9381", 24),
      c220("Ascend910_9382", 24), c220("Ascend910_9391", 24), c220("Ascend910_9392", 24),
  };
  return all;
}

const Target* find_target(std::string_view name) {
  for (const Target& target : targets())
    if (same_name(target.name, name)) return &target;
  return nullptr;
}

std::string target_names() {
  std::string names;
  for (const Target& target : targets()) names += (names.empty() ? "" : " ") + std::string(target.name);
  return names;
}

}  // namespace thalweg::ascend
