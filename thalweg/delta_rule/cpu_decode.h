// Decode of the delta rules: one or a few tokens a call, states in a pool. For files compiled per instruction set;
// the headers of the operators' cpu_decode.cpp describe it.
//
//   s = S^T (a k), z = S^T (a q) in one read of S;  u = beta (v - s);  o = scale (z + (k . q) u);  S <- a S + k u^T
//
// with a = exp(g), a number or one for each row of S: the recurrence with the read-out taken before the write is
// stored. Args is the operator's; a decay per channel is known by its lower bound.
#ifndef THALWEG_DELTA_RULE_CPU_DECODE_H
#define THALWEG_DELTA_RULE_CPU_DECODE_H

#include "thalweg/core/exec.h"
#include "thalweg/cpu/blocks/channel_gate.h"
#include "thalweg/cpu/blocks/rows.h"
#include "thalweg/delta_rule/problem.h"

namespace thalweg::delta_rule {
namespace {

template <class Args>
constexpr bool kChannelDecay = requires(Args a) { a.lower_bound; };

// V contiguous: the vectors of columns whose sums, or u, or both, stay in registers down the rows.
constexpr int kSumVectors = kVectorRegisters / 4, kUpdateVectors = 8, kBothVectors = kVectorRegisters == 32 ? 8 : 2;
constexpr int64_t kAhead = 8;      // rows that prefetches run ahead
constexpr int64_t kMaxPairs = 16;  // (sequence, value head) pairs of a task
constexpr int64_t kLine = 64;      // bytes

bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }

// A state, or a place for one: rows `stride` elements apart.
struct State {
  void* data;  // null: not kept
  int64_t stride;
};

// What the value heads of a key head share of one token.
struct Keys {
  float *q, *k;     // [K] q without scale
  float kq;         // k . q
  int64_t n, t, h;  // whose they are
};

// One token of one value head; rows are padded with 0 to whole vectors.
struct Step {
  const Keys* keys;
  float *decay, *dk, *dq;      // [K] a (one number for all: in decay[0]), a k, a q
  float *v, *o, *s, *z, *u;    // [V]
  float beta, scale;
  State from, to;
};

// u and o from s and z.
void finish(Step& step, int64_t V) {
  const vf beta = set1(step.beta), scale = set1(step.scale), kq = set1(step.keys->kq);
  for (int64_t j = 0; j < V; j += kLanes) {
    const vf u = beta * (load(step.v + j) - load(step.s + j));
    store(step.u + j, u);
    store(step.o + j, scale * fma(kq, u, load(step.z + j)));
  }
}

// ---- V contiguous ----

enum Dots { kNoDots, kOwnState, kUpdatedState };

// C vectors of columns of a state from column j on, down its rows: the update of `old`, the sums of `next`, or both in
// one pass over the state that they share. S is how the state is stored; `lanes` is a constant where vectors are
// whole, which then cost no mask.
template <class S, bool kChannel, int C, bool kUpdate, Dots kDots>
[[gnu::always_inline]] inline void panel(const Step* old, Step* next, int64_t K, int64_t j, int64_t lanes) {
  using Element = typename S::Element;
  const State from = kUpdate ? old->from : next->from;
  const State to = kUpdate ? old->to : State{nullptr, 0};
  // The update alone goes back up, to the rows that are still in L1.
  constexpr int64_t kDown = kDots == kNoDots ? -1 : 1;
  int64_t i = kDown > 0 ? 0 : K - 1;
  const Element* row = static_cast<const Element*>(from.data) + i * from.stride + j;
  Element* out = static_cast<Element*>(to.data) + (kUpdate ? i * to.stride + j : 0);
  vf s[C], z[C], u[C], decay = zero();
  each<C>([&](int64_t c) {
    if (kDots != kNoDots) s[c] = z[c] = zero();
    if (kUpdate) u[c] = load(old->u + j + c * kLanes);
  });
  if (kUpdate) decay = set1(old->decay[0]);
  for (int64_t n = 0; n < K; ++n, i += kDown, row += kDown * from.stride, out += kDown * to.stride) {
    vf k_old = zero(), k = zero(), q = zero();
    if (kUpdate) k_old = set1(old->keys->k[i]);
    if (kUpdate && kChannel) decay = set1(old->decay[i]);
    if (kDots != kNoDots) k = set1(next->dk[i]), q = set1(next->dq[i]);
    each<C>([&](int64_t c) {
      const int64_t at = c * kLanes;
      if (kDots == kOwnState && at * int64_t(sizeof(Element)) % kLine == 0) prefetch(row + kAhead * from.stride + at);
      vf x = lanes == kLanes ? S::load(row + at) : S::load_n(row + at, lanes);
      if (kUpdate) {
        x = fma(k_old, u[c], decay * x);
        if (lanes == kLanes) S::store(out + at, x);
        else S::store_n(out + at, x, lanes);
      }
      if (kDots != kNoDots) s[c] = fma(x, k, s[c]), z[c] = fma(x, q, z[c]);
    });
  }
  if (kDots != kNoDots)
    each<C>([&](int64_t c) { store(next->s + j + c * kLanes, s[c]), store(next->z + j + c * kLanes, z[c]); });
}

// The columns from j up to `end`, whole vectors, by panels of C and then of fewer.
template <class S, bool kChannel, int C, bool kUpdate, Dots kDots>
[[gnu::always_inline]] inline void panels(const Step* old, Step* next, int64_t K, int64_t j, int64_t end) {
  for (; j + C * kLanes <= end; j += C * kLanes) panel<S, kChannel, C, kUpdate, kDots>(old, next, K, j, kLanes);
  if constexpr (C > 1) panels<S, kChannel, C / 2, kUpdate, kDots>(old, next, K, j, end);
}

template <class S, bool kChannel, bool kUpdate, Dots kDots>
[[gnu::noinline]] void advance_as(const Step* old, Step* next, int64_t K, int64_t V) {
  constexpr int C = kDots == kNoDots ? kUpdateVectors : kUpdate ? kBothVectors : kSumVectors;
  const int64_t whole = V / kLanes * kLanes;
  panels<S, kChannel, C, kUpdate, kDots>(old, next, K, 0, whole);
  if (whole < V) panel<S, kChannel, 1, kUpdate, kDots>(old, next, K, whole, V - whole);
}

// Stores the state of `old` (if there is one to store) while `next` (if any) reads its own.
template <class S, bool kChannel>
void advance(const Step* old, Step* next, int64_t K, int64_t V) {
  if (!next) advance_as<S, kChannel, true, kNoDots>(old, next, K, V);
  else if (!old) advance_as<S, kChannel, false, kOwnState>(old, next, K, V);
  else advance_as<S, kChannel, true, kUpdatedState>(old, next, K, V);
  if (next) finish(*next, V);
}

// ---- K contiguous ----

// One row (column j of the state): read, summed, updated while in L1.
template <class S, bool kChannel>
[[gnu::always_inline]] inline void k_row(Step& step, int64_t K, int64_t j) {
  using Element = typename S::Element;
  const Element* row = static_cast<const Element*>(step.from.data) + j * step.from.stride;
  const int64_t whole = K / kLanes * kLanes, rest = K - whole;
  vf s[2] = {zero(), zero()}, z[2] = {zero(), zero()};  // two of each hide the latency of a sum
  int64_t i = 0;
  for (int64_t at = 0; at < K; at += kLine / int64_t(sizeof(Element))) prefetch(row + kAhead * step.from.stride + at);
  for (; i + kLanes < whole; i += 2 * kLanes)
    for (int half = 0; half < 2; ++half) {
      const int64_t at = i + half * kLanes;
      const vf x = S::load(row + at);
      s[half] = fma(x, load(step.dk + at), s[half]);
      z[half] = fma(x, load(step.dq + at), z[half]);
    }
  if (i < whole) {
    const vf x = S::load(row + i);
    s[0] = fma(x, load(step.dk + i), s[0]), z[0] = fma(x, load(step.dq + i), z[0]);
  }
  if (rest) {
    const vf x = S::load_n(row + whole, rest);
    s[1] = fma(x, load(step.dk + whole), s[1]), z[1] = fma(x, load(step.dq + whole), z[1]);
  }
  const float delta = step.beta * (step.v[j] - hsum(s[0] + s[1]));
  step.o[j] = step.scale * (hsum(z[0] + z[1]) + step.keys->kq * delta);
  if (!step.to.data) return;
  Element* out = static_cast<Element*>(step.to.data) + j * step.to.stride;
  const float* k = step.keys->k;
  const vf common = set1(step.decay[0]), u = set1(delta);
  auto decay = [&](int64_t at) __attribute__((always_inline)) { return kChannel ? load(step.decay + at) : common; };
  for (i = 0; i < whole; i += kLanes) S::store(out + i, fma(load(k + i), u, decay(i) * S::load(row + i)));
  if (rest) S::store_n(out + whole, fma(load(k + whole), u, decay(whole) * S::load_n(row + whole, rest)), rest);
}

template <class S, bool kChannel>
[[gnu::noinline]] void step_k(Step& step, int64_t K, int64_t V) {
  for (int64_t j = 0; j < V; ++j) k_row<S, kChannel>(step, K, j);
}

// ---- what a token brings ----

float scalar_at(const thalweg_tensor& t, int64_t i0, int64_t i1 = 0, int64_t i2 = 0) {
  float x = 0;
  read_row(t.dtype, element_at(t, i0, i1, i2), 1, &x);
  return x;
}

int64_t slot_at(const thalweg_tensor& t, int64_t n, int64_t token = 0) {
  const int64_t at = n * t.stride[0] + token * t.stride[1];
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
}

// x [n] of storage, 0 up to the next whole vector.
void load_padded(const thalweg_tensor& t, const char* at, int64_t stride, int64_t n, float* x) {
  if (n % kLanes) store(x + n / kLanes * kLanes, zero());
  if (stride == 1) read_row(t.dtype, at, n, x);
  else read_strided(t.dtype, at, stride, n, x);
}

// x . y, padded with 0
float dot(const float* x, const float* y, int64_t n) {
  vf sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) sum = fma(load(x + i), load(y + i), sum);
  return hsum(sum);
}

void l2norm(float* x, int64_t n) {
  const vf norm = sqrt(set1(dot(x, x, n) + 1e-6f));
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) / norm);
}

template <class Args>
void load_keys(const Problem& p, const Args& a, int64_t n, int64_t t, int64_t h, Keys& keys) {
  load_padded(a.q, element_at(a.q, n, t, h), 1, p.K, keys.q);
  load_padded(a.k, element_at(a.k, n, t, h), 1, p.K, keys.k);
  if (a.use_qk_l2norm) l2norm(keys.q, p.K), l2norm(keys.k, p.K);
  keys.kq = dot(keys.k, keys.q, p.K);
  keys.n = n, keys.t = t, keys.h = h;
}

// The decay of the whole head, in decay[0].
template <class Args>
void load_head_decay(const Args& a, int64_t n, int64_t t, int64_t hv, float* decay) {
  float g = is_there(a.g) ? scalar_at(a.g, n, t, hv) : 0.f;
  if (a.use_gate) {
    if (is_there(a.dt_bias)) g += scalar_at(a.dt_bias, hv);
    // Kept finite: infinity times a softplus of 0 would be NaN.
    float rate = exp(set1(scalar_at(a.A_log, hv)))[0];
    if (rate > __FLT_MAX__) rate = __FLT_MAX__;
    g = -rate * softplus(set1(g))[0];
  }
  decay[0] = is_there(a.g) ? exp(set1(g))[0] : 1.f;
}

// Of each channel; `line` is scratch.
template <class Args>
void load_channel_decays(const Args& a, int64_t n, int64_t t, int64_t hv, int64_t K, float* decay, float* line) {
  if (!is_there(a.g)) {
    for (int64_t i = 0; i < K; i += kLanes) store(decay + i, set1(1.f));
    return;
  }
  load_padded(a.g, element_at(a.g, n, t, hv), a.g.stride[3], K, decay);
  if (a.use_gate) {
    const ChannelGate gate =
        channel_gate(is_there(a.A_log), is_there(a.A_log) ? scalar_at(a.A_log, hv) : 0.f, float(a.lower_bound));
    for (int64_t i = 0; i < K; i += kLanes) store(line + i, zero());
    if (is_there(a.dt_bias)) load_padded(a.dt_bias, element_at(a.dt_bias, hv), 1, K, line);
    for (int64_t i = 0; i < K; i += kLanes) store(decay + i, gate_of(gate, load(decay + i) + load(line + i)));
  }
  // The rounding of a constant gate's decay adds up from token to token: no faster exp here.
  for (int64_t i = 0; i < K; i += kLanes) store(decay + i, exp(load(decay + i)));
}

template <class Args>
void load_step(const Problem& p, const Args& a, int64_t n, int64_t t, int64_t hv, const Keys& keys, Step& step) {
  load_padded(a.v, element_at(a.v, n, t, hv), 1, p.V, step.v);
  step.keys = &keys;
  step.scale = float(p.scale);
  step.beta = is_there(a.beta) ? scalar_at(a.beta, n, t, hv) : 1.f;
  if (a.use_beta_sigmoid) step.beta = (a.allow_neg_eigval ? 2.f : 1.f) * sigmoid(set1(step.beta))[0];
  if constexpr (kChannelDecay<Args>) load_channel_decays(a, n, t, hv, p.K, step.decay, step.dk);
  else load_head_decay(a, n, t, hv, step.decay);
  const vf common = set1(step.decay[0]);
  for (int64_t i = 0; i < p.K; i += kLanes) {
    const vf decay = kChannelDecay<Args> ? load(step.decay + i) : common;
    store(step.dk + i, decay * load(keys.k + i));
    store(step.dq + i, decay * load(keys.q + i));
  }
}

// ---- a task ----

// What all tasks share. `advance` and `step_k` are those of the storage that states are worked on in.
template <class Args>
struct Job {
  const Problem& p;
  const Args& a;
  char* slots;
  int64_t slot_bytes;
  int64_t pairs_per_task;
  bool v_contiguous, in_place;
  int64_t outer, inner, stride;  // a state's rows, their length, and how far they are apart in the pool
  void (*advance)(const Step* old, Step* next, int64_t K, int64_t V);
  void (*step_k)(Step& step, int64_t K, int64_t V);
};

template <class S, class Args>
void set_storage(Job<Args>& job) {
  job.advance = advance<S, kChannelDecay<Args>>;
  job.step_k = step_k<S, kChannelDecay<Args>>;
}

int64_t row_floats(int64_t n) { return round_up(n, 16); }

// The steps of one task. V contiguous: the state of a step is stored while the next step reads its own.
template <class Args>
class Run {
 public:
  Run(const Job<Args>& job, char* slot) : job_(job), floats_(reinterpret_cast<float*>(slot)) {
    const int64_t K = row_floats(job.p.K), V = row_floats(job.p.V);
    for (Keys& keys : keys_) keys.q = take(K), keys.k = take(K), keys.n = -1;
    for (Step& step : steps_) {
      step.decay = take(K), step.dk = take(K), step.dq = take(K);
      step.v = take(V), step.o = take(V), step.s = take(V), step.z = take(V), step.u = take(V);
    }
    scratch_ = floats_;
  }

  void pair(int64_t n, int64_t hv) {
    const Problem& p = job_.p;
    const int64_t read = is_there(job_.a.read_slots) ? slot_at(job_.a.read_slots, n) : n;
    if (read < 0) {
      Step& step = free_step();
      for (int64_t j = 0; j < p.V; ++j) step.o[j] = 0;
      for (int64_t t = 0; t < p.T; ++t) store_o(n, t, hv, step);
      return;
    }
    const State scratch{scratch_, row_floats(job_.inner)};
    if (!job_.in_place) convert(read, hv, scratch, true);
    State from = job_.in_place ? pool_state(read, hv) : scratch;
    for (int64_t t = 0; t < p.T; ++t) {
      const int64_t write = write_slot(n, t, read);
      Step& step = free_step();
      load_step(p, job_.a, n, t, hv, keys_of(n, t, hv / (p.HV / p.H)), step);
      step.from = from;
      step.to = {nullptr, 0};
      if (write >= 0 && job_.in_place) step.to = pool_state(write, hv);
      else if (write >= 0 || t + 1 < p.T) step.to = scratch;
      take_step(step);
      store_o(n, t, hv, step);
      from = step.to;
      if (write >= 0 && !job_.in_place) flush(), convert(write, hv, scratch, false);
    }
    flush();
  }

 private:
  float* take(int64_t floats) {
    floats_ += floats;
    return floats_ - floats;
  }

  Step& free_step() { return steps_[pending_ == steps_]; }

  // The step before may still need its own.
  const Keys& keys_of(int64_t n, int64_t t, int64_t h) {
    if (keys_[last_].n == n && keys_[last_].t == t && keys_[last_].h == h) return keys_[last_];
    last_ = 1 - last_;
    load_keys(job_.p, job_.a, n, t, h, keys_[last_]);
    return keys_[last_];
  }

  void take_step(Step& step) {
    if (!job_.v_contiguous) return job_.step_k(step, job_.p.K, job_.p.V);
    job_.advance(pending_, &step, job_.p.K, job_.p.V);
    pending_ = step.to.data ? &step : nullptr;
  }

  void flush() {
    if (pending_) job_.advance(pending_, nullptr, job_.p.K, job_.p.V);
    pending_ = nullptr;
  }

  void store_o(int64_t n, int64_t t, int64_t hv, const Step& step) {
    write_row(job_.a.o.dtype, element_at(job_.a.o, n, t, hv), job_.p.V, step.o);
  }

  // The slot that keeps the state after token t, or -1.
  int64_t write_slot(int64_t n, int64_t t, int64_t read) const {
    if (is_there(job_.a.write_slots)) return slot_at(job_.a.write_slots, n, t);
    return t + 1 == job_.p.T ? read : -1;
  }

  State pool_state(int64_t slot, int64_t hv) const { return {element_at(job_.a.state, slot, hv), job_.stride}; }

  // A state of another dtype into scratch, or back.
  void convert(int64_t slot, int64_t hv, State scratch, bool in) {
    const thalweg_dtype dtype = job_.a.state.dtype;
    char* at = element_at(job_.a.state, slot, hv);
    float* x = static_cast<float*>(scratch.data);
    for (int64_t i = 0; i < job_.outer; ++i, at += job_.stride * element_bytes(dtype), x += scratch.stride) {
      if (in) read_row(dtype, at, job_.inner, x);
      else write_row(dtype, at, job_.inner, x);
    }
  }

  const Job<Args>& job_;
  float* floats_;  // what is left of the slot
  float* scratch_;
  Keys keys_[2];  // used in turn
  Step steps_[2];
  int last_ = 0;             // of keys_
  Step* pending_ = nullptr;  // its state is still to be stored
};

template <class Args>
void decode_task(void* arg, int64_t task, int64_t slot) {
  const Job<Args>& job = *static_cast<Job<Args>*>(arg);
  const int64_t HV = job.p.HV, begin = task * job.pairs_per_task, all = job.p.N * HV;
  const int64_t end = begin + job.pairs_per_task < all ? begin + job.pairs_per_task : all;
  Run<Args> run(job, job.slots + slot * job.slot_bytes);
  for (int64_t pair = begin; pair < end; ++pair) run.pair(pair / HV, pair % HV);
}

int64_t decode_slot_bytes(const Problem& p) {
  const int64_t K = row_floats(p.K), V = row_floats(p.V), by_k = p.K * V, by_v = p.V * K;
  return (2 * 2 * K + 2 * (3 * K + 5 * V) + (by_k > by_v ? by_k : by_v)) * int64_t(sizeof(float));
}

template <class Args>
void decode(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  const int64_t pairs = p.N * p.HV, share = (pairs + plan.num_slots - 1) / plan.num_slots;
  if (pairs == 0 || p.T == 0) return;
  Job<Args> job{p, a, exec.workspace + plan.shared_bytes, plan.slot_bytes};
  job.pairs_per_task = share < kMaxPairs ? share : kMaxPairs;
  job.v_contiguous = a.state.stride[3] == 1 || p.V == 1;
  job.outer = job.v_contiguous ? p.K : p.V;
  job.inner = job.v_contiguous ? p.V : p.K;
  job.stride = a.state.stride[job.v_contiguous ? 2 : 3];
  // Between the tokens of a call a state is not rounded, so 16-bit states of several tokens are worked on in scratch.
  const thalweg_dtype dtype = a.state.dtype;
  const bool narrow = dtype == THALWEG_BF16 || dtype == THALWEG_F16;
  job.in_place = dtype == THALWEG_F32 || (narrow && p.T == 1);
  set_storage<F32>(job);
  if (job.in_place && dtype == THALWEG_BF16) set_storage<Bf16>(job);
  if (job.in_place && dtype == THALWEG_F16) set_storage<F16>(job);
  parallel_tasks(exec, (pairs + job.pairs_per_task - 1) / job.pairs_per_task, plan.num_slots, decode_task<Args>, &job);
}

}  // namespace
}  // namespace thalweg::delta_rule
#endif
