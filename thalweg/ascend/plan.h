// What a kernel would do on an Ascend device: tile, on-chip memory, data movement, split over cores. A Plan is
// arithmetic only; no compiler is needed for it, and no time is predicted. docs/ascend.md has the formulas.
#ifndef THALWEG_ASCEND_PLAN_H
#define THALWEG_ASCEND_PLAN_H

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "testing/testing.h"
#include "thalweg/ascend/device.h"

namespace thalweg::ascend {

enum class Mode {
  kSingle,      // one program, one task
  kPersistent,  // as many programs as cores; each loops over tasks px, px + nx, ...
};

// How the gate of a chunk lies in device memory: HV = 1 makes the two alike.
enum class Gate {
  kNone,        // the problem has no gate
  kHeadsFirst,  // [HV T]: transposed by the host, stride 1
  kTokensFirst  // [T HV]: as given, stride HV
};

// What is asked for: sizes and facts, no pointers. Letters as in docs/conventions.md.
struct Problem {
  std::string kernel;  // name of a row of kernels(): "gated_delta_rule.bwd/dv_local"
  std::string text;    // the case string that it came from
  thalweg_dtype dtype = THALWEG_BF16;      // of q, k, v, d_o (x of kda_gate)
  thalweg_dtype out_dtype = THALWEG_F32;   // kda_gate.fwd: of g; kda_gate.bwd: of d_g, which is read
  int64_t B = 1, T = 0, S = 0;             // S: keys, where they are tokens of their own
  int64_t H = 1, HV = 1, K = 0, V = 0;     // kda_gate: HV heads of K channels; attention: HV is HK
  int64_t block_q = 0, block_k = 0;        // block_sparse_attention
  int64_t E = 0;                           // sparse_flash_attention: entries of a query's list
  bool has_A_log = false, has_dt_bias = false;  // kda_gate
  double lower_bound = 0;                  // kda_gate: below 0 the form with a bound
  bool causal = false;                     // dkdv
  bool has_sink = false;                   // dkdv: of the data alone, as lse holds it
  bool reverse = false;                    // cumsum: suffix sums (the backward's)
  bool split = false;                      // dkdv: P and dS as a high and a low half, each a product of its own
  Gate gate = Gate::kNone;                 // which layout the kernel reads
  std::vector<int64_t> lengths;            // packed sequences (then B = 1); empty: B of T tokens
  bool is_packed = false;                  // has cu_seqlens

  std::vector<int64_t> sequences() const;  // lengths, or B times T
};

// 0 where the kernel has no such side.
struct Tile {
  int64_t BT = 0;  // tokens; of dkdv key tokens
  int64_t BM = 0;  // query tokens of dkdv
  int64_t K = 0;   // channels; of kda_gate the only width
  int64_t V = 0;
  bool operator==(const Tile&) const = default;
};

// One tile alive at the point where its memory is fullest.
struct Buffer {
  std::string name;
  int64_t bytes;  // of one copy
  int64_t copies = 1;
};
struct Need {
  std::vector<Buffer> ub, l1, l0c;
  static int64_t sum(const std::vector<Buffer>&);
};

// Transfers of one tensor by one program, in the interior of a sequence.
struct Move {
  std::string tensor;
  bool cube = false;  // by the AIC, else by one AIV
  bool out = false;
  int64_t bursts = 0, bytes = 0;
  bool per_pass = false;  // counted for one turn of a loop whose length depends on data
};

// Of one program: all transfers of one kind of core in one direction.
struct Traffic {
  int64_t bursts = 0, bytes = 0;
};
Traffic traffic(const std::vector<Move>& moves, bool cube, bool out);

struct Split {
  int64_t chunks = 0;  // along the first axis of the grid
  int64_t tasks = 0;   // chunks times what stands beside them
  int64_t cores = 0;   // AIC of a mixed kernel, else AIV
  int64_t stride_max = 0;  // tasks of the busiest core when core c takes c, c + P, ...
  int64_t range_max = 0;   // ... when it takes a range of chunks, of all heads
  std::vector<int64_t> grid;  // of one launch, logical
  struct Segment {
    int64_t offset, count;  // along grid[0]
  };
  std::vector<Segment> segments;  // launches, each with a product of dimensions of at most kMaxGrid
};

// A larger tile that was tried.
struct Trial {
  Tile tile;
  std::string refused;  // "UB 262176 of 196608"; "" when it fits too
};

// How the compiler buffers tiles twice: docs/ascend.md.
enum class Buffering { kCube, kOff, kVector };  // its default; none; only tiles of the vector cores

struct Options {
  Mode mode = Mode::kSingle;
  Buffering buffering = Buffering::kCube;
  Tile tile;              // sides that are not 0 are forced
  Gate gate = Gate::kNone;  // kHeadsFirst or kTokensFirst forces that layout
  bool interior = false;  // no mask code, whatever the lengths
  bool split = false;     // operands as high and low halves: Problem::split
};

struct Plan {
  Problem problem;
  Target target{};
  Mode mode = Mode::kSingle;
  Buffering buffering = Buffering::kCube;
  bool mixed = false;     // AIC and 2 AIV work on one task; else AIV alone
  bool boundary = false;  // some tile crosses the end of a sequence: the text has mask code
  std::string task;       // what one task is: "one chunk of one head"
  Tile tile;
  Need need;
  std::vector<Move> moves;        // with problem.gate
  std::vector<Move> other_moves;  // with the gate's other layout; empty without one
  int64_t scalar_loads = 0;       // scalar loads and stores inside loops that the text asks for (lists, A_log)
  int64_t workspace = 0;          // device memory between AIC and AIV, of one block
  Split split;
  std::vector<Trial> larger;      // larger tiles: what fits too, and why the others were refused
  std::vector<std::string> notes;  // rules of the original work that the plan keeps and no tool here confirms
  std::string refused;            // a planning rule that refuses the problem or the tile; ""
  bool need_is_predicted = true;  // false: no formula for this target; the compiler's word is the only one

  std::string overflow() const;  // "UB 262176 of 196608"; "" when each need is within the target's size
  bool fits() const { return refused.empty() && overflow().empty(); }
  std::string verdict() const;  // "fits", "overflow: UB ..." or "refused: ..."
};

struct Scene;  // thalweg/ascend/execute.h

// A row of the table of kernels, one per kernel that is planned.
struct Kernel {
  const char* name;  // "<op>.<pass>" or "<op>.<pass>/<kernel>", as in a case string
  const char* doc;
  bool mixed;  // AIC and 2 AIV
  // Fills the problem from a case of the pass; std::invalid_argument when no kernel covers it.
  void (*read)(const testing::Case&, Problem&);
  // Fills tile, need, moves, workspace and refused of a plan whose problem, target, mode and tile are set; sides of the
  // tile that are 0 are chosen.
  void (*plan)(Plan&);
  std::string (*emit)(const Plan&);  // MLIR text of the plan's kernel; null: planned only
  Scene (*scene)(const Plan&) = nullptr;  // data and float64 results for execute(); null: not executed
  bool can_split = false;                 // takes Problem::split
};
// Of all operators that are built: each has `const ascend::Kernel* <op>_ascend_at(int i)`, null past the end.
const std::vector<const Kernel*>& kernels();
const Kernel* find_kernel(std::string_view name);

int64_t ceil_div(int64_t a, int64_t b);
int64_t round_up(int64_t a, int64_t to);
int64_t floor_pow2(int64_t a);  // a >= 1
int64_t next_pow2(int64_t a);

// A tile of rows whose neighbours lie `heads` tiles apart in device memory: one burst a row, or one in all.
Move rows_move(const char* tensor, bool cube, bool out, int64_t rows, int64_t width, int64_t element, int64_t heads);
// A tile that is contiguous: one burst.
Move whole_move(const char* tensor, bool cube, bool out, int64_t bytes);
// The gate of a chunk, f32, in plan.problem.gate's layout; nothing without a gate.
void add_gate_move(Plan& plan, const char* tensor, bool out = false);
// Fills plan.split and plan.boundary: a task is one chunk of plan.tile.BT tokens of a sequence, of one of `heads` heads
// (times sequences, where they are equally long).
void split_chunks(Plan& plan, int64_t heads);
// Fills plan.split: `along` tasks on the grid's first axis, `beside` on the second.
void split_tasks(Plan& plan, int64_t along, int64_t beside);

// The problem of a case "<op>.<pass>[/<kernel>]:<tokens>". std::invalid_argument says what was got and expected; a case
// that no kernel covers says which kernels there are.
Problem parse_problem(std::string_view case_text);
Plan make_plan(const Problem&, const Target&, const Options& = {});

}  // namespace thalweg::ascend
#endif
