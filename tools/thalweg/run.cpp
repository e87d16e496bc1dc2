// thalweg run PASS: real tensors in, real tensors out.
#include "tools/thalweg/run.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>

#include "testing/fields.h"
#include "thalweg/core/error.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

struct Options {
  std::vector<std::string> in, out, want, sizes;
  std::string kernel;
  int64_t threads = 0;
  std::map<std::string, std::string> values;  // of the pass's options, as typed
  std::map<std::string, bool> flags;
};

// --size NAME=N: sizes that only outputs have, such as the length of a list to find.
void add_sizes(const Options& options, testing::Case& c) {
  for (const std::string& word : options.sizes) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals), number = equals == std::string::npos ? "" : word.substr(equals + 1);
    char* end = nullptr;
    const long long size = std::strtoll(number.c_str(), &end, 10);
    if (number.empty() || *end || size < 0) throw UsageError(fmt::format("--size, got {}, expected NAME=N", word));
    auto [at, is_new] = c.sizes.try_emplace(name, size);
    if (!is_new && at->second != size) throw UsageError(fmt::format("--size {}: got {}, expected {} (from the inputs)", name, size, at->second));
  }
}

// Sizes that the inputs bind, or --size; what they do not, the operator's usual value.
testing::Case sizes_of(const Options& options, Args& args, const Tensors& tensors) {
  testing::Case c;
  c.pass = &args.pass();
  c.dtype = THALWEG_F32;
  bool first = true;
  for (const thalweg_field* field : testing::tensor_fields(*c.pass)) {
    auto it = tensors.find(field->name);
    if (it == tensors.end()) continue;
    const thalweg_tensor& t = args.tensor(*field);
    if (first) c.dtype = t.dtype;
    first = false;
    if (field->optional) c.options[field->name] = "";
    std::vector<std::string> dims = testing::words(field->dims);
    for (size_t i = 0; i < dims.size(); ++i) {
      size_t plus = dims[i].find('+');
      int64_t more = plus == std::string::npos ? 0 : std::stoll(dims[i].substr(plus + 1));
      c.sizes.try_emplace(dims[i].substr(0, plus), std::max<int64_t>(t.shape[i] - more, 0));  // the library judges them
    }
  }
  for (const auto& [name, value] : options.values)
    if (!value.empty()) c.options[name] = value;
  add_sizes(options, c);
  testing::spec_of(*c.pass).complete(c);
  if (c.sizes.count("B")) c.sizes.try_emplace("N", c.sizes["B"]);
  return c;
}

// float32 (float64 beside float64 inputs) where the pass takes it: states and statistics; else the main dtype, or
// what the table names first (indices).
thalweg_dtype default_dtype(const thalweg_field& field, const thalweg_pass& pass, thalweg_dtype main, Args& args) {
  if (field.dtypes[0] == '=') {
    const thalweg_field* other = testing::find_field(pass, field.dtypes + 1);
    if (other && args.tensor(*other).dtype != THALWEG_NONE) return args.tensor(*other).dtype;
  }
  for (thalweg_dtype dtype : {main == THALWEG_F64 ? main : thalweg_dtype(THALWEG_F32), main})
    if (testing::accepts_dtype(pass, field, dtype)) return dtype;
  return testing::parse_dtype(testing::words(field.dtypes).front());
}

// Names of --want with their dtypes; "all" stands for every output that the inputs given allow.
std::map<std::string, thalweg_dtype> wanted(const Options& options, const thalweg_pass& pass, const Tensors& tensors) {
  std::map<std::string, thalweg_dtype> out;
  std::string names;
  for (const thalweg_field* field : testing::tensor_fields(pass))
    if (field->role == THALWEG_OUT) {
      names += std::string(" ") + field->name;
      if (!field->optional) out[field->name] = THALWEG_NONE;
    }
  for (const std::string& list : options.want)
    for (const std::string& word : words(list, ',')) {
      size_t equals = word.find('=');
      std::string name = word.substr(0, equals);
      thalweg_dtype dtype = equals == std::string::npos ? thalweg_dtype(THALWEG_NONE) : testing::parse_dtype(word.substr(equals + 1));
      if (equals != std::string::npos && dtype == THALWEG_NONE) throw UsageError(fmt::format("--want {}: dtype, got {}, expected one of f64 f32 bf16 f16", name, word.substr(equals + 1)));
      const thalweg_field* field = testing::find_field(pass, name);
      if (name == "all") {
        for (const thalweg_field* each : testing::tensor_fields(pass)) {
          std::string_view of = each->name;
          bool gradient = of.starts_with("d_");
          if (each->role == THALWEG_OUT && (!gradient || tensors.count(std::string(of.substr(2))))) out.try_emplace(each->name, THALWEG_NONE);
        }
      } else if (field && field->role == THALWEG_OUT) {
        out[name] = dtype;
      } else {
        std::string reason = refusal(pass, name);
        throw UsageError(reason.empty() ? fmt::format("--want, got {}, expected all or some of:{}", name, names) : fmt::format("--want: {}: {}: {}", pass_name(pass), name, reason));
      }
    }
  if (out.empty() && names != "") {
    bool inout = false;
    for (const thalweg_field* field : testing::tensor_fields(pass)) inout = inout || field->role == THALWEG_INOUT;
    if (!inout) throw UsageError(fmt::format("--want: got nothing, and every output of {} is optional: expected all or some of:{}", pass_name(pass), names));
  }
  return out;
}

void hold_outputs(const Options& options, Args& args, Tensors& tensors) {
  const thalweg_pass& pass = args.pass();
  testing::Case c = sizes_of(options, args, tensors);
  for (const auto& [name, dtype] : wanted(options, pass, tensors)) {
    const thalweg_field& field = *testing::find_field(pass, name);
    hold_output(field, testing::shape_in(c, field), dtype == THALWEG_NONE ? default_dtype(field, pass, c.dtype, args) : dtype, args, tensors);
  }
}

void set_options(const Options& options, Args& args) {
  for (const auto& [name, value] : options.values)
    if (!value.empty()) args.set(*testing::find_field(args.pass(), name), value);
  for (const auto& [name, on] : options.flags)
    if (on) args.set(*testing::find_field(args.pass(), name), "1");
}

void check_required(Args& args, const Tensors& tensors) {
  for (const thalweg_field* field : testing::tensor_fields(args.pass()))
    if (testing::is_input(*field) && !field->optional && !tensors.count(field->name))
      throw UsageError(fmt::format("{}: {}: missing, expected [{}] in a file of --in", pass_name(args.pass()), field->name, field->dims));
}

int run(const thalweg_pass& pass, const Options& options) {
  Args args(pass);
  Tensors tensors;
  set_options(options, args);
  for (const std::string& source : options.in) load_inputs(source, args, tensors);
  check_required(args, tensors);
  hold_outputs(options, args, tensors);
  check_targets(options.out, options.in, args, tensors);
  thalweg_context ctx{};
  ctx.size = sizeof ctx;
  ctx.num_threads = options.threads;
  ctx.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
  auto start = std::chrono::steady_clock::now();
  throw_on_error(pass.call(args.data(), &ctx));
  std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
  std::vector<char> text(16384);
  throw_on_error(pass.explain(args.data(), &ctx, text.data(), text.size()));
  std::string kernel = "unknown kernel";
  for (const std::string& line : words(text.data(), '\n'))
    if (size_t at = line.find(": runs"); at != std::string::npos) kernel = line.substr(0, at);
  std::vector<std::string> lines = save_outputs(options.out, args, tensors);
  fmt::print("{}: {}, {:.3f} ms (first call)\n", pass_name(pass), kernel, ms.count());
  for (const std::string& line : lines) fmt::print("{}\n", line);
  return kOk;
}

std::string tensor_lines(const thalweg_pass& pass) {
  std::string out = "\nTensors (names in the files; ? may be absent)\n";
  for (const thalweg_field* field : testing::tensor_fields(pass)) {
    const char* role = field->role == THALWEG_IN ? "in" : field->role == THALWEG_OUT ? "out" : "in/out";
    out += fmt::format("  {:<18}{:<7}{:<14}{:<20}{}\n", std::string(field->name) + (field->optional ? "?" : ""), role, fmt::format("[{}]", field->dims), field->dtypes, field->doc);
  }
  if (pass.refused && *pass.refused) {
    out += "Refused\n";
    for (const std::string& entry : words(pass.refused, ';')) out += "  " + entry + "\n";
  }
  return out + "\nOutputs that are not optional are always written; --want names others. An in/out tensor is read from the input and written.";
}

void add_field_option(CLI::App& app, const thalweg_field& field, Options& options) {
  std::string name = std::string("--") + field.name;
  if (field.kind == THALWEG_FLAG) {
    app.add_flag(name, options.flags[field.name], field.doc)->group("Options of the pass");
    return;
  }
  const char* type = field.kind == THALWEG_COUNT ? "N" : field.kind == THALWEG_REAL ? "X" : "WORD";
  std::string doc = field.kind == THALWEG_CHOICE ? fmt::format("{} ({})", field.doc, field.choices) : field.doc;
  app.add_option(name, options.values[field.name], doc)->type_name(type)->group("Options of the pass");
}

// Arguments that no option took: refused names get their reason.
void check_extras(const thalweg_pass& pass, const std::vector<std::string>& extras) {
  for (const std::string& extra : extras) {
    std::string name = extra.substr(std::min(extra.find_first_not_of('-'), extra.size()));
    name = name.substr(0, name.find('='));
    if (std::string reason = refusal(pass, name); !reason.empty()) throw UsageError(fmt::format("{}: {}: {}", pass_name(pass), name, reason));
  }
  if (extras.empty()) return;
  std::string names;
  for (int64_t i = 0; i < pass.num_fields; ++i)
    if (pass.fields[i].kind != THALWEG_TENSOR) names += std::string(" --") + pass.fields[i].name;
  throw UsageError(fmt::format("{}: got {}, expected --in --out --want --size --threads --kernel or an option:{}", pass_name(pass), extras[0], names));
}

}  // namespace

Action add_run(CLI::App& app) {
  struct Choice {
    const thalweg_pass* pass;
    CLI::App* app;
    Options options;
  };
  auto choices = std::make_shared<std::vector<std::unique_ptr<Choice>>>();
  app.require_subcommand(1);
  for (int64_t i = 0; const thalweg_pass* pass = thalweg_pass_at(i); ++i) {
    auto choice = std::make_unique<Choice>(Choice{pass, app.add_subcommand(pass_name(*pass), pass->doc), {}});
    CLI::App& one = *choice->app;
    Options& options = choice->options;
    one.allow_extras();
    one.add_option("--in", options.in, "FILE.safetensors, or name=FILE.npy; may be repeated")->required()->type_name("FILE")->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    one.add_option("--out", options.out, "FILE.safetensors for all outputs, or name=FILE.npy; may be repeated")->required()->type_name("FILE")->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    one.add_option("--want", options.want, "Optional outputs, separated by commas, with a dtype where wished (final_state=bf16); all")->type_name("NAMES")->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    one.add_option("--size", options.sizes, "A size that no input has (E=2048); may be repeated")->type_name("NAME=N")->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    one.add_option("--threads", options.threads, "Threads (default: the library's)")->type_name("N")->check(CLI::Range(1, 1024).description(""));
    one.add_option("--kernel", options.kernel, "Force a kernel row")->type_name("NAME");
    for (int64_t f = 0; f < pass->num_fields; ++f)
      if (pass->fields[f].kind != THALWEG_TENSOR) add_field_option(one, pass->fields[f], options);
    one.footer([pass] { return tensor_lines(*pass); });
    choices->push_back(std::move(choice));
  }
  app.footer("\nthalweg run PASS --help lists a pass's tensors and options.");
  return [choices] {
    for (auto& choice : *choices)
      if (choice->app->parsed()) {
        check_extras(*choice->pass, choice->app->remaining());
        return run(*choice->pass, choice->options);
      }
    return int(kUsage);
  };
}

}  // namespace thalweg::tool
