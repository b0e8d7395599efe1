// The Python side of the run loop.
#pragma once

#include <nanobind/nanobind.h>

namespace qccl {

void bind_engine(nanobind::module_& m);

}  // namespace qccl
