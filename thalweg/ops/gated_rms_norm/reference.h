// Float64 oracle of the gated RMS norm, for tools and tests.
#ifndef THALWEG_OPS_GATED_RMS_NORM_REFERENCE_H
#define THALWEG_OPS_GATED_RMS_NORM_REFERENCE_H

namespace thalweg::gated_rms_norm {

// `args` is the pass's args struct, valid for the pass, whose float tensors are all f64 with any strides.
void reference_fwd(const void* args);
void reference_bwd(const void* args);

}  // namespace thalweg::gated_rms_norm
#endif
