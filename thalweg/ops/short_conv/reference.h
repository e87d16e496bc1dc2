// Float64 oracle of the short convolution, for tools and tests.
#ifndef THALWEG_OPS_SHORT_CONV_REFERENCE_H
#define THALWEG_OPS_SHORT_CONV_REFERENCE_H

namespace thalweg::short_conv {

// `args` is the pass's args struct, valid for the pass, whose float tensors are all f64 with any strides.
void reference_fwd(const void* args);
void reference_bwd(const void* args);
void reference_decode(const void* args);

}  // namespace thalweg::short_conv
#endif
