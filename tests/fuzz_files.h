// Damaged safetensors files for the tool's reader; a build without the tool has fuzz_files_none.cpp.
#ifndef THALWEG_TESTS_FUZZ_FILES_H
#define THALWEG_TESTS_FUZZ_FILES_H

#include "testing/testing.h"

namespace thalweg::tests {

// Makes a file, damages it, reads it: it is taken with arrays inside the file, or refused with a FileError.
// Prints and returns false otherwise.
bool survive_damaged_file(testing::Random& random);

}  // namespace thalweg::tests
#endif
