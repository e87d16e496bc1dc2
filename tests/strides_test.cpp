// Layouts: every tensor of every pass with every kind of strides it may have gives the bits that
// contiguous tensors give, on the same kernel row (an exchanged state: the same within the limits).
#include <cstring>

#include "tests/properties.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

constexpr double kSmall = 3e7;

std::string stride_text(const std::vector<int64_t>& strides) {
  std::string text = "s";
  for (size_t i = 0; i < strides.size(); ++i) text += (i ? "_" : "") + std::to_string(strides[i]);
  return text;
}

std::vector<int64_t> row_major(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * std::max<int64_t>(1, shape[i + 1]);
  return strides;
}

std::string digits(size_t rank, size_t a, size_t b) {  // axes a and b exchanged in storage
  std::string text;
  for (size_t i = 0; i < rank; ++i) text += char('0' + (i == a ? b : i == b ? a : i));
  return text;
}

// The layouts a field may have beside row-major, as case tokens.
std::vector<std::string> layouts_of(const Case& c, const thalweg_field& field) {
  std::vector<int64_t> shape = tt::shape_in(c, field), strides = row_major(shape);
  size_t rank = shape.size();
  std::vector<std::string> list = {"off1", "off3"};
  auto leading = [&](int64_t factor) {
    std::vector<int64_t> s = strides;
    for (size_t i = 0; i + 1 < rank; ++i) s[i] *= factor;
    return stride_text(s);
  };
  if (rank > 1) list.push_back("gap");
  if (rank > 2) list.push_back(digits(rank, 0, 1)), list.push_back(leading(2));
  if (rank > 3) list.push_back(digits(rank, 1, 2)), list.push_back(digits(rank, 0, 2));
  bool input_only = field.role == THALWEG_IN;
  if (rank > 1 && input_only) list.push_back(leading(-1)), list.push_back(leading(0));
  if (field.layout == THALWEG_STATE && rank > 1) list.push_back(digits(rank, rank - 2, rank - 1)), list.push_back(digits(rank, rank - 2, rank - 1) + "@off1");
  if (field.layout == THALWEG_ANY) {
    if (rank > 1) list.push_back(digits(rank, rank - 2, rank - 1)), list.push_back(digits(rank, 0, rank - 1));
    std::vector<int64_t> s = strides;
    for (int64_t& x : s) x *= 3;
    list.push_back(stride_text(s));
    if (input_only) {
      for (int64_t& x : s) x = -x;
      list.push_back(stride_text(s));
      list.push_back(stride_text(std::vector<int64_t>(rank, 0)));
      s.assign(rank, 0), s.back() = 1;
      list.push_back(stride_text(s));
    }
  }
  return list;
}

// A state stored with its last two axes exchanged: kernels then go along the other axis, and sums round in
// another order.
bool exchanged_state(const Case& c) {
  for (const thalweg_field* field : tt::tensor_fields(*c.pass)) {
    if (field->layout != THALWEG_STATE || !tt::is_present(c, *field)) continue;
    int64_t offset;
    thalweg_tensor t = tt::layout_in(c, *field, &offset);
    if (t.rank > 1 && t.stride[t.rank - 1] != 1) return true;
  }
  return false;
}

// Equal bits; with a state exchanged on one side only, equal within the limits.
void expect_equal(const Case& strided, const Case& plain, const Outputs& got, const Outputs& want) {
  std::string difference = exchanged_state(strided) != exchanged_state(plain) ? out_of_limit(strided, got, want, 2) : first_difference(got, want);
  EXPECT_EQ(difference, "") << "  thalweg verify " << strided.text();
}

// Runs `c` with one tensor's layout changed, and contiguous with the same values: equal bits.
void expect_same(const Case& c, const std::string& name, const std::string& layout) {
  std::string value = c.has(name) ? c.options.at(name) : "";
  value = value.substr(0, value.find('@'));
  Case strided_case = with(c, {{name, value + "@" + layout}}), plain_case = with(c, {{name, value}});
  Problem strided(strided_case);
  bool taken = true;
  Outputs got = run(strided, &taken);
  if (!taken) return;
  expect_equal(strided_case, plain_case, got, run_with(plain_case, strided.inputs()));
}

void every_layout(const thalweg_pass& pass) {
  std::vector<Case> cases = pass_cases(pass, {"smoke", "ci"}, kSmall);
  for (const thalweg_field* field : tt::tensor_fields(pass)) {
    int used = 0;
    for (const Case& base : cases) {
      if (used == 3) break;
      if (!tt::is_present(base, *field) || tt::count(tt::shape_in(base, *field)) < 2) continue;
      ++used;
      for (const std::string& row : kernel_rows(pass)) {
        Case c = with_kernel(base, row);
        c.threads = 1;
        if (!takes(c)) continue;
        if (tt::is_integer(tt::dtype_in(c, *field)))
          continue;  // rank 1 and 2, contiguous last axis; the sets hold i32 and i64
        for (const std::string& layout : layouts_of(c, *field)) expect_same(c, field->name, layout);
      }
    }
    EXPECT_GT(used, 0) << field->name;
  }
}

// Every tensor strided at once, in one way each.
void all_at_once(const thalweg_pass& pass) {
  for_each_row(pass, {"smoke"}, kSmall, [&](const Case& c) {
    for (size_t pick = 0; pick < 6; ++pick) {
      Case strided_case = c;
      for (const thalweg_field* field : tt::tensor_fields(pass)) {
        if (!tt::is_present(c, *field) || tt::is_integer(tt::dtype_in(c, *field)) || tt::count(tt::shape_in(c, *field)) < 1) continue;
        std::vector<std::string> layouts = layouts_of(c, *field);
        std::string value = c.has(field->name) ? c.options.at(field->name) : "";
        strided_case.options[field->name] = value.substr(0, value.find('@')) + "@" + layouts[pick % layouts.size()];
      }
      Problem strided(strided_case);
      bool taken = true;
      Outputs got = run(strided, &taken);
      if (!taken) continue;
      expect_equal(strided_case, c, got, run_with(c, strided.inputs()));
    }
  });
}

// Tensors that share their first two axes, laid side by side in one buffer [.. .. total] (as a fused
// projection leaves q, k and v), inputs in one buffer, outputs in another.
struct Slices {
  std::vector<const thalweg_field*> fields;
  std::vector<int64_t> width;
  int64_t total = 0;
  std::vector<char> memory;
};

Slices slice(Problem& problem, bool outputs) {
  const Case& c = problem.spec_case();
  std::vector<std::string> lead = tt::words(tt::tensor_fields(*c.pass)[0]->dims);
  Slices s;
  for (const thalweg_field* field : tt::tensor_fields(*c.pass)) {
    std::vector<std::string> dims = tt::words(field->dims);
    bool right = outputs ? field->role == THALWEG_OUT : field->role == THALWEG_IN;
    if (!right || !tt::is_present(c, *field) || tt::dtype_in(c, *field) != c.dtype || field->layout != THALWEG_ROWS) continue;
    if (dims.size() < 2 || dims.size() == 2 ? dims[0] != lead[0] || dims.size() < 2 : dims[0] != lead[0] || dims[1] != lead[1]) continue;
    std::vector<int64_t> shape = tt::shape_in(c, *field);
    int64_t width = 1;
    for (size_t i = dims.size() > 2 ? 2 : 1; i < shape.size(); ++i) width *= shape[i];
    s.fields.push_back(field);
    s.width.push_back(width);
    s.total += width;
  }
  if (s.fields.size() < 2) return {};
  std::vector<int64_t> shape = tt::shape_in(c, *s.fields[0]);
  size_t bytes = thalweg_dtype_bytes(c.dtype);
  int64_t rows = shape.size() > 2 ? shape[0] * shape[1] : shape[0], column = 0;
  s.memory.assign(size_t(rows * s.total) * bytes + 1, 0);
  for (size_t i = 0; i < s.fields.size(); ++i) {
    thalweg_tensor& t = problem.tensor(s.fields[i]->name);
    t.data = s.memory.data() + size_t(column) * bytes;
    column += s.width[i];
    int64_t stride = 1;
    for (int axis = t.rank - 1; axis >= 0; --axis) {
      bool row = axis < (t.rank > 2 ? 2 : 1);
      if (row && axis == (t.rank > 2 ? 1 : 0)) stride = s.total;
      t.stride[axis] = stride;
      stride *= t.shape[axis];
    }
  }
  return s;
}

void slices_of_one_buffer(const thalweg_pass& pass) {
  for_each_row(pass, {"smoke", "ci"}, kSmall, [&](const Case& c) {
    if (tt::count(tt::shape_in(c, *tt::tensor_fields(pass)[0])) == 0) return;
    for (const auto& [name, value] : c.options)
      if (value.find('@') != std::string::npos) return;
    Problem problem(c);
    Outputs want = run(problem);
    problem.poison_outputs();
    Slices in = slice(problem, false), out = slice(problem, true);
    for (const thalweg_field* field : in.fields) tt::write_values(problem.tensor(field->name), problem.inputs().at(field->name));
    ASSERT_EQ(problem.call(), THALWEG_OK) << thalweg_last_error();
    Outputs got;
    for (const std::string& name : problem.outputs()) got[name] = tt::read_values(problem.tensor(name));
    EXPECT_EQ(first_difference(got, want), "");
  });
}

// Offsets beyond 2^31 elements, by stride, on memory of which only the touched pages exist.
void far_strides(const thalweg_pass& pass) {
  int tried = 0;
  std::vector<Case> cases = pass_cases(pass, {"smoke"}, 1e7);
  for (const thalweg_field* field : tt::tensor_fields(pass)) {
    int used = 0;
    for (const Case& base : cases) {
      if (!tt::is_present(base, *field) || tt::is_integer(tt::dtype_in(base, *field)) || used == 2) continue;
      std::vector<int64_t> shape = tt::shape_in(base, *field), strides = row_major(shape);
      if (shape.size() < 2 || tt::count(shape) == 0) continue;
      size_t far = 0;
      for (size_t i = 0; i + 1 < shape.size(); ++i)
        if (shape[i] > shape[far]) far = i;
      if (shape[far] < 2) continue;
      ++used;
      strides[far] = ((int64_t(1) << 31) / (shape[far] - 1) + 4096) / 64 * 64;
      for (size_t i = 0; i < far; ++i) strides[i] = strides[far] * shape[far] * (i + 1 == far || shape[i] == 1 ? 1 : shape[i + 1]);
      for (const std::string& row : kernel_rows(pass)) {
        Case c = with_kernel(base, row);
        if (!takes(c)) continue;
        ++tried;
        expect_same(c, field->name, stride_text(strides));
      }
    }
  }
  EXPECT_GT(tried, 0);
}

}  // namespace

void register_stride_tests() {
  register_per_pass("strides", "every_layout", every_layout);
  register_per_pass("strides", "all_at_once", all_at_once);
  register_per_pass("strides", "slices_of_one_buffer", slices_of_one_buffer);
  register_per_pass("strides", "far_strides", far_strides);
}

}  // namespace thalweg::tests
