// A group whose ranks exchange messages by shared memory inside a machine, and between sites otherwise.
#pragma once

#include <memory>

#include "group_wire.h"

namespace qccl {

// Neither wire is connected yet. address() is that of `sites`. For connect(), the address of a rank that shares memory with
// this one ends with a zero byte and the rank's address for `memory`.
std::shared_ptr<GroupWire> make_mixed_wire(std::shared_ptr<GroupWire> memory, std::shared_ptr<GroupWire> sites);

}  // namespace qccl
