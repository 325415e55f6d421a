// Calls a launcher by name, with 64-bit words as arguments; used by Python and by the replay program.
#pragma once

#include <cstdint>

extern "C" {

// Each word holds the bits of an argument: a pointer (the stream too), an integer, a double, or a float in the low
// half. Returns the launcher's result, 0 for success.
int moe_call(const char* name, const uint64_t* words);

// A line "name types" for each launcher. A type is a letter: p pointer, i int, l int64_t, f float, d double.
const char* moe_signatures();
}
