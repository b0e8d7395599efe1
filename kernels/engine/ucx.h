// Transfers by UCX, whose library the Python side has loaded (qccl/transports/ucx.py): its functions are called by
// address.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "wire.h"

namespace qccl {

// Addresses of UCX's functions, in the order of UcxWire::function_names().
using UcxFunctions = std::vector<std::uintptr_t>;

// An error of UCX, or, where `status` is 0, a message of another size than was posted.
struct UcxFault {
  int status = 0;
  int peer = -1;      // the rank whose connection failed, or that sent the message; -1: none
  bool lost = false;  // the connection to `peer` failed
  std::int64_t got = 0, expected = 0;
  int rank = -1;  // this rank
};

// Returns those of some ranks whose processes have ended. UCX takes one that nobody has reaped to be alive, so the wire asks
// when nothing has completed for a while.
using FindEnded = std::function<std::vector<int>(const std::vector<int>& ranks)>;

// One worker, and an endpoint to each peer. Several threads may call it at once.
struct UcxWire : Wire {
  // Transfers with this bit in their token set the group up: poll() does not report them, set_up_completed() counts them.
  static constexpr Token kSetUp = Token{1} << 63;

  // Polls in a row without a completion in which the processor is kept (0: yielded), unless the run has used up its
  // share. From then on the thread sleeps until a message comes.
  std::uint64_t spins = 0;

  // What another rank needs to connect to this worker.
  virtual std::string address() = 0;
  // Connect rank `rank` to all others, once; `addresses` by rank. Throws std::runtime_error that names a rank.
  virtual void connect(int rank, const std::vector<std::string>& addresses, FindEnded find_ended) = 0;
  // Advance transfers without reporting the completed ones, as poll() does.
  virtual void progress(std::uint64_t idle) = 0;
  virtual std::uint64_t set_up_completed() = 0;
  // Deliver what was sent, for at most `seconds`; then close the connections and free the worker. From then on no
  // transfer touches the caller's memory.
  virtual void close(double seconds) = 0;

  static const std::vector<const char*>& function_names();
};

// `config` has UCX's settings by name. `fault` throws. Throws std::runtime_error where UCX cannot be started.
std::unique_ptr<UcxWire> make_ucx_wire(const UcxFunctions& functions,
                                       const std::vector<std::pair<std::string, std::string>>& config,
                                       std::function<void(const UcxFault&)> fault);

}  // namespace qccl
