#include "wan.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "reports.h"
#include "run.h"
#include "wan_connection.h"
#include "wan_inbox.h"
#include "wan_outbox.h"
#include "wan_relay.h"
#include "wan_sockets.h"

namespace qccl {

namespace {

using wan::Connection;
using wan::FrameError;
using wan::FramePointer;
using wan::Head;
using wan::Kind;
using wan::kNonceNbytes;
using wan::Place;

constexpr std::uint64_t kVersion = 1;
constexpr int kSleepMilliseconds = 1;
// Between two looks at what has to be done by time.
constexpr double kTickSeconds = 0.005;
// And at what TCP says of its connections.
constexpr double kMeasureSeconds = 0.05;
// How long a connection may take until it is made, and then until both sides are known; and between two tries.
constexpr double kDialSeconds = 1.5, kGreetSeconds = 5, kRetrySeconds = 0.2;
// The other one of two ranks, which usually calls, begins this much earlier.
constexpr double kSecondSeconds = 1;
// How long two ranks try to reach each other directly before they meet at the relay, and wait between two calls of it.
constexpr double kDirectSeconds = 2.5, kRelayRetrySeconds = 0.5, kForeverSeconds = 1e9;
// A connection that has been silent for so long was not refused: the other rank's machine is there, and its process busy.
constexpr double kSilentSeconds = 1;
// A process that did not look for so long has not waited meanwhile.
constexpr double kBusySeconds = 0.5;
// An acknowledgement is sent after so many frames, or this late.
constexpr std::uint64_t kFramesPerAck = 16;
// Callers that are accepted at once: those that have said who they are come first.
constexpr int kMostAccepts = 16;
constexpr int kMostEvents = 64;
// Part of a round trip for which a thread sleeps whatever comes meanwhile, if that is not too short.
constexpr double kPauseRoundTrips = 0.01, kShortestPauseSeconds = 0.0001, kLongestPauseSeconds = 0.001;
// Probes of a full connection on their way, at most.
constexpr int kUnanswered = 1;
// How long a network counts as one that loses packets, after TCP has sent some again.
constexpr double kLossySeconds = 10;
// Then a frame that was not acknowledged in this time is sent by another connection, too.
constexpr double kLateRoundTrips = 2, kLateSeconds = 0.02;
// And the network is idle that carried nothing new for so long.
constexpr double kIdleNetworkSeconds = 0.003;
// Time without a completion after which ended processes are looked for, and between two looks.
constexpr std::chrono::milliseconds kQuiet(1000), kBetweenLooks(500);

// A connection on its way: of a rank's slot, or of a caller that is not known yet.
struct Link {
  std::uint64_t id = 0;
  int descriptor = -1;  // while it has no connection
  std::unique_ptr<Connection> connection;
  std::unique_ptr<wan::RelayCall> relay;  // it goes by the relay, which has joined it once there is a connection
  int peer = -1, slot = -1;
  bool is_caller = false, is_ready = false;  // the handshake is over
  bool is_up = false;                        // and both sides are known
  bool is_patient = false;                   // TCP has no timeout
  bool has_tail = false;                     // nothing was sent behind its last frame
  std::uint64_t turn = 0;                    // when it was given its last frame, counted in frames
  std::uint32_t events = 0, resent = 0;      // resent: segments, by TCP
  double since = 0, until = 0;               // when it was connected, and when it must be up
  double round_trip = 0;                     // of the handshake by the relay: TCP measures the way to the relay alone
};

struct Peer {
  int rank = 0;
  std::vector<Place> places;
  std::size_t place = 0;
  wan::Outbox out;
  wan::Inbox in;
  std::vector<std::uint64_t> links;  // by slot; 0: none
  std::vector<double> next_dial;
  std::vector<std::uint64_t> relayed;  // by slot: connections by the relay that are not up
  std::vector<double> next_relayed;
  double relay_from = 0;     // from then on it is called by the relay
  bool was_direct = false, was_relayed = false;  // over which connection something has come last
  std::string relay_answer;  // why the relay did not join the last call
  std::string lost;      // why; nothing more is sent to it or received
  bool is_leaving = false;  // its messages go another way
  double down_since = 0;  // 0: there is a connection, and something has come over it
  std::uint64_t acknowledgements = 0;  // said to it
  double lossy_until = 0;  // packets to it were lost lately
  double round_trip = 0;   // seconds, as TCP has measured it last
};

class Sites final : public ReportingWire<WanWire> {
 public:
  Sites(const WanSettings& settings, OnFault fault)
      : ReportingWire(std::move(fault)), settings_(settings), process_(getpid()), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) throw std::runtime_error("epoll_create1 failed");
    fcntl(settings_.listener, F_SETFL, fcntl(settings_.listener, F_GETFL) | O_NONBLOCK);
  }

  ~Sites() override {
    close(0);
    ::close(epoll_);  // not earlier: a thread may sleep by it while another one closes the wire
  }

  std::string address() override { return settings_.address; }

  void connect(int rank, const std::vector<std::string>& addresses, FindEnded find_ended) override {
    const Lock lock(mutex_);
    if (is_closed_ || rank_ >= 0) throw std::logic_error("this wire was connected before, or is closed");
    std::vector<wan::Address> parsed;
    for (const std::string& address : addresses) parsed.push_back(wan::parse(address));
    group_ = parsed.at(0).nonce;
    rank_ = rank;
    find_ended_ = std::move(find_ended);
    peers_ = std::vector<Peer>(parsed.size());
    const double now = last_tick_ = seconds();
    for (std::size_t i = 0; i < parsed.size(); ++i) {
      Peer& peer = peers_[i];
      peer.rank = static_cast<int>(i);
      peer.places = parsed[i].places;
      peer.down_since = now;
      peer.links.assign(static_cast<std::size_t>(std::min(settings_.connections, parsed[i].connections)) + 1, 0);
      peer.next_dial.assign(peer.links.size(), now + (calls_first(peer) ? 0 : kSecondSeconds));
      peer.relayed.assign(peer.links.size(), 0);
      peer.next_relayed.assign(peer.links.size(), 0);
      peer.relay_from = now + kDirectSeconds;
    }
    watch(settings_.listener, 0, EPOLLIN, EPOLL_CTL_ADD);  // who calls earlier waits in the kernel
    tick(now);
    thread_.start();
  }

  void send(int peer, int tag, const void* data, std::size_t nbytes, Token token) override {
    const Lock lock(mutex_);
    if (is_closed_) return fail({});
    Peer& to = at(peer);
    if (!to.lost.empty()) return fail({0, to.lost, peer, true});
    to.out.send(tag, data, nbytes, token);
    pump(to);
  }

  void receive(int peer, int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived) override {
    const Lock lock(mutex_);
    if (is_closed_) return fail({});
    Peer& from = at(peer);
    from.in.receive(tag, data, nbytes, token, arrived);
    collect(from);
  }

  void leave(const std::vector<int>& ranks) override {
    const Lock lock(mutex_);
    for (const int rank : ranks) at(rank).is_leaving = true;
  }

  Rest rest(std::uint64_t) override {
    const Lock lock(mutex_);
    if (is_closed_ || reports_.has_completed() || has_fault() || has_pending_) return {};
    return {epoll_, pause()};
  }

  void slept() override {
    Lock lock(mutex_);
    if (!is_closed_) look_again(lock);
  }

  std::vector<int> relayed() override {
    const Lock lock(mutex_);
    std::vector<int> found;
    for (const Peer& peer : peers_)
      if (peer.was_relayed) found.push_back(peer.rank);
    return found;
  }

  void close(double limit) override {
    thread_.stop();
    if (getpid() != process_) return forget_parent();
    Lock lock(mutex_);
    if (std::exchange(is_closing_, true)) {
      while (is_closing_ && !is_closed_) {  // another thread closes it
        lock.unlock();
        sleep(kLongestPauseSeconds);
        lock.lock();
      }
      return;
    }
    try {
      const double until = seconds() + limit;
      while (limit > 0 && has_unsent() && seconds() < until) advance(1, lock);
      say_bye(until, lock);
    } catch (...) {  // Ctrl-C in FindEnded: the wire is open, and may be closed again
      if (!lock) lock.lock();
      is_closing_ = false;
      throw;
    }
    for (auto& [id, link] : links_)
      if (link.is_up) link.connection->shut();
    for (Peer& peer : peers_) forget(peer);
    close_descriptors();
  }

 private:
  // Of two ranks the one with the higher number, because rank 0 is the one that all can reach.
  bool calls_first(const Peer& peer) const { return rank_ > peer.rank; }

  Peer& at(int peer) {
    if (peer == rank_) throw std::invalid_argument("rank " + std::to_string(peer) + " is not connected to itself");
    return peers_.at(static_cast<std::size_t>(peer));
  }

  void watch(int descriptor, std::uint64_t id, std::uint32_t events, int operation) {
    epoll_event event = {};
    event.events = events;
    event.data.u64 = id;
    epoll_ctl(epoll_, operation, descriptor, &event);
  }

  // -- what happens in a poll -----------------------------------------------------------------------------------------

  void advance(std::uint64_t idle, Lock& lock) override {
    if (is_closed_) return;
    gone_.clear();
    take_events();
    const double now = seconds();
    if (now >= next_tick_) tick(now);
    if (!idle || reports_.has_completed() || has_fault() || has_pending_) return;
    const double length = pause();
    lock.unlock();
    sleep(length);
    lock.lock();
    if (!is_closed_) look_again(lock);
  }

  // In the wire's thread. Its time is not the other ranks': nobody waits for them.
  void advance_alone(int wakeup) override {
    Lock lock(mutex_);
    gone_.clear();
    take_events();
    const double now = seconds();
    for (Peer& peer : peers_)
      if (peer.down_since) peer.down_since += std::min(now - last_alone_, kBusySeconds);
    last_alone_ = now;
    if (now >= next_tick_) tick(now);
    if (has_pending_) return;
    lock.unlock();
    pollfd waited[] = {{epoll_, POLLIN, 0}, {wakeup, POLLIN, 0}};
    ::poll(waited, 2, WireThread::kSleepMilliseconds);
  }

  // What has come during a sleep.
  void look_again(Lock& lock) {
    gone_.clear();
    take_events();
    if (!reports_.has_completed()) look_for_ended(lock);
  }

  // Far away from the others a pause costs little time, and saves the processor from every single packet.
  double pause() const {
    const double found = std::min(kLongestPauseSeconds, nearest_ * kPauseRoundTrips);
    return found >= kShortestPauseSeconds ? found : 0;
  }

  void sleep(double pause) {
    if (pause > 0) {
      const timespec time = {0, static_cast<long>(pause * 1e9)};
      nanosleep(&time, nullptr);
      return;
    }
    epoll_event event;  // another thread may take the events
    epoll_wait(epoll_, &event, 1, kSleepMilliseconds);
  }

  void take_events() {
    epoll_event events[kMostEvents];
    const int count = epoll_wait(epoll_, events, kMostEvents, 0);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64) {
        serve(events[i].data.u64);
      } else {
        accept();
      }
    }
    if (!has_pending_) return;
    has_pending_ = false;
    for (const std::uint64_t id : ids()) {
      const auto found = links_.find(id);
      if (found != links_.end() && found->second.is_ready && found->second.connection->has_pending()) serve(id);
    }
  }

  std::vector<std::uint64_t> ids() const {
    std::vector<std::uint64_t> found;
    for (const auto& [id, link] : links_) found.push_back(id);
    return found;
  }

  // By time: connections that are missing or late, late acknowledgements, ranks that stay away.
  void tick(double now) {
    next_tick_ = now + kTickSeconds;
    if (const double busy = now - std::exchange(last_tick_, now); busy > kBusySeconds) give_time(busy);
    if (listens_at_ && now >= listens_at_) listen(true);
    const bool measures = now >= next_measure_;
    if (measures) next_measure_ = now + kMeasureSeconds;
    for (const std::uint64_t id : ids()) {
      const auto found = links_.find(id);
      if (found == links_.end()) continue;
      Link& link = found->second;
      if (is_silent(link, now) && at(link.peer).down_since) at(link.peer).down_since = now;
      if (!link.is_up && now > link.until) {
        drop(id);
      } else if (link.is_up) {
        if (measures) measure(link, now);
        if (link.connection->unacknowledged()) acknowledge(link);
        if (link.has_tail && is_lossy(at(link.peer), now)) probe(link);
      }
    }
    if (measures) find_nearest();
    for (Peer& peer : peers_)
      if (peer.rank != rank_) pump(peer);
    for (Peer& peer : peers_)
      if (peer.is_leaving && peer.lost.empty() && peer.out.is_empty()) end_connections(peer);
    for (Peer& peer : peers_) {
      if (peer.rank == rank_ || !peer.lost.empty()) continue;
      for (std::size_t slot = 0; slot < peer.links.size(); ++slot)
        if (!peer.links[slot] && now >= peer.next_dial[slot]) call(peer, static_cast<int>(slot), now);
      if (has_relay() && now >= peer.relay_from && !any_up(peer, false)) call_by_relay(peer, now);
      if (peer.down_since && now - peer.down_since > settings_.away_seconds) lose(peer, "it was away for too long" + peer.relay_answer);
    }
  }

  // What others had to do by now they could not show to a process that did not look.
  void give_time(double busy) {
    for (auto& [id, link] : links_) link.until += busy;
    for (Peer& peer : peers_)
      if (peer.down_since) peer.down_since += busy;
  }

  // Connected to the other rank's machine, without an answer.
  static bool is_silent(const Link& link, double now) {
    return link.peer >= 0 && link.connection && !link.connection->has_heard() && now - link.since > kSilentSeconds;
  }

  // -- connections ----------------------------------------------------------------------------------------------------

  void measure(Link& link, double now) {
    tcp_info info = {};
    socklen_t nbytes = sizeof info;
    if (getsockopt(link.connection->descriptor(), IPPROTO_TCP, TCP_INFO, &info, &nbytes)) return;
    Peer& peer = at(link.peer);
    peer.round_trip = std::max(1e-6 * info.tcpi_rtt, link.round_trip);
    if (info.tcpi_total_retrans != std::exchange(link.resent, info.tcpi_total_retrans)) peer.lossy_until = now + kLossySeconds;
    // The other rank's machine has taken all that there is room for, and its process is busy: TCP's timeout would count that.
    // It answers each probe, unless this rank's machine has lost the address, and so cannot even send.
    const bool is_full = !info.tcpi_unacked && link.connection->under_way() && info.tcpi_probes <= kUnanswered;
    if (is_full != std::exchange(link.is_patient, is_full))
      wan::set_timeout(link.connection->descriptor(), !is_full);
  }

  // TCP finds a lost packet when a later one has come. Behind the last packets of a burst there is none, and its timer
  // takes two round trips. So something small follows when all else has been sent. (RFC 8985: RACK, and TLP's timer.)
  void probe(Link& link) {
    link.has_tail = link.connection->under_way();
    if (!link.has_tail || wan::unsent(link.connection->descriptor())) return;
    Head head;
    head.kind = Kind::probe;
    link.connection->greet(head, "");
    link.has_tail = false;
  }

  void find_nearest() {
    nearest_ = 0;
    for (const Peer& peer : peers_)
      if (peer.round_trip > 0) nearest_ = nearest_ > 0 ? std::min(nearest_, peer.round_trip) : peer.round_trip;
  }

  Link& add(int descriptor, double now) {
    Link& link = links_[++last_id_];
    link.id = last_id_;
    link.descriptor = descriptor;
    link.until = now + kDialSeconds;
    wan::configure(descriptor, settings_.congestion_control, settings_.connections);
    return link;
  }

  void call(Peer& peer, int slot, double now) {
    peer.next_dial[static_cast<std::size_t>(slot)] = now + kRetrySeconds;
    if (peer.places.empty()) return;
    const int descriptor = wan::dial(peer.places[peer.place++ % peer.places.size()]);
    if (descriptor < 0) return;
    Link& link = add(descriptor, now);
    link.peer = peer.rank;
    link.slot = slot;
    peer.links[static_cast<std::size_t>(slot)] = link.id;
    watch(descriptor, link.id, link.events = EPOLLOUT, EPOLL_CTL_ADD);
  }

  // -- by the relay: both ranks call it, and it joins their connections of one name -----------------------------------

  bool has_relay() const { return !settings_.relay.place.host.empty(); }

  void call_by_relay(Peer& peer, double now) {
    for (std::size_t slot = 0; slot < peer.links.size(); ++slot) {
      if (link_at(peer, slot) || peer.relayed[slot] || now < peer.next_relayed[slot]) continue;
      peer.next_relayed[slot] = now + kRelayRetrySeconds;
      const int descriptor = wan::dial(settings_.relay.place);
      if (descriptor < 0) return;
      Link& link = add(descriptor, now);
      const std::string who = std::to_string(std::min(rank_, peer.rank)) + " " + std::to_string(std::max(rank_, peer.rank));
      link.relay = std::make_unique<wan::RelayCall>(settings_.openssl, settings_.relay,
                                                    group_ + " " + who + " " + std::to_string(slot), calls_first(peer));
      link.is_caller = !calls_first(peer);  // the other rank is the one that says who it is
      link.peer = peer.rank;
      link.slot = static_cast<int>(slot);
      peer.relayed[slot] = link.id;
      watch(descriptor, link.id, link.events = EPOLLOUT, EPOLL_CTL_ADD);
    }
  }

  // Whether the relay has joined a connection to the other rank's.
  bool is_joined(Link& link) {
    Peer& peer = at(link.peer);
    try {
      if (!link.relay->advance(link.descriptor)) {
        if (!link.relay->has_said()) return false;
        link.until = seconds() + kForeverSeconds;  // the relay holds it until the other one comes
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

  // The connection of a slot, from now on. A connection by the relay does not replace another one.
  bool take_slot(Link& link) {
    Peer& peer = at(link.peer);
    const auto slot = static_cast<std::size_t>(link.slot);
    if (link.relay && any_up(peer, false)) return false;
    if (peer.relayed[slot] == link.id) peer.relayed[slot] = 0;
    std::uint64_t& place = peer.links[slot];
    if (place && place != link.id) drop(place);
    place = link.id;
    if (link.relay) link.round_trip = seconds() - link.since;
    return true;
  }

  // Something has come from a rank. Once it is reached directly, the relay's connections end.
  void has_come(Peer& peer, bool is_direct) {
    peer.down_since = 0;
    peer.was_direct = is_direct;
    peer.was_relayed = !is_direct;
    for (std::size_t slot = 0; is_direct && slot < peer.links.size(); ++slot) {
      if (peer.relayed[slot]) drop(peer.relayed[slot]);
      if (const Link* link = link_at(peer, slot); link && link->relay) drop(link->id);
    }
  }

  void listen(bool does) {
    listens_at_ = does ? 0 : seconds() + kRetrySeconds;
    watch(settings_.listener, 0, does ? std::uint32_t{EPOLLIN} : 0, EPOLL_CTL_MOD);
  }

  void accept() {
    for (int i = 0; i < kMostAccepts; ++i) {
      const int descriptor = accept4(settings_.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (descriptor < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) listen(false);
      if (descriptor < 0) return;
      // Any of them: strangers that call without end would always end the longest wait, a rank's across the world.
      if (guests_.size() >= most_guests_) drop(guests_[random_() % guests_.size()]);
      Link& link = add(descriptor, seconds());
      link.is_caller = true;
      guests_.push_back(link.id);
      watch(descriptor, link.id, link.events = EPOLLIN, EPOLL_CTL_ADD);
      open(link);
    }
  }

  // The socket is connected: TLS begins.
  void open(Link& link) {
    const int descriptor = std::exchange(link.descriptor, -1);
    link.since = seconds();
    link.until = link.since + kGreetSeconds;
    try {
      link.connection = std::make_unique<Connection>(
          settings_.tls ? make_tls_stream(settings_.tls, descriptor, link.is_caller) : make_plain_stream(descriptor));
    } catch (const StreamError&) {
      drop(link.id);
    }
  }

  void serve(std::uint64_t id) {
    const auto found = links_.find(id);
    if (found == links_.end()) return;  // another event has ended it
    Link& link = found->second;
    try {
      if (!link.connection && wan::connect_error(link.descriptor)) {
        if (link.relay) at(link.peer).relay_answer = ", and the relay cannot be reached";
        return drop(id);
      }
      if (!link.connection && link.relay && !is_joined(link)) return update(link);
      if (!link.connection) open(link);
      if (!links_.count(id)) return;
      if (!link.is_ready && link.connection->handshake()) {
        link.is_ready = true;
        if (!link.is_caller && !take_slot(link)) return drop(id);
        if (!link.is_caller) greet(link);
      }
      if (link.connection) link.connection->retry();
      if (link.is_ready) read(link);
    } catch (const StreamError&) {
      return drop(id);
    } catch (const FrameError& error) {
      const int peer = link.is_up ? link.peer : -1;
      drop(id);
      if (peer >= 0) lose(at(peer), std::string("it sent ") + error.what());
      return;
    }
    if (const auto again = links_.find(id); again != links_.end()) update(again->second);
  }

  void read(Link& link) {
    link.connection->read([&](const Head& head, const unsigned char* data) { take(link, head, data); });
    if (!link.is_up) return;
    has_pending_ |= link.connection->has_pending();
    Peer& peer = at(link.peer);
    const bool has_heard = link.connection->has_heard(), is_direct = !link.relay;
    if (has_heard) has_come(peer, is_direct);
    settle(peer, *link.connection);
    if (link.connection->unacknowledged() >= kFramesPerAck) acknowledge(link);
    collect(peer);
    pump(peer);
  }

  // What acknowledgements have said.
  static void settle(Peer& peer, Connection& connection) {
    peer.out.acknowledged(connection.take_freed());
    peer.out.set_early(connection.peer_early(), connection.peer_number());
  }

  // This side is the one that called.
  void greet(Link& link) {
    Head head;
    head.kind = Kind::hello;
    head.nbytes = kNonceNbytes;
    head.tag = link.slot;
    head.index = static_cast<std::uint64_t>(rank_);
    head.offset = static_cast<std::uint64_t>(link.peer);
    head.total = kVersion;
    link.connection->greet(head, group_);
    link.is_up = true;
  }

  void take(Link& link, const Head& head, const unsigned char* data) {
    if (head.kind == Kind::hello) return greeted(link, head, data);
    if (!link.is_up) throw StreamError("it does not say who it is");
    Peer& peer = at(link.peer);
    if (!peer.lost.empty()) return;
    switch (head.kind) {
      case Kind::data:
        return peer.in.take(head, data);
      case Kind::announce:
        return peer.in.announced(head.tag, head.index);
      case Kind::posted:
        return peer.out.posted(head.tag, head.index);
      case Kind::bye:
        return lose(peer, "it has closed its connections");
      default:
        throw FrameError("a frame of a kind that no rank sends");
    }
  }

  // A caller says which rank it is. Its connection takes the place of the one that there was: the rank has given that up.
  void greeted(Link& link, const Head& head, const unsigned char* data) {
    const bool fits = rank_ >= 0 && link.is_caller && !link.is_up && head.total == kVersion &&
                      head.nbytes == kNonceNbytes && !std::memcmp(data, group_.data(), kNonceNbytes) &&
                      head.index < peers_.size() && head.index != static_cast<std::uint64_t>(rank_) &&
                      head.offset == static_cast<std::uint64_t>(rank_) && head.tag >= 0;
    if (!fits) throw StreamError("a caller of another group");
    Peer& peer = at(static_cast<int>(head.index));
    if (!peer.lost.empty()) throw StreamError("a rank that was lost");
    if (static_cast<std::size_t>(head.tag) >= peer.links.size()) throw StreamError("a connection that the ranks do not have");
    if (link.relay && (link.peer != peer.rank || link.slot != head.tag)) throw StreamError("not the rank that was called");
    link.peer = peer.rank;
    link.slot = head.tag;
    if (!take_slot(link)) throw StreamError("by the relay, though it is reached directly");
    if (!link.relay) guests_.erase(std::find(guests_.begin(), guests_.end(), link.id));
    link.is_up = true;
    acknowledge(link);  // so that the caller knows that it was heard
  }

  // Ends a connection; what it may not have delivered goes over another one.
  void drop(std::uint64_t id) {
    const auto found = links_.find(id);
    if (found == links_.end()) return;
    Link& link = found->second;
    if (const auto guest = std::find(guests_.begin(), guests_.end(), id); guest != guests_.end()) guests_.erase(guest);
    if (link.peer >= 0) {
      Peer& peer = at(link.peer);
      const auto slot = static_cast<std::size_t>(link.slot);
      if (peer.relayed[slot] == id) {
        peer.relayed[slot] = 0;
        peer.next_relayed[slot] = std::max(peer.next_relayed[slot], seconds() + kRelayRetrySeconds);
      }
      std::uint64_t& place = peer.links[slot];
      if (place == id) {
        place = 0;
        double& next = peer.next_dial[static_cast<std::size_t>(link.slot)];
        next = std::max(next, seconds() + (link.is_up ? 0 : kRetrySeconds) + (calls_first(peer) ? 0 : kSecondSeconds));
      }
      if (link.connection) {
        settle(peer, *link.connection);
        peer.out.again(link.connection->take_frames());
        collect(peer);
      }
      if (!peer.down_since && !any_up(peer)) {
        peer.down_since = seconds();
        peer.relay_from = peer.down_since + (peer.was_direct ? kDirectSeconds : 0);
      }
    }
    if (link.connection) {
      gone_.push_back(std::move(link.connection));  // perhaps one of its functions is running
    } else if (link.descriptor >= 0) {
      ::close(link.descriptor);
    }
    links_.erase(found);
  }

  bool any_up(const Peer& peer) const { return any_up(peer, false) || any_up(peer, true); }
  bool any_up(const Peer& peer, bool by_relay) const {
    return std::any_of(peer.links.begin(), peer.links.end(), [&](std::uint64_t id) {
      const auto found = links_.find(id);
      return found != links_.end() && found->second.is_up && bool(found->second.relay) == by_relay;
    });
  }

  // What epoll waits for.
  void update(Link& link) {
    const int descriptor = link.connection ? link.connection->descriptor() : link.descriptor;
    const bool writes = link.connection && (link.connection->waits_to_write());
    const std::uint32_t events = (writes ? EPOLLOUT : 0u) | EPOLLIN;
    if (events == link.events) return;
    link.events = events;
    watch(descriptor, link.id, events, EPOLL_CTL_MOD);
  }

  // -- messages -------------------------------------------------------------------------------------------------------

  // Writes as much as the connections take. Short messages have one of their own, which long ones do not hold up; of the
  // others the one with the least under way takes the next frame.
  void pump(Peer& peer) {
    const double now = seconds();
    fill(peer);
    for (std::size_t slot = 0; slot < peer.links.size(); ++slot)
      if (Link* link = link_at(peer, slot); link && link->connection->has_rest()) write(*link, nullptr);
    while (Link* link = least_loaded(peer)) {
      const bool is_alone = is_lossy(peer, now) && now - last_new_ > kIdleNetworkSeconds;
      last_new_ = now;
      const int slot = link->slot;
      const FramePointer frame = peer.out.next(slot, takes_short(peer, *link), takes_long(peer, *link), now);
      write(*link, frame);
      if (is_alone) write_twice(peer, frame, slot);
      if (!peer.out.has_long()) fill(peer);
    }
    if (is_lossy(peer, now) && now - last_new_ > kIdleNetworkSeconds && is_idle())
      send_copies(peer, now - kLateRoundTrips * peer.round_trip - kLateSeconds);
  }

  static bool is_lossy(const Peer& peer, double now) { return now < peer.lossy_until; }

  bool takes_short(Peer& peer, const Link& link) { return !link.slot || !link_at(peer, 0); }
  bool takes_long(Peer& peer, const Link& link) {
    if (link.slot) return true;
    for (std::size_t slot = 1; slot < peer.links.size(); ++slot)
      if (link_at(peer, slot)) return false;
    return true;
  }

  // Of the connections that can take a frame, and for which there is one; null: there is none.
  Link* least_loaded(Peer& peer) {
    Link* found = nullptr;
    for (std::size_t slot = 0; slot < peer.links.size(); ++slot) {
      Link* const link = link_at(peer, slot);
      if (!link || link->connection->waits_to_write()) continue;
      const bool has_frame = (peer.out.has_short() && takes_short(peer, *link)) ||
                             (peer.out.has_long() && takes_long(peer, *link));
      if (has_frame && (!found || load(*link) < load(*found))) found = link;
    }
    return found;
  }

  // Of the connections for long messages that take a frame, beside that of the slot `except`.
  Link* idlest(Peer& peer, int except) {
    Link* found = nullptr;
    for (std::size_t slot = 1; slot < peer.links.size(); ++slot) {
      Link* const link = link_at(peer, slot);
      if (!link || link->slot == except || link->connection->waits_to_write()) continue;
      if (!found || load(*link) < load(*found)) found = link;
    }
    return found;
  }

  // Frames under way; of equal ones the connection that was used first is the next.
  static std::pair<std::size_t, std::uint64_t> load(const Link& link) {
    return {link.connection->under_way(), link.turn};
  }

  // Nothing waits to be sent to any rank.
  bool is_idle() const {
    return std::none_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return peer.out.has_short() || peer.out.has_long() || peer.out.under_way();
    });
  }

  // A frame for which an idle network has waited is often late already: a header, or the second round of a chunk that
  // was lost in the first. Another round trip would be worse than its bytes.
  void write_twice(Peer& peer, const FramePointer& frame, int slot) {
    Link* const link = idlest(peer, slot);
    if (!link || frame->copies != 1) return;
    frame->copies = 2;
    write(*link, frame);
  }

  // Where TCP has not delivered a frame in two round trips, what it sent again was lost, too. An idle network carries the
  // frame over another connection.
  void send_copies(Peer& peer, double sent_before) {
    while (Link* link = idlest(peer, -1)) {
      FramePointer frame = peer.out.copy(link->slot, sent_before);
      if (!frame) return;
      write(*link, std::move(frame));
    }
  }

  void write(Link& link, FramePointer frame) {
    Peer& peer = at(link.peer);
    if (frame) {
      link.has_tail = true;
      link.turn = ++turns_;
    }
    try {
      link.connection->write([&] { return std::exchange(frame, nullptr); });
      update(link);
    } catch (const StreamError&) {
      drop(link.id);
      if (frame) peer.out.again({frame});  // the connection has not even begun to write it
    }
  }

  Link* link_at(Peer& peer, std::size_t slot) {
    const auto found = links_.find(peer.links[slot]);
    return found == links_.end() || !found->second.is_up ? nullptr : &found->second;
  }

  void fill(Peer& peer) {
    peer.out.fill(copied_);
    for (const Token token : copied_) complete(token);
    copied_.clear();
  }

  void collect(Peer& peer) {
    for (const Token token : peer.in.take_completed()) complete(token);
    for (const Head& head : peer.in.take_posted()) peer.out.put(head);
    for (const wan::Inbox::Mismatch& each : peer.in.take_mismatches())
      reports_.mismatch(peer.rank, static_cast<std::int64_t>(each.got), static_cast<std::int64_t>(each.expected));
  }

  void complete(Token token) {
    quiet_.interrupt();
    reports_.complete(token);
  }

  void acknowledge(Link& link) {
    Peer& peer = at(link.peer);
    link.connection->acknowledge(peer.in.early(), ++peer.acknowledgements);
  }

  // Of a rank whose messages go another way, and that has acknowledged everything.
  void end_connections(Peer& peer) {
    lose(peer, "its messages go another way");  // of which nothing is told, because no transfer waits for it here
    for (const std::uint64_t id : std::vector<std::uint64_t>(peer.links)) {
      const auto found = links_.find(id);
      if (found != links_.end() && found->second.is_up) found->second.connection->shut();
      drop(id);
    }
    for (const std::uint64_t id : std::vector<std::uint64_t>(peer.relayed)) drop(id);
    peer.round_trip = 0;
  }

  // -- ranks that are lost --------------------------------------------------------------------------------------------

  void lose(Peer& peer, const std::string& reason) {
    if (peer.lost.empty()) peer.lost = reason;
  }

  void look_for_ended(Lock& lock) {
    if (!quiet_.is_over() || has_fault()) return;
    std::vector<int> waited;
    for (const Peer& peer : peers_)
      // Where there is a relay, a rank may have the address of this machine in a network of its own.
      if (peer.down_since && peer.rank != rank_ && peer.in.under_way() && (!has_relay() || peer.was_direct || peer.was_relayed))
        waited.push_back(peer.rank);
    if (waited.empty()) return;
    lock.unlock();  // it takes a moment, and Python's lock
    const std::vector<int> ended = find_ended_(waited);
    lock.lock();
    for (const int rank : ended) lose(at(rank), "its process has ended");
  }

  // A rank that has left in order counts as lost only where a transfer waits for it.
  bool has_fault() override {
    for (const Peer& peer : peers_)
      if (!peer.lost.empty() && (peer.in.under_way() || peer.out.under_way())) fail({0, peer.lost, peer.rank, true});
    return reports_.has_fault();
  }

  // -- the end --------------------------------------------------------------------------------------------------------

  bool has_unsent() {
    return std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
      return peer.rank != rank_ && peer.lost.empty() && !peer.out.is_empty();
    });
  }

  void say_bye(double until, Lock& lock) {
    Head head;
    head.kind = Kind::bye;
    for (Peer& peer : peers_) {
      if (peer.rank == rank_) continue;
      peer.out.put(head);  // a rank that was lost hears that it was, if there is a connection
      pump(peer);
    }
    const auto waits = [&](const Peer& peer) { return any_up(peer) && peer.lost.empty() && !peer.out.is_empty(); };
    while (std::any_of(peers_.begin(), peers_.end(), waits) && seconds() < until) advance(1, lock);
    const double now = seconds();
    tick(now);  // the others wait for the acknowledgements
  }

  void forget(Peer& peer) {
    peer.out.clear();
    peer.in.clear();
    peer.links.assign(peer.links.size(), 0);
    peer.relayed.assign(peer.links.size(), 0);
  }

  // In a child of fork(), which must not keep its parent's connections: their ends tell the other ranks of its end. Where
  // a thread of the parent had the lock for too long (HeldAtFork), what it guards cannot be used.
  void forget_parent() {
    const Lock lock(mutex_, std::try_to_lock);
    if (lock && !is_closed_) close_descriptors();
  }

  void close_descriptors() {
    is_closed_ = is_closing_ = true;
    for (const auto& [id, link] : links_)
      if (!link.connection && link.descriptor >= 0) ::close(link.descriptor);
    links_.clear();
    gone_.clear();
    ::close(settings_.listener);
  }

  const WanSettings settings_;
  const pid_t process_;
  const int epoll_;
  bool is_closed_ = false, is_closing_ = false;
  std::string group_;  // names the group: the nonce of rank 0's address
  FindEnded find_ended_;
  std::vector<Peer> peers_;
  std::map<std::uint64_t, Link> links_;
  std::uint64_t last_id_ = 0, turns_ = 0;
  std::vector<std::uint64_t> guests_;  // callers that are not known yet
  const std::size_t most_guests_ = wan::most_guests();
  std::minstd_rand random_{std::random_device{}()};
  std::vector<std::unique_ptr<Connection>> gone_;
  bool has_pending_ = false;
  QuietTime quiet_{kQuiet, kBetweenLooks};
  double last_tick_ = 0, next_tick_ = 0, next_measure_ = 0, last_new_ = 0, last_alone_ = 0;
  double listens_at_ = 0;  // when strangers may call again, as there were no descriptors; 0: they may
  double nearest_ = 0;  // the shortest round trip, in seconds
  std::vector<Token> copied_;
};

}  // namespace

std::shared_ptr<WanWire> make_wan_wire(const WanSettings& settings, OnFault fault) {
  return std::make_shared<Sites>(settings, std::move(fault));
}

}  // namespace qccl
