// Reads what the compiler says: the dump of the last representation (HIVM) and the memory files beside it.
#ifndef THALWEG_ASCEND_HIVM_H
#define THALWEG_ASCEND_HIVM_H

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace thalweg::ascend {

// A transfer between device memory and a core, in text order.
struct Transfer {
  std::string op;  // load, store, nd2nz, fixpipe
  bool out = false;
  // Longest contiguous run of the operand in device memory: bursts of equal length. -1: a stride is not known.
  int64_t bursts = 0, bytes = 0;
  int64_t times = 1;      // trip count of the loops around it that are constant
  bool per_pass = false;  // and one loop around it whose length is data
};

// One function of the dump: a vector kernel, or one half of a mixed one.
struct Function {
  std::string name;
  bool cube = false;  // NAME_mix_aic
  std::vector<Transfer> transfers;
  int64_t vector_ops = 0;     // v... operations, in the text
  int64_t products = 0;       // mmadL1, in the text
  int64_t scalar_loops = 0;   // loops that hold scalar loads or stores themselves
  int64_t scalar_accesses = 0;  // such loads and stores inside any loop
  std::map<std::string, int64_t> placed;  // by space (ub, cbuf, cc): the end of its last tile

  struct Sum {
    int64_t bursts = 0, bytes = 0;
  };
  Sum sum(bool out) const;  // one turn of each loop whose length is data
};

struct Dump {
  std::vector<Function> functions;
  int64_t workspace = 0;  // bytes of one block
  const Function* find(bool cube) const;
};

// `rows` is what an unknown leading dimension counts as (the interior of a sequence). std::runtime_error names the line
// and what was expected there.
Dump parse_dump(std::string_view text, int64_t rows);

// The largest sum of tiles alive at once, by space, of one memory_info_*.json. std::runtime_error when it is not one.
std::map<std::string, int64_t> parse_memory(std::string_view json);

}  // namespace thalweg::ascend
#endif
