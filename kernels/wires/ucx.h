// Transfers by UCX, whose library the Python side has loaded (qccl/transports/ucx.py): its functions are called by
// address.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group_wire.h"

namespace qccl {

// Addresses of UCX's functions, in the order of ucx_function_names().
using UcxFunctions = std::vector<std::uintptr_t>;
const std::vector<const char*>& ucx_function_names();

// One worker, and an endpoint to each peer whose address is not empty. `config` has UCX's settings by name. Throws WireError where UCX cannot
// be started, and std::system_error.
std::shared_ptr<GroupWire> make_ucx_wire(const UcxFunctions& functions,
                                         const std::vector<std::pair<std::string, std::string>>& config, OnFault fault);

}  // namespace qccl
