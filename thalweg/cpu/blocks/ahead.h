// Fetches the tokens that are worked on next while others are, for files compiled per instruction set.
//
// In [B T H K] storage a row of a token is on a page of its own, and page walks overlap only when they are close
// together: touch() asks for one line of each page of a few tokens of the next block at once, for all heads of the
// task. The rows themselves follow, those of the head that comes next, one row at a time between products
// (fetch_row).
#ifndef THALWEG_CPU_BLOCKS_AHEAD_H
#define THALWEG_CPU_BLOCKS_AHEAD_H

#include "thalweg/cpu/simd.h"

namespace thalweg {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kBurst = 16;   // tokens
constexpr int kMaxRows = 5;      // tensors

// Rows of one tensor, from the block's first token and the first head on.
struct Rows {
  const char* at;
  int64_t stride, head_stride;  // bytes from token to token, from head to head
  int64_t heads, bytes;         // of a token; of a row
};

struct Touch {
  Rows rows[kMaxRows];
  int64_t tensors;             // of `rows`
  int64_t tokens, touched;     // of the next block; asked for so far
  int64_t bursts, steps, due;  // of kBurst tokens, spread over `steps` calls
};

struct Fetch {
  Rows rows[kMaxRows];
  int64_t tensors;
  int64_t token, tensor, head;  // the next row
  int64_t count, steps, due;    // `count` rows are spread over `steps` calls
  int64_t limit;                // tokens that have been touched
};

struct Ahead {
  Touch touch;
  Fetch fetch;
  bool next_block;  // fetch is of the block that touch walks
};

[[gnu::noinline]] void touch_tokens(Touch* f, int64_t end) {
  for (; f->touched < end; ++f->touched)
    for (int64_t j = 0; j < f->tensors; ++j) {
      const Rows& rows = f->rows[j];
      const char* p = rows.at + f->touched * rows.stride;
      uintptr_t page = 0;
      for (int64_t i = 0; i < rows.heads; ++i, p += rows.head_stride) {
        uintptr_t here = reinterpret_cast<uintptr_t>(p) / kPageBytes;
        if (here != page) prefetch(p);
        page = here;
      }
    }
}

[[gnu::always_inline]] inline void touch(Ahead* ahead) {
  Touch* f = &ahead->touch;
  for (f->due += f->bursts; f->due >= f->steps; f->due -= f->steps)
    touch_tokens(f, f->tokens - f->touched < kBurst ? f->tokens : f->touched + kBurst);
  if (ahead->next_block) ahead->fetch.limit = f->touched;
}

[[gnu::always_inline]] inline void fetch_row(Fetch* f) {
  for (f->due += f->count; f->due >= f->steps; f->due -= f->steps) {
    if (f->token >= f->limit) return;
    const Rows& rows = f->rows[f->tensor];
    const char* p = rows.at + f->token * rows.stride + f->head * rows.head_stride;
    for (int64_t i = 0; i < rows.bytes; i += 64) prefetch(p + i);
    if (++f->head < rows.heads) continue;
    f->head = 0;
    if (++f->tensor == f->tensors) f->tensor = 0, ++f->token;
  }
}

}  // namespace
}  // namespace thalweg
#endif
