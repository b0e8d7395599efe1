// A schedule made ready: what there is to do, and what waits for what.
//
// Dependencies hold per transfer: one whose data is ready does not wait for its neighbours. Gates hold back what the
// ranks' agreement must come before:
//
// - A receive is posted when its sender's header has come and agrees, so that the sizes are equal (an MPI library may
//   write past the end of a receive that is too small). The header comes before the data, so this costs no waiting.
//   Where the first data for a peer is small and waits for nobody, it is in the header's own message.
// - Whatever writes the caller's output or follows a transfer waits for the headers of all ranks. So nothing received is
//   used before, and a rank that has not made the call yet gets one window of messages at most (a library that buffers
//   small ones would take them until it has no memory left for the news that this rank gave up).
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
  std::unique_ptr<Operation> operation;  // or none, and a transfer:
  unsigned char* data = nullptr;
  std::size_t nbytes = 0;
  int peer = -1;
  int tag = 0;  // counted from the first tag of the call
  bool is_send = false;
  Number message = kNone;  // of the eager ones, that its data goes with
};

// Data that goes with the header of a call, to one peer or several.
struct EagerData {
  const unsigned char* data;
  std::size_t nbytes;
};

// Numbers of steps, in program order; behind the last one that of the gate, which all headers open, and for each rank
// that of its header.
class Steps {
 public:
  // `most_eager`: bytes that may go with a header.
  Steps(int rank, int size, std::size_t most_eager) : rank(rank), size(size), most_eager_(most_eager) {}
  Steps(const Steps&) = delete;

  // A copy of `operation`. `needs` are earlier steps. `writes_output`: of the caller.
  void add_operation(const Operation& operation, const std::vector<Number>& needs, bool writes_output);
  void add_transfer(bool is_send, int peer, int tag, std::uintptr_t address, std::size_t nbytes,
                    const std::vector<Number>& needs);
  // A send takes what it sends from `address`, from the next run on. Not for what may go with a header.
  void place(Number step, std::uintptr_t address);
  // When all are there.
  void link();

  const int rank, size;

  // Of memory, when linked.
  std::size_t nbytes() const;
  Number count() const { return static_cast<Number>(steps_.size()); }
  const Step& operator[](Number i) const { return steps_[i]; }
  Number gate() const { return count(); }
  Number header(int peer) const { return gate() + 1 + static_cast<Number>(peer); }
  // How many numbers there are.
  Number all() const { return header(size); }
  // How many steps, gates and headers must complete before a run is done, beside its own headers.
  std::size_t total() const { return count() + (size > 1 ? static_cast<std::size_t>(size) : 0); }
  // How many others each waits for.
  const std::vector<Number>& counts() const { return counts_; }
  const Number* successors_begin(Number i) const { return successors_.data() + offsets_[i]; }
  const Number* successors_end(Number i) const { return successors_.data() + offsets_[i + 1]; }

  const std::vector<EagerData>& eager() const { return eager_; }
  bool gets_data(int peer) const { return gets_data_[peer]; }  // with the header
  // The receive whose data may come with the header of `peer`.
  Number first_receive(int peer) const { return first_receives_[peer]; }

 private:
  bool is_transfer(Number i) const { return !steps_[i].operation; }
  void add(Step step, const std::vector<Number>& needs, bool writes_output);
  std::vector<std::pair<Number, Number>> edges() const;
  Number message_of(const Step& step);
  void find_eager();

  std::size_t most_eager_;
  std::vector<Step> steps_;
  std::vector<bool> gated_;
  std::vector<Number> needs_, needs_ends_;  // only until link()
  std::vector<Number> counts_, offsets_, successors_;
  std::vector<EagerData> eager_;
  std::vector<bool> gets_data_;
  std::vector<Number> first_receives_;
};

}  // namespace qccl
