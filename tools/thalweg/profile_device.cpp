// thalweg profile CASE on a GPU: the kernels of one call under Nsight Compute.
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <map>

#include "tools/thalweg/args.h"
#include "tools/thalweg/cases.h"
#include "tools/thalweg/measure.h"
#include "tools/thalweg/profile.h"

namespace thalweg::tool {
namespace {

struct Metric {
  const char* name;
  const char* title;
  double scale;        // of the base unit
  const char* format;
};
constexpr Metric kMetrics[] = {
    {"gpu__time_duration.sum", "us", 1e-3, "{:.2f}"},
    {"dram__bytes.sum", "MB", 1e-6, "{:.2f}"},
    {"dram__throughput.avg.pct_of_peak_sustained_elapsed", "memory %", 1, "{:.0f}"},
    {"sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed", "tensor %", 1, "{:.0f}"},
    {"sm__warps_active.avg.pct_of_peak_sustained_active", "warps %", 1, "{:.0f}"},
    {"l1tex__data_bank_conflicts_pipe_lsu.sum", "bank conflicts", 1, "{:.0f}"},
    {"launch__registers_per_thread", "registers", 1, "{:.0f}"},
    {"launch__grid_size", "blocks", 1, "{:.0f}"},
    {"launch__block_size", "threads", 1, "{:.0f}"},
};

// The cells of a line of CSV whose cells are quoted.
std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::string cell;
  bool quoted = false;
  for (char c : line) {
    if (c == '"') quoted = !quoted;
    else if (c == ',' && !quoted) cells.push_back(std::move(cell)), cell.clear();
    else cell += c;
  }
  cells.push_back(std::move(cell));
  return cells;
}

double number_of(std::string text) {
  std::erase(text, ',');  // of thousands
  return std::atof(text.c_str());
}

using Row = std::map<std::string, std::string>;

// The profiled kernels: Nsight Compute's table, whose second line holds units.
std::vector<Row> rows_of(const std::string& text) {
  std::vector<Row> rows;
  std::vector<std::string> names;
  bool units = false;
  for (const std::string& line : words(text, '\n')) {
    if (line.empty() || line[0] != '"') continue;
    std::vector<std::string> cells = cells_of(line);
    if (names.empty()) {
      names = cells;
      units = true;
    } else if (units) {
      units = false;
    } else {
      Row row;
      for (size_t i = 0; i < std::min(cells.size(), names.size()); ++i) row[names[i]] = cells[i];
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

// "thalweg::x::kernel<float>(Args)" without its arguments.
std::string short_name(const std::string& name) {
  std::string out = name.substr(0, name.find('('));
  const size_t space = out.rfind(' ', out.find('<'));
  if (space != std::string::npos) out = out.substr(space + 1);
  return out.size() > 60 ? out.substr(0, 57) + "..." : out;
}

std::string run_ncu(const testing::Case& c, bool warm) {
  std::string metrics;
  for (const Metric& m : kMetrics) metrics += (metrics.empty() ? "" : ",") + std::string(m.name);
  std::vector<std::string> args{"ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--metrics", metrics,
                                std::filesystem::read_symlink("/proc/self/exe").string(), "profile", "--loop", c.text()};
  if (warm) args.push_back("--warm");
  int code = 0;
  std::string text;
  try {
    text = run_program(args, &code);
  } catch (const UsageError&) {
    throw UsageError("ncu, got none on PATH, expected NVIDIA's Nsight Compute");
  }
  if (code != 0) throw UsageError(fmt::format("ncu: exit code {}: {}", code, text.substr(0, 400)));
  return text;
}

}  // namespace

int loop_on_device(const testing::Case& c, bool warm) {
  Runner runner(c, !warm);
  for (int i = 0; i < 2; ++i) runner.call();  // the first loads kernels; ncu's table is cut in the middle
  testing::synchronize_device();
  return kOk;
}

void profile_on_device(const testing::Case& c, bool warm) {
  const std::vector<Row> rows = rows_of(run_ncu(c, warm));
  if (rows.empty()) throw UsageError("ncu: got a table without kernels, expected some");
  std::vector<std::string> head{"<kernel"};
  for (const Metric& m : kMetrics) head.push_back(m.title);
  Table table(head);
  double us = 0, bytes = 0;
  for (size_t i = rows.size() / 2; i < rows.size(); ++i) {
    std::vector<std::string> line{short_name(rows[i].at("Kernel Name"))};
    for (const Metric& m : kMetrics) {
      auto cell = rows[i].find(m.name);
      line.push_back(cell == rows[i].end() ? "-" : fmt::format(fmt::runtime(m.format), number_of(cell->second) * m.scale));
    }
    us += number_of(rows[i].at("gpu__time_duration.sum")) * 1e-3;
    bytes += number_of(rows[i].at("dram__bytes.sum"));
    table.add(line);
  }
  const testing::Work work = testing::spec_of(*c.pass).work(c);
  fmt::print("case      {}\nmachine   {}, clocks as they are\n{}", c.text(), testing::device_name(), table.text());
  fmt::print("all       {:.2f} us in kernels; {:.4g} MB moved, {:.4g} MB needed; {:.4g} GFLOP, {:.1f} TFLOP/s\n", us, bytes * 1e-6,
             work.bytes * 1e-6, work.flops * 1e-9, work.flops / us * 1e-6);
}

}  // namespace thalweg::tool
