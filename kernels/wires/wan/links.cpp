#include "links.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "../../engine/run.h"

namespace qccl::wan {

namespace {

constexpr std::uint64_t kVersion = 1;
// Seconds in which a connection must be made, and between two tries.
constexpr double kDialSeconds = 1.5, kRetrySeconds = 0.2;
// Seconds by which the rank that usually calls begins earlier than the other one.
constexpr double kSecondSeconds = 1;
// Most callers accepted at once: callers that have said who they are come first.
constexpr int kMostAccepts = 16;
// Connections for long messages: most to all ranks of a large group together, and least to each.
constexpr int kMostConnections = 1000, kLeastConnections = 2;

}  // namespace

Links::Links(const WanSettings& settings, Group& group)
    : settings_(settings), group_(group), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  fcntl(settings_.listener, F_SETFL, fcntl(settings_.listener, F_GETFL) | O_NONBLOCK);
}

Links::~Links() { ::close(epoll_); }

void Links::begin(int rank, const std::vector<std::string>& addresses, double now) {
  std::vector<Address> parsed;
  for (const std::string& address : addresses) {
    // Only qccl.transports.wan adds it: no rank can give itself such an address.
    const bool has_other_way = !address.empty() && address.back() == '\0';
    try {
      parsed.push_back(parse(address.substr(0, address.size() - has_other_way)));
      if (has_other_way) parsed.back() = {parsed.back().nonce, 0, {}};
    } catch (const std::invalid_argument& error) {
      throw WireError("rank " + std::to_string(parsed.size()) + " (" + error.what() + ")");
    }
  }
  group_.name = parsed.at(0).nonce;
  group_.rank = rank;
  group_.peers = std::vector<Peer>(parsed.size());
  const auto most = std::max(kLeastConnections, kMostConnections / std::max(1, static_cast<int>(parsed.size()) - 1));
  for (std::size_t i = 0; i < parsed.size(); ++i) {
    Peer& peer = group_.peers[i];
    peer.rank = static_cast<int>(i);
    peer.places = parsed[i].places;
    peer.down_since = now;
    if (!parsed[i].connections) peer.lose("its messages go another way");  // nobody sees this: no transfer waits for it
    peer.links.assign(static_cast<std::size_t>(std::min({settings_.connections, parsed[i].connections, most})) + 1, 0);
    peer.next_dial.assign(peer.links.size(), now + (calls_first(peer) ? 0 : kSecondSeconds));
  }
  watch(settings_.listener, 0, EPOLLIN, EPOLL_CTL_ADD);
}

void Links::close() {
  for (const auto& [id, link] : links_)
    if (!link.connection && link.descriptor >= 0) ::close(link.descriptor);
  links_.clear();
  dropped_.clear();
  ::close(settings_.listener);
}

// -- finding connections ----------------------------------------------------------------------------------------------

std::vector<std::uint64_t> Links::ids() const {
  std::vector<std::uint64_t> found;
  for (const auto& [id, link] : links_) found.push_back(id);
  return found;
}

Link* Links::find(std::uint64_t id) {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : &found->second;
}

Link* Links::at(const Peer& peer, std::size_t slot) {
  Link* const link = find(peer.links[slot]);
  return link && link->is_up && !link->is_broken ? link : nullptr;
}

bool Links::any_up(const Peer& peer) const {
  return std::any_of(peer.links.begin(), peer.links.end(), [&](std::uint64_t id) {
    const auto found = links_.find(id);
    return found != links_.end() && found->second.is_up;
  });
}

void Links::watch(int descriptor, std::uint64_t id, std::uint32_t events, int operation) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = id;
  epoll_ctl(epoll_, operation, descriptor, &event);
}

void Links::update(Link& link) {
  const bool writes = link.connection && link.connection->waits_to_write();
  const std::uint32_t events = (writes ? EPOLLOUT : 0u) | EPOLLIN;
  if (events == link.events) return;
  link.events = events;
  watch(link.connection ? link.connection->descriptor() : link.descriptor, link.id, events, EPOLL_CTL_MOD);
}

// -- calling ----------------------------------------------------------------------------------------------------------

Link& Links::add(int descriptor, double now) {
  Link& link = links_[++last_id_];
  link.id = last_id_;
  link.descriptor = descriptor;
  link.until = now + kDialSeconds;
  configure(descriptor, settings_.congestion_control, settings_.connections);
  return link;
}

void Links::call_missing(Peer& peer, double now) {
  for (std::size_t slot = 0; slot < peer.links.size(); ++slot)
    if (!peer.links[slot] && now >= peer.next_dial[slot]) call(peer, static_cast<int>(slot), now);
}

void Links::call(Peer& peer, int slot, double now) {
  peer.next_dial[static_cast<std::size_t>(slot)] = now + kRetrySeconds;
  if (peer.places.empty()) return;
  const int descriptor = dial(peer.places[peer.place++ % peer.places.size()]);
  if (descriptor < 0) return;
  Link& link = add(descriptor, now);
  link.peer = peer.rank;
  link.slot = slot;
  peer.links[static_cast<std::size_t>(slot)] = link.id;
  watch(descriptor, link.id, link.events = EPOLLOUT, EPOLL_CTL_ADD);
}

Link* Links::advance(std::uint64_t id) {
  Link* const link = find(id);
  if (!link) return nullptr;  // another event has ended it
  if (!link->connection && !is_connected(*link)) return nullptr;
  if (!link->is_ready && link->connection->handshake()) {
    link->is_ready = true;
    if (!link->is_caller) {
      take_slot(*link);
      greet(*link);
    }
  }
  link->connection->retry();
  if (link->is_ready) return link;
  update(*link);
  return nullptr;
}

// Whether the socket is connected, and so TLS begins.
bool Links::is_connected(Link& link) {
  if (connect_error(link.descriptor)) return drop(link.id), false;
  return open(link);
}

// TLS begins; false: it cannot, and the connection has ended.
bool Links::open(Link& link) {
  const int descriptor = std::exchange(link.descriptor, -1);
  link.since = seconds();
  link.until = link.since + settings_.hello_seconds;
  try {
    link.connection = std::make_unique<Connection>(
        settings_.tls ? make_tls_stream(settings_.tls, descriptor, link.is_caller) : make_plain_stream(descriptor));
  } catch (const StreamError&) {
    drop(link.id);
    return false;
  }
  return true;
}

// The connection of a slot, from now on.
void Links::take_slot(Link& link) {
  std::uint64_t& place = group_.at(link.peer).links[static_cast<std::size_t>(link.slot)];
  if (place && place != link.id) drop(place);
  place = link.id;
}

// This side has called: it greets.
void Links::greet(Link& link) {
  Head head;
  head.kind = Kind::hello;
  head.nbytes = kNonceNbytes;
  head.tag = link.slot;
  head.index = static_cast<std::uint64_t>(group_.rank);
  head.offset = static_cast<std::uint64_t>(link.peer);
  head.total = kVersion;
  link.connection->greet(head, group_.name);
  link.is_up = true;
}

// -- being called -----------------------------------------------------------------------------------------------------

void Links::listen(bool does) {
  listens_at_ = does ? 0 : seconds() + kRetrySeconds;
  watch(settings_.listener, 0, does ? std::uint32_t{EPOLLIN} : 0, EPOLL_CTL_MOD);
}

void Links::listen_again(double now) {
  if (listens_at_ && now >= listens_at_) listen(true);
}

void Links::accept() {
  for (int i = 0; i < kMostAccepts; ++i) {
    const int descriptor = accept4(settings_.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (descriptor < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) listen(false);
    if (descriptor < 0) return;
    // Drop a random one: if the oldest went, endless strangers would always drop a rank from across the world.
    if (guests_.size() >= settings_.most_guests) drop(guests_[random_() % guests_.size()]);
    Link& link = add(descriptor, seconds());
    link.is_caller = true;
    guests_.push_back(link.id);
    watch(descriptor, link.id, link.events = EPOLLIN, EPOLL_CTL_ADD);
    open(link);
  }
}

// Its connection takes the place of the one that there was: the rank has given that up.
void Links::greeted(Link& link, const Head& head, const unsigned char* data) {
  const bool fits = group_.rank >= 0 && link.is_caller && !link.is_up && head.total == kVersion &&
                    head.nbytes == kNonceNbytes && !std::memcmp(data, group_.name.data(), kNonceNbytes) &&
                    head.index < group_.peers.size() && head.index != static_cast<std::uint64_t>(group_.rank) &&
                    head.offset == static_cast<std::uint64_t>(group_.rank) && head.tag >= 0;
  if (!fits) throw StreamError("a caller of another group");
  Peer& peer = group_.at(static_cast<int>(head.index));
  if (!peer.lost.empty()) throw StreamError("a rank that was lost");
  if (static_cast<std::size_t>(head.tag) >= peer.links.size()) throw StreamError("a connection that the ranks do not have");
  link.peer = peer.rank;
  link.slot = head.tag;
  take_slot(link);
  guests_.erase(std::find(guests_.begin(), guests_.end(), link.id));
  link.is_up = true;
  peer.acknowledge(*link.connection);  // so that the caller knows that it was heard
}

// -- ending -----------------------------------------------------------------------------------------------------------

void Links::give_time(double busy) {
  for (auto& [id, link] : links_) link.until += busy;
}

void Links::drop(std::uint64_t id) {
  const auto found = links_.find(id);
  if (found == links_.end()) return;
  Link& link = found->second;
  if (const auto guest = std::find(guests_.begin(), guests_.end(), id); guest != guests_.end()) guests_.erase(guest);
  if (link.peer >= 0) {
    Peer& peer = group_.at(link.peer);
    const auto slot = static_cast<std::size_t>(link.slot);
    if (peer.links[slot] == id) {
      peer.links[slot] = 0;
      const double next = seconds() + (link.is_up ? 0 : kRetrySeconds) + (calls_first(peer) ? 0 : kSecondSeconds);
      peer.next_dial[slot] = std::max(peer.next_dial[slot], next);
    }
    if (link.connection) {
      peer.settle(*link.connection);
      peer.out.again(link.connection->take_frames());
    }
    if (!peer.down_since && !any_up(peer)) peer.down_since = seconds();
  }
  if (link.connection) {
    dropped_.push_back(std::move(link.connection));  // perhaps one of its functions is running
  } else if (link.descriptor >= 0) {
    ::close(link.descriptor);
  }
  links_.erase(found);
}

void Links::shut() {
  for (auto& [id, link] : links_)
    if (link.is_up) link.connection->shut();
}

}  // namespace qccl::wan
