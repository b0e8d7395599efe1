// Low-rank compression's functions for Python (see qccl/torch/factors.py).
#pragma once

#include <nanobind/nanobind.h>

namespace qccl {

void bind_factors(nanobind::module_& m);

}  // namespace qccl
