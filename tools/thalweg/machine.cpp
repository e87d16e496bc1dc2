// What stands in a record beside the figures: machine, commit, date, command.
#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdlib>
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

int64_t cache_bytes(int64_t level, int64_t otherwise) {
  for (int i = 0; i < 8; ++i) {
    std::string folder = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/", i), type, size;
    int64_t of = 0;
    std::ifstream(folder + "level") >> of;
    std::ifstream(folder + "type") >> type;
    std::ifstream(folder + "size") >> size;  // "48K"
    if (of == level && type != "Instruction" && !size.empty() && size.back() == 'K') return std::atoll(size.c_str()) * 1024;
  }
  return otherwise;
}

int64_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::string& command_store() {
  static std::string text;
  return text;
}

std::string shell_quoted(const std::string& word) {
  bool plain = !word.empty() && word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=,:@+%") == std::string::npos;
  if (plain) return word;
  std::string out = "'";
  for (char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

const Caches& caches() {
  static const Caches once{cache_bytes(1, cpu_device().l1_bytes), cache_bytes(2, cpu_device().l2_bytes), cache_bytes(3, cpu_device().l3_bytes)};
  return once;
}

int64_t Caches::last() const { return std::max({l2, l3, int64_t(1) << 20}); }

Json machine_json() {
  Cpu cpu = read_cpu();
  utsname system{};
  ::uname(&system);
  const Device& device = cpu_device();
  Json out;
  out["cpu"] = cpu.family.empty() ? cpu.model : fmt::format("{} (family {} model {})", cpu.model, cpu.family, cpu.number);
  out["cores"] = usable_cores();
  out["isa"] = isa_name(device.isa_of_machine);
  out["l1_bytes"] = caches().l1;
  out["l2_bytes"] = caches().l2;
  out["l3_bytes"] = caches().l3;
  out["compiler"] = "g++ " __VERSION__;
  out["system"] = fmt::format("{} {}", system.sysname, system.machine);
  return out;
}

std::string machine_text() {
  Json m = machine_json();
  return fmt::format("{}, {} cores, {}, L1 {}, L2 {}, L3 {}", m["cpu"].get<std::string>(), m["cores"].get<int64_t>(),
                     m["isa"].get<std::string>(), bytes_text(m["l1_bytes"].get<double>()), bytes_text(m["l2_bytes"].get<double>()),
                     bytes_text(m["l3_bytes"].get<double>()));
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
