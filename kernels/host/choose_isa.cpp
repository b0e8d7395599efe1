#include "choose_isa.h"

#include <cstdlib>
#include <stdexcept>

namespace qccl_baseline {
const qccl::Isa& isa();
}
#ifdef QCCL_X86_64_LEVELS
namespace qccl_x86_64_v3 {
const qccl::Isa& isa();
}
namespace qccl_x86_64_v4 {
const qccl::Isa& isa();
}
#endif

namespace qccl {

std::vector<const Isa*> usable_isas() {
  std::vector<const Isa*> found;
#ifdef QCCL_X86_64_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) found.push_back(&qccl_x86_64_v4::isa());
  if (__builtin_cpu_supports("x86-64-v3")) found.push_back(&qccl_x86_64_v3::isa());
#endif
  found.push_back(&qccl_baseline::isa());
  return found;
}

const Isa& choose_isa() {
  const auto usable = usable_isas();
  const char* wanted = std::getenv("QCCL_ISA");
  if (!wanted || !*wanted) return *usable.front();
  std::string names;
  for (const Isa* isa : usable) {
    if (wanted == std::string(isa->name)) return *isa;
    names += (names.empty() ? "" : ", ") + std::string(isa->name);
  }
  throw std::runtime_error("QCCL_ISA=" + std::string(wanted) +
                           " is not an instruction set that qccl can use on this processor; unset it or use one of: " +
                           names);
}

}  // namespace qccl
