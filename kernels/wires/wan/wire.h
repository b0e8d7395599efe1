// Transfers between sites: several TCP connections for each pair of ranks, plain or encrypted, which are made again when
// they break. docs/architecture/wan.md says how.
#pragma once

#include <memory>

#include "../group_wire.h"
#include "../../tls/tls.h"

namespace qccl {

struct WanSettings {
  int listener = -1;               // a listening socket, which the wire owns from now on
  std::string address;             // this rank's address; see make_wan_wire()
  std::shared_ptr<TlsContext> tls;  // null: nothing is encrypted
  std::string congestion_control;  // TCP's algorithm; empty: the system's default
  int connections = 1;             // connections for long messages, beside the one for short messages
  double away_seconds = 60;        // after which a rank that cannot be reached is lost
  std::size_t most_guests = 8;     // callers that have not said yet which rank they are
  double hello_seconds = 5;        // in which both sides of a connection must be known
};

// An address has lines: 32 hexadecimal digits, random for each wire, and the number of `connections`; then "HOST PORT", in
// numbers, for each place where the rank can be reached, best first. Two ranks have the smaller one of their numbers. With
// a rank whose address ends with a zero byte there is no connection: its messages go another way.
std::shared_ptr<GroupWire> make_wan_wire(const WanSettings& settings, OnFault fault);

}  // namespace qccl
