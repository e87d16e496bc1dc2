// Everything bind() refuses, for every field of every pass: exact text (argument, got, expected),
// status, and nothing written.
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/support.h"
#include "thalweg/core/signature.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

constexpr double kSmall = 2e8;

// A case of the sets in which the tensor is there, longer than 1 along every axis where possible; of
// several the one of the least work.
std::optional<Case> case_having(const thalweg_pass& pass, const thalweg_field& field) {
  static std::map<std::pair<const thalweg_pass*, const thalweg_field*>, std::optional<Case>> seen;
  auto [place, is_new] = seen.try_emplace({&pass, &field});
  std::optional<Case>& best = place->second;
  if (!is_new) return best;
  std::pair<int64_t, double> best_rank{-1, 0.0};  // long axes, minus the work
  for (const Case& c : pass_cases(pass, {"smoke", "ci", "edge"}, kSmall)) {
    if (!tt::is_present(c, field)) continue;
    int64_t axes = 0;
    for (int64_t size : tt::shape_in(c, field)) axes += size > 1;
    for (int64_t size : tt::shape_in(c, field))
      if (size == 0) axes = -1;
    const std::pair<int64_t, double> rank{axes, -tt::spec_of(pass).work(c).flops};
    if (axes >= 0 && (!best || rank > best_rank)) best = c, best_rank = rank;
  }
  return best;
}

std::string shape_text(const thalweg_tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.rank; ++i) text += (i ? ", " : "") + std::to_string(t.shape[i]);
  return text + "]";
}

// Whether the last error is `want`, to which an operator may add a reason in brackets.
::testing::AssertionResult last_error_is(const std::string& want) {
  const std::string got = thalweg_last_error();
  if (got == want || (got.starts_with(want + " (") && got.ends_with(")"))) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "got: " << got << "\n  expected: " << want;
}

// The call and its query fail with this text; outputs keep their first bytes.
void expect_refusal(Problem& problem, const std::string& name, const std::string& text, bool query = true) {
  const thalweg_pass& pass = *problem.spec_case().pass;
  std::string want = tt::pass_name(pass) + ": " + name + ": " + text;
  SCOPED_TRACE(problem.spec_case().text());
  thalweg_context ctx{};
  ASSERT_EQ(pass.call(problem.args(), &ctx), THALWEG_INVALID_ARGUMENT) << "expected: " << want;
  EXPECT_TRUE(last_error_is(want));
  EXPECT_EQ(problem.check_untouched(), "");
  if (!query) return;
  size_t bytes = 77;
  EXPECT_EQ(pass.workspace(problem.args(), &ctx, &bytes), THALWEG_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_is(want));
  EXPECT_EQ(bytes, 77u);
  char out[256] = "";
  EXPECT_EQ(pass.explain(problem.args(), &ctx, out, sizeof out), THALWEG_INVALID_ARGUMENT);
}

// Runs `check` for every tensor field with a problem in which the field is present.
void for_each_tensor(const thalweg_pass& pass, const std::function<void(Problem&, const thalweg_field&)>& check) {
  for (const thalweg_field* field : tt::tensor_fields(pass)) {
    std::optional<Case> c = case_having(pass, *field);
    if (!c) {
      ADD_FAILURE() << tt::pass_name(pass) << ": no case of smoke, ci or edge has " << field->name;
      continue;
    }
    Problem problem(*c);
    SCOPED_TRACE(field->name);
    check(problem, *field);
  }
}

void test_base(const thalweg_pass& pass) {
  for_each_tensor(pass, [&](Problem& problem, const thalweg_field&) { run(problem); });
}

void test_missing(const thalweg_pass& pass) {
  for_each_tensor(pass, [](Problem& problem, const thalweg_field& field) {
    if (field.optional) return;
    problem.tensor(field.name) = thalweg_tensor{};
    expect_refusal(problem, field.name, std::string("missing, expected [") + field.dims + "]");
  });
}

void test_rank(const thalweg_pass& pass) {
  for_each_tensor(pass, [](Problem& problem, const thalweg_field& field) {
    thalweg_tensor& t = problem.tensor(field.name);
    if (t.rank > 1) {
      --t.rank;
    } else {
      ++t.rank;
      t.shape[1] = t.stride[1] = 1;
    }
    expect_refusal(problem, field.name, "shape, got " + shape_text(t) + ", expected [" + field.dims + "]");
    int rank = int(tt::words(field.dims).size());
    for (int wrong : {-1, 6}) {
      t.rank = wrong;
      expect_refusal(problem, field.name, "rank, got " + std::to_string(wrong) + ", expected " + std::to_string(rank) + " for [" + field.dims + "]");
    }
  });
}

// The first present field that has the size, as bind() binds it.
std::string bound_by(Problem& problem, const thalweg_field& field, int axis) {
  std::string name = tt::words(field.dims)[size_t(axis)];
  name = name.substr(0, name.find('+'));
  for (const thalweg_field* other : tt::tensor_fields(*problem.spec_case().pass)) {
    bool same = other == &field;
    std::vector<std::string> dims = tt::words(other->dims);
    for (int i = 0; i < int(dims.size()) && !(same && i == axis); ++i)
      if (tt::is_present(problem.spec_case(), *other) && dims[size_t(i)].substr(0, dims[size_t(i)].find('+')) == name) return other->name;
    if (same) return "";
  }
  return "";
}

void test_sizes(const thalweg_pass& pass) {
  for_each_tensor(pass, [](Problem& problem, const thalweg_field& field) {
    thalweg_tensor& t = problem.tensor(field.name);
    for (int axis = 0; axis < t.rank; ++axis) {
      std::string from = bound_by(problem, field, axis);
      if (from.empty()) continue;
      int64_t right = t.shape[axis];
      t.shape[axis] = right + 1;
      expect_refusal(problem, field.name,
                     tt::words(field.dims)[size_t(axis)] + ", got " + std::to_string(right + 1) + " in " + shape_text(t) +
                         ", expected " + std::to_string(right) + " (from " + from + ")");
      t.shape[axis] = -1;
      thalweg_context ctx{};
      EXPECT_EQ(problem.spec_case().pass->call(problem.args(), &ctx), THALWEG_INVALID_ARGUMENT);
      t.shape[axis] = right;
    }
  });
}

void test_dtypes(const thalweg_pass& pass) {
  for_each_tensor(pass, [&](Problem& problem, const thalweg_field& field) {
    thalweg_tensor& t = problem.tensor(field.name);
    if (field.dtypes[0] == '=') {
      thalweg_dtype right = t.dtype;
      t.dtype = right == THALWEG_F16 ? THALWEG_BF16 : THALWEG_F16;
      expect_refusal(problem, field.name, std::string("dtype, got ") + thalweg_dtype_name(t.dtype) + ", expected " + thalweg_dtype_name(right) + " (from " + (field.dtypes + 1) + ")");
      return;
    }
    t.dtype = tt::accepts_dtype(pass, field, THALWEG_I8) ? THALWEG_I64 : THALWEG_I8;
    expect_refusal(problem, field.name, std::string("dtype, got ") + thalweg_dtype_name(t.dtype) + ", expected one of " + field.dtypes);
    t.dtype = 0x123;
    expect_refusal(problem, field.name, std::string("dtype, got unknown, expected one of ") + field.dtypes);
    t.dtype = THALWEG_F32 & ~0xff0000u;  // lanes 0
    expect_refusal(problem, field.name, std::string("dtype, got unknown, expected one of ") + field.dtypes);
  });
}

void test_strides(const thalweg_pass& pass) {
  for_each_tensor(pass, [](Problem& problem, const thalweg_field& field) {
    thalweg_tensor& t = problem.tensor(field.name);
    const thalweg_tensor right = t;
    int last = t.rank - 1;
    if (field.layout == THALWEG_ROWS && t.shape[last] > 1) {
      t.stride[last] = 2;
      expect_refusal(problem, field.name, "stride of the last axis, got 2, expected 1");
      t.stride[last] = 0;
      expect_refusal(problem, field.name, "stride of the last axis, got 0, expected 1");
    }
    t = right;
    if (field.layout == THALWEG_STATE && t.shape[last] > 1 && t.shape[last - 1] > 1) {
      t.stride[last] = 2;
      t.stride[last - 1] = 2 * t.shape[last];
      expect_refusal(problem, field.name,
                     "strides of the last two axes, got " + std::to_string(t.stride[last - 1]) + " and 2, expected a 1");
    }
    t = right;
    if (tt::is_output(field))
      for (int axis = 0; axis < last; ++axis) {
        if (t.shape[axis] < 2) continue;
        for (int64_t stride : {int64_t(0), int64_t(-1) * t.stride[axis]}) {
          t.stride[axis] = stride;
          thalweg_context ctx{};
          ASSERT_EQ(problem.spec_case().pass->call(problem.args(), &ctx), THALWEG_INVALID_ARGUMENT);
          EXPECT_NE(std::string(thalweg_last_error()).find(std::string(": ") + field.name + ": stride of axis "), std::string::npos) << thalweg_last_error();
          EXPECT_NE(std::string(thalweg_last_error()).find("(an output must not overlap itself)"), std::string::npos) << thalweg_last_error();
          EXPECT_EQ(problem.check_untouched(), "");
        }
        t = right;
      }
    for (int axis = 0; axis < last; ++axis)
      if (t.shape[axis] > 1) {
        t.stride[axis] = std::numeric_limits<int64_t>::max();
        expect_refusal(problem, field.name, "stride of axis " + std::to_string(axis) + ", got 9223372036854775807, expected offsets below 2^58");
        t = right;
      }
  });
}

void test_data(const thalweg_pass& pass) {
  for_each_tensor(pass, [](Problem& problem, const thalweg_field& field) {
    thalweg_tensor& t = problem.tensor(field.name);
    if (tt::count(t) == 0) return;
    char* data = static_cast<char*>(t.data);
    t.data = nullptr;
    expect_refusal(problem, field.name, "data, got null, expected " + shape_text(t) + " elements", false);
    size_t bytes = 0;
    thalweg_context ctx{};
    EXPECT_EQ(problem.spec_case().pass->workspace(problem.args(), &ctx, &bytes), THALWEG_OK) << thalweg_last_error();
    if (thalweg_dtype_bytes(t.dtype) == 1) return;
    t.data = data + 1;
    char address[64];
    std::snprintf(address, sizeof address, "%p", t.data);
    expect_refusal(problem, field.name, std::string("data, got address ") + address + ", expected a multiple of " + std::to_string(thalweg_dtype_bytes(t.dtype)), false);
  });
}

void test_device(const thalweg_pass& pass) {
  std::string first;  // says where the call is
  for_each_tensor(pass, [&](Problem& problem, const thalweg_field& field) {
    if (first.empty()) first = tt::tensor_fields(*problem.spec_case().pass).front()->name;
    problem.tensor(field.name).device_type = 7;
    expect_refusal(problem, field.name, "device, got type 7, expected the CPU (1) or CUDA (2)");
    problem.tensor(field.name).device_type = THALWEG_CUDA;
    if (field.name != first) expect_refusal(problem, field.name, "device, got cuda:0, expected the CPU (from " + first + ")");
    problem.tensor(field.name).device_type = 0;  // a zeroed tensor means the CPU
    run(problem);
  });
}

void test_overlap(const thalweg_pass& pass) {
  for_each_tensor(pass, [&](Problem& problem, const thalweg_field& field) {
    if (!tt::is_output(field)) return;
    thalweg_tensor& t = problem.tensor(field.name);
    void* right = t.data;
    for (const thalweg_field* other : tt::tensor_fields(pass)) {
      if (other == &field || !tt::is_present(problem.spec_case(), *other)) continue;
      const thalweg_tensor& o = problem.tensor(other->name);
      if (tt::count(o) == 0 || tt::count(t) == 0 || reinterpret_cast<uintptr_t>(o.data) % thalweg_dtype_bytes(t.dtype) != 0) continue;
      t.data = o.data;
      thalweg_context ctx{};
      ASSERT_EQ(pass.call(problem.args(), &ctx), THALWEG_INVALID_ARGUMENT) << field.name << " on " << other->name;
      std::string text = thalweg_last_error();
      EXPECT_NE(text.find("memory, got an overlap with "), std::string::npos) << text;
      EXPECT_TRUE(text.find(other->name) != std::string::npos && text.find(field.name) != std::string::npos) << text;
      EXPECT_EQ(problem.check_untouched(), "");
    }
    t.data = right;
  });
}

void test_options(const thalweg_pass& pass) {
  std::vector<Case> cases = pass_cases(pass, {"smoke"}, kSmall);
  ASSERT_FALSE(cases.empty());
  for (int64_t i = 0; i < pass.num_fields; ++i) {
    const thalweg_field& field = pass.fields[i];
    if (field.kind == THALWEG_TENSOR) continue;
    Problem problem(cases[0]);
    char* at = static_cast<char*>(problem.args()) + field.offset;
    auto put = [&](auto value) { std::memcpy(at, &value, sizeof value); };
    if (field.kind == THALWEG_FLAG) {
      put(int32_t(2)), expect_refusal(problem, field.name, "got 2, expected 0 or 1");
      put(int32_t(-1)), expect_refusal(problem, field.name, "got -1, expected 0 or 1");
    } else if (field.kind == THALWEG_CHOICE) {
      int64_t words = int64_t(tt::words(field.choices).size());
      std::string expected = ", expected 0 to " + std::to_string(words - 1) + " (" + field.choices + ")";
      put(int32_t(words)), expect_refusal(problem, field.name, "got " + std::to_string(words) + expected);
      put(int32_t(-1)), expect_refusal(problem, field.name, "got -1" + expected);
    } else if (field.kind == THALWEG_REAL) {
      put(std::numeric_limits<double>::infinity()), expect_refusal(problem, field.name, "got inf, expected a finite number");
      put(std::nan("")), expect_refusal(problem, field.name, "got nan, expected a finite number");
    } else {
      put(int64_t(-1));
      thalweg_context ctx{};
      EXPECT_EQ(pass.call(problem.args(), &ctx), THALWEG_INVALID_ARGUMENT) << field.name << " = -1";
      EXPECT_EQ(std::string(thalweg_last_error()).rfind(tt::pass_name(pass) + ": " + field.name + ": ", 0), 0u) << thalweg_last_error();
      EXPECT_EQ(problem.check_untouched(), "");
    }
  }
}

void test_struct_size(const thalweg_pass& pass) {
  std::vector<Case> cases = pass_cases(pass, {"smoke"}, kSmall);
  ASSERT_FALSE(cases.empty());
  Problem problem(cases[0]);
  Outputs want = run(problem);
  thalweg_context ctx{};
  std::vector<char> longer(pass.args_size + 64, 0);
  std::memcpy(longer.data(), problem.args(), pass.args_size);
  auto put_size = [&](size_t size) { std::memcpy(longer.data(), &size, sizeof size); };

  put_size(0);
  EXPECT_EQ(pass.call(longer.data(), &ctx), THALWEG_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(thalweg_last_error()), tt::pass_name(pass) + ": args: size, got 0, expected sizeof the struct = " + std::to_string(pass.args_size));
  EXPECT_EQ(pass.call(nullptr, &ctx), THALWEG_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(thalweg_last_error()), tt::pass_name(pass) + ": args: got null, expected a struct");
  size_t bytes;
  EXPECT_EQ(pass.workspace(nullptr, &ctx, &bytes), THALWEG_INVALID_ARGUMENT);
  EXPECT_EQ(pass.workspace(problem.args(), &ctx, nullptr), THALWEG_INVALID_ARGUMENT);

  problem.poison_outputs();
  put_size(longer.size());  // a newer caller that sets nothing new
  EXPECT_EQ(pass.call(longer.data(), &ctx), THALWEG_OK) << thalweg_last_error();
  Outputs got;
  for (const std::string& name : problem.outputs()) got[name] = problem.read(name);
  EXPECT_EQ(first_difference(got, want), "");
  problem.poison_outputs();
  longer.back() = 1;  // a newer caller that does
  EXPECT_EQ(pass.call(longer.data(), &ctx), THALWEG_INVALID_ARGUMENT);
  EXPECT_EQ(problem.check_untouched(), "");

  const thalweg_field& last = pass.fields[pass.num_fields - 1];  // an older caller without the last field
  ASSERT_NE(last.kind, THALWEG_TENSOR);
  std::vector<char> shorter(last.offset);
  std::memcpy(shorter.data(), problem.args(), shorter.size());
  size_t size = shorter.size();
  std::memcpy(shorter.data(), &size, sizeof size);
  EXPECT_EQ(pass.call(shorter.data(), &ctx), THALWEG_OK) << thalweg_last_error();
  size = 100;  // only part of the first tensor
  std::memcpy(shorter.data(), &size, sizeof size);
  EXPECT_EQ(pass.call(shorter.data(), &ctx), THALWEG_INVALID_ARGUMENT);
}

// Every member of the args struct is in the field table: sizes and alignments add up.
void test_offsets(const thalweg_pass& pass) {
  size_t at = sizeof(size_t);
  for (int64_t i = 0; i < pass.num_fields; ++i) {
    const thalweg_field& field = pass.fields[i];
    bool word = field.kind == THALWEG_FLAG || field.kind == THALWEG_CHOICE;
    size_t alignment = word ? 4 : 8, size = field.kind == THALWEG_TENSOR ? sizeof(thalweg_tensor) : word ? 4 : 8;
    at = (at + alignment - 1) / alignment * alignment;
    EXPECT_EQ(field.offset, at) << field.name;
    at += size;
    EXPECT_TRUE(field.doc && *field.doc) << field.name;
  }
  EXPECT_EQ(pass.args_size, (at + 7) / 8 * 8);
  EXPECT_TRUE(pass.doc && *pass.doc);
}

// thalweg_context: size 0, negative threads, workspace too small or misaligned.
void test_context(const thalweg_pass& pass) {
  std::vector<Case> cases = pass_cases(pass, {"smoke"}, kSmall);
  ASSERT_FALSE(cases.empty());
  Problem problem(cases.back());
  auto refused = [&](const thalweg_context& ctx, const char* word) {
    EXPECT_EQ(pass.call(problem.args(), &ctx), THALWEG_INVALID_ARGUMENT) << word;
    EXPECT_NE(std::string(thalweg_last_error()).find(word), std::string::npos) << thalweg_last_error();
    EXPECT_EQ(problem.check_untouched(), "");
  };
  thalweg_context ctx{};
  ctx.size = 0, refused(ctx, "size");
  ctx = {}, ctx.num_threads = -1, refused(ctx, "num_threads");
  ctx = {};
  size_t bytes = 0;
  ASSERT_EQ(pass.workspace(problem.args(), &ctx, &bytes), THALWEG_OK);
  std::vector<char> memory(bytes + 128);
  char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  if (bytes > 0) {
    ctx.workspace = aligned, ctx.workspace_bytes = bytes - 1;
    refused(ctx, "workspace");
    ctx.workspace = aligned + 8, ctx.workspace_bytes = bytes;
    refused(ctx, "workspace");
  }
  ctx = {};
  ctx.kernel = "no_such_kernel";
  EXPECT_NE(pass.call(problem.args(), &ctx), THALWEG_OK);
  std::string text = thalweg_last_error();
  EXPECT_EQ(text, tt::pass_name(pass) + ": kernel: got no_such_kernel, expected a name that `thalweg list` shows");
  EXPECT_EQ(problem.check_untouched(), "");
  EXPECT_EQ(pass.call(problem.args(), nullptr), THALWEG_OK) << thalweg_last_error();
}

}  // namespace

void register_bind_tests() {
  register_per_pass("bind", "accepts", test_base);
  register_per_pass("bind", "missing", test_missing);
  register_per_pass("bind", "rank", test_rank);
  register_per_pass("bind", "sizes", test_sizes);
  register_per_pass("bind", "dtypes", test_dtypes);
  register_per_pass("bind", "strides", test_strides);
  register_per_pass("bind", "data", test_data);
  register_per_pass("bind", "device", test_device);
  register_per_pass("bind", "overlap", test_overlap);
  register_per_pass("bind", "options", test_options);
  register_per_pass("bind", "struct_size", test_struct_size);
  register_per_pass("bind", "offsets", test_offsets);
  register_per_pass("bind", "context", test_context);
}

}  // namespace thalweg::tests
