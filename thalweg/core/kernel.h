// Kernel tables, and the life of a call: bind, check, select, plan, run.
#ifndef THALWEG_CORE_KERNEL_H
#define THALWEG_CORE_KERNEL_H

#include <chrono>
#include <iterator>
#include <string>
#include <string_view>

#include "thalweg/core/device.h"
#include "thalweg/core/exec.h"
#include "thalweg/core/signature.h"
#include "thalweg/cpu/parallel.h"

namespace thalweg {

// One row of a kernel table. `plan` returns false when it cannot take the problem, and says why when
// `why` is given; it fills `plan` otherwise. plan->num_slots comes in as the number of threads.
template <class Problem, class Args>
struct Kernel {
  const char* name;
  thalweg_backend backend;
  Isa isa;
  bool (*plan)(const Problem&, const Device&, Plan* plan, std::string* why);
  void (*run)(const Problem&, const Plan&, const Args&, const Exec&);
  // What a caller may decide in its stead, values[0] and on, with what is worth trying: "block=4|16 stream=0|1".
  // plan() then finds the caller's decision in a value, or kFree, and passes it through decide().
  const char* choices = "";
};

// An operator's pass: its public description and what the library needs to run it.
// check() adds the rules that the field table cannot say and returns the Problem.
template <class Problem, class Args>
struct Pass {
  const thalweg_pass* info;
  Problem (*check)(const Args&, const Sizes&, Binding);
  const Kernel<Problem, Args>* kernels;  // best first; the last takes anything valid
  int64_t num_kernels;
  // Looks at the args before bind(), to give a refusal its reason; may be null.
  void (*refuse)(const Args&) = nullptr;
};

// The caller's context with every default filled in. Throws on a context of size 0 or negative threads.
thalweg_context full_context(const thalweg_pass& pass, const thalweg_context* ctx);

// A caller's args and context with every default filled in, checked.
template <class Problem, class Args>
struct Checked {
  Args args;
  thalweg_context ctx;
  Place place;
  Sizes sizes;
  Problem problem;

  Checked(const Pass<Problem, Args>& pass, const void* caller_args, const thalweg_context* caller_ctx,
          Binding binding) {
    full_args(*pass.info, caller_args, &args);
    ctx = full_context(*pass.info, caller_ctx);
    if (pass.refuse) pass.refuse(args);
    place = place_of(*pass.info, &args);
    if (place.backend == THALWEG_CUDA && binding == Binding::kRun) binding = Binding::kDevice;
    sizes = bind(*pass.info, &args, binding);
    problem = pass.check(args, sizes, binding);
  }
};

// What a row's machine must have: an instruction set of the CPU, or "sm_90a".
const char* row_isa_name(thalweg_backend backend, Isa isa);

struct CallFacts {  // for THALWEG_VERBOSE
  const char* kernel;
  const char* isa;
  int64_t threads;
  double milliseconds;
};
bool verbose();
void print_call(const thalweg_pass& pass, const void* args, const Sizes& sizes, const CallFacts& facts);

[[noreturn]] void fail_no_kernel(const thalweg_pass& pass, const char* forced, const std::string& reasons, bool known);
// ctx.workspace, checked. On CUDA it has to be there when `bytes` is not 0.
char* caller_workspace(const thalweg_pass& pass, const thalweg_context& ctx, size_t bytes);
inline int64_t workspace_bytes(const Plan& plan) { return plan.shared_bytes + plan.num_slots * plan.slot_bytes; }
void copy_text(const std::string& text, char* out, size_t capacity);

// Whether `forced` ("name" or "name/choice=value/...") names the row.
bool names_row(const char* forced, std::string_view row);
// values[i] of the choices of a row: what `forced` says, when it names the row, else kFree. Throws when it says nonsense.
void read_choices(const thalweg_pass& pass, const char* forced, const char* row, std::string_view choices, Plan* plan);
// The value of a choice: `otherwise` where the caller left it free. False, with the reason, when it is not in [low, high].
bool decide(int64_t* value, const char* name, int64_t otherwise, int64_t low, int64_t high, std::string* why);
// ", block 4, stream 1": what a plan chose.
std::string choices_text(std::string_view choices, const Plan& plan);

template <class Problem, class Args>
bool accepts(const Pass<Problem, Args>& pass, const Kernel<Problem, Args>& row, const Problem& problem,
             const Device& device, const thalweg_context& ctx, Plan* plan, std::string* why) {
  *plan = Plan{};
  plan->num_slots = ctx.num_threads;
  read_choices(*pass.info, ctx.kernel, row.name, row.choices, plan);
  if (row.backend != device.backend) {
    if (why) *why = row.backend == THALWEG_CUDA ? "needs CUDA tensors, got CPU tensors" : "needs CPU tensors, got CUDA tensors";
    return false;
  }
  if (row.isa > device.isa) {
    if (why) *why = std::string("needs ") + isa_name(row.isa) + ", got " + isa_name(device.isa);
    return false;
  }
  return row.plan(problem, device, plan, why);
}

// The first row that takes the problem, or the forced one. Throws when none does.
template <class Problem, class Args>
const Kernel<Problem, Args>& select(const Pass<Problem, Args>& pass, const Problem& problem, const Device& device,
                                    const thalweg_context& ctx, Plan* plan) {
  for (int64_t i = 0; i < pass.num_kernels; ++i) {
    const auto& row = pass.kernels[i];
    if (ctx.kernel && !names_row(ctx.kernel, row.name)) continue;
    if (accepts(pass, row, problem, device, ctx, plan, nullptr)) return row;
  }
  std::string reasons;
  bool known = false;
  for (int64_t i = 0; i < pass.num_kernels; ++i) {
    const auto& row = pass.kernels[i];
    if (ctx.kernel && !names_row(ctx.kernel, row.name)) continue;
    std::string why;
    accepts(pass, row, problem, device, ctx, plan, &why);
    reasons += std::string("\n  ") + row.name + ": " + why;
    known = true;
  }
  fail_no_kernel(*pass.info, ctx.kernel, reasons, known);
}

// The device of a call's tensors.
inline const Device& device_of(const Place& place) {
  return place.backend == THALWEG_CUDA ? cuda_device(place.id) : cpu_device();
}

template <class Problem, class Args>
void run_on_cuda(const Pass<Problem, Args>& pass, const Checked<Problem, Args>& call, const Device& device) {
  Plan plan;
  const auto& row = select(pass, call.problem, device, call.ctx, &plan);
  const size_t bytes = size_t(workspace_bytes(plan));
  char* workspace = bytes > 0 ? caller_workspace(*pass.info, call.ctx, bytes) : nullptr;
  CudaDeviceScope scope(device.id);
  row.run(call.problem, plan, call.args,
          {call.ctx.num_threads, call.ctx.parallel_for, call.ctx.pool, workspace, call.ctx.stream, call.ctx.report});
  if (verbose()) print_call(*pass.info, &call.args, call.sizes, {row.name, row_isa_name(row.backend, row.isa), 0, 0});
}

template <class Problem, class Args>
thalweg_status call_pass(const Pass<Problem, Args>& pass, const void* caller_args, const thalweg_context* caller_ctx) {
  return guard([&] {
    auto start = std::chrono::steady_clock::now();
    Checked<Problem, Args> call(pass, caller_args, caller_ctx, Binding::kRun);
    if (call.place.backend == THALWEG_CUDA) return run_on_cuda(pass, call, device_of(call.place));
    Plan plan;
    const auto& row = select(pass, call.problem, cpu_device(), call.ctx, &plan);
    size_t bytes = size_t(workspace_bytes(plan));
    bool lent = call.ctx.workspace && bytes > 0;
    ThreadArena arena(lent ? 0 : bytes);
    char* workspace = lent ? caller_workspace(*pass.info, call.ctx, bytes) : static_cast<char*>(arena.data());
    row.run(call.problem, plan, call.args, {call.ctx.num_threads, call.ctx.parallel_for, call.ctx.pool, workspace, nullptr, nullptr});
    if (verbose()) {
      std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
      print_call(*pass.info, &call.args, call.sizes, {row.name, row_isa_name(row.backend, row.isa), call.ctx.num_threads, ms.count()});
    }
  });
}

template <class Problem, class Args>
thalweg_status query_workspace(const Pass<Problem, Args>& pass, const void* caller_args,
                               const thalweg_context* caller_ctx, size_t* bytes) {
  return guard([&] {
    if (!bytes) fail_field(*pass.info, "bytes", "got null, expected a place for the size");
    Checked<Problem, Args> call(pass, caller_args, caller_ctx, Binding::kQuery);
    Plan plan;
    select(pass, call.problem, device_of(call.place), call.ctx, &plan);
    *bytes = size_t(workspace_bytes(plan));
  });
}

template <class Problem, class Args>
thalweg_status explain_pass(const Pass<Problem, Args>& pass, const void* caller_args, const thalweg_context* caller_ctx,
                            char* out, size_t capacity) {
  return guard([&] {
    Checked<Problem, Args> call(pass, caller_args, caller_ctx, Binding::kQuery);
    const Device& device = device_of(call.place);
    std::string text;
    bool chosen = false, known = false;
    for (int64_t i = 0; i < pass.num_kernels; ++i) {
      const auto& row = pass.kernels[i];
      const bool forced = call.ctx.kernel && names_row(call.ctx.kernel, row.name);
      known = known || forced;
      Plan plan;
      std::string why;
      bool ok = accepts(pass, row, call.problem, device, call.ctx, &plan, &why);
      bool runs = ok && !chosen && (!call.ctx.kernel || forced);
      text += std::string(row.name) + ": " + (runs ? "runs" : ok ? "accepts" : why);
      if (runs) {
        text += ", workspace " + std::to_string(workspace_bytes(plan)) + " bytes (" +
                std::to_string(plan.shared_bytes) + " shared + " + std::to_string(plan.num_slots) + " slots x " +
                std::to_string(plan.slot_bytes) + "), values";
        for (int64_t value : plan.values) text += " " + std::to_string(value);
        text += choices_text(row.choices, plan);
      }
      text += "\n";
      chosen = chosen || runs;
    }
    if (call.ctx.kernel && !known) fail_no_kernel(*pass.info, call.ctx.kernel, "", false);
    copy_text(text, out, capacity);
  });
}

template <class Problem, class Args>
const char* kernel_name_at(const Pass<Problem, Args>& pass, int64_t i, const char** isa) {
  if (i < 0 || i >= pass.num_kernels) return nullptr;
  if (isa) *isa = row_isa_name(pass.kernels[i].backend, pass.kernels[i].isa);
  return pass.kernels[i].name;
}

template <class Problem, class Args>
const char* choices_of(const Pass<Problem, Args>& pass, int64_t i) {
  return i < 0 || i >= pass.num_kernels ? nullptr : pass.kernels[i].choices;
}

// The functions of a pass's row in the pass table.
template <const auto& pass>
struct Entry {
  static thalweg_status call(const void* args, const thalweg_context* ctx) { return call_pass(pass, args, ctx); }
  static thalweg_status workspace(const void* args, const thalweg_context* ctx, size_t* bytes) {
    return query_workspace(pass, args, ctx, bytes);
  }
  static thalweg_status explain(const void* args, const thalweg_context* ctx, char* text, size_t capacity) {
    return explain_pass(pass, args, ctx, text, capacity);
  }
  static const char* kernel_at(int64_t i, const char** isa) { return kernel_name_at(pass, i, isa); }
  static const char* choices_at(int64_t i) { return choices_of(pass, i); }
};

// A row of the pass table: pass_row<kFwd, Args>("short_conv", "fwd", doc, kFwdFields, refused).
template <const auto& pass, class Args, class Fields>
constexpr thalweg_pass pass_row(const char* op, const char* name, const char* doc, const Fields& fields,
                                const char* refused) {
  using E = Entry<pass>;
  return {op,      name,         doc,        std::data(fields), int64_t(std::size(fields)), sizeof(Args),
          E::call, E::workspace, E::explain, E::kernel_at,      E::choices_at,              refused};
}

}  // namespace thalweg
#endif
