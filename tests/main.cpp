// Entry of thalweg_tests. Tests that walk the tables of passes and cases are registered here; the rest
// are ordinary TESTs. THALWEG_TESTS_CHILD names a scene to play instead of testing (tests/child.cpp).
#include <cstdlib>

#include "tests/child.h"
#include "tests/support.h"

int main(int argc, char** argv) {
  if (const char* scene = std::getenv("THALWEG_TESTS_CHILD")) return thalweg::tests::play(scene);
  ::testing::InitGoogleTest(&argc, argv);
  thalweg::tests::register_kernel_tests();
  thalweg::tests::register_bind_tests();
#if !THALWEG_SMOKE_ONLY
  thalweg::tests::register_property_tests();
  thalweg::tests::register_stride_tests();
  thalweg::tests::register_gradient_tests();
#endif
  return RUN_ALL_TESTS();
}
