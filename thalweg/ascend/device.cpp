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
  static const std::vector<Target> all = [] {
    std::vector<Target> list;
    for (const char* name : {"Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910_9381", "Ascend910_9382", "Ascend910_9391", "Ascend910_9392"})
      list.push_back(c220(name, 24));
    for (const char* name : {"Ascend910B3", "Ascend910B4", "Ascend910B4-1", "Ascend910_9362", "Ascend910_9372"})
      list.push_back(c220(name, 20));
    for (const char* name : {"Ascend910_950z", "Ascend950PR_950z"}) list.push_back(c310(name, 4));
    for (const char* name : {"Ascend950DT_950x", "Ascend950DT_950y"}) list.push_back(c310(name, 8));
    for (const char* name :
         {"Ascend910_9579", "Ascend910_957b", "Ascend910_957d", "Ascend950PR_9579", "Ascend950PR_957a", "Ascend950PR_957b",
          "Ascend950PR_957c", "Ascend950PR_957d", "Ascend950DT_9571", "Ascend950DT_9572", "Ascend950DT_9573", "Ascend950DT_9574",
          "Ascend950DT_9575", "Ascend950DT_9576", "Ascend950DT_9577", "Ascend950DT_9578"})
      list.push_back(c310(name, 28));
    for (const char* name :
         {"Ascend910_9581", "Ascend910_9589", "Ascend910_958a", "Ascend910_958b", "Ascend950PR_9589", "Ascend950PR_958a",
          "Ascend950PR_958b", "Ascend950PR_958c", "Ascend950PR_958d", "Ascend950DT_9581", "Ascend950DT_9582", "Ascend950DT_9583",
          "Ascend950DT_9584", "Ascend950DT_9585", "Ascend950DT_9586", "Ascend950DT_9587", "Ascend950DT_9588"})
      list.push_back(c310(name, 32));
    for (const char* name : {"Ascend910_9599", "Ascend950PR_9599", "Ascend950PR_959a", "Ascend950PR_959b", "Ascend950DT_9591",
                             "Ascend950DT_9592", "Ascend950DT_9595", "Ascend950DT_9596", "Ascend950DT_95A1", "Ascend950DT_95A2"})
      list.push_back(c310(name, 36));
    return list;
  }();
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
