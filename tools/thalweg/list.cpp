// thalweg list
#include <fmt/format.h>

#include <iostream>

#include "testing/device.h"
#include "testing/testing.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

Json kernels_json(const thalweg_pass& pass) {
  Json out = Json::array();
  const char* isa = nullptr;
  for (int64_t i = 0; const char* name = pass.kernel_at(i, &isa); ++i) {
    const bool cuda = testing::is_cuda_row(pass, name), gpu = testing::why_no_device().empty();
    const Isa needed = kernel_isa(pass, name);
    out.push_back({{"kernel", name}, {"backend", cuda ? "cuda" : "cpu"}, {"isa", isa}, {"choices", pass.choices_at(i)},
                   {"runs", cuda ? gpu : needed <= cpu_device().isa},
                   {"machine_has_isa", cuda ? gpu : needed <= cpu_device().isa_of_machine}});
  }
  return out;
}

Json list_json() {
  const Device& device = cpu_device();
  Json out;
  out["version"] = thalweg_version();
  out["commit"] = commit();
  out["isa"] = isa_name(device.isa);
  out["threads"] = thalweg_default_threads();
  out["machine"] = machine_json();
  out["passes"] = Json::array();
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i)
    out["passes"].push_back({{"operator", pass->op}, {"pass", pass->name}, {"doc", pass->doc}, {"kernels", kernels_json(*pass)}});
  return out;
}

void print_list() {
  const Device& device = cpu_device();
  fmt::print("thalweg {} (commit {})\nmachine  {}\n", thalweg_version(), commit(), machine_text());
  if (testing::why_no_device().empty()) fmt::print("gpu      {}\n", testing::device_name());
  else fmt::print("no gpu   {}\n", testing::why_no_device());
  fmt::print("in use   isa {}{}, {} threads\n", isa_name(device.isa),
             device.isa < device.isa_of_machine ? fmt::format(" (the machine has {})", isa_name(device.isa_of_machine)) : "",
             thalweg_default_threads());
  std::string op;
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    if (op != pass->op) fmt::print("\n{}\n", op = pass->op);
    fmt::print("  {:<8}{}\n", pass->name, pass->doc);
    for (const Json& row : kernels_json(*pass)) {
      const char* note = row["runs"] ? "" : row["machine_has_isa"] ? "not used: THALWEG_ISA lowers it" : "not on this machine";
      const std::string choices = row["choices"];
      fmt::print("    {:<28}{:<10}{}{}\n", row["kernel"].get<std::string>(), row["isa"].get<std::string>(),
                 choices.empty() ? "" : "(" + choices + ") ", note);
    }
  }
  fmt::print("\nKernels stand best first; the first that takes a problem runs it (thalweg explain CASE).\n");
}

}  // namespace

Action add_list(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  app.add_flag("--json", *json, "As JSON");
  return [json] {
    if (*json) {
      std::cout << list_json().dump(2) << std::endl;
    } else {
      print_list();
    }
    return int(kOk);
  };
}

}  // namespace thalweg::tool
