// thalweg plan CASE: tiles, memory, transfers and split of a kernel on an Ascend device, and the public compiler's word.
#include <fmt/format.h>

#include <fstream>
#include <iostream>

#include "thalweg/ascend/execute.h"
#include "thalweg/ascend/lower.h"
#include "thalweg/ascend/plan.h"
#include "tools/thalweg/tool.h"

namespace thalweg::tool {
namespace {

using namespace ascend;

enum PlanExit : int { kFitsExit = 0, kBadCaseExit = 1, kOverflowExit = 2, kDiffersExit = 3, kToolExit = 4 };

struct PlanOptions {
  std::string target, text, mode = "single", gate, tile, buffering = "cube", emit, bin;
  bool lower = false, execute = false, json = false, interior = false, split = false;
};

[[noreturn]] void bad(const std::string& what, const std::string& got, const std::string& expected) {
  throw std::invalid_argument("plan: " + what + ", got '" + got + "', expected " + expected);
}

template <class T>
T choice(const std::string& what, const std::string& got, std::initializer_list<std::pair<const char*, T>> rows) {
  std::string expected;
  for (const auto& [name, value] : rows) {
    if (got == name) return value;
    expected += (expected.empty() ? "" : " or ") + std::string(name);
  }
  bad(what, got, expected);
}

// "BT=192", "BM=128,BT=64", "V=64"
Tile parse_tile(const std::string& text) {
  Tile tile;
  for (const std::string& word : words(text, ',')) {
    size_t equals = word.find('=');
    std::string side = word.substr(0, equals), number = equals == std::string::npos ? "" : word.substr(equals + 1);
    int64_t value = 0;
    bool is_number = !number.empty() && number.size() < 7 && number.find_first_not_of("0123456789") == std::string::npos;
    if (is_number) value = std::stoll(number);
    if ((side != "BT" && side != "BM" && side != "V") || value < 1) bad("--tile", text, "BT=<tokens>, BM=<tokens> or V=<channels>, joined by commas");
    (side == "BT" ? tile.BT : side == "BM" ? tile.BM : tile.V) = value;
  }
  return tile;
}

std::string tile_text(const Tile& tile) {
  std::string text;
  auto add = [&](const char* name, int64_t size) {
    if (size) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, size);
  };
  add("BM", tile.BM), add("BT", tile.BT), add("K", tile.K), add("V", tile.V);
  return text;
}

std::string counted(int64_t count, const char* one) { return fmt::format("{} {}{}", count, one, count == 1 ? "" : "s"); }

std::string direction_text(const std::vector<Move>& moves, bool cube) {
  const char* word = cube ? "run" : "burst";
  Traffic in = traffic(moves, cube, false), out = traffic(moves, cube, true);
  return fmt::format("{} {} B in, {} {} B out", counted(in.bursts, word), in.bytes, counted(out.bursts, word), out.bytes);
}

std::string gate_text(Gate gate, const Problem& p) {
  if (gate == Gate::kNone) return "none";
  if (p.HV == 1) return "[T] (HV 1), stride 1";
  return gate == Gate::kHeadsFirst ? fmt::format("[HV,T] by host transpose (HV {}), stride 1", p.HV) : fmt::format("[T,HV] as given, stride HV = {}", p.HV);
}

const char* gate_name(Gate gate) { return gate == Gate::kHeadsFirst ? "[HV,T]" : "[T,HV]"; }

std::string percent(int64_t part, int64_t whole) { return fmt::format("{} %", whole ? 100 * part / whole : 0); }

std::string buffers_text(const std::vector<Buffer>& buffers) {
  std::string text;
  for (const Buffer& b : buffers)
    text += fmt::format("{}{} {}{}", text.empty() ? "" : ", ", b.name, b.copies > 1 ? fmt::format("{} x ", b.copies) : "", b.bytes);
  return text;
}

void print_plan(const Plan& plan) {
  const Target& t = plan.target;
  const Problem& p = plan.problem;
  fmt::print("target    {}: {} AIC, {} AIV, UB {}, L1 {}, L0C {} (L0A {}, L0B {})\n", t.name, t.aic, t.aiv, t.ub, t.l1, t.l0c, t.l0a, t.l0b);
  fmt::print("kernel    {}, {}, one task = {}\n", p.kernel, plan.mixed ? "mixed (AIC + 2 AIV)" : "vector (AIV)", plan.task);
  fmt::print("tile      {}{}\n", tile_text(plan.tile), plan.boundary ? "; some tiles cross the end of a sequence: mask code" : "");
  for (size_t i = 0; i < plan.larger.size(); ++i)
    fmt::print("{} {}: {}\n", i ? "         " : "larger   ", tile_text(plan.larger[i].tile), plan.larger[i].refused.empty() ? "fits" : plan.larger[i].refused);
  if (p.gate != Gate::kNone) fmt::print("gate      {}\n", gate_text(p.gate, p));
  if (plan.need_is_predicted) {
    std::string need, tiles;
    auto add = [&](const char* name, const std::vector<Buffer>& buffers, int64_t size) {
      if (buffers.empty()) return;
      int64_t bytes = Need::sum(buffers);
      need += fmt::format("{}{} {} ({})", need.empty() ? "" : ", ", name, bytes, percent(bytes, size));
      tiles += fmt::format("          {}: {}\n", name, buffers_text(buffers));
    };
    add("UB", plan.need.ub, t.ub), add("L1", plan.need.l1, t.l1), add("L0C", plan.need.l0c, t.l0c);
    fmt::print("need      {}\n{}", need, tiles);
  } else {
    fmt::print("need      not predicted; the compiler's word is the only one (--lower)\n");
  }
  fmt::print("traffic   AIV: {}.", direction_text(plan.moves, false));
  if (plan.mixed) fmt::print("  AIC: {}", direction_text(plan.moves, true));
  fmt::print("\n");
  for (const Move& m : plan.moves)
    fmt::print("          {} {} {}: {} {} B{}\n", m.cube ? "AIC" : "AIV", m.tensor, m.out ? "out" : "in", counted(m.bursts, m.cube ? "run" : "burst"), m.bytes, m.per_pass ? " a pass" : "");
  if (!plan.other_moves.empty()) {
    Gate other = p.gate == Gate::kHeadsFirst ? Gate::kTokensFirst : Gate::kHeadsFirst;
    fmt::print("          gate as {}: AIV {}\n", gate_name(other), direction_text(plan.other_moves, false));
  }
  if (plan.workspace) fmt::print("workspace {} B per block\n", plan.workspace);
  const Split& s = plan.split;
  fmt::print("split     {} tasks on {} cores: stride max {} ({}), chunk range max {} ({});  grid", s.tasks, s.cores, s.stride_max,
             percent(s.tasks, s.cores * s.stride_max), s.range_max, percent(s.tasks, s.cores * s.range_max));
  int64_t product = 1;
  for (size_t i = 0; i < s.grid.size(); ++i) {
    fmt::print("{}{}", i ? " x " : " ", s.grid[i]);
    product *= s.grid[i];
  }
  if (s.grid.size() > 1) fmt::print(" = {}", product);
  if (s.segments.size() > 1) {
    fmt::print("\n          {} launches, as the product stays within {}:", s.segments.size(), kMaxGrid);
    for (size_t i = 0; i < s.segments.size() && i < 8; ++i) fmt::print(" {}+{}", s.segments[i].offset, s.segments[i].count);
    if (s.segments.size() > 8) fmt::print(" ...");
  }
  fmt::print("\n");
  for (const std::string& note : plan.notes) fmt::print("note      from the original work, not confirmed: {}\n", note);
  fmt::print("verdict   {}\n", plan.verdict());
}

Json tile_json(const Tile& tile) {
  Json json;
  auto add = [&](const char* name, int64_t size) {
    if (size) json[name] = size;
  };
  add("BM", tile.BM), add("BT", tile.BT), add("K", tile.K), add("V", tile.V);
  return json;
}

Json buffers_json(const std::vector<Buffer>& buffers) {
  Json list = Json::array();
  for (const Buffer& b : buffers) list.push_back({{"name", b.name}, {"bytes", b.bytes}, {"copies", b.copies}});
  return list;
}

Json moves_json(const std::vector<Move>& moves) {
  Json list = Json::array();
  for (const Move& m : moves)
    list.push_back({{"tensor", m.tensor}, {"core", m.cube ? "AIC" : "AIV"}, {"direction", m.out ? "out" : "in"}, {"bursts", m.bursts}, {"bytes", m.bytes}, {"per_pass", m.per_pass}});
  return list;
}

Json plan_json(const Plan& plan) {
  const Target& t = plan.target;
  Json json;
  json["case"] = plan.problem.text;
  json["target"] = {{"name", t.name}, {"aic", t.aic}, {"aiv", t.aiv}, {"ub", t.ub}, {"l1", t.l1}, {"l0a", t.l0a}, {"l0b", t.l0b}, {"l0c", t.l0c}};
  json["mode"] = plan.mode == Mode::kSingle ? "single" : "persistent";
  json["mixed"] = plan.mixed;
  json["tile"] = tile_json(plan.tile);
  json["boundary"] = plan.boundary;
  json["larger"] = Json::array();
  for (const Trial& trial : plan.larger) json["larger"].push_back({{"tile", tile_json(trial.tile)}, {"refused", trial.refused}});
  if (plan.problem.gate != Gate::kNone) json["gate"] = gate_name(plan.problem.gate);
  if (plan.need_is_predicted) {
    json["need"] = {{"ub", Need::sum(plan.need.ub)}, {"l1", Need::sum(plan.need.l1)}, {"l0c", Need::sum(plan.need.l0c)}};
    json["tiles"] = {{"ub", buffers_json(plan.need.ub)}, {"l1", buffers_json(plan.need.l1)}, {"l0c", buffers_json(plan.need.l0c)}};
  }
  json["moves"] = moves_json(plan.moves);
  if (!plan.other_moves.empty()) json["moves_other_gate"] = moves_json(plan.other_moves);
  json["workspace"] = plan.workspace;
  json["split"] = {{"tasks", plan.split.tasks}, {"cores", plan.split.cores}, {"stride_max", plan.split.stride_max}, {"range_max", plan.split.range_max}, {"grid", plan.split.grid}};
  json["split"]["segments"] = Json::array();
  for (const auto& segment : plan.split.segments) json["split"]["segments"].push_back({{"offset", segment.offset}, {"count", segment.count}});
  if (!plan.notes.empty()) json["notes"] = plan.notes;
  json["verdict"] = plan.verdict();
  return json;
}

std::string need_text(const std::map<std::string, int64_t>& bytes) {
  std::string text;
  for (const char* space : {"ub", "cbuf", "cc"})
    if (auto it = bytes.find(space); it != bytes.end()) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", space_name(space), it->second);
  return text;
}

std::string lowered_text(const Plan& plan, const Lowered& lowered, const std::vector<std::string>& differ) {
  std::string text;
  if (lowered.outcome == Outcome::kOverflow)
    text = "overflow: " + lowered.message;
  else
    text = "fits: " + (lowered.need.empty() ? "" : "need " + need_text(lowered.need) + "; ") + "placed " + need_text(lowered.placed);
  for (const std::string& difference : differ) text += "\n          differs: " + difference;
  if (differ.empty() && lowered.outcome == Outcome::kFits && plan.need_is_predicted && !lowered.dump.functions.empty())
    text += "; bursts equal";
  return text;
}

Json lowered_json(const Lowered& lowered, const std::vector<std::string>& differ) {
  Json json;
  json["verdict"] = lowered.outcome == Outcome::kFits ? "fits" : "overflow: " + lowered.message;
  for (const auto& [space, bytes] : lowered.need) json["need"][space_name(space)] = bytes;
  for (const auto& [space, bytes] : lowered.placed) json["placed"][space_name(space)] = bytes;
  for (const Function& f : lowered.dump.functions) {
    Function::Sum in = f.sum(false), out = f.sum(true);
    json["functions"].push_back({{"name", f.name}, {"bursts_in", in.bursts}, {"bytes_in", in.bytes}, {"bursts_out", out.bursts}, {"bytes_out", out.bytes},
                                 {"vector_ops", f.vector_ops}, {"products", f.products}, {"scalar_loops", f.scalar_loops}, {"scalar_accesses", f.scalar_accesses}});
  }
  json["differences"] = differ;
  return json;
}

// The mathematics of the text, on this machine: nothing of placement, synchronisation or an NPU's arithmetic.
void print_executed(const Executed& executed) {
  fmt::print("executed  on the host{}{}\n", executed.sizes.empty() ? "" : ", the same text with " + executed.sizes,
             executed.inputs_intact ? "" : "; an input was written");
  for (const Executed::Output& out : executed.outputs)
    fmt::print("          {}: largest error {:.3g} of {:.3g}{}{}\n", out.name, out.worst, out.limit, out.worst <= out.limit ? "" : ", too large",
               out.guards_intact ? "" : ", written outside");
}

Json executed_json(const Executed& executed) {
  Json json;
  json["ran"] = executed.ran;
  if (!executed.ran) json["error"] = executed.error;
  if (!executed.sizes.empty()) json["sizes"] = executed.sizes;
  for (const Executed::Output& out : executed.outputs)
    json["outputs"].push_back({{"name", out.name}, {"worst", number_json(out.worst)}, {"limit", out.limit}, {"guards_intact", out.guards_intact}, {"ok", out.ok()}});
  return json;
}

int plan_case(const PlanOptions& o) {
  const Target* target = find_target(o.target);
  if (!target) bad("--target", o.target, "one of " + target_names());
  Options options;
  options.mode = choice<Mode>("--mode", o.mode, {{"single", Mode::kSingle}, {"persistent", Mode::kPersistent}});
  options.buffering = choice<Buffering>("--buffering", o.buffering, {{"cube", Buffering::kCube}, {"vector", Buffering::kVector}, {"off", Buffering::kOff}});
  if (!o.gate.empty()) options.gate = choice<Gate>("--gate", o.gate, {{"heads", Gate::kHeadsFirst}, {"tokens", Gate::kTokensFirst}});
  if (o.json && o.emit == "-") bad("--emit with --json", o.emit, "a file");
  options.tile = parse_tile(o.tile);
  options.interior = o.interior;
  options.split = o.split;
  Problem problem = parse_problem(o.text);
  const Kernel* kernel = find_kernel(problem.kernel);
  Plan plan = make_plan(problem, *target, options);
  if (o.execute && o.interior) {
    options.interior = false;
    if (make_plan(problem, *target, options).boundary) bad("--interior with --execute", problem.text, "lengths that the tiles divide");
  }

  std::string text;
  if (o.lower || o.execute || !o.emit.empty()) {
    if (!kernel->emit) throw std::invalid_argument("plan: " + problem.kernel + ": planned only; no text is generated for it");
    text = kernel->emit(plan);
  }
  if (!o.emit.empty()) write_text(o.emit, text);
  Json json;
  if (o.json)
    json = plan_json(plan);
  else if (o.emit != "-")
    print_plan(plan);

  int exit = plan.fits() || (plan.refused.empty() && !plan.need_is_predicted) ? kFitsExit : kOverflowExit;
  std::string failure;
  if (o.lower) {
    Lowered lowered = lower(plan, text, {o.bin});
    if (lowered.has_verdict()) {
      std::vector<std::string> differ = differences(plan, lowered);
      if (o.json)
        json["compiler"] = lowered_json(lowered, differ);
      else if (o.emit != "-")
        fmt::print("compiler  {}\n", lowered_text(plan, lowered, differ));
      if (!differ.empty())
        exit = kDiffersExit;
      else if (lowered.outcome == Outcome::kOverflow)
        exit = kOverflowExit;
    } else {
      failure = "plan: --lower: " + lowered.message;
      exit = kToolExit;
    }
  }
  if (o.execute) {
    Executed executed = ascend::execute(plan, text);
    if (o.json)
      json["executed"] = executed_json(executed);
    else if (executed.ran && o.emit != "-")
      print_executed(executed);
    if (!executed.ran) {
      failure += (failure.empty() ? "" : "\nthalweg: ") + ("plan: --execute: " + executed.error);
      exit = kToolExit;
    } else if (!executed.ok() && exit != kToolExit) {
      exit = kDiffersExit;
    }
  }
  if (o.json) fmt::print("{}\n", json.dump(2));
  if (!failure.empty()) {
    std::cout << std::flush;
    std::cerr << "thalweg: " << failure << std::endl;
  }
  return exit;
}

}  // namespace

Action add_plan(CLI::App& app) {
  auto o = std::make_shared<PlanOptions>();
  app.add_option("case", o->text, "A case string whose pass names a planned kernel: gated_delta_rule.bwd/dv_local:bf16,...")->required();
  app.add_option("--target", o->target, "The device: ascend910b3, ...")->required();
  app.add_option("--mode", o->mode, "single: a program is a task; persistent: as many programs as cores");
  app.add_option("--gate", o->gate, "The gate's layout: heads ([HV,T], the default) or tokens ([T,HV])");
  app.add_option("--tile", o->tile, "Sides of the tile: BT=64, BM=64,BT=32 or V=64; otherwise the planner's");
  app.add_option("--buffering", o->buffering, "What the compiler buffers twice: cube (its default), vector, off");
  app.add_flag("--interior", o->interior, "No code for tiles that cross the end of a sequence");
  app.add_flag("--split", o->split, "dK/dV: P and dS as a high and a low half, each a product of its own");
  app.add_option("--emit", o->emit, "Write the kernel's MLIR text there; - is standard output");
  app.add_flag("--lower", o->lower, "Let the public compiler judge the text");
  app.add_flag("--execute", o->execute, "Run the text on the host and compare with the float64 reference");
  app.add_flag("--json", o->json, "The plan as JSON");
  app.add_option("--ascend-bin", o->bin, "Folder of the compiler's programs; otherwise THALWEG_ASCEND_BIN, then PATH");
  app.footer(
      "Exit codes: 0 fits, 1 wrong command or case, 2 overflow or refused by a rule, 3 planner and compiler (or the reference) differ,\n"
      "4 a tool is missing, of another version, or failed. A plan is arithmetic: it predicts no times. docs/ascend.md");
  return [=] {
    try {
      return plan_case(*o);
    } catch (const std::exception& e) {
      std::cerr << "thalweg: " << e.what() << std::endl;
      return int(kBadCaseExit);
    }
  };
}

}  // namespace thalweg::tool
