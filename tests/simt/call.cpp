// The table of launchers, made from the list in ops.h of the unit that is built.
#include "call.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include <driver_types.h>

#include "ops.h"
#ifdef SIMT_HOST
#include "simt.h"
#endif

namespace {

template <class T>
T argument(uint64_t word) {
  if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(static_cast<uintptr_t>(word));
  if constexpr (std::is_integral_v<T>) return static_cast<T>(word);
  if constexpr (std::is_floating_point_v<T>) {
    T value;
    std::memcpy(&value, &word, sizeof value);  // of a float the low half: words are little-endian
    return value;
  }
}

template <class T>
constexpr char type_letter() {
  if constexpr (std::is_pointer_v<T>) return 'p';
  if constexpr (std::is_same_v<T, int>) return 'i';
  if constexpr (std::is_same_v<T, int64_t>) return 'l';
  if constexpr (std::is_same_v<T, float>) return 'f';
  if constexpr (std::is_same_v<T, double>) return 'd';
}

struct Launcher {
  cudaError_t (*call)(const uint64_t* words);
  std::string types;
};

template <auto function>
struct Unpack;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Unpack<function> {
  template <size_t... i>
  static cudaError_t apply(const uint64_t* words, std::index_sequence<i...>) {
    if constexpr (std::is_void_v<Result>) {
      function(argument<Arguments>(words[i])...);
      return cudaSuccess;
    } else {
      return function(argument<Arguments>(words[i])...);
    }
  }
  static Launcher launcher() {
    return {[](const uint64_t* words) { return apply(words, std::index_sequence_for<Arguments...>{}); },
            {type_letter<Arguments>()...}};
  }
};

const std::map<std::string, Launcher>& launchers() {
  static const std::map<std::string, Launcher> table = {
#ifdef MOE_ISA  // the CPU kernels of one instruction set
#define LAUNCHER(name) {#name, Unpack<moe::MOE_ISA::name>::launcher()},
      MOE_CPU_OPS(LAUNCHER)
#else
#define LAUNCHER(name) {#name, Unpack<moe::name>::launcher()},
      MOE_CUDA_OPS(LAUNCHER)
#endif
#undef LAUNCHER
  };
  return table;
}

}  // namespace

int moe_call(const char* name, const uint64_t* words, int count, char* error, int error_size) {
  std::string message;
  try {
    const auto found = launchers().find(name);
    if (found == launchers().end()) {
      message = "no such launcher";
    } else if (count != static_cast<int>(found->second.types.size())) {
      message = std::to_string(count) + " arguments, " + std::to_string(found->second.types.size()) + " expected";
    } else if (const cudaError_t status = found->second.call(words); status != cudaSuccess) {
      message = "CUDA error " + std::to_string(status);
    }
  } catch (const std::exception& exception) {
    message = exception.what();
  }
  std::snprintf(error, error_size, "%s", message.c_str());
  return !message.empty();
}

const char* moe_signatures() {
  static const std::string text = [] {
    std::string lines;
    for (const auto& [name, launcher] : launchers()) lines += name + " " + launcher.types + "\n";
    return lines;
  }();
  return text.c_str();
}

#ifdef SIMT_HOST
void simt_seed(int seed) { simt::set_seed(seed); }
#else
void simt_seed(int) {}
#endif
