// A mutex that no other thread holds while this process forks, so that the child can use what it guards.
#pragma once

#include <mutex>

namespace qccl {

class HeldAtFork {
 public:
  // `mutex` must live as long as this. A thread that holds it must not wait for Python's lock.
  explicit HeldAtFork(std::mutex& mutex);
  HeldAtFork(const HeldAtFork&) = delete;
  HeldAtFork& operator=(const HeldAtFork&) = delete;
  ~HeldAtFork();

 private:
  std::mutex& mutex_;
};

}  // namespace qccl
