// Calls a launcher by name, with 64-bit words as arguments; used by Python and by the replay program.
#pragma once

#include <cstdint>

extern "C" {

// Each word holds an argument's bits: a pointer (also the stream), an integer, a double, or a float in the low half.
// Returns the launcher's result, 0 for success.
int moe_call(const char* name, const uint64_t* words);

// Lines "name types": p pointer, i int, l int64_t, f float, d double.
const char* moe_signatures();
}
