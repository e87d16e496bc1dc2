// cpu_decode – gated delta rule, one or a few tokens a call, states in a pool. Compiled once per ISA.
//
// Math     a = exp(g);  s = S^T k, z = S^T q in one read of S;  u = beta (v - a s);
//          o = scale (a z + (k . q) u);  S <- a S + k u^T
//          which is the recurrence with the read-out taken before the write is stored.
// Shapes   q,k [N,T,H,K]  v,o [N,T,HV,V]  g,beta [N,T,HV]  state [M,HV,K,V], K or V contiguous
// Takes    q of f32, bf16, f16; other tensors of any float dtype; K and V up to 512; any slot strides
// Threads  a task is a run of neighbouring (sequence, value head) pairs; pairs are independent, so how
//          they are cut into tasks changes no bit
// Vectors  V contiguous: kColumns vectors of columns, two sums each, down all K rows, then back up with the
//          update, so that the rows read last are still in L1. K contiguous: kRows rows at a time, read,
//          summed and updated while in L1.
// Tile     AVX-512: 8 vectors of 16 columns, 8 rows; AVX2: 4 vectors of 8 columns, 4 rows
// Scratch  per slot: q, k, v, o as floats and one state (for states not stored as f32, and for drafts whose
//          state is not kept)
// Numerics float32; exp and softplus of simd.h (2 ulp). f32 states are updated in place.
// Traps    The state after token t may go to another slot than token t+1 is read from: `from` follows the
//          state, never the slot number. A state that nobody keeps is not written at all.
//          While one state is worked on, the next one of the run is prefetched, half of each row in either
//          direction, so that memory is never idle.
// Measured see README.md, Performance
#include "thalweg/cpu/simd.h"
#include "thalweg/ops/gated_delta_rule/problem.h"

namespace thalweg::gated_delta_rule {
namespace {

using Args = thalweg_gated_delta_rule_decode_args;

constexpr int kColumns = kLanes == 16 ? 8 : 4;
constexpr int kRows = kLanes == 16 ? 8 : 4;
constexpr int64_t kRowFloats = 512;  // room for a row of K or V
constexpr int64_t kTasksPerSlot = 2;

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
struct Token {
  float q[kRowFloats], k[kRowFloats];  // [K], q without scale
  float v[kRowFloats], o[kRowFloats];  // [V]
  float decay, beta, scale, kq;        // kq = k . q
};

template <int NV>
struct Columns {
  vf x[NV];
};

// Columns j … of a V-contiguous state, NV vectors of which the last has `last` lanes.
template <int NV>
void step_columns(Token& token, int64_t K, State from, State to, int64_t j, int64_t last, const float* next,
                  int64_t next_stride) {
  constexpr int kLines = NV * kLanes / 16;  // cache lines of a row of this block
  auto read = [&](const float* p, int c) __attribute__((always_inline)) {
    return c + 1 < NV ? load(p + c * kLanes) : load_n(p + c * kLanes, last);
  };
  Columns<NV> s, z;
  for (int c = 0; c < NV; ++c) s.x[c] = z.x[c] = zero();
  for (int64_t i = 0; i < K; ++i) {
    const float* row = from.data + i * from.stride + j;
    const vf k = set1(token.k[i]), q = set1(token.q[i]);
    for (int c = 0; c < NV; ++c) {
      const vf x = read(row, c);
      s.x[c] = fma(x, k, s.x[c]);
      z.x[c] = fma(x, q, z.x[c]);
    }
    if (next)
      for (int line = 0; line < kLines / 2; ++line) prefetch(next + i * next_stride + j + line * 16);
  }
  const vf decay = set1(token.decay), beta = set1(token.beta), scale = set1(token.scale), kq = set1(token.kq);
  Columns<NV> u;
  for (int c = 0; c < NV; ++c) {
    u.x[c] = beta * fnma(decay, s.x[c], read(token.v + j, c));
    const vf o = scale * fma(kq, u.x[c], decay * z.x[c]);
    if (c + 1 < NV) store(token.o + j + c * kLanes, o);
    else store_n(token.o + j + c * kLanes, o, last);
  }
  if (!to.data) return;
  for (int64_t i = K - 1; i >= 0; --i) {
    const float* row = from.data + i * from.stride + j;
    float* out = to.data + i * to.stride + j;
    const vf k = set1(token.k[i]);
    for (int c = 0; c < NV; ++c) {
      const vf x = fma(k, u.x[c], decay * read(row, c));
      if (c + 1 < NV) store(out + c * kLanes, x);
      else store_n(out + c * kLanes, x, last);
    }
    if (next)
      for (int line = kLines / 2; line < kLines; ++line) prefetch(next + i * next_stride + j + line * 16);
  }
}

// A whole token on a V-contiguous state.
void step_v(Token& token, int64_t K, int64_t V, State from, State to, const float* next, int64_t next_stride) {
  int64_t j = 0;
  while (j < V) {
    const int64_t vectors = (V - j + kLanes - 1) / kLanes;
    const int64_t last = V - j - (vectors - 1) * kLanes;  // lanes of the last vector there is
    if (vectors >= kColumns) {
      step_columns<kColumns>(token, K, from, to, j, vectors == kColumns ? last : kLanes, next, next_stride);
      j += kColumns * kLanes;
    } else if (vectors >= 4) {
      step_columns<4>(token, K, from, to, j, vectors == 4 ? last : kLanes, next, next_stride);
      j += 4 * kLanes;
    } else if (vectors >= 2) {
      step_columns<2>(token, K, from, to, j, vectors == 2 ? last : kLanes, next, next_stride);
      j += 2 * kLanes;
    } else {
      step_columns<1>(token, K, from, to, j, last, next, next_stride);
      j += kLanes;
    }
  }
}

// R rows (columns j … of the state) of a K-contiguous state.
template <int R>
void step_rows(Token& token, int64_t K, State from, State to, int64_t j, const float* next, int64_t next_stride) {
  Columns<R> s, z;
  for (int r = 0; r < R; ++r) s.x[r] = z.x[r] = zero();
  const float* row = from.data + j * from.stride;
  for (int64_t i = 0; i < K; i += kLanes) {
    const int64_t part = K - i < kLanes ? K - i : kLanes;
    const vf k = load_n(token.k + i, part), q = load_n(token.q + i, part);
    for (int r = 0; r < R; ++r) {
      const vf x = load_n(row + r * from.stride + i, part);
      s.x[r] = fma(x, k, s.x[r]);
      z.x[r] = fma(x, q, z.x[r]);
    }
  }
  if (next)
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < K; i += 16) prefetch(next + (j + r) * next_stride + i);
  Columns<R> u;
  for (int r = 0; r < R; ++r) {
    const float delta = token.beta * (token.v[j + r] - token.decay * hsum(s.x[r]));
    token.o[j + r] = token.scale * (token.decay * hsum(z.x[r]) + token.kq * delta);
    u.x[r] = set1(delta);
  }
  if (!to.data) return;
  float* out = to.data + j * to.stride;
  const vf decay = set1(token.decay);
  for (int64_t i = 0; i < K; i += kLanes) {
    const int64_t part = K - i < kLanes ? K - i : kLanes;
    const vf k = load_n(token.k + i, part);
    for (int r = 0; r < R; ++r)
      store_n(out + r * to.stride + i, fma(k, u.x[r], decay * load_n(row + r * from.stride + i, part)), part);
  }
}

void step_k(Token& token, int64_t K, int64_t V, State from, State to, const float* next, int64_t next_stride) {
  int64_t j = 0;
  for (; j + kRows <= V; j += kRows) step_rows<kRows>(token, K, from, to, j, next, next_stride);
  for (; j < V; ++j) step_rows<1>(token, K, from, to, j, next, next_stride);
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

void load_scalars(const Args& a, int64_t n, int64_t t, int64_t hv, Token& token) {
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

void load_token(const Job& job, int64_t n, int64_t t, int64_t hv, Token& token) {
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

void store_o(const Job& job, int64_t n, int64_t t, int64_t hv, const Token& token) {
  const thalweg_tensor& o = job.a.o;
  store_row(o, n * o.stride[0] + t * o.stride[1] + hv * o.stride[2], job.p.V, token.o);
}

void step(const Job& job, Token& token, State from, State to, const float* next) {
  if (job.v_contiguous) step_v(token, job.p.K, job.p.V, from, to, next, job.stride);
  else step_k(token, job.p.K, job.p.V, from, to, next, job.stride);
}

// f32 states are read and written where they are. `next` is the state that this thread needs after this.
void run_in_place(const Job& job, int64_t n, int64_t hv, int64_t read, Token& token, float* scratch,
                  const float* next) {
  float* pool = static_cast<float*>(job.a.state.data);
  State from{pool + pool_offset(job, read, hv), job.stride};
  for (int64_t t = 0; t < job.p.T; ++t) {
    load_token(job, n, t, hv, token);
    const int64_t write = write_slot(job, n, t, read);
    State to{nullptr, 0};
    if (write >= 0) to = {pool + pool_offset(job, write, hv), job.stride};
    else if (t + 1 < job.p.T) to = {scratch, round_up(job.inner, 16)};
    step(job, token, from, to, t == 0 ? next : nullptr);
    store_o(job, n, t, hv, token);
    from = to;
  }
}

// States of other dtypes are worked on in scratch.
void run_converted(const Job& job, int64_t n, int64_t hv, int64_t read, Token& token, float* scratch) {
  const thalweg_tensor& pool = job.a.state;
  const State state{scratch, round_up(job.inner, 16)};
  for (int64_t i = 0; i < job.outer; ++i)
    load_row(pool, pool_offset(job, read, hv) + i * job.stride, job.inner, scratch + i * state.stride);
  for (int64_t t = 0; t < job.p.T; ++t) {
    load_token(job, n, t, hv, token);
    step(job, token, state, state, nullptr);
    store_o(job, n, t, hv, token);
    const int64_t write = write_slot(job, n, t, read);
    for (int64_t i = 0; i < job.outer && write >= 0; ++i)
      store_row(pool, pool_offset(job, write, hv) + i * job.stride, job.inner, scratch + i * state.stride);
  }
}

void run_task(void* arg, int64_t task, int64_t slot) {
  const Job& job = *static_cast<Job*>(arg);
  const Problem& p = job.p;
  Token& token = *reinterpret_cast<Token*>(job.slots + slot * job.slot_bytes);
  float* scratch = reinterpret_cast<float*>(&token + 1);
  const int64_t begin = task * job.pairs_per_task;
  const int64_t end = begin + job.pairs_per_task < p.N * p.HV ? begin + job.pairs_per_task : p.N * p.HV;
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t n = pair / p.HV, hv = pair % p.HV, read = read_slot(job, n);
    if (read < 0) {
      for (int64_t j = 0; j < p.V; ++j) token.o[j] = 0;
      for (int64_t t = 0; t < p.T; ++t) store_o(job, n, t, hv, token);
    } else if (job.a.state.dtype == THALWEG_F32) {
      const int64_t next_read = pair + 1 < end ? read_slot(job, (pair + 1) / p.HV) : -1;
      const float* next = nullptr;
      if (next_read >= 0)
        next = static_cast<float*>(job.a.state.data) + pool_offset(job, next_read, (pair + 1) % p.HV);
      run_in_place(job, n, hv, read, token, scratch, next);
    } else {
      run_converted(job, n, hv, read, token, scratch);
    }
  }
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_decode_slot_bytes(const Problem& p) {
  const int64_t by_k = p.K * round_up(p.V, 16), by_v = p.V * round_up(p.K, 16);
  return int64_t(sizeof(Token)) + (by_k > by_v ? by_k : by_v) * 4;
}

void cpu_decode(const Problem& p, const Plan& plan, const Args& a, const Exec& exec) {
  const bool v_contiguous = a.state.stride[3] == 1 || p.V == 1;
  const int64_t pairs = p.N * p.HV, cuts = plan.num_slots * kTasksPerSlot;
  if (pairs == 0 || p.T == 0) return;
  Job job{p,
          a,
          exec.workspace + plan.shared_bytes,
          plan.slot_bytes,
          (pairs + cuts - 1) / cuts,
          v_contiguous,
          v_contiguous ? p.K : p.V,
          v_contiguous ? p.V : p.K,
          a.state.stride[v_contiguous ? 2 : 3]};
  const int64_t tasks = (pairs + job.pairs_per_task - 1) / job.pairs_per_task;
  parallel_tasks(exec, tasks, plan.num_slots, run_task, &job);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::gated_delta_rule
