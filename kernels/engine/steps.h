// A compiled schedule: operations, transfers, and the dependencies between them.
//
// Dependencies hold per transfer: one whose data is ready does not wait for its neighbours. Some steps also wait for
// headers:
//
// - A receive is posted when its sender's header has arrived and matches, so that the sizes are equal (an MPI library
//   may write past the end of a receive that is too small). The header precedes the data, so this costs no time. If the
//   first data for a peer is small and depends on no other rank, it is in the header's own message.
// - A step that writes the caller's output or depends on a transfer waits for the headers of all ranks (the gate). So
//   received data is not used before, and a rank that has not made the call yet gets at most one window of messages.
//   Otherwise a library that buffers small messages could run out of memory for the message that this rank gave up.
//   If the transport itself limits such messages to a rank (`sends_ahead`), a step need not wait because of an earlier
//   send to it: between sites, headers arrive later than a window of messages is sent. A mixed group has both kinds.
// - A Commit waits for all steps, and until this rank's own headers were sent, so that no run fails after it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../host/operations.h"

namespace qccl {

using Number = std::uint32_t;
constexpr Number kNone = ~Number{0};

struct Step {
  std::unique_ptr<Operation> operation;  // null for a transfer:
  unsigned char* data = nullptr;
  std::size_t nbytes = 0;
  int peer = -1;
  int tag = 0;  // counted from the first tag of the call
  bool is_send = false;
  Number message = kNone;  // the eager message that contains the data
};

// Data that is sent with the header of a call, to one peer or several.
struct EagerData {
  const unsigned char* data;
  std::size_t nbytes;
};

// Steps are numbered in program order. Then come the number of the gate, which opens when all headers have arrived, and
// one number for each rank's header.
class Steps {
 public:
  // `most_eager`: bytes of data that may be sent with a header. `sends_ahead`: the ranks for which the transport limits the
  // messages that it keeps until they make the call. A step that only waits for an earlier send to one of them need not
  // wait for the headers.
  Steps(int rank, int size, std::size_t most_eager, const std::vector<int>& sends_ahead);
  Steps(const Steps&) = delete;

  // Adds a copy of `operation`. `needs` are earlier steps; `writes_output`: whether it writes the caller's output.
  void add_operation(const Operation& operation, const std::vector<Number>& needs, bool writes_output);
  void add_transfer(bool is_send, int peer, int tag, std::uintptr_t address, std::size_t nbytes,
                    const std::vector<Number>& needs);
  // Makes a send take its bytes from `address`, from the next run on. Not for data that may be sent with a header.
  void set_source(Number step, std::uintptr_t address);
  // Call this after the last step was added.
  void link();

  const int rank, size;

  // Bytes of memory, after link().
  std::size_t nbytes() const;
  // Bytes that all sends, and all receives, carry in a run.
  std::size_t sent() const { return sent_; }
  std::size_t received() const { return received_; }
  // Whether the operations of a run take so long that looking at the clock for each costs nothing.
  bool is_long() const { return sent_ + received_ >= kLongNbytes; }
  Number count() const { return static_cast<Number>(steps_.size()); }
  const Step& operator[](Number i) const { return steps_[i]; }
  Number gate() const { return count(); }
  Number header(int peer) const { return gate() + 1 + static_cast<Number>(peer); }
  // Count of all numbers.
  Number all() const { return header(size); }
  // Count of the steps, gates and received headers that must complete in a run.
  std::size_t total() const { return count() + (size > 1 ? static_cast<std::size_t>(size) : 0); }
  // For each number, how many others it waits for.
  const std::vector<Number>& counts() const { return counts_; }
  const Number* successors_begin(Number i) const { return successors_.data() + offsets_[i]; }
  const Number* successors_end(Number i) const { return successors_.data() + offsets_[i + 1]; }

  // The operation that replaces the caller's state, or kNone. It waits for all other steps.
  Number commit() const { return commit_; }

  const std::vector<EagerData>& eager() const { return eager_; }
  bool gets_data(int peer) const { return gets_data_[peer]; }  // with its header
  // The receive whose data the header of `peer` may bring.
  Number first_receive(int peer) const { return first_receives_[peer]; }

 private:
  bool is_transfer(Number i) const { return !steps_[i].operation; }
  void add(Step step, const std::vector<Number>& needs, bool writes_output);
  std::vector<std::pair<Number, Number>> edges() const;
  Number message_of(const Step& step);
  void find_eager();

  static constexpr std::size_t kLongNbytes = 256 << 10;

  std::size_t most_eager_, sent_ = 0, received_ = 0;
  std::vector<bool> sends_ahead_;  // by rank: see Steps()
  Number commit_ = kNone;
  std::vector<Step> steps_;
  std::vector<bool> gated_;
  std::vector<Number> needs_, needs_ends_;  // only until link()
  std::vector<Number> counts_, offsets_, successors_;
  std::vector<EagerData> eager_;
  std::vector<bool> gets_data_;
  std::vector<Number> first_receives_;
};

}  // namespace qccl
