// Connections by the relay: both ranks call it, and it joins their connections of one name.
#include <sys/epoll.h>

#include <algorithm>
#include <string>

#include "run.h"
#include "wan_links.h"

namespace qccl::wan {

namespace {

// The relay holds a connection until the other rank comes.
constexpr double kForeverSeconds = 1e9;

}  // namespace

void Links::call_by_relay(Peer& peer, double now) {
  for (std::size_t slot = 0; slot < peer.links.size(); ++slot) {
    if (at(peer, slot) || peer.relayed[slot] || now < peer.next_relayed[slot]) continue;
    peer.next_relayed[slot] = now + kRelayRetrySeconds;
    const int descriptor = dial(settings_.relay.place);
    if (descriptor < 0) return;
    Link& link = add(descriptor, now);
    const auto [low, high] = std::minmax(group_.rank, peer.rank);
    const std::string name =
        group_.name + " " + std::to_string(low) + " " + std::to_string(high) + " " + std::to_string(slot);
    link.relay = std::make_unique<RelayCall>(settings_.openssl, settings_.relay, name, calls_first(peer));
    link.is_caller = !calls_first(peer);  // the other rank is the one that says who it is
    link.peer = peer.rank;
    link.slot = static_cast<int>(slot);
    peer.relayed[slot] = link.id;
    watch(descriptor, link.id, link.events = EPOLLOUT, EPOLL_CTL_ADD);
  }
}

// Whether the relay has joined a connection to the other rank's.
bool Links::is_joined(Link& link) {
  Peer& peer = group_.at(link.peer);
  try {
    if (!link.relay->advance(link.descriptor)) {
      if (!link.relay->has_said()) return false;
      link.until = seconds() + kForeverSeconds;
      peer.relay_answer = ", and did not come to the relay";
      return false;
    }
  } catch (const StreamError& error) {
    peer.relay_answer = std::string(", also by the relay: ") + error.what();
    throw;
  }
  peer.relay_answer.clear();
  return true;
}

void Links::drop_relayed(Peer& peer) {
  for (std::size_t slot = 0; slot < peer.links.size(); ++slot) {
    if (peer.relayed[slot]) drop(peer.relayed[slot]);
    if (const Link* link = at(peer, slot); link && link->relay) drop(link->id);
  }
}

}  // namespace qccl::wan
