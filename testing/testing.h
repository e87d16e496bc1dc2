// The library behind `thalweg verify`, `thalweg bench` and the tests: cases, guarded buffers, inputs,
// the float64 oracle, comparison.
#ifndef THALWEG_TESTING_TESTING_H
#define THALWEG_TESTING_TESTING_H

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "thalweg/core/types.h"

namespace thalweg::testing {

// One problem of one pass. Text form, in full in testing/README.md:
//   gated_delta_rule.fwd:bf16,B2,T513,H4,HV8,K128,V128,g,beta,state,varlen=7+506,kernel=cpu_generic,seed=42
// Tokens: a dtype; <size name><number>; an optional tensor's name (it is present; the word `state` means
// every optional tensor whose dims are [N ...] and a state's); <tensor>=[dtype][@layout]...;
// <option>=<value>; varlen=<lengths joined by +>; fill knobs of the operator; guard=, kernel=, seed=,
// threads=; cuda (the tensors lie on the GPU, as they do too when kernel= names a CUDA row). Layouts: @0213 (axes in the order they are stored, outermost first), @gap (rows padded apart),
// @s<strides joined by _>, @off<n> (the first element n elements off alignment); for slots @pad (some -1).
struct Case {
  const thalweg_pass* pass = nullptr;
  thalweg_dtype dtype = THALWEG_F32;
  std::map<std::string, int64_t> sizes;
  std::map<std::string, std::string> options;  // tensors, options, knobs and varlen as given; flags are "1"
  std::string kernel;                          // "" = the library's choice
  uint64_t seed = 42;
  int64_t threads = 0;
  bool cuda = false;

  bool has(const std::string& option) const { return options.count(option) != 0; }
  double number(const std::string& option, double otherwise) const;
  int64_t size(const std::string& name) const;  // 0 when not given
  std::string text() const;                     // parses back to an equal case
  bool operator==(const Case&) const = default;
};

// Throws std::invalid_argument that names the token, what was got and what was expected.
Case parse_case(std::string_view text);

// Whether the tensors of a case lie on the GPU: it says so, or its kernel is a CUDA row.
bool on_cuda(const Case&);
// Whether row `kernel` of the pass runs on CUDA; false when there is no such row.
// The row of "name/choice=value", which is how a case or a context forces one.
std::string row_of(const std::string& kernel);
bool is_cuda_row(const thalweg_pass& pass, const std::string& kernel);

// Cases named on a command line: a case string, a file of them, or @set, op@set, op.pass@set. A set's
// cases stand in thalweg/ops/<op>/cases.txt (compiled in), under a line "[set]", one a line, '#' opens a
// comment; a line there without ".pass" ("gated_delta_rule:f32,...") stands for every pass of the operator,
// and a token that only other passes know is left out. Order is the files'.
std::vector<Case> find_cases(const std::string& name);
std::vector<std::string> set_names();

// A tensor in float64, row-major, whatever its storage.
struct Values {
  std::vector<int64_t> shape;
  std::vector<double> data;
  int64_t count() const { return int64_t(data.size()); }
};

// Counter-based and seeded, the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  double uniform();  // [0, 1)
  double normal();
  int64_t below(int64_t n);

 private:
  uint64_t state_;
};

struct Work {
  double flops = 0;         // counted as docs/benchmarking.md says, whatever the kernel does
  double bytes = 0;         // each input read once, each output written once
  const char* roof = "";    // "fma", "copy", "scale" or "exp_log": what bounds it
};

// A condition on the elements of one output, beside the RMS limit. An element is within when
//   |got - want| <= atol + rtol |want|,  or  |got - stored(want)| <= ulps units in the last place of stored(want),
// stored() being the rounding to the output's dtype. Elements with |want| below `floor` are not looked at.
struct Rule {
  const char* name;
  double atol = 0, rtol = 0, ulps = 0, floor = 0;
  double share = 1;  // of the elements looked at that must be within
};
// What judge() found of a rule.
struct Judgement {
  Rule rule;
  int64_t looked_at = 0, outside = 0;
  double max_error = 0, mean_error = 0;  // of |got - want|
  double max_relative = 0;               // of |got - want| / |want|, where want is not 0
  int64_t worst_at = -1;                 // the first element outside, or of the largest error
  double share() const { return looked_at ? double(looked_at - outside) / double(looked_at) : 1; }
  bool ok() const { return share() >= rule.share; }
};

// What an operator adds for tools and tests, one per pass; found by op and pass name. Its spec.cpp defines
//   namespace thalweg { const testing::Spec* <op>_spec_at(int i); }   // nullptr past the end
struct Spec {
  const char* op;
  const char* pass;
  // Sizes left out get their usual value (HV = H, V = K, N = B, …); throws on what cannot be.
  void (*complete)(Case&);
  // Fills inputs in the operator's natural range. Values come filled with normal numbers, from a stream of
  // their own per tensor; integer tensors are given as numbers too and are already set: cu_seqlens from
  // varlen, read_slots and write_slots to distinct valid slots (write_slots: of each row, read first).
  void (*fill)(const Case&, std::map<std::string, Values>& inputs, Random&);
  // The oracle: an args struct of the pass, all float tensors f64, any strides. Token by token.
  void (*reference)(const void* args);
  Work (*work)(const Case&);
  // RMS-ratio limit of one output, for the case's dtype and kernel (filled in also when the library
  // chose it). 0: judged by the table's last row alone, at most 4 times its error on the same case. Below 0, for sums
  // that may nearly cancel: its absolute value, or for the other rows 4 times the last one's error where that is more.
  double (*limit)(const Case&, const std::string& output);
  // Options for fill(), "name: meaning; name: meaning".
  const char* knobs;
  // Sizes along which heads are independent ("H HV"), so that an oracle may take some of them; "" if none.
  const char* head_sizes;
  // Rules of one output beside limit(); null: none.
  std::vector<Rule> (*rules)(const Case&, const std::string& output) = nullptr;
  // Where more than one answer is right (indices of scores that are equal to rounding), makes `want` the right
  // answer that `got` is, if it is one; by name, all outputs. Null: there is one answer.
  void (*settle)(const Case&, const std::map<std::string, Values>& inputs, const std::map<std::string, Values>& got,
                 std::map<std::string, Values>* want) = nullptr;
};
const Spec& spec_of(const thalweg_pass& pass);  // throws std::out_of_range
// Spec.limit; where the output is stored narrower than the case's dtype, at least one rounding of that storage.
double limit_of(const Case&, const std::string& output);

// The memory of one case: every tensor in a guarded, canaried allocation of its own, outputs filled
// with NaN (integers 0x7f…), inputs filled and rounded to their dtype.
class Problem {
 public:
  explicit Problem(const Case&);
  ~Problem();
  Problem(Problem&&) noexcept;

  const Case& spec_case() const;
  void* args();                        // the pass's args struct
  thalweg_context& context();          // forced kernel, threads; workspace poisoned, exactly as queried
  thalweg_status call();               // fills args and context, calls the pass; on CUDA copies there and back, and waits
  // Copies of a CUDA case: its memory, guards included, to the device, and the args that point there. Calls with
  // device_args() are the caller's own; the context's workspace is on the device too.
  void* device_args();
  std::string report() const;          // CUDA: words for what the last call found in the tensors, "" for nothing
  void poison_outputs();               // NaN again; inout tensors back to their first values
  thalweg_tensor& tensor(const std::string& field);    // in the args struct; tests may tamper with it
  void set(const std::string& field, const Values&);   // other values of an input or inout, rounded to its dtype
  Values read(const std::string& field) const;       // as stored now, in float64
  const std::map<std::string, Values>& inputs() const;  // as rounded; inout: before the call
  std::string check_guards() const;    // "" or what was written outside its buffer, or an input changed
  std::string check_untouched() const; // the same, and "" only if no output was written either: after an error
  std::vector<std::string> outputs() const;  // names of present out and inout tensors
  std::string kernel() const;          // which row runs it, from explain

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The heads of `groups` (indices along the first of Spec.head_sizes) of a tensor of the case.
Values take_groups(const Case&, const std::string& field, const Values&, const std::vector<int64_t>& groups);

// The oracle's outputs for the inputs of `problem`; for a large case only the heads in `groups` (see
// Spec.head_sizes; empty = all, otherwise indices of key-head groups). Outputs start as NaN, integers as 0x7f….
std::map<std::string, Values> run_reference(const Problem& problem, const std::vector<int64_t>& groups = {});
// Spec.settle for what `problem` holds now; without one, `want` stays. Integer outputs are compared exactly.
void settle(const Problem& problem, std::map<std::string, Values>* want);

// Which groups verify() gives the oracle: all (empty) for a small case, else the first, the last and
// random ones, four at least.
std::vector<int64_t> oracle_groups(const Case&);

// rms(got - want) / rms(want), with masks of NaN and infinity compared first (a mismatch is infinite).
struct Difference {
  double ratio = 0;
  double worst = 0;  // largest |got - want|
  int64_t worst_at = -1;
  double want_rms = 0;
};
Difference compare(const Values& got, const Values& want);

struct Verdict {
  struct Output {
    std::string name;
    Difference difference;
    double limit;
    bool ok;                       // within the limit and every rule
    std::vector<Judgement> rules;  // of Spec.rules
  };
  std::string case_text, kernel, isa, status;  // status: "passed", "failed", "skipped"
  std::string reason;                          // of a failure or a skip
  std::vector<Output> outputs;
  double seconds = 0;
  bool passed() const { return status == "passed"; }
};
// Calls the pass on poisoned, guarded memory and compares every output with the oracle.
Verdict verify(const Case&);
// The same for every kernel row that takes the case; rows this machine lacks come back as skipped.
std::vector<Verdict> verify_all_kernels(const Case&);

}  // namespace thalweg::testing
#endif
