// Data for the KDA gate's generated kernels and what they shall compute, by the float64 oracle.
#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/testing.h"
#include "thalweg/ascend/execute.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/kda_gate/kda_gate.h"
#include "thalweg/ops/kda_gate/reference.h"

namespace thalweg::ascend {
namespace {

using Vector = std::vector<double>;

struct GateScene {
  const Problem& p;
  const Element x_type, g_type;
  const int64_t HV, K;
  int64_t tokens = 0;
  Vector x, A_log, dt_bias;
  testing::Random random;

  explicit GateScene(const Plan& plan)
      : p(plan.problem), x_type(element_of(p.dtype)), g_type(element_of(p.out_dtype)), HV(p.HV), K(p.K), random(23) {
    for (int64_t n : p.sequences()) tokens += n;
    // One in twenty above 20, where softplus is its argument.
    x.resize(size_t(tokens * HV * K));
    for (double& v : x) v = rounded(random.uniform() < 0.05 ? 20 + 80 * random.uniform() : 3 * random.normal(), x_type);
    A_log.resize(size_t(HV)), dt_bias.resize(size_t(HV * K));
    for (double& v : A_log) v = p.has_A_log ? rounded(0.7 * random.normal(), kF32) : 0;
    for (double& v : dt_bias) v = p.has_dt_bias ? rounded(random.normal(), kF32) : 0;
  }

  void add_inputs(Scene* scene) const {
    scene->arguments.push_back(input("x", x_type, x));
    if (p.has_A_log) scene->arguments.push_back(input("A_log", kF32, A_log));
    if (p.has_dt_bias) scene->arguments.push_back(input("dt_bias", kF32, dt_bias));
  }
  void finish(const Plan& plan, Scene* scene) const {
    scene->arguments.push_back(scalar("T", kI32, double(tokens)));
    scene->tiles = (tokens + plan.tile.BT - 1) / plan.tile.BT;
    scene->heads = HV;
  }
  // 1e-3 + 1e-3 |want|, and where the output has 16 bits, half a unit in its last place.
  Argument output(const std::string& name, Element element, Vector want) const {
    const double rounding = element == kBF16 ? 0x1p-8 : element == kF16 ? 0x1p-11 : 0;
    return {name, Argument::kOutput, element, std::move(want), 1e-3, 1e-3 + rounding, 1};
  }
};

}  // namespace

Scene kda_gate_fwd_scene(const Plan& plan) {
  const GateScene s(plan);
  Vector g(s.x.size());
  thalweg_kda_gate_fwd_args args{};
  args.x = view(s.x.data(), {1, s.tokens, 1, s.HV, s.K});
  args.A_log = view(s.A_log.data(), {s.HV}), args.dt_bias = view(s.dt_bias.data(), {s.HV, s.K});
  args.g = view(g.data(), {1, s.tokens, 1, s.HV, s.K});
  args.lower_bound = s.p.lower_bound;
  kda_gate::reference_fwd(&args);
  Scene scene;
  s.add_inputs(&scene);
  scene.arguments.push_back(s.output("g", s.g_type, g));
  s.finish(plan, &scene);
  return scene;
}

Scene kda_gate_bwd_scene(const Plan& plan) {
  GateScene s(plan);
  const int64_t HV = s.HV, K = s.K, BT = plan.tile.BT, NT = (s.tokens + BT - 1) / BT;
  Vector d_g(s.x.size()), d_x(s.x.size()), A_sums(size_t(NT * HV)), bias_sums(size_t(NT * HV * K));
  for (double& v : d_g) v = rounded(s.random.normal(), s.g_type);
  for (int64_t i = 0; i < NT; ++i) {  // a tile at a time: the kernel's sums are those of one
    const int64_t t = i * BT, n = std::min(BT, s.tokens - t), at = t * HV * K;
    thalweg_kda_gate_bwd_args args{};
    args.x = view(s.x.data() + at, {1, n, 1, HV, K});
    args.A_log = view(s.A_log.data(), {HV}), args.dt_bias = view(s.dt_bias.data(), {HV, K});
    args.d_g = view(d_g.data() + at, {1, n, 1, HV, K}), args.d_x = view(d_x.data() + at, {1, n, 1, HV, K});
    args.d_A_log = view(A_sums.data() + i * HV, {HV});
    args.d_dt_bias = view(bias_sums.data() + i * HV * K, {HV, K});
    args.lower_bound = s.p.lower_bound;
    kda_gate::reference_bwd(&args);
  }
  Scene scene;
  s.add_inputs(&scene);
  scene.arguments.push_back(input("d_g", s.g_type, d_g));
  scene.arguments.push_back(s.output("d_x", s.x_type, d_x));
  if (s.p.has_A_log) scene.arguments.push_back(s.output("A_sums", kF32, A_sums));
  if (s.p.has_dt_bias) scene.arguments.push_back(s.output("bias_sums", kF32, bias_sums));
  s.finish(plan, &scene);
  return scene;
}

}  // namespace thalweg::ascend
