// The connections of a wire between sites: makes them, accepts callers, and ends them. It does not read or write frames,
// except those with which a connection begins.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "wire.h"
#include "peer.h"

namespace qccl::wan {

class Links {
 public:
  // Both must live as long as this. It owns the listener of the settings, whose callers wait in the kernel until begin().
  // Throws std::system_error where the system has no descriptor left.
  Links(const WanSettings& settings, Group& group);
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  ~Links();

  // Sets the group up, with this rank's number and the addresses by rank; connections follow by call_missing(). Throws
  // std::invalid_argument, and has changed nothing then.
  void begin(int rank, const std::vector<std::string>& addresses, double now);
  // Ends all connections, without a word to the other ranks.
  void close();

  // A descriptor of epoll, which stays open until the destructor. Its events have the ids of connections; 0: accept().
  int descriptor() const { return epoll_; }
  void accept();
  // Goes on with a connection that is not ready. Null: it is not ready yet, or has ended. Throws StreamError: drop() it.
  Link* advance(std::uint64_t id);
  // A caller says which rank it is. Throws StreamError.
  void greeted(Link& link, const Head& head, const unsigned char* data);
  // Sets for what epoll waits.
  void update(Link& link);

  // Timed work: calls a rank for connections that are missing, and listens again after descriptors were short.
  void call_missing(Peer& peer, double now);
  void listen_again(double now);
  // Extends deadlines by the seconds for which the process was stopped or busy.
  void give_time(double busy);

  // Ends a connection; what it may not have delivered goes over another one.
  void drop(std::uint64_t id);
  // Tells the other sides that nothing more comes.
  void shut();
  // Destroys connections that were dropped. Not while a function of one of them runs.
  void forget_dropped() { dropped_.clear(); }

  // The ids of all connections, also of unfinished ones. Connections may end meanwhile: see find().
  std::vector<std::uint64_t> ids() const;
  // The connection with an id; null: it has ended.
  Link* find(std::uint64_t id);
  // The connection of a slot, if it is up and not broken.
  Link* at(const Peer& peer, std::size_t slot);
  bool any_up(const Peer& peer) const;

 private:
  // The rank with the higher number calls, because all can reach rank 0.
  bool calls_first(const Peer& peer) const { return group_.rank > peer.rank; }
  void watch(int descriptor, std::uint64_t id, std::uint32_t events, int operation);
  Link& add(int descriptor, double now);
  void call(Peer& peer, int slot, double now);
  bool is_connected(Link& link);
  bool open(Link& link);
  void take_slot(Link& link);
  void greet(Link& link);
  void listen(bool does);

  const WanSettings& settings_;
  Group& group_;
  const int epoll_;
  std::map<std::uint64_t, Link> links_;
  std::uint64_t last_id_ = 0;
  std::vector<std::uint64_t> guests_;  // callers that are not known yet
  std::minstd_rand random_{std::random_device{}()};
  std::vector<std::unique_ptr<Connection>> dropped_;
  double listens_at_ = 0;  // when strangers may call again, as there were no descriptors; 0: they may
};

}  // namespace qccl::wan
