// Error texts: formatted only on failure, kept in a fixed buffer of the calling thread.
#include "thalweg/core/fail.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace thalweg {
namespace {

constexpr size_t kTextBytes = 4096;
thread_local char last_error[kTextBytes] = "";

[[noreturn]] void throw_formatted(thalweg_status status, const char* format, va_list values) {
  char text[kTextBytes];
  std::vsnprintf(text, sizeof text, format, values);
  throw Error(status, text);
}

}  // namespace

void fail(thalweg_status status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  throw_formatted(status, format, values);
}

void fail_argument(const char* format, ...) {
  va_list values;
  va_start(values, format);
  throw_formatted(THALWEG_INVALID_ARGUMENT, format, values);
}

thalweg_status set_last_error(thalweg_status status, const char* text) {
  std::snprintf(last_error, sizeof last_error, "%s", text);
  return status;
}

}  // namespace thalweg

const char* thalweg_last_error(void) { return thalweg::last_error; }
