// cpu_decode – gated delta rule, one or a few tokens a call, states in a pool. Compiled once per ISA.
//
// Math     a = exp(g);  s = S^T k, z = S^T q in one read of S;  u = beta (v - a s);
//          o = scale (a z + (k . q) u);  S <- a S + k u^T
//          which is the recurrence with the read-out taken before the write is stored.
// Shapes   q,k [N,T,H,K]  v,o [N,T,HV,V]  g,beta [N,T,HV]  state [M,HV,K,V], K or V contiguous
// Takes    q of f32, bf16, f16; other tensors of any float dtype; K and V up to 512; any slot strides
// Threads  a task is a run of at most 16 neighbouring (sequence, value head) pairs; pairs are independent, so
//          how they are cut into tasks changes no bit. With one task a thread, a thread tends to find the
//          states of its last call in its own cache.
// Vectors  V contiguous: four rows at a time, one vector of columns after the other, the sums kept in L1;
//          then the update alone goes back up, so that the rows read last are still in L1. Of several
//          tokens, the update of one and the sums of the next are one pass.
//          K contiguous: row by row, read, summed and updated while in L1.
// Tile     four rows (V contiguous), one (K contiguous)
// Scratch  per slot: two tokens' rows as floats and one state (for states not stored as f32, and for drafts
//          whose state is not kept)
// Numerics float32; exp and softplus of simd.h (2 ulp). f32 states are updated in place.
// Traps    The state after token t may go to another slot than token t+1 is read from: `from` follows the
//          state, never the slot number. A state that nobody keeps is not written at all.
//          Prefetches run 16 rows ahead of the sums, past the end of the state too, where the next head's
//          state usually lies; a prefetch cannot fault.
//          Lost: storing one head's state while the next one's is read (the two streams defeat the
//          hardware prefetcher: from memory 2.5 times slower); the next state prefetched whole during the
//          update; K contiguous with 2 to 8 rows side by side (from memory up to twice slower).
// Measured Zen 5, one thread of a shared machine, N1 H16 HV32 K=V=128 f32, with the call's checks (5 us there):
//          AVX-512, [K V]: 39 us with the states in L3, 82 us from memory; [V K]: 52 and 62 us. AVX2, [K V]: 47
//          and 91 us; [V K]: 64 and 66 us. Scale in place of the same bytes: 18 and 60 us.
//          thalweg bench gated_delta_rule.decode@perf
#include "thalweg/cpu/simd.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {
namespace {

using Args = thalweg_gated_delta_rule_decode_args;

constexpr int kRows = 4;           // V contiguous: rows at a time
constexpr int64_t kAhead = 16;     // rows that prefetches run ahead
constexpr int64_t kRowFloats = 512;  // room for a row of K or V
constexpr int64_t kMaxPairs = 16;  // (sequence, value head) pairs of a task

bool is_there(const thalweg_tensor& t) { return t.dtype != THALWEG_NONE; }

float scalar_at(const thalweg_tensor& t, int64_t offset) {
  if (t.dtype == THALWEG_F32) return static_cast<const float*>(t.data)[offset];
  if (t.dtype == THALWEG_BF16) return float_of_bf16(static_cast<const uint16_t*>(t.data)[offset]);
  if (t.dtype == THALWEG_F16) return float_of_f16(static_cast<const uint16_t*>(t.data)[offset]);
  return float(static_cast<const double*>(t.data)[offset]);
}

int64_t slot_at(const thalweg_tensor& t, int64_t offset) {
  return t.dtype == THALWEG_I64 ? static_cast<const int64_t*>(t.data)[offset]
                                : static_cast<const int32_t*>(t.data)[offset];
}

// n neighbouring elements of `t` from `offset` on, as floats.
void load_row(const thalweg_tensor& t, int64_t offset, int64_t n, float* out) {
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t part = n - j < kLanes ? n - j : kLanes;
    if (t.dtype == THALWEG_F32) {
      store_n(out + j, load_n(static_cast<const float*>(t.data) + offset + j, part), part);
    } else if (t.dtype == THALWEG_BF16) {
      store_n(out + j, load_bf16_n(static_cast<const uint16_t*>(t.data) + offset + j, part), part);
    } else if (t.dtype == THALWEG_F16) {
      store_n(out + j, load_f16_n(static_cast<const uint16_t*>(t.data) + offset + j, part), part);
    } else {
      for (int64_t i = 0; i < part; ++i) out[j + i] = float(static_cast<const double*>(t.data)[offset + j + i]);
    }
  }
}

void store_row(const thalweg_tensor& t, int64_t offset, int64_t n, const float* in) {
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t part = n - j < kLanes ? n - j : kLanes;
    if (t.dtype == THALWEG_F32) {
      store_n(static_cast<float*>(t.data) + offset + j, load_n(in + j, part), part);
    } else if (t.dtype == THALWEG_BF16) {
      store_bf16_n(static_cast<uint16_t*>(t.data) + offset + j, load_n(in + j, part), part);
    } else if (t.dtype == THALWEG_F16) {
      store_f16_n(static_cast<uint16_t*>(t.data) + offset + j, load_n(in + j, part), part);
    } else {
      for (int64_t i = 0; i < part; ++i) static_cast<double*>(t.data)[offset + j + i] = double(in[j + i]);
    }
  }
}

float dot(const float* a, const float* b, int64_t n) {
  vf sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t part = n - i < kLanes ? n - i : kLanes;
    sum = fma(load_n(a + i, part), load_n(b + i, part), sum);
  }
  return hsum(sum);
}

void l2norm(float* x, int64_t n) {
  const float rstd = 1.f / sqrt(set1(dot(x, x, n) + 1e-6f))[0];
  for (int64_t i = 0; i < n; ++i) x[i] *= rstd;
}

// A state, or a place for one: `inner` elements beside each other, `outer` rows `stride` apart.
struct State {
  float* data;  // null: not kept
  int64_t stride;
};

// One token of one value head.
struct Step {
  float q[kRowFloats], k[kRowFloats];                // [K], q without scale
  float v[kRowFloats], o[kRowFloats];                // [V]
  float s[kRowFloats], z[kRowFloats], u[kRowFloats]; // [V]: S^T k, S^T q, the delta
  float decay, beta, scale, kq;                      // kq = k . q
  State from, to;
};

// u and o from s and z.
void finish(Step& step, int64_t V) {
  const vf decay = set1(step.decay), beta = set1(step.beta), scale = set1(step.scale), kq = set1(step.kq);
  for (int64_t j = 0; j < V; j += kLanes) {
    const vf u = beta * fnma(decay, load(step.s + j), load(step.v + j));
    store(step.u + j, u);
    store(step.o + j, scale * fma(kq, u, decay * load(step.z + j)));
  }
}

// ---- V contiguous ----

enum Dots { kNoDots, kOwnState, kUpdatedState };

// R rows of a state from row i on, one vector of columns after the other: the update of `old`, the sums of
// `next`, or both in one pass over the state that they share.
template <int R, bool kUpdate, Dots kDots>
[[gnu::always_inline]] inline void v_rows(const Step* old, Step* next, int64_t i, int64_t V) {
  const State from = kUpdate ? old->from : next->from;
  const State to = kUpdate ? old->to : State{nullptr, 0};
  const float* row = from.data + i * from.stride;
  float* out = to.data + (kUpdate ? i * to.stride : 0);
  vf k_old[R], k[R], q[R], decay;
  if (kUpdate) decay = set1(old->decay);
  for (int r = 0; r < R; ++r) {
    if (kUpdate) k_old[r] = set1(old->k[i + r]);
    if (kDots != kNoDots) k[r] = set1(next->k[i + r]), q[r] = set1(next->q[i + r]);
  }
  // `lanes` is a constant in the loop below: whole vectors then cost no mask.
  auto column = [&](int64_t j, int64_t lanes) __attribute__((always_inline)) {
    vf s, z, u;
    if (kDots != kNoDots) s = load(next->s + j), z = load(next->z + j);
    if (kUpdate) u = load(old->u + j);
    for (int r = 0; r < R; ++r) {
      if (kDots == kOwnState && (kLanes == 16 || (j & 15) == 0)) prefetch(row + (kAhead + r) * from.stride + j);
      const float* p = row + r * from.stride + j;
      vf x = lanes == kLanes ? load(p) : load_n(p, lanes);
      if (kUpdate) {
        x = fma(k_old[r], u, decay * x);
        if (lanes == kLanes) store(out + r * to.stride + j, x);
        else store_n(out + r * to.stride + j, x, lanes);
      }
      if (kDots != kNoDots) s = fma(x, k[r], s), z = fma(x, q[r], z);
    }
    if (kDots != kNoDots) store(next->s + j, s), store(next->z + j, z);
  };
  const int64_t whole = V / kLanes * kLanes, rest = V - whole;
  for (int64_t j = 0; j < whole; j += kLanes) column(j, kLanes);
  if (rest) column(whole, rest);
}

template <bool kUpdate, Dots kDots>
void advance_as(const Step* old, Step* next, int64_t K, int64_t V) {
  // The update alone goes back up, to the rows that are still in L1.
  int64_t i = kDots == kNoDots ? K : 0;
  if (kDots == kNoDots) {
    for (; i >= kRows; i -= kRows) v_rows<kRows, kUpdate, kDots>(old, next, i - kRows, V);
    for (; i >= 1; --i) v_rows<1, kUpdate, kDots>(old, next, i - 1, V);
  } else {
    for (; i + kRows <= K; i += kRows) v_rows<kRows, kUpdate, kDots>(old, next, i, V);
    for (; i < K; ++i) v_rows<1, kUpdate, kDots>(old, next, i, V);
  }
}

// Stores the state of `old` (if there is one to store) while `next` (if any) reads its own.
void advance(const Step* old, Step* next, int64_t K, int64_t V) {
  if (next)
    for (int64_t j = 0; j < V; j += kLanes) store(next->s + j, zero()), store(next->z + j, zero());
  if (!next) advance_as<true, kNoDots>(old, next, K, V);
  else if (!old) advance_as<false, kOwnState>(old, next, K, V);
  else advance_as<true, kUpdatedState>(old, next, K, V);
  if (next) finish(*next, V);
}

// ---- K contiguous ----

// One row (column j of the state): read, summed, updated while in L1.
void k_row(Step& step, int64_t K, int64_t j) {
  const float* row = step.from.data + j * step.from.stride;
  const int64_t whole = K / kLanes * kLanes, rest = K - whole;
  vf s[2] = {zero(), zero()}, z[2] = {zero(), zero()};  // two of each hide the latency of a sum
  int64_t i = 0;
  for (int64_t ahead = 0; ahead < K; ahead += 16) prefetch(row + kAhead * step.from.stride + ahead);
  for (; i + kLanes < whole; i += 2 * kLanes)
    for (int half = 0; half < 2; ++half) {
      const int64_t at = i + half * kLanes;
      const vf x = load(row + at);
      s[half] = fma(x, load(step.k + at), s[half]);
      z[half] = fma(x, load(step.q + at), z[half]);
    }
  if (i < whole) s[0] = fma(load(row + i), load(step.k + i), s[0]), z[0] = fma(load(row + i), load(step.q + i), z[0]);
  if (rest) {
    const vf x = load_n(row + whole, rest);
    s[1] = fma(x, load_n(step.k + whole, rest), s[1]);
    z[1] = fma(x, load_n(step.q + whole, rest), z[1]);
  }
  const float delta = step.beta * (step.v[j] - step.decay * hsum(s[0] + s[1]));
  step.o[j] = step.scale * (step.decay * hsum(z[0] + z[1]) + step.kq * delta);
  if (!step.to.data) return;
  float* out = step.to.data + j * step.to.stride;
  const vf decay = set1(step.decay), u = set1(delta);
  for (i = 0; i < whole; i += kLanes) store(out + i, fma(load(step.k + i), u, decay * load(row + i)));
  if (rest) store_n(out + whole, fma(load_n(step.k + whole, rest), u, decay * load_n(row + whole, rest)), rest);
}

void step_k(Step& step, int64_t K, int64_t V) {
  for (int64_t j = 0; j < V; ++j) k_row(step, K, j);
}

// What all tasks share.
struct Job {
  const Problem& p;
  const Args& a;
  char* slots;
  int64_t slot_bytes;
  int64_t pairs_per_task;
  bool v_contiguous;
  int64_t outer, inner, stride;  // a state's rows, their length, and how far they are apart in the pool
};

int64_t pool_offset(const Job& job, int64_t slot, int64_t hv) {
  return slot * job.a.state.stride[0] + hv * job.a.state.stride[1];
}
int64_t read_slot(const Job& job, int64_t n) {
  return is_there(job.a.read_slots) ? slot_at(job.a.read_slots, n * job.a.read_slots.stride[0]) : n;
}
// The slot that keeps the state after token t, or -1.
int64_t write_slot(const Job& job, int64_t n, int64_t t, int64_t read) {
  const thalweg_tensor& slots = job.a.write_slots;
  if (is_there(slots)) return slot_at(slots, n * slots.stride[0] + t * slots.stride[1]);
  return t + 1 == job.p.T ? read : -1;
}

void load_scalars(const Args& a, int64_t n, int64_t t, int64_t hv, Step& token) {
  float g = 0;
  if (is_there(a.g)) g = scalar_at(a.g, n * a.g.stride[0] + t * a.g.stride[1] + hv * a.g.stride[2]);
  if (a.use_gate) {
    if (is_there(a.dt_bias)) g += scalar_at(a.dt_bias, hv * a.dt_bias.stride[0]);
    // Kept finite: infinity times a softplus of 0 would be NaN.
    float rate = exp(set1(scalar_at(a.A_log, hv * a.A_log.stride[0])))[0];
    if (rate > __FLT_MAX__) rate = __FLT_MAX__;
    g = -rate * softplus(set1(g))[0];
  }
  token.decay = is_there(a.g) ? exp(set1(g))[0] : 1.f;
  token.beta = 1;
  if (is_there(a.beta))
    token.beta = scalar_at(a.beta, n * a.beta.stride[0] + t * a.beta.stride[1] + hv * a.beta.stride[2]);
  if (a.use_beta_sigmoid) token.beta = (a.allow_neg_eigval ? 2.f : 1.f) * sigmoid(set1(token.beta))[0];
}

void load_token(const Job& job, int64_t n, int64_t t, int64_t hv, Step& token) {
  const Args& a = job.a;
  const Problem& p = job.p;
  const int64_t h = hv / (p.HV / p.H);
  load_row(a.q, n * a.q.stride[0] + t * a.q.stride[1] + h * a.q.stride[2], p.K, token.q);
  load_row(a.k, n * a.k.stride[0] + t * a.k.stride[1] + h * a.k.stride[2], p.K, token.k);
  load_row(a.v, n * a.v.stride[0] + t * a.v.stride[1] + hv * a.v.stride[2], p.V, token.v);
  if (a.use_qk_l2norm) l2norm(token.q, p.K), l2norm(token.k, p.K);
  token.kq = dot(token.k, token.q, p.K);
  token.scale = float(p.scale);
  load_scalars(a, n, t, hv, token);
}

void store_o(const Job& job, int64_t n, int64_t t, int64_t hv, const Step& token) {
  const thalweg_tensor& o = job.a.o;
  store_row(o, n * o.stride[0] + t * o.stride[1] + hv * o.stride[2], job.p.V, token.o);
}

// The steps of one task. V contiguous: the state of a step is stored while the next step reads its own.
class Run {
 public:
  Run(const Job& job, char* slot) : job_(job), steps_(reinterpret_cast<Step*>(slot)) {
    scratch_ = reinterpret_cast<float*>(steps_ + 2);
  }

  void pair(int64_t n, int64_t hv) {
    const Problem& p = job_.p;
    const int64_t read = read_slot(job_, n);
    if (read < 0) {
      Step& step = free_step();
      for (int64_t j = 0; j < p.V; ++j) step.o[j] = 0;
      for (int64_t t = 0; t < p.T; ++t) store_o(job_, n, t, hv, step);
      return;
    }
    const bool in_place = job_.a.state.dtype == THALWEG_F32;
    const State scratch{scratch_, round_up(job_.inner, 16)};
    if (!in_place) convert(read, hv, scratch, true);
    State from = in_place ? pool_state(read, hv) : scratch;
    for (int64_t t = 0; t < p.T; ++t) {
      const int64_t write = write_slot(job_, n, t, read);
      Step& step = free_step();
      load_token(job_, n, t, hv, step);
      step.from = from;
      step.to = {nullptr, 0};
      if (write >= 0 && in_place) step.to = pool_state(write, hv);
      else if (write >= 0 || t + 1 < p.T) step.to = scratch;
      take(step);
      store_o(job_, n, t, hv, step);
      from = step.to;
      if (write >= 0 && !in_place) flush(), convert(write, hv, scratch, false);
    }
    flush();
  }

  void flush() {
    if (pending_) advance(pending_, nullptr, job_.p.K, job_.p.V);
    pending_ = nullptr;
  }

 private:
  Step& free_step() { return steps_[pending_ == steps_]; }

  void take(Step& step) {
    if (!job_.v_contiguous) return step_k(step, job_.p.K, job_.p.V);
    advance(pending_, &step, job_.p.K, job_.p.V);
    pending_ = step.to.data ? &step : nullptr;
  }

  State pool_state(int64_t slot, int64_t hv) const {
    return {static_cast<float*>(job_.a.state.data) + pool_offset(job_, slot, hv), job_.stride};
  }

  // A state of another dtype into scratch, or back.
  void convert(int64_t slot, int64_t hv, State scratch, bool in) {
    const thalweg_tensor& pool = job_.a.state;
    for (int64_t i = 0; i < job_.outer; ++i) {
      const int64_t offset = pool_offset(job_, slot, hv) + i * job_.stride;
      if (in) load_row(pool, offset, job_.inner, scratch.data + i * scratch.stride);
      else store_row(pool, offset, job_.inner, scratch.data + i * scratch.stride);
    }
  }

  const Job& job_;
  Step* steps_;  // [2], used in turn
  float* scratch_;
  Step* pending_ = nullptr;  // its state is still to be stored
};

void run_task(void* arg, int64_t task, int64_t slot) {
  const Job& job = *static_cast<Job*>(arg);
  const int64_t HV = job.p.HV, begin = task * job.pairs_per_task;
  const int64_t end = begin + job.pairs_per_task < job.p.N * HV ? begin + job.pairs_per_task : job.p.N * HV;
  Run run(job, job.slots + slot * job.slot_bytes);
  for (int64_t pair = begin; pair < end; ++pair) run.pair(pair / HV, pair % HV);
  run.flush();
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_decode_slot_bytes(const Problem& p) {
  const int64_t by_k = p.K * round_up(p.V, 16), by_v = p.V * round_up(p.K, 16);
  return 2 * int64_t(sizeof(Step)) + (by_k > by_v ? by_k : by_v) * 4;
}

void cpu_decode(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  const bool v_contiguous = a.state.stride[3] == 1 || p.V == 1;
  const int64_t pairs = p.N * p.HV, share = (pairs + plan.num_slots - 1) / plan.num_slots;
  if (pairs == 0 || p.T == 0) return;
  Job job{p,
          a,
          exec.workspace + plan.shared_bytes,
          plan.slot_bytes,
          share < kMaxPairs ? share : kMaxPairs,
          v_contiguous,
          v_contiguous ? p.K : p.V,
          v_contiguous ? p.V : p.K,
          a.state.stride[v_contiguous ? 2 : 3]};
  const int64_t tasks = (pairs + job.pairs_per_task - 1) / job.pairs_per_task;
  parallel_tasks(exec, tasks, plan.num_slots, run_task, &job);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::gated_delta_rule
