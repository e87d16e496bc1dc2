// What the build generates from the operators' folders (testing/CMakeLists.txt).
#ifndef THALWEG_TESTING_TABLES_H
#define THALWEG_TESTING_TABLES_H

#include <vector>

#include "testing/testing.h"

namespace thalweg::testing {

struct CaseFile {
  const char* op;
  const char* text;  // of thalweg/ops/<op>/cases.txt
};
const std::vector<CaseFile>& case_files();
const std::vector<const Spec*>& specs();

}  // namespace thalweg::testing
#endif
