// A table of earlier calls, by the forms of their arrays and by their options.
#pragma once

#include <nanobind/nanobind.h>

namespace qccl {

void bind_call_table(nanobind::module_& m);

}  // namespace qccl
