#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace qccl {
namespace {

// How long a waiting thread spins before it sleeps. Waking a sleeping thread takes 5 to 50 us, and the next
// operation of a collective mostly begins within this time.
constexpr std::chrono::microseconds kAwake{30};

template <class Condition>
void stay_awake(const Condition& is_met) {
  const auto limit = std::chrono::steady_clock::now() + kAwake;
  while (!is_met() && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
}

// A call of run_parts(), on its thread's stack.
struct Job {
  const std::function<void(std::uint64_t)>& run;
  const std::uint64_t parts;
  std::atomic<std::uint64_t> next{0};     // the first part that nobody has taken
  std::atomic<std::uint64_t> helpers{0};  // at work on it; changed with the mutex of Helpers
  std::atomic<bool> has_failed{false};
  std::exception_ptr error{};  // set by the thread that has set has_failed

  // Runs parts until all are taken.
  void work() {
    try {
      for (std::uint64_t part; (part = next.fetch_add(1)) < parts;) run(part);
    } catch (...) {
      if (!has_failed.exchange(true)) error = std::current_exception();
    }
  }
};

// Threads that wait for jobs. They end with the process, so an object with threads is never deleted.
class Helpers {
 public:
  // The caller works, too: it never waits for a helper that has not begun.
  void run(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    start(job.parts - 1);
    jobs_.push_back(&job);
    waiting_.store(true);
    lock.unlock();
    wake_.notify_all();
    job.work();
    lock.lock();
    remove(job);
    lock.unlock();
    stay_awake([&] { return !job.helpers.load(); });
    lock.lock();
    left_.wait(lock, [&] { return !job.helpers.load(); });
  }

 private:
  // If the system gives fewer threads than wanted, the others take more parts.
  void start(std::uint64_t wanted) {
    try {
      for (; threads_ < wanted; ++threads_) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (jobs_.empty()) {
        lock.unlock();
        stay_awake([&] { return waiting_.load(); });
        lock.lock();
        wake_.wait(lock, [&] { return !jobs_.empty(); });
      }
      Job& job = *jobs_.front();
      ++job.helpers;
      lock.unlock();
      job.work();
      lock.lock();
      remove(job);
      if (!--job.helpers) left_.notify_all();  // the job may be gone from here on
    }
  }

  void remove(Job& job) {
    jobs_.remove(&job);
    waiting_.store(!jobs_.empty());
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::list<Job*> jobs_;  // jobs that may have parts left
  std::atomic<bool> waiting_{false};  // whether there are jobs
  std::uint64_t threads_ = 0;
};

// The helpers of this process. The child of a fork has none of its parent's threads, and makes its own.
Helpers& helpers() {
  static std::atomic<Helpers*> current{nullptr};
  static const int error = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  if (error) throw std::system_error(error, std::generic_category(), "pthread_atfork");
  Helpers* found = current.load();
  if (found) return *found;
  auto made = std::make_unique<Helpers>();
  if (current.compare_exchange_strong(found, made.get())) return *made.release();
  return *found;  // another thread was first
}

}  // namespace

void run_parts(std::uint64_t parts, const std::function<void(std::uint64_t)>& run) {
  Job job{run, parts};
  helpers().run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace qccl
