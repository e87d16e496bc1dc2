// Verifies the smoke set on every kernel row, a line each. What builds of a single operator and sanitizer
// builds run first: it needs no test framework.
#include <cstdio>

#include "testing/testing.h"

int main() {
  int failed = 0;
  for (const thalweg::testing::Case& c : thalweg::testing::find_cases("@smoke"))
    for (const thalweg::testing::Verdict& verdict : thalweg::testing::verify_all_kernels(c)) {
      std::printf("%-7s %s%s%s\n", verdict.status.c_str(), verdict.case_text.c_str(), verdict.reason.empty() ? "" : ": ",
                  verdict.reason.c_str());
      failed += verdict.status == "failed";
    }
  std::printf("%d failed\n", failed);
  return failed != 0;
}
