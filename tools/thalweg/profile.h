// What `thalweg profile` does with a case on a GPU.
#ifndef THALWEG_TOOLS_PROFILE_H
#define THALWEG_TOOLS_PROFILE_H

#include "testing/testing.h"

namespace thalweg::tool {

// Runs this program's loop_on_device() under Nsight Compute and prints a table of its kernels. Throws UsageError.
void profile_on_device(const testing::Case& c, bool warm);
// Two calls, in the process that Nsight Compute watches.
int loop_on_device(const testing::Case& c, bool warm);

}  // namespace thalweg::tool
#endif
