// The Python side of the run loop and of its connections.
#pragma once

#include <nanobind/nanobind.h>

namespace qccl {

void bind_engine(nanobind::module_& m);
void bind_tls(nanobind::module_& m);

}  // namespace qccl
