// thalweg::Error, what the C++ functions throw. Inline, so that no C++ runtime is shared.
#ifndef THALWEG_CORE_ERROR_H
#define THALWEG_CORE_ERROR_H

#include <stdexcept>

#include "thalweg/core/types.h"

namespace thalweg {

// what() is "<op>.<pass>: <argument>: <what>, got <value>, expected <value> (from <argument>)".
class Error : public std::runtime_error {
 public:
  Error(thalweg_status what_kind, const char* text) : std::runtime_error(text), status(what_kind) {}
  thalweg_status status;
};

inline void throw_on_error(thalweg_status status) {
  if (status != THALWEG_OK) throw Error(status, thalweg_last_error());
}

}  // namespace thalweg
#endif
