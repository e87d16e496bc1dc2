#include "tools/thalweg/args.h"

#include <charconv>
#include <cstring>

#include "testing/fields.h"
#include "thalweg/core/error.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

template <class T>
T parse(const thalweg_field& option, const std::string& text, const char* expected) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw UsageError(std::string("--") + option.name + ", got " + text + ", expected " + expected);
  return value;
}

int32_t parse_choice(const thalweg_field& option, const std::string& text) {
  std::vector<std::string> all = words(option.choices);
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i] == text || std::to_string(i) == text) return int32_t(i);
  throw UsageError(std::string("--") + option.name + ", got " + text + ", expected one of: " + option.choices);
}

thalweg_context context_of(const testing::Case& c) {
  thalweg_context ctx{};
  ctx.size = sizeof ctx;
  ctx.num_threads = c.threads;
  ctx.kernel = c.kernel.empty() ? nullptr : c.kernel.c_str();
  return ctx;
}

}  // namespace

Args::Args(const thalweg_pass& pass)
    : pass_(&pass), bytes_((pass.args_size + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t)) {
  std::memset(bytes_.data(), 0, bytes_.size() * sizeof(std::max_align_t));
  std::memcpy(bytes_.data(), &pass.args_size, sizeof(size_t));  // every args struct begins with its size
}

Args::Args(const testing::Case& c) : Args(*c.pass) {
  for (int64_t i = 0; i < pass_->num_fields; ++i) {
    const thalweg_field& field = pass_->fields[i];
    if (field.kind == THALWEG_TENSOR) {
      int64_t offset = 0;
      if (!testing::is_present(c, field)) continue;
      tensor(field) = testing::layout_in(c, field, &offset);
      if (testing::on_cuda(c)) tensor(field).device_type = THALWEG_CUDA;
    } else if (c.has(field.name)) {
      set(field, c.options.at(field.name));
    }
  }
}

thalweg_tensor& Args::tensor(const thalweg_field& field) {
  return *reinterpret_cast<thalweg_tensor*>(reinterpret_cast<char*>(bytes_.data()) + field.offset);
}

void Args::set(const thalweg_field& option, const std::string& text) {
  void* at = reinterpret_cast<char*>(bytes_.data()) + option.offset;
  switch (option.kind) {
    case THALWEG_FLAG: {
      int32_t value = text.empty() ? 1 : parse<int32_t>(option, text, "0 or 1");
      std::memcpy(at, &value, sizeof value);
      return;
    }
    case THALWEG_COUNT: {
      int64_t value = parse<int64_t>(option, text, "a whole number");
      std::memcpy(at, &value, sizeof value);
      return;
    }
    case THALWEG_REAL: {
      double value = parse<double>(option, text, "a number");
      std::memcpy(at, &value, sizeof value);
      return;
    }
    case THALWEG_CHOICE: {
      int32_t value = parse_choice(option, text);
      std::memcpy(at, &value, sizeof value);
      return;
    }
    case THALWEG_TENSOR: break;
  }
  throw std::logic_error("Args::set: a tensor");
}

std::string explain_text(const testing::Case& c) {
  Args args(c);
  thalweg_context ctx = context_of(c);
  std::vector<char> text(16384);
  throw_on_error(c.pass->explain(args.data(), &ctx, text.data(), text.size()));
  return text.data();
}

std::string running_kernel(const std::string& text) {
  for (const std::string& line : words(text, '\n')) {
    const size_t colon = line.find(": runs");
    if (colon != std::string::npos) return line.substr(0, colon);
  }
  return "";
}

size_t workspace_of(const testing::Case& c) {
  Args args(c);
  thalweg_context ctx = context_of(c);
  size_t bytes = 0;
  throw_on_error(c.pass->workspace(args.data(), &ctx, &bytes));
  return bytes;
}

std::string refusal(const thalweg_pass& pass, const std::string& name) {
  for (const std::string& entry : words(pass.refused ? pass.refused : "", ';')) {
    size_t colon = entry.find(':');
    if (colon == std::string::npos) continue;
    for (const std::string& each : words(entry.substr(0, colon), ','))
      if (each == name) return words(entry.substr(colon + 1), '\n').front();
  }
  return "";
}

}  // namespace thalweg::tool
