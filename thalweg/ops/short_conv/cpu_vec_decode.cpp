// cpu_vec_decode – short convolution, decode, vectors over channels.
//
// Math     window <- (window[1..W-1], x)    y = silu(bias + sum_j weight_j window_j), or without silu
// Shapes   x,y [N T D]  weight [D W]  state [M D W], D or W contiguous
// Takes    x and state of f32, bf16, f16; weight and bias of any float dtype; W 1 to 8
// Threads  one task per (strip of channels, sequence), the sequences of a strip after each other so that its
//          weights stay in L1
// Vectors  over channels; window and weights stay in registers for all T tokens. A state or weight with W = 4
//          contiguous taps is turned by eight shuffles per four vectors, one with contiguous channels is loaded
//          as it is, any other goes through a row on the stack.
// Tile     one vector of channels; strip 256 to 2048 channels
// Scratch  none
// Numerics as cpu_vec_fwd, bit for bit. A 16-bit state is what was read and x, so no rounding happens in it.
// Traps    A window is read before its sequence writes any, so a sequence may write the slot it reads;
//          check_slots refuses every other overlap.
// Measured prediction: the state's traffic, 2 x 128 KiB at D8192 W4 f32, in L2. Zen 5, one thread: N1 9.4 us on
//          AVX-512 and 14.7 on AVX2; 222 us (machine busy) when every tap was staged by strided scalar loads;
//          N32 261 us.
#include "thalweg/ops/short_conv/problem.h"
#include "thalweg/ops/short_conv/vec.h"

namespace thalweg::short_conv {
namespace {

struct Call {
  const Problem& p;
  const thalweg_short_conv_decode_args& args;
  int64_t strip;
};

// ---- windows: W vectors of kLanes channels, tap by tap ------------------------------------------------

typedef int32_t Lanes __attribute__((vector_size(kLanes * 4)));

// Lane i of the result is element index(i) of x followed by y.
template <class Index>
[[gnu::always_inline]] inline vf pick(vf x, vf y, Index index) {
  Lanes lanes{};
#pragma GCC unroll 16
  for (int i = 0; i < int(kLanes); ++i) lanes[i] = index(i);
  return __builtin_shuffle(x, y, lanes);
}

constexpr int kL = int(kLanes), kHalf = kL / 2;
[[gnu::always_inline]] inline vf low_halves(vf x, vf y) {
  return pick(x, y, [](int i) { return i < kHalf ? i : kHalf + i; });
}
[[gnu::always_inline]] inline vf high_halves(vf x, vf y) {
  return pick(x, y, [](int i) { return i < kHalf ? kHalf + i : kL + i; });
}

// Four vectors that hold 4 taps of each channel in turn, to a vector of channels for each tap.
[[gnu::always_inline]] inline void taps_of_channels(vf (&v)[4]) {
  auto taps01 = [](int i) { return i < kHalf ? 4 * i : 4 * (i - kHalf) + 1; };
  auto taps23 = [](int i) { return i < kHalf ? 4 * i + 2 : 4 * (i - kHalf) + 3; };
  const vf a = pick(v[0], v[1], taps01), b = pick(v[2], v[3], taps01);
  const vf c = pick(v[0], v[1], taps23), d = pick(v[2], v[3], taps23);
  v[0] = low_halves(a, b), v[1] = high_halves(a, b), v[2] = low_halves(c, d), v[3] = high_halves(c, d);
}
[[gnu::always_inline]] inline void channels_of_taps(vf (&v)[4]) {
  auto even = [](int i) { return i / 4 + i % 4 * kHalf; };
  auto odd = [](int i) { return i / 4 + kL / 4 + i % 4 * kHalf; };
  const vf a = low_halves(v[0], v[1]), b = low_halves(v[2], v[3]);
  const vf c = high_halves(v[0], v[1]), d = high_halves(v[2], v[3]);
  v[0] = pick(a, b, even), v[1] = pick(a, b, odd), v[2] = pick(c, d, even), v[3] = pick(c, d, odd);
}

// kLanes channels of a weight or of one state.
struct Taps {
  char* p;
  thalweg_dtype dtype;
  int64_t channel_stride, tap_stride;  // elements
};

[[gnu::always_inline]] inline vf load_as(thalweg_dtype dtype, const char* p) {
  if (dtype == THALWEG_F32) return F32::load(reinterpret_cast<const float*>(p));
  if (dtype == THALWEG_BF16) return Bf16::load(reinterpret_cast<const uint16_t*>(p));
  return F16::load(reinterpret_cast<const uint16_t*>(p));
}
[[gnu::always_inline]] inline void store_as(thalweg_dtype dtype, char* p, vf x) {
  if (dtype == THALWEG_F32) return F32::store(reinterpret_cast<float*>(p), x);
  if (dtype == THALWEG_BF16) return Bf16::store(reinterpret_cast<uint16_t*>(p), x);
  F16::store(reinterpret_cast<uint16_t*>(p), x);
}
// The first n elements, any dtype.
[[gnu::always_inline]] inline vf load_n_as(thalweg_dtype dtype, const char* p, int64_t n) {
  if (n == kLanes) return load_as(dtype, p);
  float row[kLanes] = {};
  read_strided(dtype, p, 1, n, row);
  return load(row);
}
[[gnu::always_inline]] inline void store_n_as(thalweg_dtype dtype, char* p, vf x, int64_t n) {
  if (n == kLanes) return store_as(dtype, p, x);
  float row[kLanes];
  store(row, x);
  write_strided(dtype, p, 1, n, row);
}

template <int W>
[[gnu::always_inline]] inline void load_window(const Taps& t, int64_t n, vf (&w)[W]) {
  const int64_t bytes = element_bytes(t.dtype);
  if (n == kLanes && t.channel_stride == 1 && t.dtype != THALWEG_F64) {
    for (int j = 0; j < W; ++j) w[j] = load_as(t.dtype, t.p + j * t.tap_stride * bytes);
    return;
  }
  if constexpr (W == 4)
    if (n == kLanes && t.tap_stride == 1 && t.channel_stride == 4 && t.dtype != THALWEG_F64) {
      for (int j = 0; j < 4; ++j) w[j] = load_as(t.dtype, t.p + j * kLanes * bytes);
      return taps_of_channels(w);
    }
  float row[kLanes];
  for (int j = 0; j < W; ++j) {
    memset(row, 0, sizeof row);
    read_strided(t.dtype, t.p + j * t.tap_stride * bytes, t.channel_stride, n, row);
    w[j] = load(row);
  }
}

template <int W>
[[gnu::always_inline]] inline void store_window(const Taps& t, int64_t n, const vf (&w)[W]) {
  const int64_t bytes = element_bytes(t.dtype);
  if (n == kLanes && t.channel_stride == 1) {
    for (int j = 0; j < W; ++j) store_as(t.dtype, t.p + j * t.tap_stride * bytes, w[j]);
    return;
  }
  if constexpr (W == 4)
    if (n == kLanes && t.tap_stride == 1 && t.channel_stride == 4) {
      vf v[4] = {w[0], w[1], w[2], w[3]};
      channels_of_taps(v);
      for (int j = 0; j < 4; ++j) store_as(t.dtype, t.p + j * kLanes * bytes, v[j]);
      return;
    }
  float row[kLanes];
  for (int j = 0; j < W; ++j) {
    store(row, w[j]);
    write_strided(t.dtype, t.p + j * t.tap_stride * bytes, t.channel_stride, n, row);
  }
}

Taps state_taps(const thalweg_tensor& state, int64_t slot, int64_t d) {
  return {element_at(state, slot, d), state.dtype, state.stride[1], state.stride[2]};
}

// ---- tokens -----------------------------------------------------------------------------------------

int64_t int_of(const thalweg_tensor& t, int64_t i, int64_t j) {
  const int64_t at = i * t.stride[0] + (t.rank > 1 ? j * t.stride[1] : 0);
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
}

// All tokens of sequence n, channels [d, d + n_channels), at most a vector of them.
template <int W>
void tokens(const Call& call, int64_t n, int64_t slot, int64_t d, int64_t n_channels) {
  const auto& args = call.args;
  const thalweg_tensor &tx = args.x, &ty = args.y, &bias = args.bias;
  vf weight[W], window[W], offset[1] = {zero()};
  load_window<W>({element_at(args.weight, d), args.weight.dtype, args.weight.stride[0], args.weight.stride[1]},
                 n_channels, weight);
  if (bias.dtype) load_window<1>({element_at(bias, d), bias.dtype, bias.stride[0], 0}, n_channels, offset);
  load_window<W>(state_taps(args.state, slot, d), n_channels, window);
  const thalweg_dtype dtype = call.p.dtype;
  const int64_t bytes = element_bytes(dtype);
  const char* x = static_cast<const char*>(tx.data) + (n * tx.stride[0] + d) * bytes;
  char* y = static_cast<char*>(ty.data) + (n * ty.stride[0] + d) * bytes;
  for (int64_t t = 0; t < call.p.T; ++t, x += tx.stride[1] * bytes, y += ty.stride[1] * bytes) {
    for (int j = 0; j < W - 1; ++j) window[j] = window[j + 1];
    window[W - 1] = load_n_as(dtype, x, n_channels);
    vf pre = offset[0];
    for (int j = 0; j < W; ++j) pre = fma(weight[j], window[j], pre);
    store_n_as(dtype, y, call.p.silu ? fast_silu(pre) : pre, n_channels);
    const int64_t to = args.write_slots.dtype ? int_of(args.write_slots, n, t) : t + 1 == call.p.T ? slot : -1;
    if (to >= 0) store_window<W>(state_taps(args.state, to, d), n_channels, window);
  }
}

// One sequence, one strip; the sequences of a strip follow each other, so that its weights stay near.
template <int W>
void decode_task(void* arg, int64_t i, int64_t) {
  const Call& call = *static_cast<const Call*>(arg);
  const auto& args = call.args;
  const int64_t n = i % call.p.N, d0 = i / call.p.N * call.strip;
  const int64_t end = d0 + call.strip < call.p.D ? d0 + call.strip : call.p.D;
  const int64_t slot = args.read_slots.dtype ? int_of(args.read_slots, n, 0) : n;
  if (slot < 0) {
    const int64_t bytes = element_bytes(call.p.dtype);
    char* y = static_cast<char*>(args.y.data) + (n * args.y.stride[0] + d0) * bytes;
    for (int64_t t = 0; t < call.p.T; ++t) memset(y + t * args.y.stride[1] * bytes, 0, size_t((end - d0) * bytes));
    return;
  }
  for (int64_t d = d0; d < end; d += kLanes) tokens<W>(call, n, slot, d, end - d < kLanes ? end - d : kLanes);
}

using Task = void (*)(void*, int64_t, int64_t);

constexpr Task kTasks[] = {decode_task<1>, decode_task<2>, decode_task<3>, decode_task<4>,
                           decode_task<5>, decode_task<6>, decode_task<7>, decode_task<8>};

}  // namespace

namespace THALWEG_ISA {

void cpu_vec_decode(const Problem& p, const Plan& plan, const thalweg_short_conv_decode_args& args, const Exec& exec) {
  Call call{p, args, plan.values[kStrip]};
  parallel_tasks(exec, p.N * ((p.D + call.strip - 1) / call.strip), plan.num_slots, kTasks[p.W - 1], &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::short_conv
