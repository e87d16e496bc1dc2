// What general compressors need for the held-out text: the numbers to compare with.
#ifndef LANGUAGE_MODEL_COMPRESSORS_H
#define LANGUAGE_MODEL_COMPRESSORS_H

#include "data.h"

namespace language_model {

// Bits per byte of `text` in gzip's format, zlib's level 9.
double gzip_bits_per_byte(const Bytes& text);
// Bits per byte that `text` adds to an xz -9 file when `before` stands in front of it.
double xz_bits_per_byte(const Bytes& text, const Bytes& before);

}  // namespace language_model
#endif
