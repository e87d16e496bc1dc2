// Pieces of cpu_chunk_bwd.cpp: channel rows, and the gate with its gradients.
#ifndef THALWEG_OPS_KIMI_DELTA_ATTENTION_CPU_CHUNK_BWD_IO_H
#define THALWEG_OPS_KIMI_DELTA_ATTENTION_CPU_CHUNK_BWD_IO_H

#include "thalweg/cpu/blocks/channel_gate.h"
#include "thalweg/cpu/blocks/chunk_bwd_io.h"
#include "thalweg/ops/kimi_delta_attention/problem.h"

namespace thalweg::kimi_delta_attention {
namespace {

using Args = thalweg_kimi_delta_attention_bwd_args;

// What has a number for every token and key channel lies in blocks of 16 channels, [Kp/16][C][16]: a token's 16
// are one cache line, and a block is 1 KiB.
constexpr int kBV = int(kRows / kLanes);
inline int64_t blocked(int64_t row, int64_t at, int64_t) { return (at / kRows * kC + row) * kRows + at % kRows; }

// ---- rows of a gate: any dtype, any strides ---------------------------------------------------------

struct GateRows {
  Tokens tokens;
  int64_t channel_step;
  bool is_plain() const { return channel_step == 1 && tokens.dtype != THALWEG_F64; }
};
inline GateRows gate_rows(const Tokens& tokens, const thalweg_tensor& t) {
  return {tokens, is_there(t) ? t.stride[3] : 1};
}
inline char* gate_row(const GateRows& rows, int64_t i) {
  return rows.tokens.data + i * rows.tokens.step * element_bytes(rows.tokens.dtype);
}

// `count` rows of n into blocks; the rest is 0. line: [width] scratch.
inline void load_gate_rows(const GateRows& from, int64_t count, int64_t n, int64_t width, float* to, float* line) {
  if (!from.tokens.data || from.is_plain()) return load_rows<blocked>(from.tokens, count, n, width, to);
  memset(to, 0, size_t(kC * width) * sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    read_strided(from.tokens.dtype, gate_row(from, i), from.channel_step, n, line);
    for (int64_t at = 0; at < n; ++at) to[blocked(i, at, width)] = line[at];
  }
}
inline void store_gate_rows(const GateRows& to, int64_t count, int64_t n, int64_t width, const float* from,
                            float* line) {
  if (to.is_plain()) return store_rows<blocked>(to.tokens, count, n, width, from);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t at = 0; at < n; ++at) line[at] = from[blocked(i, at, width)];
    write_strided(to.tokens.dtype, gate_row(to, i), to.channel_step, n, line);
  }
}

// Rows [begin, end) of d_g: zeros, for tokens that belong to no sequence. line: [width] scratch.
inline void zero_gate_rows(const thalweg_tensor& t, int64_t T, int64_t begin, int64_t end, int64_t head, int64_t n,
                           float* line) {
  if (!is_there(t)) return;
  memset(line, 0, size_t(n) * sizeof(float));
  for (int64_t row = begin; row < end; ++row)
    write_strided(t.dtype, tokens_at(t, T, row, head).data, t.stride[3], n, line);
}

// ---- the fused gate ---------------------------------------------------------------------------------

inline ChannelGate head_gate(const Args& a, int64_t hv) {
  const bool has_A_log = a.use_gate && is_there(a.A_log);
  return channel_gate(has_A_log, has_A_log ? load_element(a.A_log, hv) : 0.f, float(a.lower_bound));
}

// dt_bias of a value head, [width], 0 where there is none.
inline void load_bias(const Args& a, int64_t hv, int64_t n, int64_t width, float* to) {
  memset(to, 0, size_t(width) * sizeof(float));
  if (!a.use_gate || !is_there(a.dt_bias)) return;
  read_strided(a.dt_bias.dtype, element_at(a.dt_bias, hv), a.dt_bias.stride[1], n, to);
}

// g, blocks: raw gates become gates; tokens past `count` keep 0.
inline void apply_gate(const ChannelGate& gate, const float* bias, int64_t count, int64_t width, float* g) {
  for (int64_t k = 0; k < width; k += kRows)
    for (int64_t at = 0; at < count * kRows; at += kLanes) {
      float* to = g + k * kC + at;
      store(to, gate_of(gate, load(to) + load(bias + k + at % kRows)));
    }
}

// d_g, blocks: from gradients of gates to those of raw gates. Adds to d_bias [width] and to *d_A_log, whose terms
// cancel: float32 adds up kRows of them, float64 the rest.
inline void gate_gradients(const ChannelGate& gate, const float* bias, const float* raw, int64_t count, int64_t width,
                           float* d_g, double* d_bias, double* d_A_log) {
  alignas(64) float columns[kRows];
  for (int64_t k = 0; k < width; k += kRows) {
    vf column[kBV];
    for (int v = 0; v < kBV; ++v) column[v] = zero();
    for (int64_t i = 0; i < count; ++i) {
      vf A_log = zero();
      for (int v = 0; v < kBV; ++v) {
        const int64_t at = k * kC + i * kRows + v * kLanes;
        const GateSlopes slopes = gate_slopes(gate, load(raw + at) + load(bias + k + v * kLanes));
        const vf d = load(d_g + at), d_raw = d * slopes.x * slopes.x_factor;
        A_log = A_log + d * slopes.A_log * slopes.A_log_factor;
        column[v] = column[v] + d_raw;
        store(d_g + at, d_raw);
      }
      *d_A_log += double(hsum(A_log));
    }
    for (int v = 0; v < kBV; ++v) store(columns + v * kLanes, column[v]);
    for (int64_t i = 0; i < kRows; ++i) d_bias[k + i] += double(columns[i]);
  }
}

}  // namespace
}  // namespace thalweg::kimi_delta_attention
#endif
