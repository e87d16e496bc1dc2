// Executes a kernel's text on the host and compares it with the float64 reference.
//
// The text is lowered to loops by the upstream tools of MLIR 19 (mlir-opt-19, mlir-translate-19, llc-19) and linked by
// g++; every program of the grid runs, one after another. Outputs start as NaN, canaries lie around every tensor.
// This checks the mathematics of the text: its addresses, strides, masks and formulas. It says nothing of placement on
// the chip, of synchronisation between cores, or of the NPU's own arithmetic (its exp and log, the order of its sums).
#ifndef THALWEG_ASCEND_EXECUTE_H
#define THALWEG_ASCEND_EXECUTE_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "thalweg/ascend/mlir.h"
#include "thalweg/ascend/plan.h"

namespace thalweg::ascend {

// An argument of a kernel, in the order of its signature, without the launch's own (first, count, grid).
struct Argument {
  enum Kind { kInput, kOutput, kScalar };
  std::string name;
  Kind kind = kInput;
  Element element = kF32;
  std::vector<double> values;  // what goes in, as `element` holds it; kOutput: what is right
  // kOutput: an element's error is |got - want| / (absolute + relative |want|), and none may be above the limit.
  double absolute = 0, relative = 0, limit = 0;
};

// A problem with its data.
struct Scene {
  std::vector<Argument> arguments;
  int64_t tiles = 0;  // along T: of one sequence, or of all packed ones
  int64_t heads = 0;  // of all sequences: grid[1] of a single launch
  Argument& operator[](const std::string& name);
};

// For those who make scenes: numbers as an element holds them, inputs and outputs.
double rounded(double x, Element element);
Argument input(const std::string& name, Element element, std::vector<double> values);  // rounds them
Argument scalar(const std::string& name, Element element, double value);
// The limit for products of operands of `element` with f32 sums, in units of the largest value that is right: not quite
// four roundings to `element` (2^-8 and 2^-11). Measured: a third of it.
double product_limit(Element element);
// With an error in units of the largest value that is right.
Argument output_of_largest(const std::string& name, Element element, std::vector<double> want, double limit);

struct Executed {
  bool ran = false;  // false: a tool is missing or failed, `error` says which and how
  std::string error;
  std::string sizes;  // where fewer tiles were run than the plan has: "T 192"
  struct Output {
    std::string name;
    double worst = 0, limit = 0;  // the largest error, in the unit of its Argument; infinite where NaN is left
    int64_t worst_at = -1;
    bool guards_intact = true;
    bool ok() const { return worst <= limit && guards_intact; }
  };
  std::vector<Output> outputs;
  bool inputs_intact = true;
  bool ok() const;
};

// A text as machine code of the host, for scenes with the arguments of `scene` (their values do not matter).
// Throws std::runtime_error that names the tool and what it said.
class HostProgram {
 public:
  HostProgram(const std::string& text, const Scene& scene);
  ~HostProgram();
  HostProgram(const HostProgram&) = delete;
  HostProgram& operator=(const HostProgram&) = delete;

 private:
  friend struct Run;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A launch over tiles [first, first + count).
struct Part {
  const HostProgram* program;
  int64_t first, count;
};
// Runs the parts one after another on one copy of the scene's data; the grid is that of the plan's mode and target.
Executed execute(const Plan&, const Scene&, const std::vector<Part>& parts);
// The problem of the plan, with random data of the kernel's own scene. What would take the host too long is run with
// shorter sequences (Executed::sizes), which are arguments: the text is the same, to the byte.
Executed execute(const Plan&, const std::string& text);

// "" or which tool is missing and what it comes with.
std::string missing_host_tool();

}  // namespace thalweg::ascend
#endif
