#include "wire.h"

#include <poll.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "../reports.h"
#include "../../engine/run.h"
#include "links.h"
#include "sender.h"

namespace qccl {

namespace {

using wan::FrameError;
using wan::Head;
using wan::Kind;
using wan::Link;
using wan::Peer;

constexpr int kSleepMilliseconds = 1;
// Seconds between two looks at timed work.
constexpr double kTickSeconds = 0.005;
// Seconds between two readings of TCP's measurements.
constexpr double kMeasureSeconds = 0.05;
// A connection that was silent for this time was not refused: the other machine is there, and its process is busy.
constexpr double kSilentSeconds = 1;
// A gap of this time between two looks does not count as waiting.
constexpr double kBusySeconds = 0.5;
// An acknowledgement is sent after this many frames, or this many seconds.
constexpr std::uint64_t kFramesPerAck = 16;
constexpr int kMostEvents = 64;
// Part of a round trip for which a thread sleeps whatever comes meanwhile, if that is not too short.
constexpr double kPauseRoundTrips = 0.01, kShortestPauseSeconds = 0.0001, kLongestPauseSeconds = 0.001;
// Time without a completion after which ended processes are looked for, and between two looks.
constexpr std::chrono::milliseconds kQuiet(1000), kBetweenLooks(500);

class Sites final : public ReportingWire {
 public:
  Sites(const WanSettings& settings, OnFault fault)
      : ReportingWire(std::move(fault)), settings_(settings), process_(getpid()), links_(settings_, group_) {}

  ~Sites() override { close(0); }

  std::string address() override { return settings_.address; }

  void connect(int rank, const std::vector<std::string>& addresses, FindEnded find_ended) override {
    const Lock lock(mutex_);
    if (is_closed_ || rank_ >= 0) throw std::logic_error("this wire was connected before, or is closed");
    const double now = last_tick_ = seconds();
    links_.begin(rank, addresses, now);
    rank_ = rank;
    find_ended_ = std::move(find_ended);
    tick(now);
    thread_.start();
  }

  void send(int peer, int tag, const void* data, std::size_t nbytes, Token token) override {
    const Lock lock(mutex_);
    if (is_closed_) return fail({});
    Peer& to = group_.at(peer);
    if (!to.lost.empty()) return fail({0, to.lost, peer, true});
    to.out.send(tag, data, nbytes, token);
    pump(to);
  }

  void receive(int peer, int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived) override {
    const Lock lock(mutex_);
    if (is_closed_) return fail({});
    Peer& from = group_.at(peer);
    from.in.receive(tag, data, nbytes, token, arrived);
    collect(from);
  }

  std::optional<Rest> rest() override {
    Lock lock(mutex_);
    if (!is_closed_) look_for_ended(lock);
    if (is_closed_ || reports_.has_completed() || has_fault() || has_pending_) return std::nullopt;
    return Rest{links_.descriptor(), pause()};
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
    links_.shut();
    for (Peer& peer : group_.peers) peer.clear();
    close_descriptors();
  }

 private:
  // -- what happens in a poll -----------------------------------------------------------------------------------------

  void advance(std::uint64_t idle, Lock& lock) override {
    if (is_closed_) return;
    const double now = move();
    if (now >= next_tick_) tick(now);
    if (!idle || reports_.has_completed() || has_fault() || has_pending_) return;
    const double length = pause();
    lock.unlock();
    sleep(length);
    lock.lock();
    if (is_closed_) return;
    move();
    if (!reports_.has_completed()) look_for_ended(lock);
  }

  // In the wire's thread. While only this thread runs, nobody waits for the other ranks, so their time to come back does not
  // pass.
  void advance_alone(int wakeup) override {
    Lock lock(mutex_);
    const double now = move();
    for (Peer& peer : group_.peers)
      if (peer.down_since) peer.down_since += std::min(now - last_alone_, kBusySeconds);
    last_alone_ = now;
    if (now >= next_tick_) tick(now);
    if (has_pending_) return;
    lock.unlock();
    pollfd waited[] = {{links_.descriptor(), POLLIN, 0}, {wakeup, POLLIN, 0}};
    ::poll(waited, 2, WireThread::kSleepMilliseconds);
  }

  // If the other ranks are far away, a pause costs little time, and the processor need not handle each packet by itself.
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
    epoll_wait(links_.descriptor(), &event, 1, kSleepMilliseconds);
  }

  // Serves the connections at which something has happened; returns the time.
  double move() {
    links_.forget_dropped();
    epoll_event events[kMostEvents];
    const int count = epoll_wait(links_.descriptor(), events, kMostEvents, 0);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64) {
        serve(events[i].data.u64);
      } else {
        links_.accept();
      }
    }
    if (std::exchange(has_pending_, false)) {
      for (const std::uint64_t id : links_.ids()) {
        const Link* const link = links_.find(id);
        if (link && link->is_ready && link->connection->has_pending()) serve(id);
      }
    }
    return seconds();
  }

  // Does timed work: connections that are missing or late, late acknowledgements, ranks that stay away.
  void tick(double now) {
    next_tick_ = now + kTickSeconds;
    if (const double busy = now - std::exchange(last_tick_, now); busy > kBusySeconds) give_time(busy);
    links_.listen_again(now);
    const bool measures = now >= next_measure_;
    if (measures) next_measure_ = now + kMeasureSeconds;
    for (const std::uint64_t id : links_.ids())
      if (Link* const link = links_.find(id)) look_at(*link, now, measures);
    if (measures) find_nearest();
    for (Peer& peer : group_.peers)
      if (peer.rank != rank_) pump(peer);
    for (Peer& peer : group_.peers) {
      if (peer.rank == rank_ || !peer.lost.empty()) continue;
      links_.call_missing(peer, now);
      if (peer.down_since && now - peer.down_since > settings_.away_seconds)
        peer.lose("it was away for too long");
    }
  }

  void look_at(Link& link, double now, bool measures) {
    if (link.is_broken) return links_.drop(link.id);
    if (is_silent(link, now) && group_.at(link.peer).down_since) group_.at(link.peer).down_since = now;
    if (!link.is_up) {
      if (now > link.until) links_.drop(link.id);
      return;
    }
    Peer& peer = group_.at(link.peer);
    if (measures) sender_.measure(link, now);
    if (link.connection->unacknowledged()) peer.acknowledge(*link.connection);
    if (link.has_tail && peer.is_lossy(now)) sender_.probe(link);
  }

  // Extends the other ranks' deadlines by the seconds in which this process was stopped or busy, and saw nothing of them.
  void give_time(double busy) {
    links_.give_time(busy);
    for (Peer& peer : group_.peers)
      if (peer.down_since) peer.down_since += busy;
  }

  // Connected to the other rank's machine, without an answer.
  static bool is_silent(const Link& link, double now) {
    return link.peer >= 0 && link.connection && !link.connection->has_heard() && now - link.since > kSilentSeconds;
  }

  void find_nearest() {
    nearest_ = 0;
    for (const Peer& peer : group_.peers)
      if (peer.round_trip > 0) nearest_ = nearest_ > 0 ? std::min(nearest_, peer.round_trip) : peer.round_trip;
  }

  // -- messages -------------------------------------------------------------------------------------------------------

  void serve(std::uint64_t id) {
    try {
      if (Link* const link = links_.advance(id)) read(*link);
    } catch (const StreamError&) {
      return give_up(id, "");
    } catch (const FrameError& error) {
      return give_up(id, std::string("it sent ") + error.what());
    }
    if (Link* const link = links_.find(id)) links_.update(*link);
  }

  void read(Link& link) {
    link.connection->read([&](const Head& head, const unsigned char* data) { take(link, head, data); });
    if (!link.is_up) return;
    has_pending_ |= link.connection->has_pending();
    Peer& peer = group_.at(link.peer);
    if (link.connection->has_heard()) peer.down_since = 0;
    peer.settle(*link.connection);
    if (link.connection->unacknowledged() >= kFramesPerAck) peer.acknowledge(*link.connection);
    collect(peer);
    pump(peer);
  }

  // A connection is broken. With a `reason` its rank is lost, if it has said who it is.
  void give_up(std::uint64_t id, const std::string& reason) {
    const Link* const link = links_.find(id);
    Peer* const peer = link && link->is_up ? &group_.at(link->peer) : nullptr;
    links_.drop(id);
    if (!peer) return;
    collect(*peer);  // use what came before the error
    if (!reason.empty()) peer->lose(reason);
  }

  void take(Link& link, const Head& head, const unsigned char* data) {
    if (head.kind == Kind::hello) return links_.greeted(link, head, data);
    if (!link.is_up) throw StreamError("it does not say who it is");
    Peer& peer = group_.at(link.peer);
    if (!peer.lost.empty()) return;
    switch (head.kind) {
      case Kind::data:
        return peer.in.take(head, data);
      case Kind::announce:
        return peer.in.announced(head.tag, head.index);
      case Kind::posted:
        return peer.out.posted(head.tag, head.index);
      case Kind::bye:
        return peer.lose("it has closed its connections");
      default:
        throw FrameError("a frame of a kind that no rank sends");
    }
  }

  void pump(Peer& peer) {
    sender_.pump(peer, copied_);
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

  // -- ranks that are lost, and the end -------------------------------------------------------------------------------

  void look_for_ended(Lock& lock) {
    if (!quiet_.is_over() || has_fault()) return;
    std::vector<int> waited;
    for (const Peer& peer : group_.peers)
      if (peer.down_since && peer.rank != rank_ && peer.in.under_way()) waited.push_back(peer.rank);
    if (waited.empty()) return;
    lock.unlock();  // it takes a moment, and Python's lock
    const std::vector<int> ended = find_ended_(waited);
    lock.lock();
    for (const int rank : ended) group_.at(rank).lose("its process has ended");
  }

  // A rank that has left in order counts as lost only where a transfer waits for it.
  bool has_fault() override {
    for (const Peer& peer : group_.peers)
      if (!peer.lost.empty() && (peer.in.under_way() || peer.out.under_way())) fail({0, peer.lost, peer.rank, true});
    return reports_.has_fault();
  }

  bool has_unsent() {
    return std::any_of(group_.peers.begin(), group_.peers.end(), [&](const Peer& peer) {
      return peer.rank != rank_ && peer.lost.empty() && !peer.out.is_empty();
    });
  }

  void say_bye(double until, Lock& lock) {
    Head head;
    head.kind = Kind::bye;
    for (Peer& peer : group_.peers) {
      if (peer.rank == rank_) continue;
      peer.out.put(head);  // a rank that was lost hears that it was, if there is a connection
      pump(peer);
    }
    const auto waits = [&](const Peer& peer) { return links_.any_up(peer) && peer.lost.empty() && !peer.out.is_empty(); };
    while (std::any_of(group_.peers.begin(), group_.peers.end(), waits) && seconds() < until) advance(1, lock);
    tick(seconds());  // the others wait for the acknowledgements
  }

  // In a child of fork(), which must not keep its parent's connections: their ends tell the other ranks of its end. Where
  // a thread of the parent had the lock for too long (HeldAtFork), what it guards cannot be used.
  void forget_parent() {
    const Lock lock(mutex_, std::try_to_lock);
    if (lock && !is_closed_) close_descriptors();
  }

  void close_descriptors() {
    is_closed_ = is_closing_ = true;
    links_.close();
  }

  const WanSettings settings_;
  const pid_t process_;
  wan::Group group_;
  wan::Links links_;
  wan::Sender sender_{links_, group_};
  bool is_closed_ = false, is_closing_ = false;
  FindEnded find_ended_;
  bool has_pending_ = false;  // a connection has bytes of which epoll does not tell
  QuietTime quiet_{kQuiet, kBetweenLooks};
  double last_tick_ = 0, next_tick_ = 0, next_measure_ = 0, last_alone_ = 0;
  double nearest_ = 0;  // the shortest round trip, in seconds
  std::vector<Token> copied_;
};

}  // namespace

std::shared_ptr<GroupWire> make_wan_wire(const WanSettings& settings, OnFault fault) {
  return std::make_shared<Sites>(settings, std::move(fault));
}

}  // namespace qccl
