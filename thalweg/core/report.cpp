// Words for what kernels found in device tensors.
#include "thalweg/core/report.h"

#include "thalweg/core/kernel.h"

namespace thalweg {
namespace {

const thalweg_field* field_at(const thalweg_pass& pass, int64_t offset) {
  for (int64_t i = 0; i < pass.num_fields; ++i)
    if (pass.fields[i].offset == offset) return &pass.fields[i];
  return nullptr;
}

const char* expectation(Fault fault) {
  switch (fault) {
    case Fault::kBorder: return "borders from 0, never falling, up to the number of tokens";
    case Fault::kSlot: return "-1 or a slot of the pool";
    case Fault::kSlotTwice: return "a slot that no other sequence uses";
    case Fault::kIndex: return "-1 or the index of a key";
    case Fault::kLength: return "0 to the tokens of the sequence";
    default: return "another value";
  }
}

}  // namespace
}  // namespace thalweg

extern "C" thalweg_status thalweg_report_text(const thalweg_pass* pass, const int32_t report[4], char* text,
                                              size_t capacity) {
  using namespace thalweg;
  return guard([&] {
    if (!pass || !report) fail_argument("thalweg_report_text: got a null pointer, expected a pass and a report");
    std::string words;
    if (report[0] != int32_t(Fault::kNone)) {
      const thalweg_field* field = field_at(*pass, report[1]);
      words = std::string(pass->op) + "." + pass->name + ": " + (field ? field->name : "an argument") + ": element " +
              std::to_string(report[2]) + ", got " + std::to_string(report[3]) + ", expected " +
              expectation(Fault(report[0]));
    }
    copy_text(words, text, capacity);
  });
}
