// Float64 oracle of the KDA gate, for tools and tests.
#ifndef THALWEG_OPS_KDA_GATE_REFERENCE_H
#define THALWEG_OPS_KDA_GATE_REFERENCE_H

namespace thalweg::kda_gate {

// `args` is the pass's args struct, valid for the pass, whose float tensors are all f64 with any strides.
void reference_fwd(const void* args);
void reference_bwd(const void* args);

}  // namespace thalweg::kda_gate
#endif
