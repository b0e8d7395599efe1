// Records of a loop's last runs: their headers, when they began and ended, and how long the loop stood still.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "run.h"

namespace qccl {

// It reads no clock itself but the coarse one: the loop gives it the times at which it looks at the clock anyway.
class Recorder {
 public:
  static constexpr std::size_t kRuns = 1024;
  // Seconds; shorter intervals between two looks at the clock are usual operations and naps, and are not recorded.
  static constexpr double kStill = 50e-3;

  struct alignas(64) Entry {
    std::shared_ptr<const std::string> header;  // the run's Run::description()
    std::uint64_t call = 0;
    std::size_t sent = 0, received = 0;         // bytes of data, without headers
    double begun = 0, ended = 0;                // in seconds(); 0: not yet
    double still = 0;                           // the longest interval above kStill between two looks at the clock
  };

  Recorder() : entries_(kRuns) {}

  void begin(const Run& run, double now) {
    Entry& entry = at(run.sequence());
    entry.call = run.call();
    // Most slots get the text that they have, and the count of its owners is atomic.
    if (entry.header != run.description()) entry.header = run.description();
    entry.sent = run.steps().sent();
    entry.received = run.steps().received();
    entry.begun = now;
    entry.ended = entry.still = 0;
  }

  // `looked`: when the loop last looked at the clock, at most one operation ago. Returns the recorded end.
  double end(std::uint64_t sequence, double looked) {
    return at(sequence).ended = std::max(looked, coarse_seconds());
  }

  // Run `sequence` is under way, and the loop has looked at the clock at `looked` and `now`, and not in between.
  void look(std::uint64_t sequence, double looked, double now) {
    Entry& entry = at(sequence);
    const double still = now - std::max(looked, entry.begun);
    if (still > kStill) entry.still = std::max(entry.still, still);
  }

  // From the oldest on, with their numbers; `next`: the number of the next run. The first has the number 0.
  std::vector<std::pair<std::uint64_t, Entry>> entries(std::uint64_t next) const {
    std::vector<std::pair<std::uint64_t, Entry>> found;
    for (std::uint64_t i = next > kRuns ? next - kRuns : 0; i < next; ++i) found.emplace_back(i, entries_[i % kRuns]);
    return found;
  }

 private:
  Entry& at(std::uint64_t sequence) { return entries_[sequence % kRuns]; }

  std::vector<Entry> entries_;
};

}  // namespace qccl
