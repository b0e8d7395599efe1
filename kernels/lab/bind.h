// The Python side of the lab's network.
#pragma once

#include <nanobind/nanobind.h>

namespace qccl::lab {

void bind_lab(nanobind::module_& m);

}  // namespace qccl::lab
