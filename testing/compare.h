// Comparison of an output with the oracle, by what its storage can hold.
#ifndef THALWEG_TESTING_COMPARE_H
#define THALWEG_TESTING_COMPARE_H

#include "testing/testing.h"

namespace thalweg::testing {

// compare() for an output stored as `stored`. A wanted value that rounds to infinity there is infinity before
// masks are compared, and rms(want) counts as at least the smallest normal number of `stored`, below which
// storage has no relative precision. compare() itself is this for float64.
Difference compare_stored(const Values& got, const Values& want, thalweg_dtype stored);
// compare_stored() with the dtype that `output` has in the case.
Difference compare_output(const Case& c, const std::string& output, const Values& got, const Values& want);

// A rule on an output stored as `stored`, over the elements that are finite in both.
Judgement judge(const Rule& rule, const Values& got, const Values& want, thalweg_dtype stored);

// How many elements of `want` are numbers in that storage, neither NaN nor infinite: what the ratio is about.
int64_t count_finite(const Values& want, thalweg_dtype stored);

}  // namespace thalweg::testing
#endif
