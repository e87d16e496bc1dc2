// Rates of the machine and times of cases.
#ifndef THALWEG_TOOLS_MEASURE_H
#define THALWEG_TOOLS_MEASURE_H

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "testing/device.h"
#include "testing/testing.h"
#include "thalweg/core/device.h"

namespace thalweg::tool {

double median(std::vector<double> values);
// Half of the interval that holds the median with 95 % (by order statistics), over the median. Falls as
// samples are added; what is left is how far the reported median may be off.
double spread_of(std::vector<double> samples);

// Roofs on `threads` threads. Each holds its own buffers, so that measuring again costs no page faults.
class Roofs {
 public:
  // `scale_bytes`: read and written in place, counted once; `cold`: rotated through more than the
  // last-level cache, otherwise the same bytes again and again.
  Roofs(Isa isa, int64_t threads, double scale_bytes, bool cold);
  ~Roofs();
  void sample_fma();  // adds a few samples each
  void sample_tiles();  // of rows that need amx
  void sample_copy();
  void sample_scale();
  void sample_exp_log();
  double fma_gflops() const { return median(fma_); }
  double tiles_gflops() const { return median(tiles_); }
  double copy_gbs() const { return median(copy_); }    // read + written
  double scale_gbs() const { return median(scale_); }  // read + written
  double exp_log_gbs() const { return median(exp_log_); }  // read + written
  const std::string& isa() const { return isa_name_; }

 private:
  struct Buffer;
  void sample_products(int64_t flops_per_round, std::vector<double>* rates,
                       const std::function<void(int64_t, int64_t)>& kernel);
  void sample_streams(void (*kernel)(void*, const void*, size_t), std::vector<double>* rates);
  Isa isa_;
  std::string isa_name_;
  int64_t threads_;
  size_t scale_bytes_;
  int64_t scale_copies_;
  std::unique_ptr<Buffer> from_, to_, scaled_;
  std::vector<double> fma_, tiles_, copy_, scale_, exp_log_;
};

// The ISA whose peak judges a kernel row: its own; for portable rows the vectors in use, at least AVX2.
// False when the machine has neither vector ISA.
bool roof_isa(Isa kernel, Isa* isa);
// The roof that judges a row: the pass's, but of products in bf16 tiles where the row makes them.
const char* roof_of(const testing::Work& work, Isa kernel);

struct Timing {
  double median_us = 0, spread = 0, min_us = 0;
  int64_t samples = 0;
};

// The ceilings of the GPU, measured once in this process.
struct DeviceRoofs {
  double copy_gbs;     // read + written
  double bf16_gflops;  // matrix units, random data
};
const DeviceRoofs& device_roofs();

// One case, ready to be called again and again: inputs filled, `cold`: as many copies of all its
// tensors as exceed twice the last-level cache, taken in turn; else one.
class Runner {
 public:
  Runner(const testing::Case& c, bool cold);
  void call(void* stream = nullptr);  // the next copy; throws Error; on CUDA it is only issued, on `stream`
  // Where calls take one copy again and again: what they change in place back to its first values, and a call, which
  // brings it into the caches. The same token decoded thousands of times would leave numbers that no model has: with a
  // gate, subnormal ones.
  void renew();
  bool on_cuda() const { return testing::on_cuda(case_); }
  int64_t copies() const { return int64_t(problems_.size()); }
  std::string kernel() const { return problems_[0].kernel(); }

 private:
  testing::Case case_;
  std::vector<testing::Problem> problems_;
  std::vector<void*> args_;
  std::vector<thalweg_context> contexts_;
  testing::DeviceMemory workspace_;  // CUDA: one for all copies, as a caller's calls in turn have it
  size_t next_ = 0;
};

// Seconds of `calls` calls in turn.
double time_calls(Runner& runner, int64_t calls);
// Warms up, then repeats until the spread is below 1 % (20 samples at least) or `seconds` are over.
Timing time_case(Runner& runner, double seconds);
// The calls that make one sample at least 2 ms long.
int64_t calls_per_sample(Runner& runner);

}  // namespace thalweg::tool
#endif
