// thalweg explain CASE
#include <fmt/format.h>

#include "tools/thalweg/args.h"
#include "tools/thalweg/cases.h"
#include "tools/thalweg/measure.h"

namespace thalweg::tool {
namespace {

// "name: runs …" is how the library marks the row that runs.
void print_floor(const testing::Case& c, const testing::Work& work, const std::string& kernel) {
  if (testing::on_cuda(c)) {
    const DeviceRoofs& roofs = device_roofs();
    double flops_us = work.flops / roofs.bf16_gflops * 1e-3, copy_us = work.bytes / roofs.copy_gbs * 1e-3;
    fmt::print("roofs      {:.0f} TFLOP/s bf16 products, {:.2f} TB/s copy, {}\n", roofs.bf16_gflops * 1e-3,
               roofs.copy_gbs * 1e-3, testing::device_name());
    fmt::print("floor      {} arithmetic, {} memory: bound by {}\n", time_text(flops_us), time_text(copy_us),
               flops_us > copy_us ? "arithmetic" : "memory");
    return;
  }
  Isa isa;
  if (!roof_isa(kernel_isa(*c.pass, kernel), &isa)) {
    fmt::print("floor      not measured: the roofs need AVX2\n");
    return;
  }
  Roofs roofs(isa, threads_of(c), work.bytes / 2, true);
  const bool tiles = std::string_view(roof_of(work, isa)) == "tiles";
  tiles ? roofs.sample_tiles() : roofs.sample_fma();
  roofs.sample_copy();
  const double peak = tiles ? roofs.tiles_gflops() : roofs.fma_gflops();
  double fma_us = work.flops / peak * 1e-3, copy_us = work.bytes / roofs.copy_gbs() * 1e-3;
  fmt::print("roofs      {:.0f} GFLOP/s {} ({}), {:.1f} GB/s non-temporal copy, {} threads\n", peak, tiles ? "bf16 tiles" : "fp32 FMA", roofs.isa(),
             roofs.copy_gbs(), threads_of(c));
  fmt::print("floor      {} arithmetic, {} memory: bound by {}\n", time_text(fma_us), time_text(copy_us), fma_us > copy_us ? "arithmetic" : "memory");
}

void explain(const testing::Case& c, bool roof) {
  testing::Work work = testing::spec_of(*c.pass).work(c);
  std::string text = explain_text(c);
  fmt::print("case       {}\n", c.text());
  fmt::print("pass       {}\n", c.pass->doc);
  if (testing::on_cuda(c)) fmt::print("machine    {}\n", testing::device_name());
  else fmt::print("machine    isa {}, {} threads\n", thalweg_cpu_isa(), threads_of(c));
  fmt::print("kernels\n");
  for (const std::string& line : words(text, '\n')) fmt::print("  {}\n", line);
  fmt::print("workspace  {}\n", bytes_text(double(workspace_of(c))));
  fmt::print("work       {:.4g} GFLOP, {:.4g} MB, {:.1f} FLOP/byte; judged against: {}\n", work.flops * 1e-9, work.bytes * 1e-6,
             work.bytes > 0 ? work.flops / work.bytes : 0.0, work.roof);
  if (roof) {
    print_floor(c, work, running_kernel(text));
  } else {
    fmt::print("floor      work over this machine's roofs: measure them with --roof\n");
  }
}

}  // namespace

Action add_explain(CLI::App& app) {
  auto options = std::make_shared<CaseOptions>();
  auto roof = std::make_shared<bool>(false);
  add_case_options(app, *options);
  app.add_flag("--roof", *roof, "Measure this machine's roofs and print the case's floor in time");
  return [=] {
    bool first = true;
    for (const testing::Case& c : cases_of(*options)) {
      if (!first) fmt::print("\n");
      first = false;
      explain(c, *roof);
    }
    return int(kOk);
  };
}

}  // namespace thalweg::tool
