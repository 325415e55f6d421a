// The table of launchers, made from the list in ops.h of the unit that is built.
#include "call.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "moe/launcher.h"
#include "ops.h"
#ifdef SIMT_HOST
#include "simt.h"
#endif

namespace {

const std::map<std::string, moe::Launcher>& launchers() {
  static const std::map<std::string, moe::Launcher> table = {
#ifdef MOE_ISA  // the CPU kernels of one instruction set
#define LAUNCHER(name) {#name, moe::launcher<moe::MOE_ISA::name>},
      MOE_CPU_OPS(LAUNCHER)
#else
#define LAUNCHER(name) {#name, moe::launcher<moe::name>},
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
    } else if (count != static_cast<int>(std::strlen(found->second.types))) {
      message = std::to_string(count) + " arguments, " + std::to_string(std::strlen(found->second.types)) + " expected";
    } else if (const int status = found->second.call(words); status != 0) {
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
