// The table of launchers, from the list MOE_CPU_OPS or MOE_CUDA_OPS in the ops.h of the folder that is built.
#include "call.h"

#include <map>
#include <string>

#include "moe/common/launcher.h"
#include "ops.h"

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

int moe_call(const char* name, const uint64_t* words) { return launchers().at(name).call(words); }

const char* moe_signatures() {
  static const std::string text = [] {
    std::string lines;
    for (const auto& [name, launcher] : launchers()) lines += name + " " + launcher.types + "\n";
    return lines;
  }();
  return text.c_str();
}
