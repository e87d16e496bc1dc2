// Raising errors inside the library, and the border where they become a status.
#ifndef THALWEG_CORE_FAIL_H
#define THALWEG_CORE_FAIL_H

#include <new>
#include <string>

#include "thalweg/core/error.h"

namespace thalweg {

// printf-style; throws Error. Call it only when something is wrong, so that text is built only then.
[[noreturn]] void fail(thalweg_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] void fail_argument(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Keeps `text` as the calling thread's last error and returns `status`.
thalweg_status set_last_error(thalweg_status status, const char* text);

// Runs `body` and turns whatever it throws into a status and the last error's text.
template <class Body>
thalweg_status guard(Body&& body) {
  try {
    body();
    return THALWEG_OK;
  } catch (const Error& e) {
    return set_last_error(e.status, e.what());
  } catch (const std::bad_alloc&) {
    return set_last_error(THALWEG_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return set_last_error(THALWEG_INTERNAL, e.what());
  } catch (...) {
    return set_last_error(THALWEG_INTERNAL, "an exception of unknown type");
  }
}

}  // namespace thalweg
#endif
