// Using a trained model: the bits it needs for a text, text of its own, and whether both passes agree.
#ifndef LANGUAGE_MODEL_DECODE_H
#define LANGUAGE_MODEL_DECODE_H

#include "data.h"
#include "model.h"

namespace language_model {

// Bits per byte of `text` from its first byte on (which is predicted from a line end). The text is read in
// overlapping windows, so that every byte but the first ones has at least 512 bytes before it. (Carrying the
// states through the whole text instead needed the same bits within 0.005 where it was tried.)
double bits_per_byte(Model&, Threads&, const Bytes& text);

// `count` bytes that follow `prompt`, byte by byte through the decode passes. Temperature 0 takes the
// likeliest byte.
std::string generate(Model&, const std::string& prompt, int64_t count, double temperature, uint64_t seed);

// The largest difference between logits of `text` from the chunked pass and from the decode pass.
double decode_difference(Model&, const Bytes& text);

}  // namespace language_model
#endif
