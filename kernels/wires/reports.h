// The reports of a wire that connects a group to its callers: completed transfers, and faults.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "group_wire.h"
#include "held_at_fork.h"
#include "wire_thread.h"

namespace qccl {

// Used with the wire's lock.
class Reports {
 public:
  using Lock = std::unique_lock<std::mutex>;

  explicit Reports(OnFault raise) : raise_(std::move(raise)) {}

  void complete(Token token) {
    if (token & GroupWire::kSetUp) {
      ++set_up_completed_;
    } else {
      completed_.push_back(token);
    }
  }
  bool has_completed() const { return !completed_.empty(); }
  // Appends the tokens of completed transfers.
  void take_completed(std::vector<Token>& tokens) {
    tokens.insert(tokens.end(), completed_.begin(), completed_.end());
    completed_.clear();
  }
  std::uint64_t set_up_completed() const { return set_up_completed_; }

  // Keeps the first fault of each kind.
  void fail(const WireFault& fault) {
    if (!fault_) fault_ = fault;
  }
  void mismatch(int peer, std::int64_t got, std::int64_t expected) {
    if (!mismatch_) mismatch_ = WireFault{0, "", peer, false, got, expected};
  }
  bool has_fault() const { return fault_.has_value(); }

  // Raises a message of the wrong size once, because the other transfers go on; other faults are raised again and again.
  void raise_any(int rank, Lock& lock) {
    if (!mismatch_) return raise_fault(rank, lock);
    const WireFault fault = *mismatch_;
    mismatch_.reset();
    raise(fault, rank, lock);
  }
  void raise_fault(int rank, Lock& lock) {
    if (fault_) raise(*fault_, rank, lock);
  }

 private:
  void raise(WireFault fault, int rank, Lock& lock) {
    fault.rank = rank;
    lock.unlock();  // Python's error handling may use the wire
    raise_(fault);
  }

  const OnFault raise_;
  std::vector<Token> completed_;
  std::uint64_t set_up_completed_ = 0;
  std::optional<WireFault> fault_, mismatch_;
};

// A wire that connects a group, and reports to those who poll it.
class ReportingWire : public GroupWire {
 public:
  void poll(std::uint64_t idle, std::vector<Token>& completed) final {
    thread_.note_caller();
    Lock lock(mutex_);
    advance(idle, lock);
    if (reports_.has_completed()) return reports_.take_completed(completed);
    has_fault();  // a loss counts after everything that had come before it: perhaps a message that says why
    reports_.raise_any(rank_, lock);
  }

  void progress(std::uint64_t idle) final {
    thread_.note_caller();
    Lock lock(mutex_);
    advance(idle, lock);
    if (reports_.has_completed()) return;  // as in poll()
    has_fault();
    reports_.raise_fault(rank_, lock);
  }

  std::uint64_t set_up_completed() final {
    const Lock lock(mutex_);
    return reports_.set_up_completed();
  }

 protected:
  using Lock = Reports::Lock;

  explicit ReportingWire(OnFault raise) : reports_(std::move(raise)) {}

  // Moves data; where nothing has completed it may sleep, for about a millisecond at most. The lock is released meanwhile.
  virtual void advance(std::uint64_t idle, Lock& lock) = 0;
  // In the wire's thread: moves data, then sleeps as WireThread says. Without Python.
  virtual void advance_alone(int wakeup) = 0;
  // Whether a fault was reported; first reports ranks that were lost and for which a transfer waits.
  virtual bool has_fault() = 0;

  void fail(const WireFault& fault) { reports_.fail(fault); }

  std::mutex mutex_;
  const HeldAtFork held_at_fork_{mutex_};
  Reports reports_;
  int rank_ = -1;
  // connect() starts it, and close() stops it before it takes the lock.
  WireThread thread_{[this](int wakeup) { advance_alone(wakeup); }};
};

// When to look for ended processes: after a time without a completion, and then again and again.
class QuietTime {
 public:
  using Clock = std::chrono::steady_clock;

  QuietTime(Clock::duration quiet, Clock::duration between) : quiet_(quiet), between_(between) {}

  void interrupt() { is_quiet_ = false; }
  bool is_over() {
    const auto now = Clock::now();
    if (!std::exchange(is_quiet_, true)) next_ = now + quiet_;
    if (now < next_) return false;
    next_ = now + between_;
    return true;
  }

 private:
  const Clock::duration quiet_, between_;
  bool is_quiet_ = false;
  Clock::time_point next_;
};

}  // namespace qccl
