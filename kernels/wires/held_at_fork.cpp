#include "held_at_fork.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

namespace qccl {
namespace {

// The longest that a fork waits for all mutexes. After it a mutex may stay locked in the child, which must try to lock it.
constexpr std::chrono::seconds kLongest{1};
constexpr std::chrono::milliseconds kBetweenTries{1};

std::mutex guard;  // guards the next two
std::vector<std::mutex*> mutexes, held;

bool lock_until(std::mutex& mutex, std::chrono::steady_clock::time_point limit) {
  while (!mutex.try_lock()) {
    if (std::chrono::steady_clock::now() >= limit) return false;
    std::this_thread::sleep_for(kBetweenTries);
  }
  return true;
}

void before_fork() {
  guard.lock();
  const auto limit = std::chrono::steady_clock::now() + kLongest;
  for (std::mutex* mutex : mutexes)
    if (lock_until(*mutex, limit)) held.push_back(mutex);
}

// In the parent and in the child.
void after_fork() {
  for (std::mutex* mutex : held) mutex->unlock();
  held.clear();
  guard.unlock();
}

}  // namespace

HeldAtFork::HeldAtFork(std::mutex& mutex) : mutex_(mutex) {
  static const int error = pthread_atfork(before_fork, after_fork, after_fork);
  if (error) throw std::system_error(error, std::generic_category(), "pthread_atfork");
  const std::lock_guard<std::mutex> lock(guard);
  mutexes.push_back(&mutex_);
  held.reserve(mutexes.size());  // nothing is allocated while the process forks
}

HeldAtFork::~HeldAtFork() {
  const std::lock_guard<std::mutex> lock(guard);
  mutexes.erase(std::find(mutexes.begin(), mutexes.end(), &mutex_));
}

}  // namespace qccl
