// thalweg bench CASE|FILE|@set, and --pair A B
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <mutex>
#include <thread>

#include "tools/thalweg/args.h"
#include "tools/thalweg/cases.h"
#include "tools/thalweg/measure.h"
#include "tools/thalweg/sweep.h"

namespace thalweg::tool {
namespace {

struct Options {
  CaseOptions cases;
  std::vector<std::string> pair;
  std::string json;
  bool warm = false, child = false, sweep = false;
  double seconds = 3, limit = 120;
  int64_t processes = 1, jobs = 1;
  std::string lock;
};

// Of several processes that prepare cases at once, one times at a time, while none prepares.
class Turn {
 public:
  Turn(const std::string& file, bool alone) {
    if (file.empty()) return;
    fd_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0 || ::flock(fd_, alone ? LOCK_EX : LOCK_SH) != 0) throw UsageError("--lock: " + file + ": cannot be locked");
  }
  ~Turn() {
    if (fd_ >= 0) ::close(fd_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  int fd_ = -1;
};

// Everything of a record that is not a measured time.
Json base_record(const testing::Case& c, const std::string& kernel, const Options& options) {
  Json r;
  r["case"] = c.text();
  r["kernel"] = kernel;
  const bool cuda = testing::on_cuda(c);
  r["backend"] = cuda ? "cuda" : "cpu";
  r["isa"] = cuda ? "sm_90a" : isa_name(kernel_isa(*c.pass, kernel));
  if (cuda) r["gpu"] = testing::device_name();
  r["threads"] = threads_of(c);
  r["buffers"] = options.warm ? "warm" : "cold";
  r["processes"] = options.processes;
  return r;
}

void finish_record(Json& r, bool verified) {
  r["verified"] = verified;
  r["commit"] = commit();
  r["machine"] = machine_json();
  r["command"] = command();
  r["date"] = utc_date();
}

void sample_roofs(Roofs& roofs, const testing::Work& work) {
  roofs.sample_fma();
  roofs.sample_copy();
  if (std::string_view(work.roof) == "tiles") roofs.sample_tiles();
  if (std::string_view(work.roof) == "scale") roofs.sample_scale();
  if (std::string_view(work.roof) == "exp_log") roofs.sample_exp_log();
}

void add_work(Json& r, const testing::Case& c, const testing::Work& work, double median_us) {
  r["flops"] = work.flops;
  r["bytes"] = work.bytes;
  r["workspace_bytes"] = workspace_of(c);
  r["gflops"] = work.flops / median_us * 1e-3;
  r["gbs"] = work.bytes / median_us * 1e-3;
  r["roof"] = work.roof;
}

// The share of what the GPU could do: of its matrix units' rate where arithmetic bounds a 16-bit case, else of a copy.
void add_device_rates(Json& r, const testing::Case& c, const testing::Work& work, double median_us) {
  add_work(r, c, work, median_us);
  const DeviceRoofs& roofs = device_roofs();
  const double floor_flops = work.flops / roofs.bf16_gflops, floor_bytes = work.bytes / roofs.copy_gbs;
  const bool products = floor_flops > floor_bytes;
  r["roof"] = products ? "bf16" : "copy";
  r["roof_isa"] = "sm_90a";
  r["roof_value"] = products ? roofs.bf16_gflops : roofs.copy_gbs;
  r["roof_share"] = std::max(floor_flops, floor_bytes) * 1e-3 / median_us;
  r["bf16_gflops"] = roofs.bf16_gflops;
  r["copy_gbs"] = roofs.copy_gbs;
}

void add_rates(Json& r, const testing::Case& c, const testing::Work& work, double median_us, const Roofs* roofs) {
  add_work(r, c, work, median_us);
  if (!roofs) {
    r["roof_value"] = r["roof_share"] = nullptr;
    return;
  }
  std::string_view kind = work.roof;
  double peak = roofs->copy_gbs();
  if (kind == "fma") peak = roofs->fma_gflops() / (c.dtype == THALWEG_F64 ? 2 : 1);
  if (kind == "tiles") peak = roofs->tiles_gflops();
  if (kind == "scale") peak = roofs->scale_gbs();
  if (kind == "exp_log") peak = roofs->exp_log_gbs();
  double rate = kind == "fma" || kind == "tiles" ? r["gflops"].get<double>() : r["gbs"].get<double>();
  r["roof_value"] = peak;
  r["roof_share"] = rate / peak;
  r["roof_isa"] = roofs->isa();
  r["fma_gflops"] = roofs->fma_gflops();
  r["copy_gbs"] = roofs->copy_gbs();
  if (kind == "tiles") r["tiles_gflops"] = roofs->tiles_gflops();
  if (kind == "scale") r["scale_gbs"] = roofs->scale_gbs();
  if (kind == "exp_log") r["exp_log_gbs"] = roofs->exp_log_gbs();
}

void add_timing(Json& r, const Timing& t, const Runner& runner) {
  r["median_us"] = t.median_us;
  r["spread"] = number_json(t.spread);
  r["min_us"] = t.min_us;
  r["samples"] = t.samples;
  r["copies"] = runner.copies();
}

// In this process, without verification.
Json measure_here(const testing::Case& c, const Options& options) {
  testing::Work work = testing::spec_of(*c.pass).work(c);
  auto prepare = std::make_unique<Turn>(options.lock, false);
  Runner runner(c, !options.warm);
  prepare.reset();
  const Turn alone(options.lock, true);
  Json r = base_record(c, runner.kernel(), options);
  if (runner.on_cuda()) {
    Timing t = time_case(runner, options.seconds);
    add_timing(r, t, runner);
    add_device_rates(r, c, work, t.median_us);
    return r;
  }
  const Isa needed = kernel_isa(*c.pass, runner.kernel());
  work.roof = roof_of(work, needed);
  Isa isa;
  std::unique_ptr<Roofs> roofs;
  if (roof_isa(needed, &isa)) {
    roofs = std::make_unique<Roofs>(isa, threads_of(c), work.bytes / 2, !options.warm);
    sample_roofs(*roofs, work);
  }
  Timing t = time_case(runner, options.seconds);
  if (roofs) sample_roofs(*roofs, work);
  add_timing(r, t, runner);
  add_rates(r, c, work, t.median_us, roofs.get());
  return r;
}

Json measure_pair_here(const testing::Case& a, const testing::Case& b, const Options& options) {
  Runner first(a, !options.warm), second(b, !options.warm);
  int64_t calls_a = calls_per_sample(first), calls_b = calls_per_sample(second);
  std::vector<double> times_a, times_b, ratios;
  double total = 0;
  while (ratios.size() < 3 || (total < 2 * options.seconds && (ratios.size() < 20 || ratios.size() % 5 || spread_of(ratios) >= 0.005))) {
    bool swap = ratios.size() % 2;  // a b, b a, a b, …: a drift of the clock falls on both
    double y = swap ? time_calls(second, calls_b) / double(calls_b) : 0;
    double x = time_calls(first, calls_a) / double(calls_a);
    if (!swap) y = time_calls(second, calls_b) / double(calls_b);
    total += x * double(calls_a) + y * double(calls_b);
    times_a.push_back(x * 1e6);
    times_b.push_back(y * 1e6);
    ratios.push_back(x / y);
  }
  Json r = base_record(a, first.kernel(), options);
  r["against"] = b.text();
  r["against_kernel"] = second.kernel();
  r["median_us"] = median(times_a);
  r["against_us"] = median(times_b);
  r["min_us"] = *std::min_element(times_a.begin(), times_a.end());
  r["against_min_us"] = *std::min_element(times_b.begin(), times_b.end());
  r["ratio"] = median(ratios);
  r["spread"] = number_json(spread_of(ratios));
  r["samples"] = ratios.size();
  return r;
}

// The median over processes of every figure that can differ; spread is half the range over the median.
Json merge(const std::vector<Json>& runs, const char* main_figure) {
  Json out = runs[0];
  for (const char* name : {"median_us", "min_us", "gflops", "gbs", "roof_value", "roof_share", "fma_gflops", "tiles_gflops", "copy_gbs", "scale_gbs", "exp_log_gbs", "against_us", "against_min_us", "ratio"}) {
    std::vector<double> values;
    for (const Json& r : runs)
      if (r.contains(name) && r[name].is_number()) values.push_back(r[name].get<double>());
    if (values.size() == runs.size()) out[name] = median(values);
  }
  double low = INFINITY, high = -INFINITY;
  std::vector<double> each;
  for (const Json& r : runs) {
    double value = r[main_figure].get<double>();
    low = std::min(low, value);
    high = std::max(high, value);
    each.push_back(value);
  }
  out["spread"] = (high - low) / 2 / median(each);
  out["each_process"] = each;
  return out;
}

Json measure(const std::vector<testing::Case>& cases, const Options& options, Progress& progress, int64_t job) {
  bool pair = cases.size() == 2;
  if (options.processes == 1 && options.jobs == 1) return pair ? measure_pair_here(cases[0], cases[1], options) : measure_here(cases[0], options);
  std::vector<Json> runs;
  for (int64_t p = 0; p < options.processes; ++p) {
    progress.show(job * options.processes + p, fmt::format("process {} of {}: {}", p + 1, options.processes, cases[0].text()));
    std::vector<std::string> args{"bench", "--child", "--json", "-", "--seconds", fmt::format("{}", options.seconds)};
    if (options.warm) args.push_back("--warm");
    if (!options.lock.empty()) args.insert(args.end(), {"--lock", options.lock});
    if (pair) args.push_back("--pair");
    for (const auto& c : cases) args.push_back(c.text());
    int code = 0;
    std::string text = run_self(args, &code);
    if (code != 0) throw UsageError(fmt::format("process {} of {}: exit code {}", p + 1, options.processes, code));
    runs.push_back(Json::parse(text));
  }
  progress.clear();
  if (runs.size() == 1) return runs[0];  // with its own spread
  Json out = merge(runs, pair ? "ratio" : "median_us");
  out["processes"] = options.processes;
  return out;
}

// False, with the reason on stderr, when the case must not be timed.
bool verifies(const testing::Case& c, Progress& progress) {
  testing::Verdict v = testing::verify(c);
  if (v.passed()) return true;
  progress.clear();
  fmt::print(stderr, "thalweg: refused to time {}: {}{}\n  thalweg verify '{}'\n", c.text(), v.status, v.reason.empty() ? "" : ": " + v.reason, c.text());
  for (const auto& o : v.outputs)
    if (!o.ok) fmt::print(stderr, "  {}: rms ratio {:.2e}, limit {:.1e}\n", o.name, o.difference.ratio, o.limit);
  return false;
}

std::string roof_text(const Json& r) {
  if (!r["roof_value"].is_number()) return "no roof measured";
  std::string kind = r["roof"];
  if (kind == "bf16") return fmt::format("bf16 products {:.1f} TFLOP/s", r["roof_value"].get<double>() * 1e-3);
  if (kind == "tiles") return fmt::format("bf16 tiles {:.1f} GFLOP/s", r["roof_value"].get<double>());
  return fmt::format("{} {:.1f} {}", kind == "fma" ? "fma " + r["roof_isa"].get<std::string>() : kind, r["roof_value"].get<double>(), kind == "fma" ? "GFLOP/s" : "GB/s");
}

std::string share_text(const Json& r) {
  return r["roof_share"].is_number() ? fmt::format("{:.3f}", r["roof_share"].get<double>()) : "-";
}

std::string spread_text(const Json& r) {
  return r["spread"].is_number() ? fmt::format("{:.1f} %", 100 * r["spread"].get<double>()) : "-";
}

void print_result(const Json& r) {
  fmt::print("{}\n  {}, {} threads, {} buffers: {}, spread {}, {:.1f} GFLOP/s, {:.1f} GB/s, {} of {}\n", r["case"].get<std::string>(),
             r["kernel"].get<std::string>(), r["threads"].get<int64_t>(), r["buffers"].get<std::string>(), time_text(r["median_us"].get<double>()), spread_text(r),
             r["gflops"].get<double>(), r["gbs"].get<double>(), share_text(r), roof_text(r));
  std::cout << std::flush;
}

void print_pair(const Json& r) {
  fmt::print("a  {}  {}  {}\nb  {}  {}  {}\na / b = {:.4f}, spread {} (median of {} pairs, alternating in one process{}); of the fastest {:.4f}\n", r["case"].get<std::string>(),
             r["kernel"].get<std::string>(), time_text(r["median_us"].get<double>()), r["against"].get<std::string>(), r["against_kernel"].get<std::string>(),
             time_text(r["against_us"].get<double>()), r["ratio"].get<double>(), spread_text(r), r["samples"].get<int64_t>(),
             r["processes"].get<int64_t>() > 1 ? fmt::format("; median of {} processes", r["processes"].get<int64_t>()) : "",
             r["min_us"].get<double>() / r["against_min_us"].get<double>());
}

void print_table(const std::vector<Json>& results) {
  Table table({"case", "<kernel", "threads", "time", "spread", "GFLOP/s", "GB/s", "<roof", "share"});
  for (const Json& r : results)
    table.add({r["case"], r["kernel"], std::to_string(r["threads"].get<int64_t>()), time_text(r["median_us"].get<double>()), spread_text(r),
               fmt::format("{:.1f}", r["gflops"].get<double>()), fmt::format("{:.1f}", r["gbs"].get<double>()), roof_text(r), share_text(r)});
  fmt::print("\n{}", table.text());
}

int bench_child(const std::vector<std::vector<testing::Case>>& jobs, const Options& options) {
  Progress progress(0);
  for (const auto& job : jobs) {
    Json r = measure(job, options, progress, 0);
    finish_record(r, false);  // the parent knows
    write_text("-", r.dump() + "\n");
  }
  return kOk;
}

std::vector<std::vector<testing::Case>> jobs_of(const Options& options) {
  std::vector<std::vector<testing::Case>> jobs;
  if (options.pair.empty()) {
    for (auto& c : cases_of(options.cases)) jobs.push_back({c});
    return jobs;
  }
  if (!options.cases.names.empty()) throw UsageError("--pair: got cases beside it, expected the two cases alone");
  CaseOptions both = options.cases;
  both.names = options.pair;
  jobs.push_back(cases_of(both));
  if (jobs[0].size() != 2) throw UsageError("--pair: got " + std::to_string(jobs[0].size()) + " cases, expected 2");
  return jobs;
}

// Calls body(i) for every job in options.jobs threads.
template <class Body>
void each_at_once(size_t count, int64_t jobs, Body&& body) {
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < jobs; ++t)
    threads.emplace_back([&] {
      for (size_t i; (i = next++) < count;) body(i);
    });
  for (std::thread& thread : threads) thread.join();
}

// Verifies all jobs, then prepares them, options.jobs at once, in processes of their own; they time one by one.
// Returns how many were refused.
int64_t bench_at_once(const std::vector<std::vector<testing::Case>>& jobs, Options options, const std::function<void(Json)>& keep) {
  std::vector<char> ok(jobs.size());
  std::mutex mutex;
  each_at_once(jobs.size(), options.jobs, [&](size_t i) {
    int code = 0;
    std::vector<std::string> args{"verify"};
    for (testing::Case c : jobs[i]) {
      if (c.kernel.empty()) c.kernel = running_kernel(explain_text(c));
      args.push_back(c.text());
    }
    const std::string text = run_self(args, &code, {.errors = true});
    ok[i] = code == 0;
    const std::lock_guard lock(mutex);
    if (!ok[i]) fmt::print(stderr, "thalweg: refused to time {}\n{}", jobs[i][0].text(), text);
  });
  options.lock = std::filesystem::read_symlink("/proc/self/exe");
  Progress none(0);
  each_at_once(jobs.size(), options.jobs, [&](size_t i) {
    if (!ok[i]) return;
    try {
      Json r = measure(jobs[i], options, none, 0);
      const std::lock_guard lock(mutex);
      keep(std::move(r));
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      ok[i] = false;
      fmt::print(stderr, "thalweg: {}: {}\n", jobs[i][0].text(), error.what());
    }
  });
  return int64_t(std::count(ok.begin(), ok.end(), false));
}

int bench(const Options& options) {
  if (options.cases.names.empty() && options.pair.empty()) throw UsageError("cases: got none, expected CASE|FILE|@SET or --pair A B");
  auto jobs = jobs_of(options);
  if (options.child) return bench_child(jobs, options);
  bool quiet = options.json == "-";
  if (!options.json.empty() && !quiet) write_text(options.json, "");
  Progress progress(int64_t(jobs.size()) * options.processes);
  if (!quiet) fmt::print("{}; commit {}\n", machine_text(), commit());
  std::vector<Json> results;
  int64_t refused = 0, done = 0;
  const auto keep = [&](Json r) {
    progress.clear();
    finish_record(r, true);
    if (!options.json.empty()) write_text(options.json, r.dump() + "\n", true);
    if (!quiet) options.pair.empty() ? print_result(r) : print_pair(r);
    results.push_back(std::move(r));
  };
  if (options.jobs > 1) refused = bench_at_once(jobs, options, keep);
  for (const auto& job : jobs) {
    if (options.jobs > 1) break;
    progress.show(done++ * options.processes, "verify " + job[0].text());
    bool ok = true;
    for (const auto& c : job) ok = ok && verifies(c, progress);
    if (!ok) {
      ++refused;
      continue;
    }
    progress.show((done - 1) * options.processes, job[0].text());
    keep(measure(job, options, progress, done - 1));
  }
  if (!quiet && results.size() > 1) print_table(results);
  if (refused) fmt::print(stderr, "thalweg: {} of {} cases were not timed, because they did not verify\n", refused, jobs.size());
  return refused ? kNegative : kOk;
}

int sweep(const Options& options) {
  if (!options.pair.empty()) throw UsageError("--sweep: got --pair beside it, expected cases alone");
  if (options.processes != 1) throw UsageError("--sweep: got --processes beside it, expected one process a choice");
  Sweep sweep{options.json, options.limit, {"--seconds", fmt::format("{}", options.seconds)}};
  if (options.warm) sweep.bench_options.push_back("--warm");
  return run_sweep(cases_of(options.cases), sweep);
}

// "" or what is wrong, as CLI::App::check has it; it says the option's name.
std::string check_seconds(const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  bool ok = !text.empty() && *end == 0 && std::isfinite(value) && value > 0;
  return ok ? "" : "got " + text + ", expected a number of seconds above 0";
}

constexpr char kFooter[] = R"(
A case is verified against the float64 reference first; one that fails is not timed (exit code 1).
Roofs are measured in the same process, on the same threads, before and after each case: the fp32 FMA peak of the
kernel's vector width, a non-temporal copy, and a scale in place of the case's bytes. GB/s counts each input read once
and each output written once; FLOPs are counted from the mathematics, whatever a kernel does.
With --jobs cases are verified and prepared at once, and timed one by one while none is prepared.
Buffers are cold: copies of the tensors of twice the last-level cache are taken in turn; --warm uses one.
spread is half of the 95 % interval of the median, over it; with --processes half the range of the processes' medians.)";

}  // namespace

Action add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  add_case_options(app, options->cases, false);
  app.add_option("--pair", options->pair, "Alternate two cases in one process; the median of paired ratios a / b")->expected(2)->type_name("A B");
  app.add_option("--json", options->json, "JSON lines, one a case (- is standard output)")->type_name("FILE");
  app.add_flag("--warm", options->warm, "One copy of the tensors, warm in cache");
  app.add_option("--seconds", options->seconds, "Time limit of a case; ends earlier when the spread is below 1 % (default 3)")->type_name("S")->check(check_seconds);
  app.add_option("--processes", options->processes, "Median over so many runs of this program (default 1)")->type_name("N")->check(CLI::Range(1, 1000).description(""));
  app.add_flag("--sweep", options->sweep, "Every combination of the choices that the case's kernel declares (thalweg list), each in a process of its own");
  app.add_option("--limit", options->limit, "--sweep: seconds that one combination may take, verification included (default 120)")->type_name("S")->check(check_seconds);
  app.add_option("--jobs", options->jobs, "Verify and prepare so many cases at once, each in a process of its own; they are timed one by one (default 1)")->type_name("N")->check(CLI::Range(1, 1000).description(""));
  app.add_option("--lock", options->lock)->group("");  // of --jobs: the file by which processes take turns
  app.add_flag("--child", options->child)->group("");  // one of --processes: the parent verified
  app.footer(kFooter);
  return [options] { return options->sweep ? sweep(*options) : bench(*options); };
}

}  // namespace thalweg::tool
