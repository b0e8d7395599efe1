// Totals of the calls of one collective with one codec, for Communicator.stats().
#pragma once

#include <atomic>
#include <cstdint>

namespace qccl {

// One thread at a time adds, and any thread reads: the totals of one reading may be of two successive calls.
class Tally {
 public:
  // The amounts that each run of a program adds.
  struct Traffic {
    std::uint64_t elements = 0, raw_nbytes = 0, sent_nbytes = 0;
  };

  // In seconds. `total`: from the call's begin to its end; `computing`: in operations; `hidden`: while the program did not
  // wait for any call; `waiting`: while it did, and the call did not compute. Each second of waiting is counted for the
  // call that ends next.
  struct Times {
    double total = 0, computing = 0, waiting = 0, hidden = 0;
  };

  void add(const Traffic& traffic) {
    increase(calls_, std::uint64_t{1});
    increase(elements_, traffic.elements);
    increase(raw_, traffic.raw_nbytes);
    increase(sent_, traffic.sent_nbytes);
  }

  void add(const Times& times) {
    increase(total_, times.total);
    increase(computing_, times.computing);
    increase(waiting_, times.waiting);
    increase(hidden_, times.hidden);
  }

  std::uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  Traffic traffic() const { return {load(elements_), load(raw_), load(sent_)}; }
  Times times() const { return {load(total_), load(computing_), load(waiting_), load(hidden_)}; }

 private:
  template <class T>
  static T load(const std::atomic<T>& value) {
    return value.load(std::memory_order_relaxed);
  }
  // Cheaper than an atomic addition, which a single writer does not need.
  template <class T>
  static void increase(std::atomic<T>& value, T by) {
    value.store(load(value) + by, std::memory_order_relaxed);
  }

  std::atomic<std::uint64_t> calls_{0}, elements_{0}, raw_{0}, sent_{0};
  std::atomic<double> total_{0}, computing_{0}, waiting_{0}, hidden_{0};
};

}  // namespace qccl
