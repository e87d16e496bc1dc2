#include "tools/thalweg/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "testing/fields.h"
#include "thalweg/core/error.h"
#include "tools/thalweg/roof.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct RoofKernels {
  double (*fma)(int64_t, float, float);
  int64_t (*fma_flops_per_round)();
  void (*copy)(void*, const void*, size_t);
  void (*scale)(void*, size_t, float);
  void (*exp_log)(void*, const void*, size_t);
};
RoofKernels kernels_of(Isa isa) {
  if (isa >= Isa::kAvx512)
    return {roof::avx512::fma, roof::avx512::fma_flops_per_round, roof::avx512::copy, roof::avx512::scale, roof::avx512::exp_log};
  return {roof::avx2::fma, roof::avx2::fma_flops_per_round, roof::avx2::copy, roof::avx2::scale, roof::avx2::exp_log};
}

// Runs body(thread) on all threads at once; seconds from the first start to the last end.
double timed_together(int64_t threads, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> ready{0};
  std::vector<Clock::time_point> begin(static_cast<size_t>(threads)), end(static_cast<size_t>(threads));
  auto run = [&](int64_t t) {
    ready.fetch_add(1);
    while (ready.load(std::memory_order_acquire) < threads) std::this_thread::yield();
    begin[size_t(t)] = Clock::now();
    body(t);
    end[size_t(t)] = Clock::now();
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(run, t);
  run(0);
  for (auto& other : others) other.join();
  auto span = *std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end());
  return std::chrono::duration<double>(span).count();
}

// Thread t's part of `bytes`, in whole 64-byte lines.
struct Part {
  size_t begin, bytes;
};
Part part_of(size_t bytes, int64_t t, int64_t threads) {
  size_t lines = bytes / 64, n = size_t(threads), i = size_t(t);
  size_t first = lines * i / n, last = lines * (i + 1) / n;
  return {first * 64, (last - first) * 64};
}

constexpr int kSamples = 5;
constexpr double kSampleSeconds = 0.008;

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double spread_of(std::vector<double> samples) {
  if (samples.size() < 2) return INFINITY;
  std::sort(samples.begin(), samples.end());
  double n = double(samples.size()), half = 0.98 * std::sqrt(n);
  size_t low = size_t(std::max(0.0, std::floor(n / 2 - half))), high = size_t(std::min(n - 1, std::ceil(n / 2 + half)));
  return (samples[high] - samples[low]) / 2 / median(samples);
}

struct Roofs::Buffer {
  explicit Buffer(size_t size) : bytes(size), data(static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64))) {
    if (!data) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void touch(int64_t threads) {  // by the threads that will use it
    timed_together(threads, [&](int64_t t) {
      Part p = part_of(bytes, t, threads);
      float* x = reinterpret_cast<float*>(data + p.begin);
      for (size_t i = 0; i < p.bytes / 4; ++i) x[i] = 1.0f + float(i % 97);
    });
  }
  size_t bytes;
  char* data;
};

Roofs::Roofs(Isa isa, int64_t threads, double scale_bytes, bool cold)
    : isa_(isa), isa_name_(isa_name(isa)), threads_(threads) {
  scale_bytes_ = std::max<size_t>(size_t(scale_bytes) / 64 * 64, 64 * size_t(threads));
  scale_copies_ = cold ? 2 * last_cache_bytes() / int64_t(scale_bytes_) + 1 : 1;
}
Roofs::~Roofs() = default;

void Roofs::sample_fma() {
  RoofKernels kernels = kernels_of(isa_);
  std::vector<double> sink(static_cast<size_t>(threads_));
  sample_products(kernels.fma_flops_per_round(), &fma_, [&](int64_t t, int64_t rounds) {
    sink[size_t(t)] = kernels.fma(rounds, 0.5f + 1e-3f * float(t), 0.25f);
  });
  if (!std::isfinite(sink[0])) fma_.clear();
}

void Roofs::sample_tiles() {
  sample_products(roof::amx::tile_flops_per_round(), &tiles_, [](int64_t, int64_t rounds) { roof::amx::tiles(rounds); });
}

// kernel(thread, rounds) on all threads at once.
void Roofs::sample_products(int64_t flops_per_round, std::vector<double>* rates,
                            const std::function<void(int64_t, int64_t)>& kernel) {
  int64_t rounds = 20000;
  auto body = [&](int64_t t) { kernel(t, rounds); };
  double seconds = 0;
  for (int i = 0; i < 12; ++i) {  // long enough
    seconds = timed_together(threads_, body);
    if (seconds >= kSampleSeconds) break;
    rounds *= 2;
  }
  for (int i = 0; i < kSamples; ++i)
    rates->push_back(double(rounds) * double(flops_per_round) * double(threads_) / timed_together(threads_, body) * 1e-9);
}

void Roofs::sample_copy() { sample_streams(kernels_of(isa_).copy, &copy_); }
void Roofs::sample_exp_log() { sample_streams(kernels_of(isa_).exp_log, &exp_log_); }

void Roofs::sample_streams(void (*kernel)(void*, const void*, size_t), std::vector<double>* rates) {
  size_t bytes = size_t(4 * last_cache_bytes());
  if (!from_) {
    from_ = std::make_unique<Buffer>(bytes);
    to_ = std::make_unique<Buffer>(bytes);
    from_->touch(threads_);
    to_->touch(threads_);
  }
  for (int i = 0; i < kSamples; ++i) {
    double seconds = timed_together(threads_, [&](int64_t t) {
      Part p = part_of(bytes, t, threads_);
      kernel(to_->data + p.begin, from_->data + p.begin, p.bytes);
    });
    rates->push_back(2 * double(bytes) / seconds * 1e-9);
  }
}

void Roofs::sample_scale() {
  RoofKernels kernels = kernels_of(isa_);
  if (!scaled_) {
    scaled_ = std::make_unique<Buffer>(scale_bytes_ * size_t(scale_copies_));
    // Each thread keeps its part of every copy, as the kernel it is compared with would.
    timed_together(threads_, [&](int64_t t) {
      Part p = part_of(scale_bytes_, t, threads_);
      for (int64_t c = 0; c < scale_copies_; ++c) std::memset(scaled_->data + size_t(c) * scale_bytes_ + p.begin, 0x3f, p.bytes);
    });
  }
  int64_t rounds = 1;
  auto body = [&](int64_t t) {
    Part p = part_of(scale_bytes_, t, threads_);
    for (int64_t r = 0; r < rounds; ++r)
      for (int64_t c = 0; c < scale_copies_; ++c) kernels.scale(scaled_->data + size_t(c) * scale_bytes_ + p.begin, p.bytes, r % 2 ? 0.5f : 2.0f);
  };
  double seconds = 0;
  for (int i = 0; i < 24; ++i) {
    seconds = timed_together(threads_, body);
    if (seconds >= kSampleSeconds) break;
    rounds *= 2;
  }
  for (int i = 0; i < kSamples; ++i)
    scale_.push_back(2 * double(scale_bytes_) * double(scale_copies_) * double(rounds) / timed_together(threads_, body) * 1e-9);
}

bool roof_isa(Isa kernel, Isa* isa) {
  Isa machine = cpu_device().isa_of_machine;
  *isa = kernel == Isa::kPortable ? std::min(machine, Isa::kAvx512) : kernel;
  return machine >= Isa::kAvx2 && *isa <= machine;
}

const char* roof_of(const testing::Work& work, Isa kernel) {
  return kernel == Isa::kAmx && std::string_view(work.roof) == "fma" ? "tiles" : work.roof;
}

const DeviceRoofs& device_roofs() {
  static const DeviceRoofs roofs{testing::device_copy_gbs(), testing::device_bf16_gflops()};
  return roofs;
}

Runner::Runner(const testing::Case& c, bool cold) : case_(c) {
  const bool cuda = testing::on_cuda(c);
  const double cache = double(cuda ? cuda_device(0).l2_bytes : last_cache_bytes());
  double bytes = std::max(1.0, testing::spec_of(*c.pass).work(c).bytes);
  int64_t copies = cold ? std::max<int64_t>(1, int64_t(std::ceil(2.0 * cache / bytes))) : 1;
  copies = std::min<int64_t>(copies, 1024);  // each tensor takes a few mappings
  for (int64_t i = 0; i < copies; ++i) {
    testing::Case one = c;
    one.seed += uint64_t(i);
    problems_.emplace_back(one);
  }
  for (auto& problem : problems_) {
    args_.push_back(cuda ? problem.device_args() : problem.args());
    thalweg_context ctx = problem.context();
    ctx.kernel = case_.kernel.empty() ? nullptr : case_.kernel.c_str();
    ctx.workspace = nullptr;  // the library's arena, kept between calls, as a caller has it
    ctx.workspace_bytes = 0;
    if (cuda) {
      throw_on_error(case_.pass->workspace(args_.back(), &ctx, &ctx.workspace_bytes));
      if (!workspace_.data()) workspace_ = testing::DeviceMemory(ctx.workspace_bytes);
      ctx.workspace = workspace_.data();
    }
    contexts_.push_back(ctx);
  }
}

void Runner::call(void* stream) {
  contexts_[next_].stream = stream;
  throw_on_error(case_.pass->call(args_[next_], &contexts_[next_]));
  next_ = (next_ + 1) % problems_.size();
}

void Runner::renew() {
  if (copies() > 1 || std::none_of(case_.pass->fields, case_.pass->fields + case_.pass->num_fields,
                                   [](const thalweg_field& f) { return f.role == THALWEG_INOUT; }))
    return;
  problems_[0].poison_outputs();
  call();
}

double time_calls(Runner& runner, int64_t calls) {
  auto start = Clock::now();
  for (int64_t i = 0; i < calls; ++i) runner.call();
  return seconds_since(start);
}

int64_t calls_per_sample(Runner& runner) {
  int64_t calls = 1;
  while (time_calls(runner, calls) < 0.002 && calls < (int64_t(1) << 20)) calls *= 2;
  return calls;
}

namespace {

// Graphs of at least 200 us, so that the gap between two replays is small beside them.
Timing time_on_device(Runner& runner, double seconds) {
  auto start = Clock::now();
  int64_t calls = runner.copies();
  auto issue = [&](void* stream) {
    for (int64_t i = 0; i < calls; ++i) runner.call(stream);
  };
  const double once = median(testing::time_graph(issue, 3));
  if (once < 200) calls *= int64_t(std::ceil(200 / std::max(once, 1.0)));
  std::vector<double> samples;
  while (samples.size() < 20 || (spread_of(samples) > 0.01 && seconds_since(start) < seconds))
    for (double us : testing::time_graph(issue, 20)) samples.push_back(us / double(calls));
  return {median(samples), spread_of(samples), *std::min_element(samples.begin(), samples.end()), int64_t(samples.size())};
}

}  // namespace

Timing time_case(Runner& runner, double seconds) {
  if (runner.on_cuda()) return time_on_device(runner, seconds);
  auto start = Clock::now();
  time_calls(runner, runner.copies());
  int64_t calls = calls_per_sample(runner);
  while (seconds_since(start) < std::min(0.1, seconds / 4)) time_calls(runner, calls);
  std::vector<double> samples;
  for (;;) {
    runner.renew();
    samples.push_back(time_calls(runner, calls) / double(calls) * 1e6);
    bool over = seconds_since(start) > seconds && samples.size() >= 3;
    if (over || (samples.size() >= 20 && samples.size() % 5 == 0 && spread_of(samples) < 0.01)) break;
  }
  return {median(samples), spread_of(samples), *std::min_element(samples.begin(), samples.end()), int64_t(samples.size())};
}

}  // namespace thalweg::tool
