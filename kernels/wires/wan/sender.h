// Chooses the connection for each frame, and resends frames before TCP does so. The section Loss of
// docs/architecture/wan.md says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "links.h"

namespace qccl::wan {

class Sender {
 public:
  // Both must live as long as this.
  Sender(Links& links, Group& group) : links_(links), group_(group) {}

  // Writes as much to a rank as its connections take. Appends the tokens of messages whose memory is free again.
  void pump(Peer& peer, std::vector<Token>& copied);
  // Reads TCP's measurements of a connection.
  void measure(Link& link, double now);
  // Sends something small after the last frame of a connection, if TCP has sent that frame.
  void probe(Link& link);

 private:
  bool takes_short(const Peer& peer, const Link& link) { return !link.slot || !links_.at(peer, 0); }
  bool takes_long(const Peer& peer, const Link& link);
  Link* least_loaded(const Peer& peer);
  Link* idlest(const Peer& peer, int except);
  bool is_idle() const;
  void write_twice(Peer& peer, const FramePointer& frame, int slot);
  void send_copies(Peer& peer, double sent_before);
  void write(Link& link, FramePointer frame);

  Links& links_;
  Group& group_;
  std::uint64_t turns_ = 0;
  double last_new_ = 0;  // when a frame was sent for the first time
};

}  // namespace qccl::wan
