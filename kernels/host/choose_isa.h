// The choice of the instruction set at run time.
#pragma once

#include <string>
#include <vector>

#include "kernel_args.h"

namespace qccl {

// The builds that this processor can run, best first; never empty.
std::vector<const Isa*> usable_isas();

// The best usable one, or the one that the environment variable QCCL_ISA names. Throws std::runtime_error if that one does
// not exist or cannot run here.
const Isa& choose_isa();

}  // namespace qccl
