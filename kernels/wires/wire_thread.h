// A wire's own thread, which advances it while its callers do something else.
#pragma once

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace qccl {

// A message that a caller has sent may still be in this process: in a buffer, or not acknowledged. Without this thread it
// would arrive with the caller's next call, and the rank that waits for it would wait for this one's computation.
class WireThread {
 public:
  // The thread advances the wire when no caller has done so for this time.
  static constexpr std::chrono::milliseconds kQuiet{5};
  // The longest sleep in `advance`, and so the longest delay of timed work.
  static constexpr int kSleepMilliseconds = 50;

  // `advance` does what there is to do, then sleeps for kSleepMilliseconds at most, until more comes or the descriptor
  // `wakeup` becomes readable.
  explicit WireThread(std::function<void(int wakeup)> advance)
      : advance_(std::move(advance)), process_(getpid()), wakeup_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (wakeup_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }

  WireThread(const WireThread&) = delete;
  WireThread& operator=(const WireThread&) = delete;

  ~WireThread() { stop(); }

  // Blocks signals, which are for the interpreter's threads.
  void start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread([this] { run(); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "qccl wire");
  }

  // A caller advances the wire. Any thread may call this.
  void note_caller() { calls_.fetch_add(1, std::memory_order_relaxed); }

  // Waits until the thread has ended. Any thread may call this, without the lock that `advance` takes. Idempotent.
  void stop() {
    if (getpid() != process_) {  // a child of fork() has no such thread, and its parent may have had a lock
      if (thread_.joinable()) thread_.detach();
      if (wakeup_ >= 0) ::close(std::exchange(wakeup_, -1));
      return;
    }
    const std::lock_guard<std::mutex> one_at_a_time(stopping_);
    if (wakeup_ < 0) return;
    is_ended_ = true;
    eventfd_write(wakeup_, 1);
    if (thread_.joinable()) thread_.join();
    ::close(std::exchange(wakeup_, -1));
  }

 private:
  void run() {
    std::uint64_t seen = calls_.load(std::memory_order_relaxed);
    while (!is_ended_) {
      if (const std::uint64_t calls = calls_.load(std::memory_order_relaxed); calls != seen) {
        seen = calls;
        pollfd waited = {wakeup_, POLLIN, 0};
        ::poll(&waited, 1, kQuiet.count());
      } else {
        advance_(wakeup_);
      }
    }
  }

  const std::function<void(int)> advance_;
  const pid_t process_;
  int wakeup_;
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<bool> is_ended_{false};
  std::mutex stopping_;
  std::thread thread_;
};

}  // namespace qccl
