// A group whose ranks exchange messages by shared memory inside a machine, and between sites otherwise.
#pragma once

#include <memory>

#include "group_wire.h"
#include "wan.h"

namespace qccl {

// Connects all ranks between sites at first, for the set-up. Then share() says to which the messages go by memory.
struct MixedWire : GroupWire {
  // Connects the wire of the shared memory to the ranks whose address, by rank, is not empty. Follows connect(). Throws
  // as connect().
  virtual void reach(const std::vector<std::string>& addresses) = 0;
  // From now on the messages to and from these ranks go by memory. Once, when no transfer is under way. Both of two ranks
  // must have reached each other, and say the same.
  virtual void share(const std::vector<int>& ranks) = 0;
};

// Neither wire is connected yet. address() is that of `sites`. `descriptor`: of a file that the wire owns, and closes when it
// shares memory or is closed; -1: none.
std::shared_ptr<MixedWire> make_mixed_wire(std::shared_ptr<PartWire> memory, std::shared_ptr<WanWire> sites,
                                           int descriptor);

}  // namespace qccl
