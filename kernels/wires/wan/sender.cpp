#include "sender.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

#include "../../engine/run.h"

namespace qccl::wan {

namespace {

// Most unanswered probes of a full connection.
constexpr int kUnanswered = 1;
// Seconds for which a network counts as lossy after TCP has resent packets.
constexpr double kLossySeconds = 10;
// On a lossy network a frame that was not acknowledged in this time is sent by another connection, too.
constexpr double kLateRoundTrips = 2, kLateSeconds = 0.02;
// A network counts as idle after this many seconds without a new frame.
constexpr double kIdleNetworkSeconds = 0.003;

// The order in which connections get a frame: the fewest frames under way, then the longest time without a new frame.
std::pair<std::size_t, std::uint64_t> load(const Link& link) { return {link.connection->under_way(), link.turn}; }

}  // namespace

// Short messages have a connection of their own, which long ones do not hold up; of the others the one with the least
// under way takes the next frame.
void Sender::pump(Peer& peer, std::vector<Token>& copied) {
  const double now = seconds();
  peer.out.fill(copied);
  for (std::size_t slot = 0; slot < peer.links.size(); ++slot)
    if (Link* link = links_.at(peer, slot); link && link->connection->has_rest()) write(*link, nullptr);
  while (Link* link = least_loaded(peer)) {
    const bool is_alone = peer.is_lossy(now) && now - last_new_ > kIdleNetworkSeconds;
    last_new_ = now;
    const int slot = link->slot;
    const FramePointer frame = peer.out.next(slot, takes_short(peer, *link), takes_long(peer, *link), now);
    write(*link, frame);
    if (is_alone) write_twice(peer, frame, slot);
    if (!peer.out.has_long()) peer.out.fill(copied);
  }
  if (peer.is_lossy(now) && now - last_new_ > kIdleNetworkSeconds && is_idle())
    send_copies(peer, now - kLateRoundTrips * peer.round_trip - kLateSeconds);
}

bool Sender::takes_long(const Peer& peer, const Link& link) {
  if (link.slot) return true;
  for (std::size_t slot = 1; slot < peer.links.size(); ++slot)
    if (links_.at(peer, slot)) return false;
  return true;
}

// The least loaded connection that can take a frame that waits; null: there is none.
Link* Sender::least_loaded(const Peer& peer) {
  Link* found = nullptr;
  for (std::size_t slot = 0; slot < peer.links.size(); ++slot) {
    Link* const link = links_.at(peer, slot);
    if (!link || link->connection->waits_to_write()) continue;
    const bool has_frame =
        (peer.out.has_short() && takes_short(peer, *link)) || (peer.out.has_long() && takes_long(peer, *link));
    if (has_frame && (!found || load(*link) < load(*found))) found = link;
  }
  return found;
}

// The idlest connection for long messages that takes a frame, apart from the one of the slot `except`.
Link* Sender::idlest(const Peer& peer, int except) {
  Link* found = nullptr;
  for (std::size_t slot = 1; slot < peer.links.size(); ++slot) {
    Link* const link = links_.at(peer, slot);
    if (!link || link->slot == except || link->connection->waits_to_write()) continue;
    if (!found || load(*link) < load(*found)) found = link;
  }
  return found;
}

// Nothing waits to be sent to any rank.
bool Sender::is_idle() const {
  return std::none_of(group_.peers.begin(), group_.peers.end(), [](const Peer& peer) {
    return peer.out.has_short() || peer.out.has_long() || peer.out.under_way();
  });
}

// A frame for which an idle network has waited is often late already: a header, or the second round of a chunk that
// was lost in the first. Another round trip would be worse than its bytes.
void Sender::write_twice(Peer& peer, const FramePointer& frame, int slot) {
  Link* const link = idlest(peer, slot);
  if (!link || frame->copies != 1) return;
  frame->copies = 2;
  write(*link, frame);
}

// Where TCP has not delivered a frame in two round trips, what it sent again was lost, too. An idle network carries the
// frame over another connection.
void Sender::send_copies(Peer& peer, double sent_before) {
  while (Link* link = idlest(peer, -1)) {
    FramePointer frame = peer.out.copy(link->slot, sent_before);
    if (!frame) return;
    write(*link, std::move(frame));
  }
}

void Sender::write(Link& link, FramePointer frame) {
  Peer& peer = group_.at(link.peer);
  if (frame) {
    link.has_tail = true;
    link.turn = ++turns_;
  }
  try {
    link.connection->write([&] { return std::exchange(frame, nullptr); });
    links_.update(link);
  } catch (const StreamError&) {
    link.is_broken = true;
    if (frame) peer.out.again({frame});  // the connection has not even begun to write it
  }
}

void Sender::measure(Link& link, double now) {
  tcp_info info = {};
  socklen_t nbytes = sizeof info;
  if (getsockopt(link.connection->descriptor(), IPPROTO_TCP, TCP_INFO, &info, &nbytes)) return;
  Peer& peer = group_.at(link.peer);
  peer.round_trip = 1e-6 * info.tcpi_rtt;
  if (info.tcpi_total_retrans != std::exchange(link.resent, info.tcpi_total_retrans)) peer.lossy_until = now + kLossySeconds;
  // The other rank's machine has no room for more, because its process is busy, and TCP's timeout would count that time. The
  // machine answers each probe, unless this machine has lost its address, and so cannot even send.
  const bool is_full = !info.tcpi_unacked && link.connection->under_way() && info.tcpi_probes <= kUnanswered;
  if (is_full != std::exchange(link.is_patient, is_full)) set_timeout(link.connection->descriptor(), !is_full);
}

// TCP finds a lost packet when a later one has come. Behind the last packets of a burst there is none, and its timer
// takes two round trips. So something small follows when all else has been sent. (RFC 8985: RACK, and TLP's timer.)
void Sender::probe(Link& link) {
  link.has_tail = link.connection->under_way();
  if (!link.has_tail || unsent(link.connection->descriptor())) return;
  Head head;
  head.kind = Kind::probe;
  link.connection->greet(head, "");
  link.has_tail = false;
}

}  // namespace qccl::wan
