#include "loop.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace qccl {

namespace {

// The upper half of a token is its owner: the slot of a run in flight, or one of these. The lower half is the number of
// a step or a rank.
constexpr int kOwnerShift = 32;
constexpr Token kControlReceive = kRunsInFlight, kControlSend = kRunsInFlight + 1;
// Interval between two calls of Turn::check_signals.
constexpr double kCheckSeconds = 5e-3;
// Time beyond the deadline in which a run may take messages that arrived while this process was paused or busy.
constexpr double kGraceSeconds = 0.1;
// Number of empty polls that a yielding turn starts from, so that it naps for long at once: other threads may need the
// processor.
constexpr std::uint64_t kYieldingPolls = 10000;

// Sets a flag while it exists; throws if the flag is set already.
class ReentryGuard {
 public:
  explicit ReentryGuard(bool& flag) : flag_(flag) {
    if (flag) throw std::logic_error("a codec of Python functions, or a signal handler, made or awaited a call during one");
    flag = true;
  }
  ~ReentryGuard() { flag_ = false; }

 private:
  bool& flag_;
};

std::uint64_t sequence_of(const unsigned char* message) {
  std::uint64_t found;
  std::memcpy(&found, message + 8, sizeof found);
  return found;
}

std::size_t data_nbytes(const unsigned char* message) {
  std::uint32_t found;
  std::memcpy(&found, message + kAgreedNbytes, sizeof found);
  return found;
}

std::string_view text(const unsigned char* message) { return {reinterpret_cast<const char*>(message), kHeaderNbytes}; }

}  // namespace

Loop::Loop(std::shared_ptr<Wire> given, int rank, int size, std::size_t most_eager, std::string call)
    : wire(std::move(given)),
      rank(rank),
      size(size),
      call_(std::move(call)),
      slot_nbytes_(kHeaderNbytes + most_eager),
      inbox_(slot_nbytes_ * static_cast<std::size_t>(size)) {
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) post_control_receive(peer);
}

void Loop::begin(std::shared_ptr<Run> run, const std::vector<std::string>& headers, std::uint64_t sequence,
                 double deadline, bool traced, const OnControl& on_control) {
  const ReentryGuard inside(advancing_);
  const Token owner = sequence % kRunsInFlight;
  if (by_owner_[owner]) throw std::logic_error("too many runs in flight");
  run->prepare(sequence, headers, owner << kOwnerShift, static_cast<int>(owner) * kTagsPerRun, deadline, traced);
  by_owner_[owner] = run;
  active_.push_back(run);
  deadline_ = std::min(deadline_, deadline);
  idle_ = 0;
  run->begin(*wire);
  // encode first the data that is sent with the headers
  while (run->sends_data_with_headers() && run->can_compute()) run->compute(*wire);
  for (std::size_t i = 0; i < early_.size();) {
    if (early_[i].sequence != sequence) {
      ++i;
      continue;
    }
    const Early found = std::move(early_[i]);
    early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(i));
    check_header(*run, found.peer, found.message.data(), on_control);
  }
  collect_ended();
}

Outcome Loop::advance(const Turn& turn, const OnControl& on_control) {
  if (advancing_ && turn.once) return Outcome::pause;  // the caller only tests a call
  const ReentryGuard inside(advancing_);
  double checked = turn.check_signals ? seconds() : 0;
  while (!halted_) {
    const bool computed = compute();
    poll(computed ? 0 : idle_, turn.yields ? kYieldingPolls : 0, on_control);
    // Poll until nothing completes, then compute: MPICH progresses the network only when shared memory is idle.
    while (!completed_.empty() && ended_.empty() && !halted_) poll(0, 0, on_control);
    if (!ended_.empty()) return Outcome::ended;
    const double now = seconds();
    if (idle_ && now > deadline_ && is_overdue(now)) return Outcome::overdue;
    if (turn.once || now >= turn.limit || (turn.yields && wanted)) return Outcome::pause;
    if (turn.check_signals && now > checked + kCheckSeconds) {
      turn.check_signals();
      checked = now;
    }
  }
  return Outcome::pause;
}

void Loop::broadcast_control(const std::string& message) {
  outbox_.assign(message.begin(), message.end());
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    ++control_sends_;
    wire->send(peer, kControlTag, outbox_.data(), outbox_.size(), kControlSend << kOwnerShift);
  }
}

void Loop::drain(std::uint64_t idle, const OnControl& on_control) {
  std::vector<Token> completed;
  wire->poll(idle, completed);
  for (const Token token : completed) {
    const int peer = static_cast<int>(static_cast<Number>(token));
    if (token >> kOwnerShift == kControlSend) --control_sends_;
    if (token >> kOwnerShift != kControlReceive) continue;
    if (is_call(inbox(peer))) {
      post_control_receive(peer);
    } else {
      on_control(peer, text(inbox(peer)));
    }
  }
}

// Runs the first operation that is ready; false if there is none.
bool Loop::compute() {
  for (const std::shared_ptr<Run>& run : active_) {
    if (!run->can_compute()) continue;
    run->compute(*wire);
    idle_ = 0;
    collect_ended();
    return true;
  }
  return false;
}

// Handles the transfers that have completed.
void Loop::poll(std::uint64_t idle, std::uint64_t more, const OnControl& on_control) {
  completed_.clear();
  wire->poll(idle ? idle + more : 0, completed_);
  if (halted_) return;
  idle_ = completed_.empty() ? idle + 1 : 0;
  std::exception_ptr error;  // rethrown after all transfers: some of them may complete a run
  for (const Token token : completed_) {
    try {
      dispatch(token, on_control);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (!completed_.empty()) collect_ended();
  if (error) std::rethrow_exception(error);
}

void Loop::dispatch(Token token, const OnControl& on_control) {
  const Token owner = token >> kOwnerShift;
  const auto number = static_cast<Number>(token);
  if (owner < kRunsInFlight) {
    by_owner_[owner]->completed(*wire, number);
  } else if (owner == kControlReceive) {
    control_received(static_cast<int>(number), on_control);
  } else if (owner == kControlSend) {
    --control_sends_;
  }
}

bool Loop::is_call(const unsigned char* message) const { return !std::memcmp(message, call_.data(), call_.size()); }

void Loop::post_control_receive(int peer) {
  const Token token = kControlReceive << kOwnerShift | static_cast<Token>(peer);
  wire->receive(peer, kControlTag, inbox(peer), slot_nbytes_, token, true);
}

// A control message has arrived: usually the header of a call that this rank has made or will make.
void Loop::control_received(int peer, const OnControl& on_control) {
  const unsigned char* message = inbox(peer);
  if (!is_call(message)) return on_control(peer, text(message));
  const std::uint64_t sequence = sequence_of(message);
  const std::shared_ptr<Run>& run = by_owner_[sequence % kRunsInFlight];
  if (run && run->sequence() == sequence) {
    check_header(*run, peer, message, on_control);
  } else {
    const std::size_t nbytes = kHeaderNbytes + std::min(data_nbytes(message), slot_nbytes_ - kHeaderNbytes);
    early_.push_back({sequence, peer, {message, message + nbytes}});
  }
  post_control_receive(peer);
}

// Compares a header with this rank's.
void Loop::check_header(Run& run, int peer, const unsigned char* message, const OnControl& on_control) {
  const std::size_t nbytes = data_nbytes(message);
  const bool matches = run.header_matches(peer, message) && (!nbytes || nbytes == run.data_nbytes(peer));
  if (!matches) return on_control(peer, text(message));
  run.header_received(*wire, peer, message + kHeaderNbytes, nbytes);
}

void Loop::collect_ended() {
  for (std::size_t i = 0; i < active_.size();) {
    if (!active_[i]->is_done()) {
      ++i;
      continue;
    }
    ended_.push_back(active_[i]->sequence());
    by_owner_[active_[i]->sequence() % kRunsInFlight] = nullptr;
    active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
    find_deadline();
  }
}

void Loop::find_deadline() {
  deadline_ = std::numeric_limits<double>::infinity();
  for (const std::shared_ptr<Run>& run : active_) deadline_ = std::min(deadline_, run->deadline());
}

// Whether a run is past its deadline and its grace period, with nothing to compute.
bool Loop::is_overdue(double now) {
  for (const std::shared_ptr<Run>& run : active_)
    if (run->can_compute()) return false;
  for (const std::shared_ptr<Run>& run : active_) {
    if (now <= run->deadline() || run->extend(now + kGraceSeconds)) continue;
    overdue_ = run->sequence();
    return true;
  }
  find_deadline();
  return false;
}

}  // namespace qccl
