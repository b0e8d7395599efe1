// What a rank says to a relay (qccl-relay) before that forwards: the protocol of qccl/transports/relay_protocol.py.
#pragma once

#include <cstddef>
#include <string>

#include "tls.h"
#include "wan_sockets.h"

namespace qccl::wan {

struct RelaySettings {
  Place place;         // in numbers; no host: there is no relay
  std::string key;     // proves to the relay that this rank belongs to the job
  std::string naming;  // a key that the relay does not have: from it the connections' names follow
};

// One connection to the relay, until it is joined to the other rank's. It does not own the descriptor.
class RelayCall {
 public:
  // `what` names the connection, the same for both ranks and for no other two; of these, one `calls`.
  RelayCall(const TlsFunctions& openssl, const RelaySettings& settings, const std::string& what, bool calls);

  // Goes on as far as it can without waiting; true when the two connections are joined, and nothing of the other rank was
  // read. Throws StreamError that says why the relay does not want to.
  bool advance(int descriptor);
  // The relay knows who waits.
  bool has_said() const { return has_said_; }

 private:
  bool receive(int descriptor, std::size_t nbytes);

  const TlsFunctions& openssl_;
  const RelaySettings& settings_;
  const std::string name_;
  const char role_;
  std::string received_;
  bool has_said_ = false;
};

}  // namespace qccl::wan
