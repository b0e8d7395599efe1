// The inner loop of the host engine (qccl/engine/host/engine.py). All runs under way on one transport advance together,
// whichever the caller waits for, because another rank may be waiting for another one.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recorder.h"
#include "run.h"

namespace qccl {

// Runs that may be in flight at once: each has its own range of tags.
constexpr std::uint64_t kRunsInFlight = 16;
constexpr int kTagsPerRun = 1024;

// A control message that no rank of this version sends; the text names the rank. Nothing of the message was used.
struct MessageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Called for a control message that is not the header that this rank expects; throws if it means a failure.
using OnControl = std::function<void(int peer, std::string_view message)>;

// The limits of one call of advance().
struct Turn {
  bool once = false;                                      // one operation and one poll
  bool brief = false;                                     // while there is something to do, and for kBriefSeconds at most
  bool attended = false;                                  // the program waits for a call meanwhile
  bool yields = false;                                    // to other threads that want to drive; also naps early
  double limit = std::numeric_limits<double>::infinity();    // in seconds()
  std::function<void()> check_signals;                             // called every few milliseconds; may throw
};

enum class Outcome { pause, overdue, ended };

// After this time a brief turn begins no further operation.
constexpr double kBriefSeconds = 100e-6;

// One thread at a time may use it.
class Loop {
 public:
  // `call`: the first bytes of every call's header. `most_eager`: bytes of data that may follow a header.
  Loop(std::shared_ptr<Wire> wire, int rank, int size, std::size_t most_eager, std::string call);

  // `run` has its headers. Runs are numbered from 0 on, in the order of their calls. `timeout`: seconds from now on.
  // `attended`: the program waits from now on, until an attended turn or the run has ended.
  void begin(std::shared_ptr<Run> run, std::uint64_t sequence, double timeout, bool traced, bool attended,
             const OnControl& on_control);
  // Advances all runs until one has ended, one is past its deadline, or the turn is over.
  Outcome advance(const Turn& turn, const OnControl& on_control);
  // The sequence numbers of the runs that have ended since the last call.
  std::vector<std::uint64_t> take_ended() { return std::exchange(ended_, {}); }

  // The last runs with their numbers, from the oldest on.
  std::vector<std::pair<std::uint64_t, Recorder::Entry>> records() const { return recorder_.entries(next_run_); }
  // The runs under way, in the order of their calls.
  const std::vector<std::shared_ptr<Run>>& runs() const { return active_; }

  bool has_ended() const { return !ended_.empty(); }
  // Runs under way.
  std::size_t active() const { return active_.size(); }

  // The sequence number of the run that made advance() return Outcome::overdue.
  std::uint64_t overdue() const { return overdue_; }

  // Starts sending a control message to all other ranks; at most once.
  void broadcast_control(const std::string& message);
  // Ranks of which nothing more is received, because of a MessageError.
  int refused() const { return refused_; }
  // Sends of broadcast_control() under way.
  int control_sends() const { return control_sends_; }
  // Polls for control messages after the last run.
  void drain(std::uint64_t idle, const OnControl& on_control);
  // Makes all present and later turns return at once. Any thread may call this.
  void halt() { halted_ = true; }
  bool halted() const { return halted_; }

  // Number of other threads that want to drive. Any thread may change it.
  std::atomic<int> wanted{0};
  // Headers of calls that this rank has not made yet.
  std::size_t early() const { return early_.size(); }

  std::shared_ptr<Wire> wire;
  const int rank, size;

 private:
  struct Early {
    std::uint64_t sequence;
    int peer;
    std::vector<unsigned char> message;
  };

  Outcome advance_until(const Turn& turn, const OnControl& on_control);
  void stop_attending();
  Outcome advance_for(double seconds_left, const OnControl& on_control);
  double look();
  bool compute();
  void poll(std::uint64_t idle, std::uint64_t extra_idle, const OnControl& on_control);
  bool is_call(const unsigned char* message) const;
  void post_control_receive(int peer);
  void control_received(int peer, const OnControl& on_control);
  bool takes_header(int peer);
  void check_size(int peer);
  void check_order(int peer, std::uint64_t sequence);
  [[noreturn]] void refuse(const std::string& found);
  void check_header(Run& run, int peer, const unsigned char* message, const OnControl& on_control);
  void collect_ended();
  void find_deadline();
  bool find_overdue(double now);
  void dispatch(Token token, const OnControl& on_control);
  unsigned char* inbox(int peer) { return inbox_.data() + inbox_nbytes_ * static_cast<std::size_t>(peer); }

  const std::string call_;
  const std::size_t inbox_nbytes_;
  std::vector<unsigned char> inbox_, outbox_;
  std::vector<std::size_t> arrived_;  // by rank: bytes of the message in its inbox
  // Numbers of runs: the next that this rank begins, and by rank the next whose header comes.
  std::uint64_t next_run_ = 0;
  std::vector<std::uint64_t> next_header_;
  std::vector<std::shared_ptr<Run>> active_;  // the runs under way, in the order of their calls
  std::shared_ptr<Run> by_slot_[kRunsInFlight];
  Recorder recorder_;
  double looked_ = 0;  // when look() was called last
  double attended_ = 0;        // seconds in which the program has waited for calls, before it began to wait
  double attended_since_ = 0;  // 0: the program does not wait
  double counted_ = 0;         // the part of these seconds that was counted for ended runs
  double last_end_ = 0;        // the latest end of a run
  std::deque<Early> early_;  // at most kRunsInFlight from each rank
  std::vector<std::uint64_t> ended_;
  std::vector<Token> completed_;
  double deadline_ = std::numeric_limits<double>::infinity();  // the earliest deadline of all runs
  std::uint64_t idle_ = 0;
  std::uint64_t overdue_ = 0;
  int control_sends_ = 0, refused_ = 0;
  std::atomic<bool> halted_{false};
  bool advancing_ = false;
};

}  // namespace qccl
