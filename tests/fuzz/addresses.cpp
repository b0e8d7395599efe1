// Texts of other processes that kernels/wires/wan reads before there is a connection between two ranks: the addresses of ranks.
#include "target.h"

#include <stdexcept>
#include <string>

#include "../../kernels/wires/wan/sockets.h"

namespace fuzz {

void fuzz(Input input) {
  std::string text(input.left(), '\0');
  input.take(text.data(), text.size());
  try {
    const qccl::wan::Address found = qccl::wan::parse(text);
    require(found.nonce.size() == qccl::wan::kNonceNbytes && found.connections > 0, "an address that is none");
    for (const qccl::wan::Place& place : found.places)
      require(!place.host.empty() && !place.port.empty(), "a place without a host or a port");
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace fuzz
