// Calling a launcher by name with words: how Python and the replay program reach the kernels of a build.
#pragma once

#include <cstdint>

extern "C" {

// Each word holds an argument's bits: a pointer, an integer, a double, or a float in the low half; the stream is a pointer like
// any other. Returns the launcher's result, 0 for success.
int moe_call(const char* name, const uint64_t* words);

// Lines "name types": p pointer, i int, l int64_t, f float, d double.
const char* moe_signatures();
}
