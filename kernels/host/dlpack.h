// The address, layout and element type of any array object.
#pragma once

#include <nanobind/nanobind.h>

namespace qccl {

// Adds View and describe() to the module.
void bind_dlpack(nanobind::module_& m);

}  // namespace qccl
