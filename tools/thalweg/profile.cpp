// thalweg profile CASE: the case in a loop under perf; on a GPU under Nsight Compute (profile_device.cpp).
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>

#include "tools/thalweg/args.h"
#include "tools/thalweg/cases.h"
#include "tools/thalweg/measure.h"
#include "tools/thalweg/profile.h"

namespace thalweg::tool {
namespace {

struct Options {
  CaseOptions cases;
  double seconds = 5;
  bool warm = false, loop = false;
  std::string control;
};

constexpr const char* kHardware[] = {"cycles", "instructions", "cache-misses", "branch-misses", "stalled-cycles-frontend", "stalled-cycles-backend"};

// A folder of our own that goes away.
class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "thalweg-profile-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw UsageError(name + ": cannot be made, expected a writable temporary folder");
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

double cpu_seconds(const rusage& u) {
  return double(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * double(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

// perf starts with its counters off, and counts only what lies between these two words.
void tell_perf(const std::string& control, const char* word) {
  if (control.empty()) return;
  std::ofstream out(control);
  out << word << "\n" << std::flush;
}

// The measured loop, in the process that perf watches. Prints JSON.
int loop(const testing::Case& c, const Options& options) {
  Runner runner(c, !options.warm);
  time_calls(runner, runner.copies());
  int64_t batch = calls_per_sample(runner), calls = 0;
  tell_perf(options.control, "enable");
  rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  auto start = std::chrono::steady_clock::now();
  std::vector<double> samples;
  double seconds = 0;
  do {
    samples.push_back(time_calls(runner, batch) / double(batch) * 1e6);
    calls += batch;
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  } while (seconds < options.seconds);
  ::getrusage(RUSAGE_SELF, &after);
  tell_perf(options.control, "disable");
  Json out;
  out["kernel"] = runner.kernel();
  out["calls"] = calls;
  out["seconds"] = seconds;
  out["median_us"] = median(samples);
  out["cpu_seconds"] = cpu_seconds(after) - cpu_seconds(before);
  out["page_faults"] = after.ru_minflt - before.ru_minflt + after.ru_majflt - before.ru_majflt;
  out["waits"] = after.ru_nvcsw - before.ru_nvcsw;
  out["preempted"] = after.ru_nivcsw - before.ru_nivcsw;
  write_text("-", out.dump() + "\n");
  return kOk;
}

std::vector<std::string> loop_args(const testing::Case& c, const Options& options, const std::string& control) {
  std::vector<std::string> args{std::filesystem::read_symlink("/proc/self/exe").string(), "profile", "--loop", "--seconds", fmt::format("{}", options.seconds), c.text()};
  if (options.warm) args.push_back("--warm");
  if (!control.empty()) args.insert(args.end(), {"--control", control});
  return args;
}

// What perf can count here: names of hardware events; `why` when there are none.
std::vector<std::string> hardware_events(std::string* why) {
  std::string list;
  for (const char* event : kHardware) list += (list.empty() ? "" : ",") + std::string(event);
  int code = 0;
  std::string text;
  try {
    text = run_program({"perf", "stat", "-x,", "-e", list, "--", "true"}, &code, {.errors = true});
  } catch (const UsageError&) {
    *why = "perf is not installed (Debian: apt-get install linux-perf)";
    return {};
  }
  std::vector<std::string> events;
  for (const std::string& line : words(text, '\n')) {
    std::vector<std::string> cells = words(line, ',');
    for (const char* event : kHardware)
      if (line.find(std::string(event)) != std::string::npos && !cells.empty() && std::isdigit(static_cast<unsigned char>(cells[0][0]))) events.push_back(event);
  }
  if (events.empty()) *why = code ? "perf may not count here (kernel.perf_event_paranoid?)" : "this machine gives perf no hardware counters";
  return events;
}

// Counts of one run: event -> count.
std::map<std::string, double> count_events(const testing::Case& c, const Options& options, const std::vector<std::string>& events, const Scratch& scratch, Json* run) {
  std::string fifo = scratch.file("control"), counts = scratch.file("counts"), list;
  if (::mkfifo(fifo.c_str(), 0600) != 0) throw UsageError(fifo + ": cannot be made");
  for (const std::string& event : events) list += (list.empty() ? "" : ",") + event;
  std::vector<std::string> args{"perf", "stat", "-x,", "-o", counts, "-D", "-1", "--control", "fifo:" + fifo, "-e", list, "--"};
  for (auto& a : loop_args(c, options, fifo)) args.push_back(a);
  int code = 0;
  std::string text = run_program(args, &code);
  if (code != 0) throw UsageError(fmt::format("perf stat: exit code {}", code));
  *run = Json::parse(text);
  std::map<std::string, double> out;
  std::ifstream in(counts);
  for (std::string line; std::getline(in, line);) {
    std::vector<std::string> cells = words(line, ',');
    for (const std::string& event : events)
      if (cells.size() > 1 && line.find("," + event) != std::string::npos) out[event] = std::atof(cells[0].c_str());
  }
  return out;
}

std::string sample_functions(const testing::Case& c, const Options& options, const std::string& event, const Scratch& scratch) {
  std::string fifo = scratch.file("control2"), data = scratch.file("samples");
  if (::mkfifo(fifo.c_str(), 0600) != 0) return "";
  std::vector<std::string> args{"perf", "record", "-q", "-F", "2000", "-e", event, "-o", data, "-D", "-1", "--control", "fifo:" + fifo, "--"};
  for (auto& a : loop_args(c, options, fifo)) args.push_back(a);
  int code = 0;
  run_program(args, &code, {.errors = true});
  return run_program({"perf", "report", "-i", data, "--stdio", "-q", "--percent-limit", "1", "-F", "overhead,dso,symbol", "-w", "8,20,140"}, &code);
}

void print_functions(const std::string& report, const std::string& event) {
  if (report.empty()) return;
  fmt::print("\nWhere the time goes (perf record, {}; functions of 1 % or more)\n", event);
  int shown = 0;
  for (const std::string& line : words(report, '\n')) {
    if (line.empty() || line[0] == '#') continue;
    fmt::print("  {}\n", line);
    if (++shown == 15) break;
  }
}

struct Shares {
  double arithmetic = 0, memory = 0, busy = 0;
};

void print_bound(const Shares& s, double faults_per_call, const std::string& memory) {
  std::string text;
  if (s.busy < 0.85) {
    text = fmt::format("threads: the cores work {:.0f} % of the time; look at how tasks are divided, or at what else runs here", 100 * s.busy);
  } else if (faults_per_call > 1) {
    text = fmt::format("page faults: {:.0f} a call; memory is mapped anew in the loop", faults_per_call);
  } else if (std::max(s.arithmetic, s.memory) < 0.3) {
    text = "neither roof: latency, dependent steps or work that the counts leave out; look at the functions below";
  } else {
    text = s.arithmetic > s.memory ? "arithmetic (the fp32 FMA peak)" : "memory (" + memory + ")";
  }
  fmt::print("nearest bound    {}\n", text);
}

void print_summary(const testing::Case& c, const Options& options, const Json& run, std::map<std::string, double>& counts) {
  testing::Work work = testing::spec_of(*c.pass).work(c);
  double us = run["median_us"], calls = run["calls"], seconds = run["seconds"];
  Shares s;
  s.busy = run["cpu_seconds"].get<double>() / seconds / double(threads_of(c));
  fmt::print("case             {}\nkernel           {}, {} threads, {} buffers, workspace {}\n", c.text(), run["kernel"].get<std::string>(), threads_of(c), options.warm ? "warm" : "cold", bytes_text(double(workspace_of(c))));
  fmt::print("time             {:.2f} us a call (median of {:.0f} calls; not verified here)\n", us, calls);
  Isa isa;
  std::string memory = "non-temporal copy";
  if (roof_isa(kernel_isa(*c.pass, run["kernel"].get<std::string>()), &isa)) {
    Roofs roofs(isa, threads_of(c), work.bytes / 2, !options.warm);
    const bool tiles = std::string_view(roof_of(work, isa)) == "tiles";
    tiles ? roofs.sample_tiles() : roofs.sample_fma();
    roofs.sample_copy();
    const double peak = tiles ? roofs.tiles_gflops() : roofs.fma_gflops();
    double bandwidth = roofs.copy_gbs();
    if (options.warm || std::string_view(work.roof) == "scale") {
      roofs.sample_scale();
      bandwidth = roofs.scale_gbs();
      memory = "scale in place of its bytes";
    }
    s.arithmetic = work.flops / us * 1e-3 / peak;
    s.memory = work.bytes / us * 1e-3 / bandwidth;
    fmt::print("arithmetic       {:.4g} GFLOP, {:.1f} GFLOP/s, {:.0f} % of {:.0f} ({}, {})\n", work.flops * 1e-9, work.flops / us * 1e-3, 100 * s.arithmetic, peak, tiles ? "bf16 tiles" : "fp32 FMA", roofs.isa());
    fmt::print("bytes            {:.4g} MB, {:.1f} GB/s, {:.0f} % of {:.1f} ({})\n", work.bytes * 1e-6, work.bytes / us * 1e-3, 100 * s.memory, bandwidth, memory);
  }
  if (counts.count("instructions")) {
    fmt::print("instructions     {:.4g} a call, {:.2f} FLOP each", counts["instructions"] / calls, work.flops * calls / counts["instructions"]);
    if (counts["cycles"] > 0) fmt::print(", {:.2f} a cycle", counts["instructions"] / counts["cycles"]);
    fmt::print("\n");
  }
  for (const char* event : {"cache-misses", "branch-misses"})
    if (counts.count(event)) fmt::print("{:<17}{:.4g} a call\n", event, counts[event] / calls);
  for (const char* event : {"stalled-cycles-frontend", "stalled-cycles-backend"})
    if (counts.count(event) && counts["cycles"] > 0) fmt::print("{:<17}{:.0f} % of cycles\n", event + 8, 100 * counts[event] / counts["cycles"]);
  double faults = run["page_faults"].get<double>() / calls;
  fmt::print("waits            cores busy {:.0f} %, {:.2f} waits and {:.2f} preemptions a call, {:.2f} page faults a call\n", 100 * s.busy, run["waits"].get<double>() / calls,
             run["preempted"].get<double>() / calls, faults);
  print_bound(s, faults, memory);
}

int profile(const Options& options) {
  std::vector<testing::Case> cases = cases_of(options.cases);
  if (options.loop) return testing::on_cuda(cases.at(0)) ? loop_on_device(cases.at(0), options.warm) : loop(cases.at(0), options);
  for (const testing::Case& c : cases) {
    explain_text(c);  // refuses what cannot run
    if (testing::on_cuda(c)) {
      profile_on_device(c, options.warm);
      continue;
    }
    Scratch scratch;
    std::string why;
    std::vector<std::string> events = hardware_events(&why);
    Json run;
    std::map<std::string, double> counts;
    if (events.empty()) {
      fmt::print("No instructions, cache misses or stalls: {}. Used instead: clocks, page faults, samples of perf's software clock.\n\n", why);
      int code = 0;
      std::vector<std::string> args = loop_args(c, options, "");
      args.erase(args.begin());
      std::string text = run_self(args, &code);
      if (code != 0) throw UsageError(fmt::format("profile --loop: exit code {}", code));
      run = Json::parse(text);
    } else {
      counts = count_events(c, options, events, scratch, &run);
    }
    print_summary(c, options, run, counts);
    std::cout << std::flush;
    bool cycles = counts.count("cycles") && counts["cycles"] > 0;
    if (why.find("installed") == std::string::npos) print_functions(sample_functions(c, options, cycles ? "cycles" : "cpu-clock", scratch), cycles ? "cycles" : "cpu-clock");
  }
  return kOk;
}

}  // namespace

Action add_profile(CLI::App& app) {
  auto options = std::make_shared<Options>();
  add_case_options(app, options->cases);
  app.add_option("--seconds", options->seconds, "Length of each measured loop (default 5)")->type_name("S")->check(CLI::PositiveNumber.description(""));
  app.add_flag("--warm", options->warm, "One copy of the tensors, warm in cache");
  app.add_flag("--loop", options->loop)->group("");  // the process that perf watches
  app.add_option("--control", options->control)->group("");
  app.footer("\nA profile says where time goes; it never counts as verification (thalweg verify) or as a result (thalweg bench).");
  return [options] { return profile(*options); };
}

}  // namespace thalweg::tool
