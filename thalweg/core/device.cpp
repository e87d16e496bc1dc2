// Reads the host once: cpuid and XCR0, affinity, cgroup quota, caches.
#include "thalweg/core/device.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "thalweg/core/fail.h"

namespace thalweg {
namespace {

#if defined(__x86_64__)
uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// A set counts only when the processor has it (cpuid) and the system saves its registers (XCR0).
Isa detect_isa() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::kPortable;
  const uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  const uint32_t kFirst = kFma | kOsxsave | kAvx | kF16c;
  if ((c & kFirst) != kFirst) return Isa::kPortable;
  const uint64_t xcr0 = read_xcr0(), kYmm = 0x6, kZmm = 0xe6;
  uint32_t b7 = 0, d7 = 0;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c, &d7)) return Isa::kPortable;
  const uint32_t kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if (!(b7 & kAvx2) || (xcr0 & kYmm) != kYmm) return Isa::kPortable;
  if ((b7 & kAvx512) != kAvx512 || (xcr0 & kZmm) != kZmm) return Isa::kAvx2;
  const uint32_t kAmx = 1u << 22 | 1u << 24, kAvx512Bf16 = 1u << 5;  // AMX-BF16, AMX-TILE
  const uint64_t kTiles = 0x60000;                                   // their configuration and their data
  if ((d7 & kAmx) != kAmx || (xcr0 & kTiles) != kTiles) return Isa::kAvx512;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & kAvx512Bf16)) return Isa::kAvx512;
  return Isa::kAmx;
}

// Linux saves tile registers for processes that ask. The answer counts for all threads, those that run already too.
bool may_use_tiles() {
  const long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
Isa detect_isa() { return Isa::kPortable; }
bool may_use_tiles() { return false; }
#endif

Isa lowered_isa(Isa machine) {
  const char* wanted = std::getenv("THALWEG_ISA");
  if (!wanted || !*wanted) return machine;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
    if (!std::strcmp(wanted, isa_name(isa))) return std::min(isa, machine);
  fail_argument("THALWEG_ISA: got %s, expected portable, avx2, avx512 or amx", wanted);
}

constexpr long kMaxThreads = 1024;

// 0 when it is unset. This library's own variable: what it cannot mean is refused, as with THALWEG_ISA.
int64_t wanted_threads() {
  const char* text = std::getenv("THALWEG_NUM_THREADS");
  if (!text || !*text) return 0;
  const bool whole = std::strspn(text, "0123456789") == std::strlen(text);
  const long value = whole ? std::strtol(text, nullptr, 10) : 0;  // LONG_MAX when it is too large
  if (value < 1 || value > kMaxThreads) fail_argument("THALWEG_NUM_THREADS: got %s, expected 1 to 1024", text);
  return value;
}

// Another library's variable: may go on after a comma, and what is no number counts as unset.
int64_t omp_threads() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (!text) return 0;
  char* end = nullptr;
  long value = std::strtol(text, &end, 10);
  return end != text && value > 0 ? std::min(value, kMaxThreads) : 0;
}

// CPUs that the cgroup lets this process use, rounded up; 0 when there is no limit.
int64_t cgroup_cpus() {
  if (FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    long long quota = 0, period = 0;
    int got = std::fscanf(f, "%lld %lld", &quota, &period);  // "max 100000" reads 0 values
    std::fclose(f);
    return got == 2 && period > 0 ? (quota + period - 1) / period : 0;
  }
  long long quota = -1, period = 0;
  if (FILE* f = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r")) {
    if (std::fscanf(f, "%lld", &quota) != 1) quota = -1;
    std::fclose(f);
  }
  if (FILE* f = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r")) {
    if (std::fscanf(f, "%lld", &period) != 1) period = 0;
    std::fclose(f);
  }
  return quota > 0 && period > 0 ? (quota + period - 1) / period : 0;
}

int64_t usable_cpus() {
  cpu_set_t set;
  int64_t n =
      sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : int64_t(std::thread::hardware_concurrency());
  if (int64_t quota = cgroup_cpus()) n = std::min(n, quota);
  return std::max<int64_t>(n, 1);
}

int64_t default_threads(int64_t cpus) {
  if (int64_t n = wanted_threads()) return n;
  if (int64_t n = omp_threads()) return n;
  return cpus;
}

// Of the first CPU, as the kernel shows it (sysconf counts the caches of other sockets on some machines).
int64_t cache_bytes(int wanted_level, int64_t otherwise) {
  for (int index = 0; index < 8; ++index) {
    auto read = [&](const char* name, char(&text)[32]) {
      char path[96];
      std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, name);
      FILE* f = std::fopen(path, "r");
      bool ok = f && std::fgets(text, sizeof text, f);
      if (f) std::fclose(f);
      return ok;
    };
    char level[32], type[32], size[32];
    if (!read("level", level) || !read("type", type) || !read("size", size)) continue;
    if (std::atoi(level) == wanted_level && type[0] != 'I' && std::atoll(size) > 0)  // "48K", not of instructions
      return std::atoll(size) * 1024;
  }
  return otherwise;
}

Device read_device() {
  Device d{};
  d.backend = THALWEG_CPU;
  d.isa_of_machine = detect_isa();
  d.isa = lowered_isa(d.isa_of_machine);
  if (d.isa == Isa::kAmx && !may_use_tiles()) d.isa = d.isa_of_machine = Isa::kAvx512;
  d.num_cpus = usable_cpus();
  d.num_threads = default_threads(d.num_cpus);
  d.l1_bytes = cache_bytes(1, 32 << 10);
  d.l2_bytes = cache_bytes(2, 512 << 10);
  d.l3_bytes = cache_bytes(3, 8 << 20);
  return d;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

const Device& cpu_device() {
  static const Device device = read_device();
  return device;
}

}  // namespace thalweg
