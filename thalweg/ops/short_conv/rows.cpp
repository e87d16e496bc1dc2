// What the rows of short_conv share, compiled once: spans, staging of weights and states, the outputs
// that are copies or sums.
#include <algorithm>

#include "thalweg/core/signature.h"
#include "thalweg/cpu/rows.h"
#include "thalweg/ops/short_conv/problem.h"

namespace thalweg::short_conv {
namespace {

constexpr int64_t kChannels = 256;  // of a task here

template <class A>
void load_weight_rows(const thalweg_tensor& weight, const thalweg_tensor& bias, int64_t d0, int64_t count,
                      int64_t pitch, A* out) {
  const int64_t W = weight.shape[1];
  for (int64_t j = 0; j < W; ++j)
    load_row(weight, d0 * weight.stride[0] + j * weight.stride[1], weight.stride[0], count, out + j * pitch);
  if (present(bias))
    load_row(bias, d0 * bias.stride[0], bias.stride[0], count, out + W * pitch);
  else
    std::fill_n(out + W * pitch, count, A(0));
}

template <class A>
void load_state_rows(const thalweg_tensor& state, int64_t W, int64_t n, int64_t d0, int64_t count, int64_t pitch,
                     A* out) {
  for (int64_t j = 0; j < W; ++j) {
    if (!present(state))
      std::fill_n(out + j * pitch, count, A(0));
    else
      load_row(state, n * state.stride[0] + d0 * state.stride[1] + j * state.stride[2], state.stride[1], count,
               out + j * pitch);
  }
}

template <class A>
void store_slot_row(const A* row, const thalweg_tensor& state, int64_t n, int64_t slot, int64_t d0, int64_t count) {
  store_row(state, n * state.stride[0] + d0 * state.stride[1] + slot * state.stride[2], state.stride[1], count, row);
}

template <class A>
void store_state_rows(const A* rows, int64_t pitch, const thalweg_tensor& state, int64_t n, int64_t d0, int64_t count) {
  for (int64_t j = 0; j < state.shape[2]; ++j) store_slot_row(rows + j * pitch, state, n, j, d0, count);
}

struct FinalStates {
  const Problem& problem;
  const thalweg_short_conv_fwd_args& args;
  int64_t num_strips;
};

void final_state_task(void* arg, int64_t i, int64_t) {
  const auto& all = *static_cast<const FinalStates*>(arg);
  const Problem& p = all.problem;
  const auto& args = all.args;
  const int64_t n = i / all.num_strips, d0 = i % all.num_strips * kChannels, count = std::min(kChannels, p.D - d0);
  const Span span = sequence_span(p, args.cu_seqlens, n);
  double row[kChannels];
  for (int64_t j = 0; j < p.W; ++j) {
    const int64_t r = span.end - p.W + j, slot = j + (span.end - span.begin);
    if (r >= span.begin)
      load_row(args.x, token_offset(args.x, p.T, r) + d0, 1, count, row);
    else if (present(args.initial_state))
      load_row(
          args.initial_state,
          n * args.initial_state.stride[0] + d0 * args.initial_state.stride[1] + slot * args.initial_state.stride[2],
          args.initial_state.stride[1], count, row);
    else
      std::fill_n(row, count, 0.0);
    store_slot_row(row, args.final_state, n, j, d0, count);
  }
}

template <class A>
struct Partials {
  const Problem& problem;
  const thalweg_short_conv_bwd_args& args;
  const A* partials;  // [num_blocks][W + 1][D]
  int64_t num_blocks;
  int64_t num_strips;
};

template <class A>
void partials_task(void* arg, int64_t i, int64_t) {
  const auto& all = *static_cast<const Partials<A>*>(arg);
  const auto& args = all.args;
  const int64_t D = all.problem.D, W = all.problem.W;
  const int64_t j = i / all.num_strips, d0 = i % all.num_strips * kChannels, count = std::min(kChannels, D - d0);
  const thalweg_tensor& out = j < W ? args.d_weight : args.d_bias;
  if (!present(out)) return;
  double sum[kChannels] = {};
  for (int64_t block = 0; block < all.num_blocks; ++block) {
    const A* part = all.partials + (block * (W + 1) + j) * D + d0;
    for (int64_t c = 0; c < count; ++c) sum[c] += double(part[c]);
  }
  store_row(out, d0 * out.stride[0] + (j < W ? j * out.stride[1] : 0), out.stride[0], count, sum);
}

template <class A>
void sum_all(const Problem& problem, const thalweg_short_conv_bwd_args& args, const A* partials, int64_t num_blocks,
             const Exec& exec) {
  if (!present(args.d_weight) && !present(args.d_bias)) return;
  Partials<A> all{problem, args, partials, num_blocks, (problem.D + kChannels - 1) / kChannels};
  parallel_tasks(exec, (problem.W + 1) * all.num_strips, exec.num_threads, partials_task<A>, &all);
}

}  // namespace

Span sequence_span(const Problem& problem, const thalweg_tensor& cu_seqlens, int64_t n) {
  if (!problem.packed) return {n, n * problem.T, (n + 1) * problem.T};
  return {n, int_at(cu_seqlens, n), int_at(cu_seqlens, n + 1)};
}

Span span_at(const Problem& problem, const thalweg_tensor& cu_seqlens, int64_t row) {
  if (!problem.packed) return sequence_span(problem, cu_seqlens, row / problem.T);
  int64_t low = 0, high = problem.N;  // the first n that ends past row is in [low, high]
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (int_at(cu_seqlens, middle + 1) > row)
      high = middle;
    else
      low = middle + 1;
  }
  if (low == problem.N) return {-1, int_at(cu_seqlens, problem.N), problem.T};
  return sequence_span(problem, cu_seqlens, low);
}

int64_t backward_block(const Problem& problem) {
  const int64_t tokens = problem.B * problem.T, least = 256;
  return tokens <= 64 * least ? least : (tokens + 63) / 64;
}

void load_weight(const thalweg_tensor& weight, const thalweg_tensor& bias, int64_t d0, int64_t count, int64_t pitch,
                 float* out) {
  load_weight_rows(weight, bias, d0, count, pitch, out);
}
void load_weight(const thalweg_tensor& weight, const thalweg_tensor& bias, int64_t d0, int64_t count, int64_t pitch,
                 double* out) {
  load_weight_rows(weight, bias, d0, count, pitch, out);
}
void load_state(const thalweg_tensor& state, int64_t W, int64_t n, int64_t d0, int64_t count, int64_t pitch,
                float* out) {
  load_state_rows(state, W, n, d0, count, pitch, out);
}
void load_state(const thalweg_tensor& state, int64_t W, int64_t n, int64_t d0, int64_t count, int64_t pitch,
                double* out) {
  load_state_rows(state, W, n, d0, count, pitch, out);
}
void load_history(const Problem& problem, const thalweg_tensor& x, const thalweg_tensor& initial_state,
                  const Span& span, int64_t first, int64_t d0, int64_t count, int64_t pitch, float* out) {
  const thalweg_tensor& state = initial_state;
  for (int64_t j = 0; j < problem.W; ++j) {
    const int64_t r = first - problem.W + j;
    float* row = out + j * pitch;
    if (r >= span.begin)
      load_row(x, token_offset(x, problem.T, r) + d0, 1, count, row);
    else if (present(state))
      load_row(state, span.n * state.stride[0] + d0 * state.stride[1] + (problem.W + r - span.begin) * state.stride[2],
               state.stride[1], count, row);
    else
      std::fill_n(row, count, 0.f);
  }
}
void store_state(const float* rows, int64_t pitch, const thalweg_tensor& state, int64_t n, int64_t d0, int64_t count) {
  store_state_rows(rows, pitch, state, n, d0, count);
}
void store_state(const double* rows, int64_t pitch, const thalweg_tensor& state, int64_t n, int64_t d0, int64_t count) {
  store_state_rows(rows, pitch, state, n, d0, count);
}
void store_slot(const float* row, const thalweg_tensor& state, int64_t n, int64_t slot, int64_t d0, int64_t count) {
  store_slot_row(row, state, n, slot, d0, count);
}
void store_slot(const double* row, const thalweg_tensor& state, int64_t n, int64_t slot, int64_t d0, int64_t count) {
  store_slot_row(row, state, n, slot, d0, count);
}

void write_final_states(const Problem& problem, const thalweg_short_conv_fwd_args& args, const Exec& exec) {
  if (!present(args.final_state)) return;
  FinalStates all{problem, args, (problem.D + kChannels - 1) / kChannels};
  parallel_tasks(exec, problem.N * all.num_strips, exec.num_threads, final_state_task, &all);
}

void write_empty_sequences(const Problem& problem, const thalweg_short_conv_bwd_args& args) {
  if (!present(args.d_initial_state)) return;
  double rows[kMaxW * kChannels];
  for (int64_t n = 0; n < problem.N; ++n) {
    const Span span = sequence_span(problem, args.cu_seqlens, n);
    if (span.begin != span.end) continue;
    for (int64_t d0 = 0; d0 < problem.D; d0 += kChannels) {
      const int64_t count = std::min(kChannels, problem.D - d0);
      load_state(args.d_final_state, problem.W, n, d0, count, kChannels, rows);
      store_state(rows, kChannels, args.d_initial_state, n, d0, count);
    }
  }
}

void sum_partials(const Problem& problem, const thalweg_short_conv_bwd_args& args, const float* partials,
                  int64_t num_blocks, const Exec& exec) {
  sum_all(problem, args, partials, num_blocks, exec);
}
void sum_partials(const Problem& problem, const thalweg_short_conv_bwd_args& args, const double* partials,
                  int64_t num_blocks, const Exec& exec) {
  sum_all(problem, args, partials, num_blocks, exec);
}

}  // namespace thalweg::short_conv
