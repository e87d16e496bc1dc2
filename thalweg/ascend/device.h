// Ascend devices as the public compiler's own table has them (docs/ascend.md). Sizes in bytes.
#ifndef THALWEG_ASCEND_DEVICE_H
#define THALWEG_ASCEND_DEVICE_H

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace thalweg::ascend {

// AIC is a cube core (matrix products), AIV a vector core; each AIC has two AIV beside it.
struct Target {
  const char* name;    // as the compiler spells it: "Ascend910B3"
  int32_t aic, aiv;    // cores
  int64_t ub;          // unified buffer, of one AIV
  int64_t l1;          // of one AIC, as are the following
  int64_t l0a, l0b, l0c;
  bool a5;             // dav-c310: another tool, bishengir-opt-a5, and most needs are not predicted
};

// Tiles start at multiples of these (L0C: of kAlignL0c).
inline constexpr int64_t kAlign = 32, kAlignL0c = 512;
// The largest product of a launch's grid dimensions.
inline constexpr int64_t kMaxGrid = 65535;

const std::vector<Target>& targets();
// By name, in any case; null when there is none.
const Target* find_target(std::string_view name);
std::string target_names();  // "Ascend910B1 Ascend910B2 ...", for error texts

}  // namespace thalweg::ascend
#endif
