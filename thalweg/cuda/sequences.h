// Sequences of queries beside sequences of keys, as the attention operators have them: rows of a batch, or packed by
// cu_seqlens and cu_seqlens_k, both cut by q_lens and k_lens. Plain C++; sequences.cuh fills and reads the table.
#ifndef THALWEG_CUDA_SEQUENCES_H
#define THALWEG_CUDA_SEQUENCES_H

#include <stdint.h>

#include "thalweg/cuda/workspace.h"

namespace thalweg::cuda {

// Queries [q_begin, q_begin + q_len) see keys of [k_begin, k_begin + k_len); the rows up to q_begin + q_room and
// k_begin + k_room belong to the sequence too, and no one uses them. An invalid one has lengths of 0.
struct Pair {
  int64_t q_begin, q_len, q_room, k_begin, k_len, k_room;
  int32_t valid;        // 0: its borders or lengths are wrong; its rows get NaN
  bool q_ends, k_ends;  // false: the border behind it is wrong; rows behind the last sequence then get NaN too
};

struct Sequences {
  Pair* pairs;  // [N], on the device
  char* spans;  // room for check_borders, of queries and of keys
  int64_t N, T, S;
  bool packed;
};

// The table's place in a workspace.
inline Sequences lay_out_sequences(int64_t N, int64_t T, int64_t S, bool packed, Cutter* memory) {
  constexpr int64_t kSpanBytes = 24;
  Sequences s{memory->take<Pair>(N), nullptr, N, T, S, packed};
  if (packed) s.spans = memory->take<char>(2 * ((N * kSpanBytes + 63) / 64 * 64));
  return s;
}

// Tiles of `rows` tokens that cover the sequences, from sizes alone: some of a packed batch are empty.
inline int64_t num_tiles(const Sequences& s, int64_t tokens, int64_t rows) {
  if (s.N == 0) return 0;
  return s.packed ? tokens / rows + s.N : s.N * ((tokens + rows - 1) / rows);
}

}  // namespace thalweg::cuda
#endif
