#include "thalweg/ascend/mlir.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "thalweg/core/fail.h"

namespace thalweg::ascend {
namespace {

constexpr size_t kWidth = 120;  // of a line

std::string number_text(int64_t n) { return n < 0 ? "?" : std::to_string(n); }

std::string join(const std::vector<std::string>& parts, const char* between) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : between) + part;
  return all;
}

std::string list(const Shape& numbers) {
  std::vector<std::string> parts;
  for (int64_t n : numbers) parts.push_back(number_text(n));
  return "[" + join(parts, ", ") + "]";
}

// 64x128xbf16
std::string contents(const Shape& shape, Element element) {
  std::string text;
  for (int64_t n : shape) text += number_text(n) + "x";
  return text + text_of(element);
}

Shape row_major(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

std::string global_type(const Shape& shape, Element element, const Shape& strides) {
  return "memref<" + contents(shape, element) + ", strided<" + list(strides) + ", offset: ?>>";
}

}  // namespace

const char* text_of(Element element) {
  constexpr const char* kNames[] = {"index", "i1", "i8", "i32", "f16", "bf16", "f32"};
  return kNames[element];
}

int64_t bytes_of(Element element) {
  constexpr int64_t kBytes[] = {8, 1, 1, 4, 2, 2, 4};
  return kBytes[element];
}

Element element_of(thalweg_dtype dtype) {
  switch (dtype) {
    case THALWEG_F16:
      return kF16;
    case THALWEG_BF16:
      return kBF16;
    case THALWEG_F32:
      return kF32;
    case THALWEG_I32:
      return kI32;
    default:
      fail(THALWEG_UNSUPPORTED, "dtype: got %#x, expected f16, bf16, f32 or i32 in a generated kernel", dtype);
  }
}

std::string Value::type() const {
  switch (kind) {
    case kScalar:
      return text_of(element);
    case kTensor:
      return "tensor<" + contents(shape, element) + ">";
    case kBuffer:
      return "memref<" + contents(shape, element) + ">";
    case kGlobal:
      break;
  }
  if (strides.empty()) return "memref<" + contents(shape, element) + ">";  // an argument
  return global_type(shape, element, strides);
}

// ---- The function ----

Writer::Writer(std::string name) : name_(std::move(name)), empties_(1) {}

std::string Writer::fresh(const std::string& hint) {
  const int uses = names_[hint]++;
  return uses == 0 ? "%" + hint : fresh(hint + "_" + std::to_string(uses));
}

// Breaks what is too long in front of a type or of what is written.
void Writer::line(const std::string& text) {
  std::string rest = std::string(indent_, ' ') + text;
  while (rest.size() > kWidth) {
    size_t at = 0;
    for (const char* mark : {" : ", " to ", " into ", " outs(", " iter_args(", " -> ", ", %"}) {
      const size_t found = rest.rfind(mark, kWidth - 1);
      if (found != std::string::npos && found > indent_ + 8) at = std::max(at, found + (mark[0] == ',' ? 1 : 0));
    }
    if (at == 0) break;
    body_.push_back(rest.substr(0, at));
    rest = std::string(indent_ + 4, ' ') + rest.substr(at);
  }
  body_.push_back(rest);
}

void Writer::describe(const std::string& text) { descriptions_.push_back(text); }

void Writer::comment(const std::string& text) { line("// " + text); }

Value Writer::memref_argument(const std::string& name, Element element) {
  Value v{fresh(name), Value::kGlobal, element, {-1}, {}};
  arguments_.push_back(v.name + ": " + v.type());
  return v;
}

Value Writer::scalar_argument(const std::string& name, Element element) {
  Value v{fresh(name), Value::kScalar, element, {}, {}};
  arguments_.push_back(v.name + ": " + v.type());
  return v;
}

void Writer::begin() {
  for (const char* name : {"lock", "ws", "nx", "ny", "nz", "px", "py", "pz"}) names_[name] = 1;
}

Value Writer::grid_size(int axis) {
  constexpr const char* kNames[] = {"%nx", "%ny", "%nz"};
  return to_index({kNames[axis], Value::kScalar, kI32, {}, {}});
}

Value Writer::program_id(int axis) {
  constexpr const char* kNames[] = {"%px", "%py", "%pz"};
  return to_index({kNames[axis], Value::kScalar, kI32, {}, {}});
}

std::string Writer::end() {
  std::string text;
  for (const std::string& d : descriptions_) text += (d.empty() ? "//" : "// " + d) + "\n";
  text += "module {\n  func.func @" + name_ + "(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel\n";
  std::string row = "     ";
  for (const std::string& a : arguments_) {
    if (row.size() + a.size() > 116) text += row + "\n", row = "     ";
    row += " " + a + ",";
  }
  text += row + "\n      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id\n";
  text += "      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = \"local\"} {\n";
  for (const std::string& c : constants_) text += "    " + c + "\n";
  for (const std::string& b : body_) text += b + "\n";
  return text + "    return\n  }\n}\n";
}

// ---- Scalars ----

Value Writer::scalar(const std::string& hint, Element element) {
  return {fresh(hint), Value::kScalar, element, {}, {}};
}

Value Writer::index(int64_t value) {
  const std::string key = "index " + std::to_string(value);
  auto found = constant_values_.find(key);
  if (found != constant_values_.end()) return found->second;
  Value v = scalar("c" + std::to_string(value), kIndex);
  constants_.push_back(v.name + " = arith.constant " + std::to_string(value) + " : index");
  index_constants_[v.name] = value;
  return constant_values_[key] = v;
}

Value Writer::number(double value, Element element) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.9g", value);
  std::string digits = buffer;
  if (element != kI32 && digits.find('.') == std::string::npos)  // a float's text needs its point
    digits.insert(std::min(digits.find('e'), digits.size()), ".0");
  const std::string key = text_of(element) + digits;
  auto found = constant_values_.find(key);
  if (found != constant_values_.end()) return found->second;
  const bool plain = value >= 0 && value <= 1000 && value == static_cast<int>(value);  // %f32_20
  Value v = scalar(std::string(text_of(element)) + (plain ? "_" + std::to_string(int(value)) : "_constant"), element);
  constants_.push_back(v.name + " = arith.constant " + digits + " : " + v.type());
  return constant_values_[key] = v;
}

Value Writer::to_index(const Value& i32) {
  Value v = scalar(i32.name.substr(1) + "_i", kIndex);
  line(v.name + " = arith.index_cast " + i32.name + " : i32 to index");
  return v;
}

Value Writer::to_i32(const Value& index) {
  Value v = scalar(index.name.substr(1) + "_i32", kI32);
  line(v.name + " = arith.index_cast " + index.name + " : index to i32");
  return v;
}

Value Writer::arithmetic(const std::string& hint, const char* operation, const Value& a, const Value& b) {
  Value v = scalar(hint, a.element);
  line(v.name + " = arith." + operation + " " + a.name + ", " + b.name + " : " + a.type());
  return v;
}

Value Writer::add(const std::string& hint, const Value& a, const Value& b) {
  if (index_constants_.count(a.name) && index_constants_[a.name] == 0) return b;
  if (index_constants_.count(b.name) && index_constants_[b.name] == 0) return a;
  return arithmetic(hint, "addi", a, b);
}
Value Writer::sub(const std::string& hint, const Value& a, const Value& b) { return arithmetic(hint, "subi", a, b); }
Value Writer::mul(const std::string& hint, const Value& a, const Value& b) {
  if (index_constants_.count(a.name) && index_constants_[a.name] == 1) return b;
  if (index_constants_.count(b.name) && index_constants_[b.name] == 1) return a;
  return arithmetic(hint, "muli", a, b);
}
Value Writer::div(const std::string& hint, const Value& a, const Value& b) {
  if (index_constants_.count(b.name) && index_constants_[b.name] == 1) return a;
  return arithmetic(hint, "divui", a, b);
}
Value Writer::rem(const std::string& hint, const Value& a, const Value& b) {
  if (index_constants_.count(b.name) && index_constants_[b.name] == 1) return index(0);
  return arithmetic(hint, "remui", a, b);
}
Value Writer::min(const std::string& hint, const Value& a, const Value& b) { return arithmetic(hint, "minsi", a, b); }

Value Writer::load_scalar(const std::string& hint, const Value& memref, const Value& offset) {
  const Value at = tile(memref, offset, {1}, {1});
  Value v = scalar(hint, memref.element);
  line(v.name + " = memref.load " + at.name + "[" + index(0).name + "] : " + at.type());
  return v;
}

void Writer::store_scalar(const Value& value, const Value& memref, const Value& offset) {
  const Value at = tile(memref, offset, {1}, {1});
  line("memref.store " + value.name + ", " + at.name + "[" + index(0).name + "] : " + at.type());
}

// The vector unit has exp, the scalar unit does not: a tensor of one element.
Value Writer::exp_scalar(const std::string& hint, const Value& value) {
  Value one = result(hint + "_t", kF32, {1});
  const Value e = empty(kF32, {1});
  line(one.name + " = tensor.insert " + value.name + " into " + e.name + "[" + index(0).name + "] : " + one.type());
  return element_at(hint, apply(hint + "_e", "math.exp", one), {index(0)});
}

Value Writer::negated(const Value& value) {
  Value v = scalar("minus_" + value.name.substr(1), value.element);
  line(v.name + " = arith.negf " + value.name + " : " + v.type());
  return v;
}

Value Writer::element_at(const std::string& hint, const Value& tensor, const std::vector<Value>& position) {
  Value v = scalar(hint, tensor.element);
  std::vector<std::string> at;
  for (const Value& p : position) at.push_back(p.name);
  line(v.name + " = tensor.extract " + tensor.name + "[" + join(at, ", ") + "] : " + tensor.type());
  return v;
}

// ---- Tiles ----

Value Writer::tile(const Value& memref, const Value& offset, const Shape& shape, const Shape& strides) {
  Value v{fresh(memref.name.substr(1) + "_gm"), Value::kGlobal, memref.element, shape, strides};
  line(v.name + " = memref.reinterpret_cast " + memref.name + " to offset: [" + offset.name +
       "], sizes: " + list(shape) + ", strides: " + list(strides) + " : " + memref.type() + " to " + v.type());
  return v;
}

// The first rows of a memref: of a tile in the device's memory, or of a buffer.
Value Writer::part(const Value& memref, const Rows& rows, const Shape& shape) {
  Value v = memref;
  v.name = fresh(memref.name.substr(1) + "_rows");
  v.shape[0] = -1;
  Shape ones(shape.size(), 1), zeros(shape.size(), 0);
  std::string sizes = "[" + rows.count.name;
  for (size_t i = 1; i < shape.size(); ++i) sizes += ", " + std::to_string(shape[i]);
  std::string type = v.type();
  if (memref.kind == Value::kBuffer)
    type = "memref<" + contents(v.shape, v.element) + ", strided<" + list(row_major(shape)) + ">>";
  line(v.name + " = memref.subview " + memref.name + list(zeros) + " " + sizes + "] " + list(ones) + " : " +
       memref.type() + " to " + type);
  return v;
}

Rows Writer::rows(const Value& count, int64_t of) {
  const Value tail = scalar("tail", kI1);
  line(tail.name + " = arith.cmpi slt, " + count.name + ", " + index(of).name + " : index");
  return {count, tail};
}

Value Writer::load(const std::string& hint, const Value& tile, const Rows& rows, double pad) {
  Value buffer{fresh(hint + "_buf"), Value::kBuffer, tile.element, tile.shape, {}};
  line(buffer.name + " = memref.alloc() : " + buffer.type());
  if (!rows.partial()) {
    line("memref.copy " + tile.name + ", " + buffer.name + " : " + tile.type() + " to " + buffer.type());
  } else {
    const Value nothing = number(pad, tile.element);
    line("scf.if " + rows.tail.name + " { linalg.fill ins(" + nothing.name + " : " + nothing.type() + ") outs(" +
         buffer.name + " : " + buffer.type() + ") }");
    const Value from = part(tile, rows, tile.shape), to = part(buffer, rows, tile.shape);
    const Shape strides = row_major(tile.shape);
    line("memref.copy " + from.name + ", " + to.name + " : " + from.type() + " to memref<" +
         contents(to.shape, to.element) + ", strided<" + list(strides) + ">>");
  }
  Value v = result(hint, tile.element, tile.shape);
  line(v.name + " = bufferization.to_tensor " + buffer.name + " restrict writable : " + buffer.type());
  return v;
}

void Writer::store(const Value& tensor, const Value& tile, const Rows& rows) {
  Value from = tensor, to = tile;
  if (rows.partial()) {
    from.name = fresh(tensor.name.substr(1) + "_rows");
    from.shape[0] = -1;
    std::string sizes = "[" + rows.count.name;
    for (size_t i = 1; i < tensor.shape.size(); ++i) sizes += ", " + std::to_string(tensor.shape[i]);
    line(from.name + " = tensor.extract_slice " + tensor.name + list(Shape(tensor.shape.size(), 0)) + " " + sizes +
         "] " + list(Shape(tensor.shape.size(), 1)) + " : " + tensor.type() + " to " + from.type());
    to = part(tile, rows, tile.shape);
  }
  line("bufferization.materialize_in_destination " + from.name + " in writable " + to.name + " : (" + from.type() +
       ", " + to.type() + ") -> ()");
}

// ---- Tensors ----

Value Writer::result(const std::string& hint, Element element, const Shape& shape) {
  return {fresh(hint), Value::kTensor, element, shape, {}};
}

// Something to write into, once a region and type.
Value Writer::empty(Element element, const Shape& shape) {
  const std::string key = contents(shape, element);
  auto found = empties_.back().find(key);
  if (found != empties_.back().end()) return found->second;
  Value v = result("empty", element, shape);
  line(v.name + " = tensor.empty() : " + v.type());
  return empties_.back()[key] = v;
}

Value Writer::splat_apart(const std::string& hint, double value, const Shape& shape) {
  const std::map<std::string, Value> shared = std::exchange(empties_.back(), {});
  const Value v = splat(hint, value, shape);
  empties_.back() = shared;
  return v;
}

Value Writer::fill(const std::string& hint, const Value& scalar, const Shape& shape) {
  const Value out = empty(scalar.element, shape);
  Value v = result(hint, scalar.element, shape);
  line(v.name + " = linalg.fill ins(" + scalar.name + " : " + scalar.type() + ") outs(" + out.name + " : " +
       out.type() + ") -> " + v.type());
  return v;
}

Value Writer::apply(const std::string& hint, const char* operation, const Value& x) {
  Value v = result(hint, x.element, x.shape);
  line(v.name + " = " + operation + " " + x.name + " : " + v.type());
  return v;
}

Value Writer::combine(const std::string& hint, const char* operation, const Value& a, const Value& b) {
  Value v = result(hint, a.element, a.shape);
  line(v.name + " = " + operation + " " + a.name + ", " + b.name + " : " + v.type());
  return v;
}

Value Writer::scaled(const std::string& hint, const Value& tensor, const Value& scalar) {
  return combine(hint, "arith.mulf", tensor, fill(scalar.name.substr(1) + "_all", scalar, tensor.shape));
}

Value Writer::convert(const std::string& hint, const Value& x, Element element) {
  if (x.element == element) return x;
  Value v = x;
  v.name = fresh(hint), v.element = element;
  line(v.name + " = arith." + (bytes_of(element) > bytes_of(x.element) ? "extf " : "truncf ") + x.name + " : " +
       x.type() + " to " + v.type());
  return v;
}

Value Writer::compare(const std::string& hint, const char* operation, const Value& a, const Value& b) {
  Value v = result(hint, kI1, a.shape);
  line(v.name + " = " + operation + ", " + a.name + ", " + b.name + " : " + a.type());
  return v;
}

Value Writer::choose(const std::string& hint, const Value& condition, const Value& yes, const Value& no) {
  Value v = result(hint, yes.element, yes.shape);
  line(v.name + " = arith.select " + condition.name + ", " + yes.name + ", " + no.name + " : " + condition.type() +
       ", " + yes.type());
  return v;
}

Value Writer::broadcast(const std::string& hint, const Value& vector, const Shape& shape, int new_axis) {
  const Value out = empty(vector.element, shape);
  Value v = result(hint, vector.element, shape);
  line(v.name + " = linalg.broadcast ins(" + vector.name + " : " + vector.type() + ") outs(" + out.name + " : " +
       out.type() + ") dimensions = [" + std::to_string(new_axis) + "]");
  return v;
}

Value Writer::repeat_rows(const std::string& hint, const Value& matrix, int64_t times) {
  if (times == 1) return matrix;
  const Shape deep = {matrix.shape[0], times, matrix.shape[1]}, flat = {matrix.shape[0] * times, matrix.shape[1]};
  const Value repeated = broadcast(hint, matrix, deep, 1);
  Value v = result(hint, matrix.element, flat);
  line(v.name + " = tensor.collapse_shape " + repeated.name + " [[0, 1], [2]] : " + repeated.type() + " into " +
       v.type());
  return v;
}

Value Writer::transpose(const std::string& hint, const Value& matrix) {
  const Shape shape = {matrix.shape[1], matrix.shape[0]};
  const Value out = empty(matrix.element, shape);
  Value v = result(hint, matrix.element, shape);
  line(v.name + " = linalg.transpose ins(" + matrix.name + " : " + matrix.type() + ") outs(" + out.name + " : " +
       out.type() + ") permutation = [1, 0]");
  return v;
}

Value Writer::matmul(const std::string& hint, const Value& a, const Value& b, const Value& sum) {
  Value v = result(hint, sum.element, sum.shape);
  line(v.name + " = linalg.matmul ins(" + a.name + ", " + b.name + " : " + a.type() + ", " + b.type() + ") outs(" +
       sum.name + " : " + sum.type() + ") -> " + v.type());
  return v;
}

Value Writer::counting(const std::string& hint, int64_t count) {
  const Value out = empty(kI32, {count});
  Value v = result(hint, kI32, {count});
  const std::string at = fresh("at"), number = fresh("number");
  line(v.name + " = linalg.generic {indexing_maps = [affine_map<(a) -> (a)>], iterator_types = [\"parallel\"]} outs(" +
       out.name + " : " + out.type() + ") {");
  line("^bb0(" + fresh("old") + ": i32):");
  line("  " + at + " = linalg.index 0 : index");
  line("  " + number + " = arith.index_cast " + at + " : index to i32  // i32: compares of i64 are scalar code");
  line("  linalg.yield " + number + " : i32");
  line("} -> " + v.type());
  return v;
}

Value Writer::sum_over(const std::string& hint, const Value& tensor, int axis) {
  Shape shape = tensor.shape;
  shape.erase(shape.begin() + axis);
  const Value zero = fill(hint + "_0", number(0, tensor.element), shape);
  Value v = result(hint, tensor.element, shape);
  line(v.name + " = linalg.reduce { arith.addf } ins(" + tensor.name + " : " + tensor.type() + ") outs(" + zero.name +
       " : " + zero.type() + ") dimensions = [" + std::to_string(axis) + "]");
  return v;
}

// ---- Control ----

std::vector<Value> Writer::loop(const std::string& hint, const Value& from, const Value& to, const Value& step,
                                const std::vector<Value>& carried, const LoopBody& body) {
  const Value counter = scalar(hint, kIndex);
  std::vector<Value> inside, after;
  std::vector<std::string> names, starts, types;
  for (const Value& c : carried) {
    inside.push_back(c), after.push_back(c);
    inside.back().name = fresh(c.name.substr(1) + "_in");
    after.back().name = fresh(c.name.substr(1) + "_out");
    names.push_back(after.back().name);
    starts.push_back(inside.back().name + " = " + c.name);
    types.push_back(c.type());
  }
  std::string head = "scf.for " + counter.name + " = " + from.name + " to " + to.name + " step " + step.name;
  if (!carried.empty())
    head = join(names, ", ") + " = " + head + " iter_args(" + join(starts, ", ") + ") -> (" + join(types, ", ") + ")";
  line(head + " {");
  indent_ += 2, empties_.emplace_back();
  const std::vector<Value> yields = body(counter, inside);
  if (!yields.empty()) {
    std::vector<std::string> values;
    for (const Value& y : yields) values.push_back(y.name);
    line("scf.yield " + join(values, ", ") + " : " + join(types, ", "));
  }
  empties_.pop_back(), indent_ -= 2;
  line("}");
  return after;
}

void Writer::when(const Value& condition, const std::function<void()>& body) {
  line("scf.if " + condition.name + " {");
  indent_ += 2, empties_.emplace_back();
  body();
  empties_.pop_back(), indent_ -= 2;
  line("}");
}

void Writer::each_task(bool persistent, const Value& first, const Value& count, const std::function<Value()>& width,
                       const std::string& number_hint, const std::string& place_hint,
                       const std::function<void(const Value& number, const Value& place)>& body) {
  const Value px = program_id(0);
  if (!persistent) {
    const Value number = add(number_hint, first, px);
    return body(number, program_id(1));
  }
  const Value size = width(), tasks = mul("tasks", count, size), step = grid_size(0);
  loop("task", px, tasks, step, {}, [&](const Value& i, const std::vector<Value>&) {
    const Value turn = div("turn", i, size), number = add(number_hint, first, turn);
    body(number, rem(place_hint, i, size));
    return std::vector<Value>{};
  });
}

}  // namespace thalweg::ascend
