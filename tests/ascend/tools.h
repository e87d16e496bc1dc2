// What the tests of the Ascend path need of tools that a machine may lack.
#ifndef THALWEG_TESTS_ASCEND_TOOLS_H
#define THALWEG_TESTS_ASCEND_TOOLS_H

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

// THALWEG_ASCEND_REQUIRED=1 (set where the tools were installed for the tests): a missing tool is a failure.
inline bool ascend_tools_required() {
  const char* value = std::getenv("THALWEG_ASCEND_REQUIRED");
  return value && std::string(value) == "1";
}

// In a test body: skips by name with the reason, or fails where tools are required.
#define THALWEG_NEEDS_TOOL(available, reason)                   \
  if (!(available)) {                                           \
    if (ascend_tools_required()) FAIL() << "a tool is missing where THALWEG_ASCEND_REQUIRED=1: " << (reason); \
    GTEST_SKIP() << (reason);                                   \
  }                                                             \
  static_assert(true)

#endif
