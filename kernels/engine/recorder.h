// The last runs of a loop: what each was, and when it began and ended.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "run.h"

namespace qccl {

class Recorder {
 public:
  static constexpr std::size_t kRuns = 1024;

  struct Entry {
    std::uint64_t sequence = 0, call = 0;
    std::shared_ptr<const std::string> header;  // as Run::description()
    std::size_t sent = 0, received = 0;         // bytes of data, without headers
    double begun = 0, ended = 0;                // in seconds(); 0: not
  };

  Recorder() : entries_(kRuns) {}

  // Returns the time, as end() does.
  double begin(const Run& run) {
    Entry& entry = at(run.sequence());
    entry.sequence = run.sequence();
    entry.call = run.call();
    // Most slots get the text that they have, and the count of its owners is atomic.
    if (entry.header != run.description()) entry.header = run.description();
    entry.sent = run.steps().sent();
    entry.received = run.steps().received();
    entry.begun = seconds();
    entry.ended = 0;
    return entry.begun;
  }

  double end(std::uint64_t sequence) { return at(sequence).ended = seconds(); }

  // From the oldest on; `next`: the number of the next run. The first has the number 0.
  std::vector<Entry> entries(std::uint64_t next) const {
    std::vector<Entry> found;
    for (std::uint64_t i = next > kRuns ? next - kRuns : 0; i < next; ++i) found.push_back(entries_[i % kRuns]);
    return found;
  }

 private:
  Entry& at(std::uint64_t sequence) { return entries_[sequence % kRuns]; }

  std::vector<Entry> entries_;
};

}  // namespace qccl
