// thalweg_ascend_tests: tests of the planner, the generator and, where they are installed, of what the compiler and
// MLIR's tools make of the texts. --record writes what the compiler says of every case of grid.txt; --judge compares the
// planner with it anew; --execute runs those texts on the host that bench/results/ascend/host.jsonl has not.
#include <gtest/gtest.h>

#include <string_view>

namespace thalweg::ascend::tests {
int write_record(bool again);
int write_host_record();
}

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--record") return thalweg::ascend::tests::write_record(false);
  if (argc == 2 && std::string_view(argv[1]) == "--judge") return thalweg::ascend::tests::write_record(true);
  if (argc == 2 && std::string_view(argv[1]) == "--execute") return thalweg::ascend::tests::write_host_record();
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  const bool all_skipped = tests.skipped_test_count() > 0 && tests.skipped_test_count() == tests.test_to_run_count();
  return result == 0 && all_skipped ? 77 : result;  // ctest's SKIP_RETURN_CODE
}
