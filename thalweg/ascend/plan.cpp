#include "thalweg/ascend/plan.h"

#include <algorithm>
#include <stdexcept>

#include "testing/fields.h"

namespace thalweg::ascend {
namespace {

struct Space {
  const char* name;
  std::vector<Buffer> Need::*tiles;
  int64_t Target::*size;
};
constexpr Space kSpaces[] = {{"UB", &Need::ub, &Target::ub}, {"L1", &Need::l1, &Target::l1}, {"L0C", &Need::l0c, &Target::l0c}};

std::string kernel_names(std::string_view with = "") {
  std::string names;
  for (const Kernel* kernel : kernels())
    if (std::string_view(kernel->name).substr(0, with.size()) == with) names += (names.empty() ? "" : " ") + std::string(kernel->name);
  return names;
}

// A plan with this tile; sides that are 0 are the kernel's choice.
Plan plan_tile(const Kernel& kernel, const Plan& start, const Tile& tile) {
  Plan plan = start;
  plan.tile = tile;
  kernel.plan(plan);
  // The cube pads widths to multiples of 16; the formulas do not.
  if (kernel.mixed && (plan.tile.K % 16 || plan.tile.V % 16)) plan.need_is_predicted = false;
  return plan;
}

std::string refusal(const Plan& plan) { return plan.refused.empty() ? plan.overflow() : plan.refused; }

// Tries larger tiles along one side: twice as large each time until one is refused, then, where the side may be any
// multiple of 16, the largest that fits.
void try_larger(const Kernel& kernel, const Plan& start, int64_t Tile::*side, Plan* plan) {
  constexpr int64_t kLargest = 1 << 14;
  auto trial = [&](int64_t size) {
    Tile tile = plan->tile;
    tile.*side = size;
    return refusal(plan_tile(kernel, start, tile));
  };
  auto keep = [&](int64_t size, const std::string& refused) {
    Trial t{plan->tile, refused};
    t.tile.*side = size;
    plan->larger.push_back(t);
  };
  int64_t fits = plan->tile.*side, size = 2 * fits;
  if (fits == 0) return;
  std::string refused;
  for (; size <= kLargest; size *= 2) {
    refused = trial(size);
    keep(size, refused);
    if (!refused.empty()) break;
    fits = size;
  }
  int64_t step = std::max<int64_t>(16, fits / 16 * 16 + 16), best = 0;
  for (int64_t between = step; between < size && size <= kLargest; between += 16) {
    if (!trial(between).empty()) break;
    best = between;
  }
  if (best) {
    keep(best, "");
    if (best + 16 < size) keep(best + 16, trial(best + 16));
  }
}

}  // namespace

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }
int64_t next_pow2(int64_t a) {
  int64_t power = 1;
  while (power < a) power *= 2;
  return power;
}
int64_t floor_pow2(int64_t a) {
  int64_t power = 1;
  while (2 * power <= a) power *= 2;
  return power;
}

int64_t Need::sum(const std::vector<Buffer>& buffers) {
  int64_t bytes = 0;
  for (const Buffer& buffer : buffers) bytes += buffer.bytes * buffer.copies;
  return bytes;
}

std::vector<int64_t> Problem::sequences() const { return is_packed ? lengths : std::vector<int64_t>(size_t(B), T); }

std::string Plan::overflow() const {
  if (!need_is_predicted) return "";
  for (const Space& space : kSpaces)
    if (int64_t bytes = Need::sum(need.*space.tiles); bytes > target.*space.size)
      return std::string(space.name) + " " + std::to_string(bytes) + " of " + std::to_string(target.*space.size);
  return "";
}

std::string Plan::verdict() const {
  if (!refused.empty()) return "refused: " + refused;
  if (std::string text = overflow(); !text.empty()) return "overflow: " + text;
  return need_is_predicted ? "fits" : "not predicted";
}

Traffic traffic(const std::vector<Move>& moves, bool cube, bool out) {
  Traffic total;
  for (const Move& move : moves)
    if (move.cube == cube && move.out == out) total.bursts += move.bursts, total.bytes += move.bytes;
  return total;
}

Move rows_move(const char* tensor, bool cube, bool out, int64_t rows, int64_t width, int64_t element, int64_t heads) {
  return {tensor, cube, out, heads == 1 ? 1 : rows, rows * width * element};
}

Move whole_move(const char* tensor, bool cube, bool out, int64_t bytes) { return {tensor, cube, out, 1, bytes}; }

void add_gate_move(Plan& plan, const char* tensor, bool out) {
  if (plan.problem.gate == Gate::kNone) return;
  bool strided = plan.problem.gate == Gate::kTokensFirst;
  plan.moves.push_back(rows_move(tensor, false, out, plan.tile.BT, 1, 4, strided ? plan.problem.HV : 1));
}

void split_chunks(Plan& plan, int64_t heads) {
  const Problem& p = plan.problem;
  std::vector<int64_t> sequences = p.sequences();
  plan.boundary = false;
  int64_t chunks = 0;
  for (int64_t length : sequences) {
    plan.boundary = plan.boundary || length % plan.tile.BT != 0;
    chunks = p.is_packed ? chunks + ceil_div(length, plan.tile.BT) : ceil_div(length, plan.tile.BT);
  }
  split_tasks(plan, chunks, p.is_packed ? heads : heads * p.B);
}

void split_tasks(Plan& plan, int64_t along, int64_t beside) {
  Split& split = plan.split;
  split = {};
  split.chunks = along;
  split.tasks = along * beside;
  split.cores = plan.mixed ? plan.target.aic : plan.target.aiv;
  split.stride_max = ceil_div(split.tasks, split.cores);
  split.range_max = ceil_div(along, split.cores) * beside;
  if (plan.mode == Mode::kPersistent) {
    split.grid = {std::min(split.cores, std::max<int64_t>(split.tasks, 1))};
    split.segments = {{0, split.grid[0]}};
    return;
  }
  split.grid = {along, beside};
  if (beside > kMaxGrid) {
    plan.refused = "grid: " + std::to_string(beside) + " heads and sequences, expected at most " + std::to_string(kMaxGrid) + " (use the persistent mode)";
    return;
  }
  int64_t most = beside ? kMaxGrid / beside : 0;
  for (int64_t offset = 0; most && offset < along; offset += most) split.segments.push_back({offset, std::min(most, along - offset)});
}

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel* kernel : kernels())
    if (name == kernel->name) return kernel;
  return nullptr;
}

Problem parse_problem(std::string_view text) {
  size_t colon = std::min(text.find(':'), text.size()), slash = std::min(text.find('/'), colon);
  std::string head(text.substr(0, colon)), pass(text.substr(0, slash));
  const Kernel* kernel = find_kernel(head);
  if (!kernel) {
    std::string same = kernel_names(pass + "/");
    throw std::invalid_argument("case '" + std::string(text) + "': kernel, got '" + head + "', expected " +
                                (same.empty() ? "one of those that are planned: " + kernel_names() : "one of " + same));
  }
  testing::Case c = testing::parse_case(pass + std::string(text.substr(colon)));
  Problem problem;
  problem.kernel = head;
  problem.text = head + c.text().substr(pass.size());
  problem.dtype = c.dtype;
  auto size = [&](const char* name, int64_t otherwise) { return c.sizes.count(name) ? c.size(name) : otherwise; };
  problem.B = size("B", 1), problem.T = size("T", 0), problem.S = size("S", problem.T);
  problem.H = size("H", 1), problem.HV = size("HV", problem.H), problem.K = size("K", 0), problem.V = size("V", problem.K);
  problem.is_packed = c.has("varlen") || c.has("cu_seqlens");
  for (const char* name : {"H", "HV", "HK", "K", "V", "E"})
    if (size(name, 1) < 1) throw std::invalid_argument(head + ": " + name + ", got 0, expected at least 1");
  kernel->read(c, problem);
  return problem;
}

Plan make_plan(const Problem& problem, const Target& target, const Options& options) {
  const Kernel* kernel = find_kernel(problem.kernel);
  if (!kernel) throw std::invalid_argument("kernel, got '" + problem.kernel + "', expected one of " + kernel_names());
  Plan start;
  start.problem = problem;
  start.target = target;
  start.mode = options.mode;
  start.buffering = options.buffering;
  start.mixed = kernel->mixed;
  if (options.split && !kernel->can_split) throw std::invalid_argument(problem.kernel + ": split, got one, expected none: it has one text");
  start.problem.split = problem.split || options.split;
  if (problem.gate != Gate::kNone && options.gate != Gate::kNone) start.problem.gate = options.gate;
  Plan plan = plan_tile(*kernel, start, options.tile);
  if (plan.problem.gate != Gate::kNone) {
    Plan other = start;
    other.problem.gate = start.problem.gate == Gate::kHeadsFirst ? Gate::kTokensFirst : Gate::kHeadsFirst;
    plan.other_moves = plan_tile(*kernel, other, plan.tile).moves;
  }
  if (plan.need_is_predicted && plan.fits()) {
    try_larger(*kernel, start, &Tile::BT, &plan);
    try_larger(*kernel, start, &Tile::BM, &plan);
  }
  if (options.interior) plan.boundary = false;
  plan.notes.push_back("tasks by strides or by ranges of chunks: counted, not timed");
  if (plan.split.segments.size() > 1) plan.notes.push_back("launches of at most " + std::to_string(kMaxGrid) + " programs: no compiler here checks a grid");
  return plan;
}

}  // namespace thalweg::ascend
