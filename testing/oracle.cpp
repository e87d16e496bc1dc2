// The float64 oracle on the inputs of a problem, and comparison with it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>

#include "testing/compare.h"
#include "testing/fields.h"

namespace thalweg::testing {
namespace {

constexpr double kWholeFlops = 3e9;  // a case up to this size is checked whole
constexpr double kPartFlops = 1e9;   // of a larger one, groups up to this size, four at least

// How many heads of size name `name` belong to one group: the first head size's count over it.
int64_t heads_per_group(const Case& c, const std::string& name) {
  std::vector<std::string> names = words(spec_of(*c.pass).head_sizes);
  for (const std::string& head : names)
    if (head == name && c.size(names[0]) > 0) return c.size(name) / c.size(names[0]);
  return 0;
}

std::vector<int64_t> picked(const Case& c, const std::string& dim, int64_t size, const std::vector<int64_t>& groups) {
  std::vector<int64_t> indices;
  int64_t per = groups.empty() ? 0 : heads_per_group(c, dim);
  if (per == 0)
    for (int64_t i = 0; i < size; ++i) indices.push_back(i);
  else
    for (int64_t group : groups)
      for (int64_t i = 0; i < per; ++i) indices.push_back(group * per + i);
  return indices;
}

struct Float64Args {
  std::vector<char> bytes;
  std::map<std::string, std::vector<double>> data;  // float tensors
  std::map<std::string, std::vector<int64_t>> integers;  // room for integer outputs, and for inputs cut to heads
  std::map<std::string, thalweg_tensor> tensors;
};

thalweg_tensor row_major(double* data, const std::vector<int64_t>& shape) {
  thalweg_tensor t{};
  t.data = data;
  t.dtype = THALWEG_F64;
  t.rank = int32_t(shape.size());
  t.device_type = THALWEG_CPU;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = shape[size_t(i)];
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

void add_tensor(const Problem& problem, const thalweg_field& field, const std::vector<int64_t>& groups, Float64Args* out) {
  const Case& c = problem.spec_case();
  Values v;
  if (is_input(field)) {
    v = take_groups(c, field.name, problem.inputs().at(field.name), groups);
  } else {
    std::vector<std::string> dims = words(field.dims);
    v.shape = shape_in(c, field);
    for (size_t i = 0; i < dims.size(); ++i) v.shape[i] = int64_t(picked(c, dims[i], v.shape[i], groups).size());
    v.data.assign(size_t(count(v.shape)), std::numeric_limits<double>::quiet_NaN());
  }
  std::vector<double>& data = out->data[field.name] = std::move(v.data);
  out->tensors[field.name] = row_major(data.data(), v.shape);
  std::memcpy(out->bytes.data() + field.offset, &out->tensors[field.name], sizeof(thalweg_tensor));
}

// An integer output, or an input with an axis of heads (a mask) cut to the groups, in its own dtype.
void add_integers(const Problem& problem, const thalweg_field& field, const std::vector<int64_t>& groups, Float64Args* out) {
  const Case& c = problem.spec_case();
  bool has_heads = false;
  for (const std::string& dim : words(field.dims)) has_heads = has_heads || heads_per_group(c, dim) > 0;
  if (is_input(field) && (groups.empty() || !has_heads)) return;
  std::vector<int64_t> shape = shape_in(c, field);
  Values v;
  if (is_input(field)) v = take_groups(c, field.name, problem.inputs().at(field.name), groups), shape = v.shape;
  std::vector<int64_t>& room = out->integers[field.name];
  room.assign(size_t(count(shape)), 0x7f7f7f7f7f7f7f7f);
  thalweg_tensor t = row_major(nullptr, shape);
  t.data = room.data();
  t.dtype = dtype_in(c, field);
  if (is_input(field)) write_values(t, v);
  out->tensors[field.name] = t;
  std::memcpy(out->bytes.data() + field.offset, &t, sizeof t);
}

// Infinity where storing `value` overflows, else `value` unrounded.
double overflowed(double value, thalweg_dtype stored) {
  if (std::fabs(value) < 65504) return value;  // every dtype holds it
  double bits = 0;  // room for any dtype
  store(&bits, stored, 0, value);
  double rounded = load(&bits, stored, 0);
  return std::isinf(rounded) ? rounded : value;
}

double smallest_normal(thalweg_dtype dtype) {
  if (dtype == THALWEG_F16) return 0x1p-14;
  return dtype == THALWEG_F64 ? 0x1p-1022 : 0x1p-126;
}

}  // namespace

Values take_groups(const Case& c, const std::string& name, const Values& values, const std::vector<int64_t>& groups) {
  if (groups.empty()) return values;
  std::vector<std::string> dims = words(find_field(*c.pass, name)->dims);
  std::vector<std::vector<int64_t>> indices;
  Values part;
  for (size_t i = 0; i < dims.size(); ++i) {
    indices.push_back(picked(c, dims[i], values.shape[i], groups));
    part.shape.push_back(int64_t(indices[i].size()));
  }
  int64_t total = count(part.shape);
  part.data.reserve(size_t(total));
  for (int64_t flat = 0; flat < total; ++flat) {
    int64_t rest = flat, at = 0, stride = 1;
    for (size_t i = dims.size(); i-- > 0;) {
      at += indices[i][size_t(rest % part.shape[i])] * stride;
      rest /= part.shape[i];
      stride *= values.shape[i];
    }
    part.data.push_back(values.data[size_t(at)]);
  }
  return part;
}

std::map<std::string, Values> run_reference(const Problem& problem, const std::vector<int64_t>& groups) {
  const Case& c = problem.spec_case();
  Float64Args args;
  const char* original = static_cast<const char*>(const_cast<Problem&>(problem).args());
  args.bytes.assign(original, original + c.pass->args_size);
  for (const thalweg_field* field : tensor_fields(*c.pass)) {
    if (!is_present(c, *field)) continue;
    if (is_integer(dtype_in(c, *field))) add_integers(problem, *field, groups, &args);
    else add_tensor(problem, *field, groups, &args);
  }
  spec_of(*c.pass).reference(args.bytes.data());
  std::map<std::string, Values> outputs;
  for (const std::string& name : problem.outputs()) outputs[name] = read_values(args.tensors.at(name));
  return outputs;
}

void settle(const Problem& problem, std::map<std::string, Values>* want) {
  const Case& c = problem.spec_case();
  if (!spec_of(*c.pass).settle) return;
  std::map<std::string, Values> got;
  for (const std::string& name : problem.outputs()) got[name] = problem.read(name);
  spec_of(*c.pass).settle(c, problem.inputs(), got, want);
}

std::vector<int64_t> oracle_groups(const Case& c) {
  const Spec& spec = spec_of(*c.pass);
  std::vector<std::string> names = words(spec.head_sizes);
  int64_t all = names.empty() ? 0 : c.size(names[0]);
  double flops = spec.work(c).flops;
  if (all <= 4 || flops <= kWholeFlops) return {};
  int64_t wanted = std::max<int64_t>(4, int64_t(kPartFlops / (flops / double(all))));
  if (wanted >= all) return {};
  std::set<int64_t> groups = {0, all - 1};
  Random random(c.seed);
  while (int64_t(groups.size()) < wanted) groups.insert(random.below(all));
  return {groups.begin(), groups.end()};
}

Difference compare_stored(const Values& got, const Values& want, thalweg_dtype stored) {
  Difference d;
  if (got.shape != want.shape) throw std::invalid_argument("compare: different shapes");
  double error = 0, square = 0;
  for (int64_t i = 0; i < want.count(); ++i) {
    double g = got.data[size_t(i)], w = overflowed(want.data[size_t(i)], stored);
    if (std::isfinite(g) && std::isfinite(w)) {
      double gap = std::fabs(g - w);
      error += gap * gap;
      square += w * w;
      if (gap > d.worst || d.worst_at < 0) d.worst = gap, d.worst_at = i;
    } else if (!(std::isnan(g) && std::isnan(w)) && g != w) {
      d.ratio = d.worst = std::numeric_limits<double>::infinity();
      d.worst_at = i;
      return d;
    }
  }
  double n = double(std::max<int64_t>(1, want.count())), floor = smallest_normal(stored), rms = std::sqrt(error / n);
  d.want_rms = std::sqrt(square / n);
  if (error > 0) d.ratio = rms / std::max(d.want_rms, floor);
  if (square == 0 && rms > floor) d.ratio = std::numeric_limits<double>::infinity();
  return d;
}

Difference compare(const Values& got, const Values& want) { return compare_stored(got, want, THALWEG_F64); }

Difference compare_output(const Case& c, const std::string& output, const Values& got, const Values& want) {
  return compare_stored(got, want, dtype_in(c, *find_field(*c.pass, output)));
}

int64_t count_finite(const Values& want, thalweg_dtype stored) {
  int64_t n = 0;
  for (double w : want.data) n += std::isfinite(overflowed(w, stored));
  return n;
}

}  // namespace thalweg::testing
