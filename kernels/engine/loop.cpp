#include "loop.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace qccl {

namespace {

// The upper half of a token is the run slot of a run in flight, or one of these. The lower half is the number of a step
// or a rank.
constexpr int kRunSlotShift = 32;
constexpr Token kControlReceive = kRunsInFlight, kControlSend = kRunsInFlight + 1;
// Empty polls in a row of which only every kPollsPerLook-th looks at the time: on some machines that takes as long as a
// poll. Later polls may nap, so that each looks.
constexpr std::uint64_t kQuickPolls = 64, kPollsPerLook = 16;
// Interval between two calls of Turn::check_signals.
constexpr double kCheckSeconds = 5e-3;
// Time beyond the deadline in which a run may take messages that arrived while this process was paused or busy.
constexpr double kGraceSeconds = 0.1;
// Added to the number of empty polls in a yielding turn, so that the transport sleeps longer: other threads may need the
// processor.
constexpr std::uint64_t kYieldingPolls = 10000;

// Sets a flag while it exists; throws if the flag is set already.
class ReentryGuard {
 public:
  explicit ReentryGuard(bool& flag) : flag_(flag) {
    if (flag)
      throw std::logic_error(
          "a Python codec or a signal handler started or waited for a call while qccl was running one; neither may do so");
    flag = true;
  }
  ~ReentryGuard() { flag_ = false; }

 private:
  bool& flag_;
};

std::uint64_t sequence_of(const unsigned char* message) {
  std::uint64_t found;
  std::memcpy(&found, message + kSequenceOffset, sizeof found);
  return found;
}

std::size_t announced_nbytes(const unsigned char* message) {
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
      inbox_nbytes_(kHeaderNbytes + most_eager),
      inbox_(inbox_nbytes_ * static_cast<std::size_t>(size)),
      arrived_(static_cast<std::size_t>(size)),
      next_header_(static_cast<std::size_t>(size)) {
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) post_control_receive(peer);
}

void Loop::begin(std::shared_ptr<Run> run, std::uint64_t sequence, double timeout, bool traced, bool attended,
                 const OnControl& on_control) {
  const ReentryGuard inside(advancing_);
  const Token run_slot = sequence % kRunsInFlight;
  if (by_slot_[run_slot]) throw std::logic_error("too many runs in flight");
  if (sequence != next_run_) throw std::logic_error("runs must begin in the order of their numbers");
  ++next_run_;
  const double now = look(), deadline = now + timeout;
  run->prepare(sequence, run_slot << kRunSlotShift, static_cast<int>(run_slot) * kTagsPerRun, deadline,
               traced ? nullptr : &looked_);
  by_slot_[run_slot] = run;
  active_.push_back(run);
  deadline_ = std::min(deadline_, deadline);
  idle_ = 0;
  recorder_.begin(*run, now);
  if (attended) attended_since_ = now;
  run->set_begin(now, attended_);
  wire->begin_run();
  run->begin(*wire);
  // encode first the data that is sent with the headers
  while (run->sends_data_with_headers() && run->can_compute()) run->compute(*wire, attended);
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
  if (attended && has_ended()) stop_attending();
}

Outcome Loop::advance(const Turn& turn, const OnControl& on_control) {
  if (advancing_ && (turn.once || turn.brief)) return Outcome::pause;  // a nested is_completed() does not advance runs
  const ReentryGuard inside(advancing_);
  try {
    if (turn.once || turn.brief) return advance_for(turn.once ? 0 : kBriefSeconds, on_control);
    if (!turn.attended) return advance_until(turn, on_control);
    if (!attended_since_) attended_since_ = look();
    const Outcome outcome = advance_until(turn, on_control);
    stop_attending();
    return outcome;
  } catch (...) {
    look();  // after a process was stopped, a message about a failure may be the first thing it sees
    throw;
  }
}

// The program's wait is over: since the end of the last run if a run has ended, otherwise since now.
void Loop::stop_attending() {
  attended_ += (ended_.empty() ? look() : std::max(last_end_, attended_since_)) - attended_since_;
  attended_since_ = 0;
}

Outcome Loop::advance_until(const Turn& turn, const OnControl& on_control) {
  double checked = std::numeric_limits<double>::infinity();  // until the first look
  while (!halted_) {
    const bool computed = compute();
    if (!ended_.empty()) return Outcome::ended;
    poll(computed ? 0 : idle_, turn.yields ? kYieldingPolls : 0, on_control);
    // Poll until nothing completes, then compute: MPICH progresses the network only when shared memory is idle.
    while (!completed_.empty() && ended_.empty() && !halted_) poll(0, 0, on_control);
    if (!ended_.empty()) return Outcome::ended;
    if (turn.yields && wanted) return Outcome::pause;
    if (!computed && idle_ < kQuickPolls && idle_ % kPollsPerLook) continue;
    const double now = look();
    if (idle_ && now > deadline_ && find_overdue(now)) return Outcome::overdue;
    if (now >= turn.limit) return Outcome::pause;
    checked = std::min(checked, now);
    if (turn.check_signals && now > checked + kCheckSeconds) {
      turn.check_signals();
      checked = now;
    }
  }
  return Outcome::pause;
}

// One operation and one poll; then others while there is something to do and time is left. Runs that end do not end the
// turn: the caller may not come back soon.
Outcome Loop::advance_for(double seconds_left, const OnControl& on_control) {
  std::uint64_t idle = idle_;
  double now = look();
  const double end = now + seconds_left;
  for (bool acts = true; acts && !halted_;) {
    acts = compute();
    poll(acts ? 0 : idle, 0, on_control);
    idle = 0;
    now = look();
    acts = now < end && (acts || !completed_.empty());
  }
  if (!ended_.empty()) return Outcome::ended;
  return idle_ && now > deadline_ && find_overdue(now) ? Outcome::overdue : Outcome::pause;
}

void Loop::broadcast_control(const std::string& message) {
  outbox_.assign(message.begin(), message.end());
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    ++control_sends_;
    wire->send(peer, kControlTag, outbox_.data(), outbox_.size(), kControlSend << kRunSlotShift);
  }
}

void Loop::drain(std::uint64_t idle, const OnControl& on_control) {
  std::vector<Token> completed;
  wire->poll(idle, completed);
  std::exception_ptr error;  // rethrown after all messages
  for (const Token token : completed) {
    const int peer = static_cast<int>(static_cast<Number>(token));
    if (token >> kRunSlotShift == kControlSend) --control_sends_;
    if (token >> kRunSlotShift != kControlReceive) continue;
    try {
      if (takes_header(peer)) {
        post_control_receive(peer);
      } else {
        on_control(peer, text(inbox(peer)));
      }
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

// Reads the clock. A long gap since the last reading means that the process was stopped, or busy in an operation or a signal
// handler; it is recorded.
double Loop::look() {
  const double now = seconds();
  if (now - looked_ > Recorder::kStill)
    for (const std::shared_ptr<Run>& run : active_) recorder_.look(run->sequence(), looked_, now);
  return looked_ = now;
}

// Runs the first operation that is ready; false if there is none.
bool Loop::compute() {
  for (const std::shared_ptr<Run>& run : active_) {
    if (!run->can_compute()) continue;
    run->compute(*wire, attended_since_ != 0);
    idle_ = 0;
    collect_ended();
    return true;
  }
  return false;
}

// Handles the transfers that have completed.
void Loop::poll(std::uint64_t idle, std::uint64_t extra_idle, const OnControl& on_control) {
  completed_.clear();
  wire->poll(idle ? idle + extra_idle : 0, completed_);
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
  const Token run_slot = token >> kRunSlotShift;
  const auto number = static_cast<Number>(token);
  if (run_slot < kRunsInFlight) {
    if (!by_slot_[run_slot]) throw std::logic_error("the transport completed a transfer of a run that has ended");
    by_slot_[run_slot]->completed(*wire, number);
  } else if (run_slot == kControlReceive) {
    control_received(static_cast<int>(number), on_control);
  } else if (run_slot == kControlSend) {
    --control_sends_;
  }
}

bool Loop::is_call(const unsigned char* message) const { return !std::memcmp(message, call_.data(), call_.size()); }

void Loop::post_control_receive(int peer) {
  const Token token = kControlReceive << kRunSlotShift | static_cast<Token>(peer);
  std::size_t& arrived = arrived_[static_cast<std::size_t>(peer)];
  arrived = inbox_nbytes_;  // a transport that has no shorter messages need not set the size
  wire->receive(peer, kControlTag, inbox(peer), inbox_nbytes_, token, &arrived);
}

// A control message has arrived: usually the header of a call that this rank has made or will make.
void Loop::control_received(int peer, const OnControl& on_control) {
  const unsigned char* message = inbox(peer);
  if (!takes_header(peer)) return on_control(peer, text(message));
  const std::uint64_t sequence = sequence_of(message);
  const std::shared_ptr<Run>& run = by_slot_[sequence % kRunsInFlight];
  if (run && run->sequence() == sequence) {
    check_header(*run, peer, message, on_control);
  } else {
    early_.push_back({sequence, peer, {message, message + arrived_[static_cast<std::size_t>(peer)]}});
  }
  post_control_receive(peer);
}

// Whether the inbox has the next header of `peer`; false for another control message. Throws MessageError for a message
// that no rank sends.
bool Loop::takes_header(int peer) {
  check_size(peer);
  if (!is_call(inbox(peer))) return false;
  check_order(peer, sequence_of(inbox(peer)));
  ++next_header_[static_cast<std::size_t>(peer)];
  return true;
}

// Checks that the inbox has a whole message: bytes behind the end of a shorter one belong to an earlier message.
void Loop::check_size(int peer) {
  const std::size_t arrived = arrived_[static_cast<std::size_t>(peer)];
  const unsigned char* message = inbox(peer);
  if (arrived >= kHeaderNbytes && arrived <= inbox_nbytes_ && announced_nbytes(message) == arrived - kHeaderNbytes) return;
  std::string found = "rank " + std::to_string(peer) + " sent rank " + std::to_string(rank) + " a control message of " +
                      std::to_string(arrived) + " bytes";
  if (arrived >= kHeaderNbytes)
    found += ", which announces " + std::to_string(announced_nbytes(message)) + " bytes of data";
  refuse(found + "; it has a header of " + std::to_string(kHeaderNbytes) + " bytes and the data that it announces");
}

// Each rank sends one header in each of its runs, in their order, and no run ends before it has the headers of all ranks.
// So a rank that is early has begun only runs whose 16th predecessor this rank has begun, too.
void Loop::check_order(int peer, std::uint64_t sequence) {
  const std::uint64_t expected = next_header_[static_cast<std::size_t>(peer)];
  if (sequence == expected && sequence < next_run_ + kRunsInFlight) return;
  std::string found = "rank " + std::to_string(peer) + " sent the header of call " + std::to_string(sequence);
  if (sequence != expected) {
    found += " where that of call " + std::to_string(expected) + " comes next";
  } else {
    found += " before rank " + std::to_string(rank) + " has made call " + std::to_string(next_run_) + "; at most " +
             std::to_string(kRunsInFlight) + " calls are under way at once";
  }
  refuse(found);
}

void Loop::refuse(const std::string& found) {
  ++refused_;
  throw MessageError(found + "; every rank must run the same version of qccl");
}

// Compares the header that `peer` sent with this rank's header of the same call.
void Loop::check_header(Run& run, int peer, const unsigned char* message, const OnControl& on_control) {
  const std::size_t nbytes = announced_nbytes(message);
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
    last_end_ = active_[i]->ended(recorder_.end(active_[i]->sequence(), looked_));
    const double attended = attended_ + (attended_since_ ? std::max(last_end_ - attended_since_, 0.0) : 0);
    active_[i]->count(last_end_, attended, std::exchange(counted_, attended));
    by_slot_[active_[i]->sequence() % kRunsInFlight] = nullptr;
    active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
    find_deadline();
  }
}

void Loop::find_deadline() {
  deadline_ = std::numeric_limits<double>::infinity();
  for (const std::shared_ptr<Run>& run : active_) deadline_ = std::min(deadline_, run->deadline());
}

// Sets overdue_ to a run that is past its deadline and its grace period; false if there is none, or if a run can compute.
bool Loop::find_overdue(double now) {
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
