#pragma once

#include <cstdint>
#include <cstring>

#include "moe/cpu/scratch.h"

namespace moe {
namespace MOE_ISA {
namespace {

// Whether slot_row (tokens, k) names each of the rows below `used` exactly once and no other row (-1 is none). If
// row_token and row_choice are not null, they must have the token and the choice of each slot. Kernels that write only the named rows then write all
// rows in use, so that no row keeps what was in its memory before.
inline bool names_each_row(const int32_t* slot_row, const int32_t* row_token, const int32_t* row_choice, int64_t tokens,
                           int64_t k, int64_t used, int64_t num_rows) {
  if (used < 0 || used > num_rows) return false;
  const Scratch<char> named_of(1, used);
  char* const named = named_of.of(0);
  std::memset(named, 0, size_t(used));
  int64_t left = used;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = t * k; i < (t + 1) * k; ++i) {
      const int64_t row = slot_row[i];
      if (row == -1) continue;
      if (row < 0 || row >= used || named[row]) return false;
      if (row_token != nullptr && row_token[row] != t) return false;
      if (row_choice != nullptr && row_choice[row] != i - t * k) return false;
      named[row] = 1;
      --left;
    }
  }
  return left == 0;
}

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
