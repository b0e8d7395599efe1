#include "choose_isa.h"

#include <cstdlib>
#include <stdexcept>

#ifdef QCCL_X86_64_LEVELS
#include <cpuid.h>
#endif

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

#ifdef QCCL_X86_64_LEVELS
namespace {

bool has_all(unsigned found, unsigned wanted) { return (found & wanted) == wanted; }

// The level of x86-64, 4, 3 or less, whose instructions the processor has and whose registers the system saves (the psABI's
// table 3.1). By CPUID, because in zig's library __builtin_cpu_supports() finds nothing.
int x86_64_level() {
  unsigned a, b, c, d, b7, c_extended, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 1;
  if (!has_all(c, bit_SSE3 | bit_SSSE3 | bit_FMA | bit_CMPXCHG16B | bit_SSE4_1 | bit_SSE4_2 | bit_MOVBE | bit_POPCNT |
                      bit_OSXSAVE | bit_AVX | bit_F16C))
    return 1;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c, &d) || !has_all(b7, bit_BMI | bit_AVX2 | bit_BMI2)) return 1;
  if (!__get_cpuid(0x80000001, &a, &b, &c_extended, &d) || !has_all(c_extended, bit_LAHF_LM | bit_LZCNT)) return 1;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!has_all(saved, 0x06)) return 1;  // XMM, YMM
  const bool has_512 = has_all(b7, bit_AVX512F | bit_AVX512DQ | bit_AVX512CD | bit_AVX512BW | bit_AVX512VL);
  return has_512 && has_all(saved, 0xe0) ? 4 : 3;  // masks, ZMM
}

}  // namespace
#endif

std::vector<const Isa*> usable_isas() {
  std::vector<const Isa*> found;
#ifdef QCCL_X86_64_LEVELS
  const int level = x86_64_level();
  if (level >= 4) found.push_back(&qccl_x86_64_v4::isa());
  if (level >= 3) found.push_back(&qccl_x86_64_v3::isa());
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
