// Checks the hand-written backward pass of the whole model against finite differences.
#ifndef LANGUAGE_MODEL_GRADIENT_CHECK_H
#define LANGUAGE_MODEL_GRADIENT_CHECK_H

#include "mixer.h"

namespace language_model {

// Prints a line a parameter; true when every one agrees.
bool check_gradients(Threads&, Mixer, uint64_t seed);

}  // namespace language_model
#endif
