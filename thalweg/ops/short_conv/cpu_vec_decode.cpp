// cpu_vec_decode – short convolution, decode, vectors over channels.
//
// HEADER
#include "thalweg/ops/short_conv/problem.h"
#include "thalweg/ops/short_conv/vec.h"

namespace thalweg::short_conv {
namespace {

struct Call {
  const Problem& p;
  const thalweg_short_conv_decode_args& args;
  char* scratch;
  int64_t slot_bytes;
  int64_t strip, num_strips;
};

int64_t int_of(const thalweg_tensor& t, int64_t i, int64_t j) {
  const int64_t at = i * t.stride[0] + (t.rank > 1 ? j * t.stride[1] : 0);
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
}

// One token: the window moves on by x, y is what it gives. `rows` are the window's, oldest first.
template <class E, int W, bool whole>
[[gnu::always_inline]] inline void column(const float* weight, float* const* rows, const typename E::Stored* x,
                                          typename E::Stored* y, int64_t pitch, bool silu, int64_t c, int64_t n) {
  const vf newest = get<E, whole>(x + c, n);
  vf pre = load(weight + W * pitch + c);
  for (int j = 0; j < W - 1; ++j) pre = fma(load(weight + j * pitch + c), load(rows[j] + c), pre);
  pre = fma(load(weight + (W - 1) * pitch + c), newest, pre);
  store(rows[W - 1] + c, newest);
  put<E, whole>(y + c, silu ? silu_of(pre) : pre, n);
}

template <class E, int W>
void decode_task(void* arg, int64_t i, int64_t slot_of_thread) {
  using Stored = typename E::Stored;
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  const int64_t n = i / call.num_strips, d0 = i % call.num_strips * call.strip, pitch = call.strip;
  const int64_t count = p.D - d0 < call.strip ? p.D - d0 : call.strip;
  const int64_t slot = args.read_slots.dtype ? int_of(args.read_slots, n, 0) : n;
  Stored* y = static_cast<Stored*>(args.y.data) + n * args.y.stride[0] + d0;
  if (slot < 0) {
    for (int64_t t = 0; t < p.T; ++t) memset(y + t * args.y.stride[1], 0, size_t(count) * sizeof(Stored));
    return;
  }
  float* weight = reinterpret_cast<float*>(call.scratch + slot_of_thread * call.slot_bytes);
  float* state = weight + (W + 1) * pitch;
  load_weight(args.weight, args.bias, d0, count, pitch, weight);
  load_state(args.state, W, slot, d0, count, pitch, state);
  float* rows[W];
  for (int j = 0; j < W; ++j) rows[j] = state + j * pitch;
  const Stored* x = static_cast<const Stored*>(args.x.data) + n * args.x.stride[0] + d0;
  for (int64_t t = 0; t < p.T; ++t, x += args.x.stride[1], y += args.y.stride[1]) {
    float* oldest = rows[0];
    for (int j = 0; j < W - 1; ++j) rows[j] = rows[j + 1];
    rows[W - 1] = oldest;
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) column<E, W, true>(weight, rows, x, y, pitch, p.silu, c, kLanes);
    if (c < count) column<E, W, false>(weight, rows, x, y, pitch, p.silu, c, count - c);
    const int64_t to = args.write_slots.dtype ? int_of(args.write_slots, n, t) : t + 1 == p.T ? slot : -1;
    for (int j = 0; j < W && to >= 0; ++j) store_slot(rows[j], args.state, to, j, d0, count);
  }
}

using Task = void (*)(void*, int64_t, int64_t);

template <class E>
Task task_of(int64_t W) {
  constexpr Task tasks[] = {decode_task<E, 1>, decode_task<E, 2>, decode_task<E, 3>, decode_task<E, 4>,
                            decode_task<E, 5>, decode_task<E, 6>, decode_task<E, 7>, decode_task<E, 8>};
  return tasks[W - 1];
}

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_decode(const Problem& p, const Plan& plan, const thalweg_short_conv_decode_args& args,
                    const Exec& exec) {
  const int64_t strip = plan.values[kStrip];
  Call call{p, args, exec.workspace + plan.shared_bytes, plan.slot_bytes, strip, (p.D + strip - 1) / strip};
  const Task task = p.dtype == THALWEG_F32    ? task_of<F32>(p.W)
                    : p.dtype == THALWEG_BF16 ? task_of<Bf16>(p.W)
                                              : task_of<F16>(p.W);
  parallel_tasks(exec, p.N * call.num_strips, plan.num_slots, task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::short_conv
