// The other ranks and the connections, as a wire between sites knows them. No sockets and no clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "connection.h"
#include "inbox.h"
#include "outbox.h"
#include "sockets.h"

namespace qccl::wan {

// A connection on its way: of a rank's slot, or of a caller that is not known yet.
struct Link {
  std::uint64_t id = 0;
  int descriptor = -1;  // while it has no connection
  std::unique_ptr<Connection> connection;
  int peer = -1, slot = -1;
  bool is_caller = false, is_ready = false;  // the handshake is over
  bool is_up = false;                        // the handshake is over, and both sides are known
  bool is_broken = false;                    // a write has failed; what has come is read before it is dropped
  bool is_patient = false;                   // TCP has no timeout
  bool has_tail = false;                     // nothing was sent behind its last frame
  std::uint64_t turn = 0;                    // when it was given its last frame, counted in frames
  std::uint32_t events = 0, resent = 0;      // epoll's events; segments that TCP has resent
  double since = 0, until = 0;               // when it was connected, and when it must be up
};

// Another rank. Times are those of seconds().
struct Peer {
  int rank = 0;
  std::vector<Place> places;
  std::size_t place = 0;
  Outbox out;
  Inbox in;
  std::vector<std::uint64_t> links;  // by slot; 0: none. Slot 0 is for short messages
  std::vector<double> next_dial;
  std::string lost;                              // the reason of its loss; nothing more is sent to it or received
  double down_since = 0;                         // 0: there is a connection, and something has come over it
  std::uint64_t acknowledgements = 0;            // number of acknowledgements sent to it
  double lossy_until = 0;                        // packets to it were lost lately
  double round_trip = 0;                         // seconds, as TCP has measured it last

  // Marks the rank as lost; the first reason counts.
  void lose(const std::string& reason) {
    if (lost.empty()) lost = reason;
  }
  bool is_lossy(double now) const { return now < lossy_until; }
  void acknowledge(Connection& connection) { connection.acknowledge(in.early(), ++acknowledgements); }
  // Applies the acknowledgements that a connection has brought.
  void settle(Connection& connection) {
    out.acknowledged(connection.take_freed());
    out.set_early(connection.peer_early(), connection.peer_number());
  }
  void clear() {
    out.clear();
    in.clear();
    std::fill(links.begin(), links.end(), 0);
  }
};

struct Group {
  int rank = -1;             // this one; -1: the wire is not connected yet
  std::string name;          // the nonce of rank 0's address
  std::vector<Peer> peers;   // by rank; that of this rank is not used

  Peer& at(int peer) {
    if (peer == rank) throw std::invalid_argument("rank " + std::to_string(peer) + " is not connected to itself");
    return peers.at(static_cast<std::size_t>(peer));
  }
};

}  // namespace qccl::wan
