// What the tests of the Ascend path need of tools that a machine may lack.
#ifndef THALWEG_TESTS_ASCEND_TOOLS_H
#define THALWEG_TESTS_ASCEND_TOOLS_H

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

// Why a test cannot run, or "" when it can: if (std::string why = missing(...); !why.empty()) GTEST_SKIP() << why;
// With THALWEG_ASCEND_REQUIRED=1 (set where the tools were installed for the tests) what is missing is a failure.
inline std::string missing(bool is_there, const std::string& reason) {
  if (is_there) return "";
  const char* required = std::getenv("THALWEG_ASCEND_REQUIRED");
  if (required && std::string(required) == "1") ADD_FAILURE() << "THALWEG_ASCEND_REQUIRED=1, and " << reason;
  return reason;
}

#endif
