#include "decode.h"

#include <algorithm>
#include <cmath>

#include "random.h"

namespace language_model {
namespace {

constexpr size_t kWindow = 2048, kOverlap = 512;  // bytes of a text that are read at once, and of them again

// What comes before a text's first byte.
constexpr uint8_t kStart = '\n';

uint8_t sample(const float* logits, double temperature, Random& random) {
  const float* likeliest = std::max_element(logits, logits + kBytes);
  if (temperature <= 0) return uint8_t(likeliest - logits);
  double weights[kBytes], sum = 0;
  for (int64_t c = 0; c < kBytes; ++c) sum += weights[c] = std::exp(double(logits[c] - *likeliest) / temperature);
  double rest = random.uniform() * sum;
  for (int64_t c = 0; c < kBytes; ++c)
    if ((rest -= weights[c]) < 0) return uint8_t(c);
  return uint8_t(likeliest - logits);
}

}  // namespace

double bits_per_byte(Model& model, Threads& threads, const Bytes& text) {
  Bytes inputs(text.size(), kStart);
  std::copy(text.begin(), text.end() - 1, inputs.begin() + 1);
  double nats = 0;
  for (size_t counted = 0; counted < text.size();) {
    size_t begin = counted - std::min(counted, kOverlap), end = std::min(begin + kWindow, text.size());
    const auto& logits = model.forward(Pass::kChunked, 1, int64_t(end - begin), inputs.data() + begin, nullptr);
    nats += cross_entropy(threads, int64_t(end - counted), logits.data() + (counted - begin) * size_t(kBytes),
                          text.data() + counted, nullptr);
    counted = end;
  }
  return nats / std::log(2.0) / double(text.size());
}

std::string generate(Model& model, const std::string& prompt, int64_t count, double temperature, uint64_t seed) {
  States states = fresh_states(model.config());
  std::string text = std::string(1, char(kStart)) + prompt;
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  int64_t T = int64_t(text.size());
  const float* next = model.forward(Pass::kChunked, 1, T, bytes, &states).data() + (T - 1) * kBytes;
  Random random(key_of({seed, 0x9e4e}));
  std::string out;
  while (int64_t(out.size()) < count) {
    uint8_t byte = sample(next, temperature, random);
    out += char(byte);
    next = model.forward(Pass::kDecode, 1, 1, &byte, &states).data();
  }
  return out;
}

double decode_difference(Model& model, const Bytes& text) {
  std::vector<float> chunked = model.forward(Pass::kChunked, 1, int64_t(text.size()), text.data(), nullptr);
  States states = fresh_states(model.config());
  double largest = 0;
  for (size_t t = 0; t < text.size(); ++t) {
    const auto& decoded = model.forward(Pass::kDecode, 1, 1, &text[t], &states);
    for (size_t c = 0; c < size_t(kBytes); ++c) {
      double difference = std::abs(double(decoded[c]) - double(chunked[t * size_t(kBytes) + c]));
      if (!(difference <= largest)) largest = difference;  // NaN counts
    }
  }
  return largest;
}

}  // namespace language_model
