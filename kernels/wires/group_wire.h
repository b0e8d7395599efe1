// Wires that connect a group of processes themselves: over UCX, and between sites.
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "wire.h"

namespace qccl {

// An error of the library (`status`, its number), the loss of a rank, a message of another size than was posted, or none of
// these: the wire is closed.
struct WireFault {
  int status = 0;
  std::string reason;  // in words, where the wire knows it
  int peer = -1;      // the rank whose connection failed, or that sent the message; -1: none
  bool lost = false;  // the connection to `peer` failed
  std::int64_t got = 0, expected = 0;
  int rank = -1;  // this rank
};
// Throws the error of a fault.
using OnFault = std::function<void(const WireFault&)>;

// The library does not start, or reaches no network: the text says which function failed, or names a rank.
struct WireError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Finds the ranks among some whose processes have ended; a wire asks when nothing has completed for a while.
using FindEnded = std::function<std::vector<int>(const std::vector<int>& ranks)>;

// How a thread may wait for a wire.
struct Rest {
  int descriptor = -1;  // becomes readable when there may be something to do; -1: there is none
  double pause = 0;     // seconds for which the thread need not look at the descriptor
};

// Several threads may call it at once.
struct GroupWire : Wire {
  // Transfers with this bit in their token set the group up: poll() does not report them, set_up_completed() counts them.
  static constexpr Token kSetUp = Token{1} << 63;

  // Sets for how many polls in a row without a completion a wait keeps the processor, before it sleeps. With 0, the
  // default, it yields the processor instead. A wire between machines always sleeps at once. Call it before the first run.
  virtual void set_spins(std::uint64_t) {}

  // The address that another rank needs to connect to this wire.
  virtual std::string address() = 0;
  // Connect rank `rank` to all others, once; `addresses` by rank. Throws WireError that names a
  // rank, and std::system_error.
  virtual void connect(int rank, const std::vector<std::string>& addresses, FindEnded find_ended) = 0;
  // Advance transfers without reporting the completed ones, as poll() does; nor a fault before poll() has reported those.
  virtual void progress(std::uint64_t idle) = 0;
  virtual std::uint64_t set_up_completed() = 0;
  // Deliver sent messages, for at most `seconds`; then close the connections. From then on no transfer touches the
  // caller's memory.
  virtual void close(double seconds) = 0;

  // Before a wait for several wires together, after a poll(0) that has found nothing. Looks for processes that have ended;
  // the next poll() tells of them. None: poll again at once.
  virtual std::optional<Rest> rest() { return std::nullopt; }
};

}  // namespace qccl
