// One run of Steps at a time: the progress of each step, and the headers.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "steps.h"
#include "tally.h"
#include "../wires/wire.h"

namespace qccl {

// Bytes of a control message (qccl/engine/control.py). The last four are the number of bytes of data that follow; all
// others must be equal on all ranks.
constexpr std::size_t kHeaderNbytes = 512;
constexpr std::size_t kAgreedNbytes = kHeaderNbytes - 4;
// Where a header has the number of its call, in 8 bytes.
constexpr std::size_t kSequenceOffset = 8;
constexpr int kControlTag = 0;

double seconds();  // seconds as time.monotonic() and time.perf_counter() count them
// The same at the kernel's last tick, some milliseconds ago at most; takes a few nanoseconds on every machine.
double coarse_seconds();

struct TraceRecord {
  Number step;
  double start, stop;
};

// A send or receive of a run under way that has begun and not completed.
struct TransferRecord {
  bool is_send;
  int peer;
  std::size_t nbytes;
  double since;
};

class Run {
 public:
  // `memory` is that of all operations of `steps`.
  Run(std::shared_ptr<const Steps> steps, MemoryPointer memory);

  // For the operations of the next run: the number of the call, and its learning rate.
  void set_call(std::uint64_t call, float lr);
  // The headers of later runs: one for all ranks, or one for each, without the last four bytes.
  void set_headers(const std::vector<std::string>& headers);
  // Every run that ends is counted there.
  void count_in(std::shared_ptr<Tally> tally, const Tally::Traffic& traffic);
  // Sets up a new run; its headers get the number `sequence`. The tokens of its transfers contain `run_slot`. `looked`:
  // the time at which the loop last looked at the clock, for the begins of transfers; null for a run that is traced.
  void prepare(std::uint64_t sequence, Token run_slot, int first_tag, double deadline, const double* looked);
  // Sends the headers, and starts all steps that depend on nothing.
  void begin(Wire& wire);
  bool header_matches(int peer, const unsigned char* header) const;
  // Bytes of data that the header of `peer` may bring.
  std::size_t data_nbytes(int peer) const;
  // A matching header of `peer` has arrived, with data or without.
  void header_received(Wire& wire, int peer, const unsigned char* data, std::size_t nbytes);
  // A transfer of this run has completed.
  void completed(Wire& wire, Number step);

  // Whether an operation is ready. A Commit also waits until this rank's headers were sent.
  bool can_compute() const { return !ready_.empty() && (left_ == 1 || ready_.front() != steps_->commit()); }
  // Runs the first operation that is ready. `attended`: the program waits for a call meanwhile.
  void compute(Wire& wire, bool attended);
  // The run begins at `now`. `attended`: seconds in which the program has waited for calls so far.
  void set_begin(double now, double attended);
  // Returns when the run has ended, about now. `recorded`: when according to the recorder, a little too early.
  double ended(double recorded);
  // Counts the run, whose end is `now`. `attended`: as above; `counted`: how much of it was counted for runs that ended
  // before.
  void count(double now, double attended, double counted);

  std::uint64_t sequence() const { return sequence_; }
  std::uint64_t call() const { return memory_->call; }
  // The header for rank 0, which contains the text of the call; the same object until set_headers().
  const std::shared_ptr<const std::string>& description() const { return description_; }
  double deadline() const { return deadline_; }
  // Moves the deadline, at most once in a run; false if it was moved before.
  bool extend(double deadline);
  bool is_done() const { return left_ == 0; }
  bool sends_data_with_headers() const { return shares_header() && !eager_.empty(); }
  const Steps& steps() const { return *steps_; }
  const std::vector<TraceRecord>& trace() const { return trace_; }
  // How much of this run has completed: bytes of sends and of receives.
  std::pair<std::size_t, std::size_t> transferred() const;
  std::vector<TransferRecord> under_way() const;
  // The ranks whose header has not arrived.
  std::vector<int> missing_ranks() const;
  // The ranks of transfers under way.
  std::vector<int> waits_for(bool is_send) const;

 private:
  using Message = std::vector<unsigned char>;
  static constexpr Number kCompleted = ~Number{0};

  bool shares_header() const { return headers_.size() == 1; }
  const Message& header(int peer) const { return headers_[shares_header() ? 0 : static_cast<std::size_t>(peer)]; }
  void launch(Wire& wire, Number i);
  void send(Wire& wire, Number i);
  void receive(Wire& wire, Number i);
  const Message& eager_message(Number number);
  Token token(Number i) const { return run_slot_ | i; }
  void started(Number i);
  void stopped(Number i);

  const std::shared_ptr<const Steps> steps_;
  const MemoryPointer memory_;
  std::uint64_t sequence_ = 0;
  Token run_slot_ = 0;
  int first_tag_ = 0;
  double deadline_ = 0;
  bool extended_ = false;
  std::vector<Number> counts_;  // number of steps that each step still waits for
  std::vector<Number> ready_;   // a heap of operations, the first in program order on top
  std::size_t left_ = 0;        // number of steps and sends that must complete
  std::vector<Message> headers_, eager_;
  std::shared_ptr<const std::string> description_;
  std::vector<bool> filled_;              // which eager messages hold this run's data
  std::vector<Message> data_;             // by rank: data that arrived before its receive could start
  int arriving_ = -1;                     // the rank whose data is at `arrived_`
  const unsigned char* arrived_ = nullptr;
  std::shared_ptr<Tally> tally_;
  Tally::Traffic traffic_;
  std::uint64_t begun_runs_ = 0;
  double begun_ = 0, attended_before_ = 0;
  // Seconds of this run if it is timed, otherwise of the last timed run: in operations, in operations while the program
  // waited, and from the recorded end to the end.
  bool timed_ = false;
  double computing_ = 0, computing_attended_ = 0, lag_ = 0;
  const double* looked_ = nullptr;        // null: traced
  std::vector<double> starts_;            // by step; only transfers, by *looked_, if the run is not traced
  std::vector<TraceRecord> trace_;
};

}  // namespace qccl
