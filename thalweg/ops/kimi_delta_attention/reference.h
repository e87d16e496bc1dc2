// Float64 oracles of Kimi delta attention, for tools and tests: token by token from the mathematics. `args` is the
// pass's args struct, valid for the pass, whose float tensors are all f64 with any strides. A checkpoint of an
// empty sequence (chunk_states) is its initial state. The gradient of a gate of minus infinity is 0.
#ifndef THALWEG_OPS_KIMI_DELTA_ATTENTION_REFERENCE_H
#define THALWEG_OPS_KIMI_DELTA_ATTENTION_REFERENCE_H

namespace thalweg::kimi_delta_attention {

void reference_fwd(const void* args);
void reference_bwd(const void* args);
void reference_decode(const void* args);

}  // namespace thalweg::kimi_delta_attention
#endif
