// The parts of a call that do not depend on the operator's types.
#include "thalweg/core/kernel.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "thalweg/cpu/parallel.h"

namespace thalweg {

bool verbose() {
  static const bool on = [] {
    const char* text = std::getenv("THALWEG_VERBOSE");
    return text && *text && std::strcmp(text, "0") != 0;
  }();
  return on;
}

void print_call(const thalweg_pass& pass, const void* args, const Sizes& sizes, const CallFacts& facts) {
  std::fprintf(stderr, "thalweg: %s | %s | %s | %lld threads | %.3f ms\n", case_text(pass, args, sizes).c_str(),
               facts.kernel, facts.isa, static_cast<long long>(facts.threads), facts.milliseconds);
}

const char* row_isa_name(thalweg_backend backend, Isa isa) { return backend == THALWEG_CUDA ? "sm_90a" : isa_name(isa); }

thalweg_context full_context(const thalweg_pass& pass, const thalweg_context* ctx) {
  thalweg_context full{};
  if (ctx) {
    if (ctx->size == 0) fail_field(pass, "ctx", "size, got 0, expected sizeof(thalweg_context) = %zu", sizeof full);
    std::memset(static_cast<void*>(&full), 0, sizeof full);
    std::memcpy(static_cast<void*>(&full), ctx, std::min(ctx->size, sizeof full));
    full.size = sizeof full;
  }
  if (full.num_threads < 0 || full.num_threads > 1024)
    fail_field(pass, "ctx", "num_threads, got %lld, expected 0 to 1024", static_cast<long long>(full.num_threads));
  if (full.num_threads == 0) full.num_threads = cpu_device().num_threads;
  if (!full.parallel_for) {
    full.parallel_for = pool_parallel_for;
    full.pool = nullptr;
  }
  if (full.kernel && !*full.kernel) full.kernel = nullptr;
  return full;
}

void fail_no_kernel(const thalweg_pass& pass, const char* forced, const std::string& reasons, bool known) {
  if (!known)
    fail(THALWEG_INVALID_ARGUMENT, "%s.%s: kernel: got %s, expected a name that `thalweg list` shows", pass.op,
         pass.name, forced);
  if (forced)
    fail(THALWEG_UNSUPPORTED, "%s.%s: no kernel for this problem (forced %s)%s", pass.op, pass.name, forced,
         reasons.c_str());
  fail(THALWEG_INTERNAL, "%s.%s: no kernel for this problem%s", pass.op, pass.name, reasons.c_str());
}

bool names_row(const char* forced, std::string_view row) {
  const std::string_view text = forced;
  return text.substr(0, text.find('/')) == row;
}

namespace {

// Calls body(name) for each choice of "block=4|16 stream=0|1", in order.
template <class Body>
void each_choice(std::string_view choices, Body&& body) {
  while (!choices.empty()) {
    const std::string_view word = choices.substr(0, choices.find(' '));
    body(word.substr(0, word.find('=')));
    choices.remove_prefix(std::min(word.size() + 1, choices.size()));
  }
}

}  // namespace

void read_choices(const thalweg_pass& pass, const char* forced, const char* row, std::string_view choices, Plan* plan) {
  int n = 0;
  each_choice(choices, [&](std::string_view) { plan->values[n++] = kFree; });
  if (!forced || !names_row(forced, row)) return;
  std::string_view text = forced;
  text.remove_prefix(std::strlen(row));
  while (!text.empty()) {
    text.remove_prefix(1);  // '/'
    const std::string_view word = text.substr(0, text.find('/'));
    text.remove_prefix(word.size());
    const size_t equals = word.find('=');
    const std::string name(word.substr(0, equals)), value(equals < word.size() ? word.substr(equals + 1) : "");
    int at = -1, i = 0;
    each_choice(choices, [&](std::string_view each) {
      if (each == name) at = i;
      ++i;
    });
    if (at < 0)
      fail(THALWEG_INVALID_ARGUMENT, "%s.%s: kernel: got choice '%s' of %s, expected one of '%s'", pass.op, pass.name,
           name.c_str(), row, std::string(choices).c_str());
    const bool whole = !value.empty() && value.size() < 19 && value.find_first_not_of("0123456789") == std::string::npos;
    if (!whole)
      fail(THALWEG_INVALID_ARGUMENT, "%s.%s: kernel: %s of %s, got '%s', expected a whole number from 0 on", pass.op,
           pass.name, name.c_str(), row, value.c_str());
    plan->values[at] = std::strtoll(value.c_str(), nullptr, 10);
  }
}

bool decide(int64_t* value, const char* name, int64_t otherwise, int64_t low, int64_t high, std::string* why) {
  if (*value == kFree) *value = otherwise;
  const bool ok = *value == otherwise || (*value >= low && *value <= high);
  if (!ok && why)
    *why = std::string("its choice ") + name + ", got " + std::to_string(*value) + ", expected " + std::to_string(low) +
           " to " + std::to_string(high);
  return ok;
}

std::string choices_text(std::string_view choices, const Plan& plan) {
  std::string text;
  int i = 0;
  each_choice(choices, [&](std::string_view name) {
    text += ", " + std::string(name) + " " + std::to_string(plan.values[i++]);
  });
  return text;
}

char* caller_workspace(const thalweg_pass& pass, const thalweg_context& ctx, size_t bytes) {
  if (!ctx.workspace) fail_field(pass, "workspace", "got none, expected %zu bytes on the tensors' device", bytes);
  if (reinterpret_cast<uintptr_t>(ctx.workspace) % 64 != 0)
    fail_field(pass, "workspace", "address, got %p, expected a multiple of 64", ctx.workspace);
  if (ctx.workspace_bytes < bytes)
    fail_field(pass, "workspace", "bytes, got %zu, expected at least %zu", ctx.workspace_bytes, bytes);
  return static_cast<char*>(ctx.workspace);
}

void copy_text(const std::string& text, char* out, size_t capacity) {
  if (!out || capacity == 0) return;
  size_t n = std::min(text.size(), capacity - 1);
  std::memcpy(out, text.data(), n);
  out[n] = '\0';
}

}  // namespace thalweg
