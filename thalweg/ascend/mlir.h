// Writes one kernel as MLIR text, in the upstream dialects func, arith, math, scf, memref, tensor, linalg and
// bufferization, so that the device's compiler lowers the very text that the host executes.
//
// A generator calls one function an operation; each writes a line and returns its result. Names are a hint and a
// number (%P_12), constants are collected at the top of the function, and comments become lines of their own:
//
//   Writer w("dv_local");
//   Value q = w.memref_argument("q", kBF16), n = w.scalar_argument("T", kI32);
//   w.begin();
//   Value x = w.load(k.tile(q, offset, {64, 128}, {512, 1}));
//   w.store(w.convert(..., kBF16), w.tile(...));
//   std::string text = w.end();
//
// Text order is the order of live ranges: load a tile just before its first use.
#ifndef THALWEG_ASCEND_MLIR_H
#define THALWEG_ASCEND_MLIR_H

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "thalweg/core/types.h"

namespace thalweg::ascend {

enum Element { kIndex, kI1, kI8, kI32, kF16, kBF16, kF32 };
const char* text_of(Element element);     // "bf16"
int64_t bytes_of(Element element);        // of one, in memory
Element element_of(thalweg_dtype dtype);  // throws Error on what a kernel cannot hold

using Shape = std::vector<int64_t>;

// Something with a name in the text. A scalar has rank 0; a negative size is one known only at run time.
struct Value {
  enum Kind { kScalar, kTensor, kBuffer, kGlobal };  // kGlobal: a memref in the device's memory
  std::string name;
  Kind kind = kScalar;
  Element element = kIndex;
  Shape shape;
  Shape strides;  // kGlobal, in elements

  std::string type() const;
};

// The rows of a tile that are there: nameless, all of them. Writer::rows() makes one.
struct Rows {
  Value count;  // index
  Value tail;   // i1: count is less than the tile's rows
  bool partial() const { return !count.name.empty(); }
};

class Writer {
 public:
  explicit Writer(std::string name);

  // ---- The function: arguments first, then begin(), the body, and end() ----

  void describe(const std::string& line);                           // a comment line above the module
  Value memref_argument(const std::string& name, Element element);  // memref<?x...>
  Value scalar_argument(const std::string& name, Element element);
  // Writes the signature: the two hidden memrefs that every device kernel begins with, the arguments, and the grid's
  // sizes and the program's place in it, which end it.
  void begin();
  Value grid_size(int axis);   // index
  Value program_id(int axis);  // index
  std::string end();           // the whole text

  void comment(const std::string& text);

  // ---- Scalars ----

  Value index(int64_t value);                          // a constant
  Value number(double value, Element element = kF32);  // a constant
  Value to_index(const Value& i32);
  Value to_i32(const Value& index);
  // Of indices and i32; what is known at writing time (x * 1, x + 0) writes nothing.
  Value add(const std::string& hint, const Value& a, const Value& b);
  Value sub(const std::string& hint, const Value& a, const Value& b);
  Value mul(const std::string& hint, const Value& a, const Value& b);
  Value div(const std::string& hint, const Value& a, const Value& b);  // of numbers >= 0
  Value rem(const std::string& hint, const Value& a, const Value& b);
  Value min(const std::string& hint, const Value& a, const Value& b);
  Value load_scalar(const std::string& hint, const Value& memref, const Value& offset);
  void store_scalar(const Value& scalar, const Value& memref, const Value& offset);
  Value exp_scalar(const std::string& hint, const Value& scalar);
  Value negated(const Value& scalar);  // of f32
  Value element_at(const std::string& hint, const Value& tensor, const std::vector<Value>& position);

  // ---- Tiles ----

  Value tile(const Value& memref, const Value& offset, const Shape& shape, const Shape& strides);
  Rows rows(const Value& count, int64_t of);
  // Copies a tile from the device's memory. Rows that are not there become `pad`.
  Value load(const std::string& hint, const Value& tile, const Rows& rows = {}, double pad = 0);
  void store(const Value& tensor, const Value& tile, const Rows& rows = {});

  // ---- Tensors ----

  Value fill(const std::string& hint, const Value& scalar, const Shape& shape);
  Value splat(const std::string& hint, double value, const Shape& shape) { return fill(hint, number(value), shape); }
  Value splat_apart(const std::string& hint, double value, const Shape& shape);  // that shares no tensor.empty
  Value apply(const std::string& hint, const char* operation, const Value& x);  // "math.exp", "arith.negf"
  Value combine(const std::string& hint, const char* operation, const Value& a, const Value& b);  // "arith.mulf"
  Value scaled(const std::string& hint, const Value& tensor, const Value& scalar);
  Value convert(const std::string& hint, const Value& x, Element element);
  Value compare(const std::string& hint, const char* operation, const Value& a, const Value& b);  // "arith.cmpf ogt"
  Value choose(const std::string& hint, const Value& condition, const Value& yes, const Value& no);
  // A row repeated down (axis 0) or a column repeated across (axis 1) a matrix.
  Value broadcast(const std::string& hint, const Value& vector, const Shape& shape, int new_axis);
  Value repeat_rows(const std::string& hint, const Value& matrix, int64_t times);  // each row, one after the other
  Value transpose(const std::string& hint, const Value& matrix);
  // a b + sum, on the cube.
  Value matmul(const std::string& hint, const Value& a, const Value& b, const Value& sum);
  Value counting(const std::string& hint, int64_t count);  // 0, 1, 2, … in i32
  Value sum_over(const std::string& hint, const Value& tensor, int axis);

  // ---- Control ----

  // Calls `body` once with the counter and the carried values, and returns what they are after the loop.
  using LoopBody = std::function<std::vector<Value>(const Value& counter, const std::vector<Value>& carried)>;
  std::vector<Value> loop(const std::string& hint, const Value& from, const Value& to, const Value& step,
                          const std::vector<Value>& carried, const LoopBody& body);
  void when(const Value& condition, const std::function<void()>& body);
  // The tasks of this program; `body`, which writes one, is called once. A task is a number, from `first` on, and a place
  // below width(). Single: the program's own place in the grid. Persistent: of all count * width() every one from the
  // program's place on, in steps of the grid's size.
  void each_task(bool persistent, const Value& first, const Value& count, const std::function<Value()>& width,
                 const std::string& number_hint, const std::string& place_hint,
                 const std::function<void(const Value& number, const Value& place)>& body);

 private:
  std::string fresh(const std::string& hint);
  void line(const std::string& text);
  Value result(const std::string& hint, Element element, const Shape& shape);
  Value scalar(const std::string& hint, Element element);
  Value arithmetic(const std::string& hint, const char* operation, const Value& a, const Value& b);
  Value empty(Element element, const Shape& shape);
  Value part(const Value& memref, const Rows& rows, const Shape& shape);

  std::string name_;
  std::vector<std::string> descriptions_, arguments_, constants_, body_;
  std::map<std::string, int> names_;
  std::map<std::string, Value> constant_values_;
  std::map<std::string, int64_t> index_constants_;     // of names of index constants
  std::vector<std::map<std::string, Value>> empties_;  // of each open region, by type
  size_t indent_ = 4;
};

}  // namespace thalweg::ascend
#endif
