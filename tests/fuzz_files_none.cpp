#include "tests/fuzz_files.h"

namespace thalweg::tests {

bool survive_damaged_file(testing::Random&) { return true; }

}  // namespace thalweg::tests
