// From any array object to its address, layout and element type.
#pragma once

#include <nanobind/nanobind.h>

namespace qccl {

// Adds View and describe() to the module.
void bind_describe(nanobind::module_& m);

}  // namespace qccl
