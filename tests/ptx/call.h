// Calls a launcher by name, for cuda_launch.py (through ctypes) and tests/sanitizers/replay.cpp.
#pragma once

#include <cstdint>

extern "C" {

// A word holds the bits of an argument: a pointer (also the stream), an integer, a double, or a float in the low half.
// Returns the launcher's result; 0 is success.
int moe_call(const char* name, const uint64_t* words);

// A line "name types" for each launcher. A type is a letter: p pointer, i int, l int64_t, f float, d double.
const char* moe_signatures();
}
