#include "tools/thalweg/cases.h"

namespace thalweg::tool {

void add_case_options(CLI::App& app, CaseOptions& options, bool required) {
  auto* names = app.add_option("cases", options.names, "A case string, a file of cases, @set, op@set or op.pass@set")->type_name("CASE|FILE|@SET");
  if (required) names->required();
  app.add_option("--threads", options.threads, "Threads of every case (default: the case's, else the library's)")->type_name("N")->check(CLI::Range(1, 1024).description(""));
  app.add_option("--isa", options.isa, "Lower the instruction set, as THALWEG_ISA does")
      ->type_name("ISA")->check(CLI::IsMember({"portable", "avx2", "avx512", "amx"}).description("portable avx2 avx512 amx"));
  app.add_option("--kernel", options.kernel, "Force this kernel row, as kernel= in a case; NAME/block=4 decides a choice of it (thalweg list)")->type_name("NAME");
  app.add_flag("--cuda", options.cuda, "Tensors on the GPU, as cuda in a case");
}

namespace {

void check_kernel(const testing::Case& c) {
  std::string names;
  for (int64_t i = 0; const char* name = c.pass->kernel_at(i, nullptr); ++i) {
    if (testing::row_of(c.kernel) == name) return;
    names += std::string(" ") + name;
  }
  throw UsageError(pass_name(*c.pass) + ": kernel, got " + c.kernel + ", expected one of:" + names);
}

}  // namespace

std::vector<testing::Case> cases_of(const CaseOptions& options) {
  lower_isa(options.isa);
  cpu_device();  // a wrong THALWEG_ISA or THALWEG_NUM_THREADS is refused here, once
  std::vector<testing::Case> out;
  for (const std::string& name : options.names)
    for (testing::Case& c : testing::find_cases(name)) {
      if (options.threads) c.threads = options.threads;
      c.cuda = c.cuda || options.cuda;
      if (!options.kernel.empty()) c.kernel = options.kernel;
      if (!c.kernel.empty()) check_kernel(c);
      out.push_back(std::move(c));
    }
  if (out.empty()) throw UsageError("cases: got none, expected at least one");
  return out;
}

int64_t threads_of(const testing::Case& c) { return c.threads ? c.threads : thalweg_default_threads(); }

}  // namespace thalweg::tool
