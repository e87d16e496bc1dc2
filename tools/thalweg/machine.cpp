// What stands in a record beside the figures: machine, commit, date, command.
#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <ctime>
#include <fstream>

#include "thalweg_commit.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

struct Cpu {
  std::string model = "unknown", family, number;
};

Cpu read_cpu() {
  Cpu cpu;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();) {
    size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    std::string name = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1), value = line.substr(colon + 2);
    if (name == "model name") cpu.model = value;
    if (name == "cpu family") cpu.family = value;
    if (name == "model") cpu.number = value;
  }
  return cpu;
}

std::string& command_store() {
  static std::string text;
  return text;
}

std::string shell_quoted(const std::string& word) {
  bool plain = !word.empty() &&
               word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=,:@+%") ==
                   std::string::npos;
  if (plain) return word;
  std::string out = "'";
  for (char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

int64_t last_cache_bytes() {
  const Device& device = cpu_device();
  return std::max({device.l2_bytes, device.l3_bytes, int64_t(1) << 20});
}

Json machine_json() {
  Cpu cpu = read_cpu();
  utsname system{};
  ::uname(&system);
  const Device& device = cpu_device();
  Json out;
  out["cpu"] =
      cpu.family.empty() ? cpu.model : fmt::format("{} (family {} model {})", cpu.model, cpu.family, cpu.number);
  out["cores"] = device.num_cpus;
  out["isa"] = isa_name(device.isa_of_machine);
  out["l1_bytes"] = device.l1_bytes;
  out["l2_bytes"] = device.l2_bytes;
  out["l3_bytes"] = device.l3_bytes;
  out["compiler"] = "g++ " __VERSION__;
  out["system"] = fmt::format("{} {}", system.sysname, system.machine);
  return out;
}

std::string machine_text() {
  Json m = machine_json();
  return fmt::format("{}, {} cores, {}, L1 {}, L2 {}, L3 {}", m["cpu"].get<std::string>(), m["cores"].get<int64_t>(),
                     m["isa"].get<std::string>(), bytes_text(m["l1_bytes"].get<double>()),
                     bytes_text(m["l2_bytes"].get<double>()), bytes_text(m["l3_bytes"].get<double>()));
}

std::string commit() { return kCommit; }

std::string utc_date() {
  std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

void keep_command(int argc, const char* const* argv) {
  std::string text = "thalweg";
  for (int i = 1; i < argc; ++i) text += " " + shell_quoted(argv[i]);
  command_store() = text;
}

const std::string& command() { return command_store(); }

}  // namespace thalweg::tool
