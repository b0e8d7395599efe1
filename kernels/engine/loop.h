// The inner loop of the host engine (qccl/host/engine.py): all runs under way on one transport advance together,
// whichever is waited for, because another rank may be waiting for another one.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "run.h"

namespace qccl {

// Runs that may have messages under way at once, so that their tags differ.
constexpr std::uint64_t kRunsInFlight = 16;
constexpr int kTagsPerRun = 1024;

// Told of a control message that is not the header of a call as this rank makes it; throws, unless it is no failure.
using Unusual = std::function<void(int peer, std::string_view message)>;

// For how long to advance.
struct Turn {
  bool once = false;                                         // one operation at most, and what has come
  bool gives_way = false;                                    // as soon as another thread wants to; and naps early
  double limit = std::numeric_limits<double>::infinity();    // in seconds()
  std::function<void()> look_up;                             // called every few milliseconds; may throw
};

enum class Outcome { pause, overdue, ended };

// One thread at a time may use it.
class Loop {
 public:
  // `call`: how headers of calls begin. `most_eager`: bytes that may come with one.
  Loop(std::shared_ptr<Wire> wire, int rank, int size, std::size_t most_eager, std::string call);

  void begin(std::shared_ptr<Run> run, const std::vector<std::string>& headers, std::uint64_t sequence, double deadline,
             bool traced, const Unusual& unusual);
  // Advances until a run has ended, one is past its deadline, or the turn is over.
  Outcome advance(const Turn& turn, const Unusual& unusual);
  // The sequence numbers of the runs that have ended since the last time.
  std::vector<std::uint64_t> take_ended() { return std::exchange(ended_, {}); }

  // The sequence number of the run that made advance() return Outcome::overdue.
  std::uint64_t overdue() const { return overdue_; }

  // Starts sending the same control message to all other ranks; at most once.
  void tell(const std::string& message);
  // Sends of it under way.
  int telling() const { return telling_; }
  // Polls, when no run counts any more, for control messages.
  void drain(std::uint64_t idle, const Unusual& unusual);
  // Makes whoever advances it return at once, and whoever comes later. Any thread may call this.
  void halt() { halted_ = true; }
  bool halted() const { return halted_; }

  // How many other threads want to advance it themselves. Any thread may change this.
  std::atomic<int> wanted{0};
  // Calls that other ranks have made, and this one not yet.
  std::size_t early() const { return early_.size(); }

  std::shared_ptr<Wire> wire;
  const int rank, size;

 private:
  struct Early {
    std::uint64_t sequence;
    int peer;
    std::vector<unsigned char> message;
  };

  bool compute();
  void poll(std::uint64_t idle, std::uint64_t more, const Unusual& unusual);
  bool is_call(const unsigned char* message) const;
  void listen(int peer);
  void heard(int peer, const Unusual& unusual);
  void agree(Run& run, int peer, const unsigned char* message, const Unusual& unusual);
  void look_for_ended();
  void find_deadline();
  bool is_overdue(double now);
  void dispatch(Token token, const Unusual& unusual);
  unsigned char* inbox(int peer) { return inbox_.data() + slot_nbytes_ * static_cast<std::size_t>(peer); }

  const std::string call_;
  const std::size_t slot_nbytes_;
  std::vector<unsigned char> inbox_, outbox_;
  std::vector<std::shared_ptr<Run>> active_;  // in the order of their calls
  std::shared_ptr<Run> by_owner_[kRunsInFlight];
  std::deque<Early> early_;
  std::vector<std::uint64_t> ended_;
  std::vector<Token> completed_;
  double deadline_ = std::numeric_limits<double>::infinity();  // the nearest one
  std::uint64_t idle_ = 0;
  std::uint64_t overdue_ = 0;
  int telling_ = 0;
  std::atomic<bool> halted_{false};
  bool advancing_ = false;
};

}  // namespace qccl
