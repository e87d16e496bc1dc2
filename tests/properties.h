// Cutting whole problems along an axis: what the property tests are made of.
#ifndef THALWEG_TESTS_PROPERTIES_H
#define THALWEG_TESTS_PROPERTIES_H

#include "tests/support.h"

namespace thalweg::tests {

// Cases small enough to run many times, every kernel row that takes them here, forced; on one thread, as
// the thread count changes no bit (properties.thread_counts) and handing over tiny work costs more than it.
void for_each_row(const thalweg_pass& pass, const std::vector<std::string>& sets, double max_flops,
                  const std::function<void(const Case&)>& body);

// Inputs that lie along sequences: [B T ...] or [N T ...], not cu_seqlens or slots.
bool is_per_token(const thalweg_field& field);
// An output that sums over sequences or tokens (gradients of parameters).
bool is_summed(const thalweg_field& field);
bool is_packed(const Case& c);

// The same problem with other inputs; shapes must be those of `c`.
Outputs run_with(const Case& c, const std::map<std::string, Values>& inputs, bool* taken = nullptr);

// Where sequence n lies in a field's tensors: elements [begin, end) of `axis`. False for what all sequences share.
struct Part {
  int axis;
  int64_t begin, end;
};
bool sequence_part(const Problem& problem, const thalweg_field& field, int64_t n, Part* part);
// Sequence n of a packed problem as a problem of its own (B = N = 1), and its inputs.
Case sequence_case(const Problem& packed, int64_t n);
std::map<std::string, Values> sequence_inputs(const Problem& packed, int64_t n);

}  // namespace thalweg::tests
#endif
