// Transfers between ranks, for the run loop (qccl/transports/base.py has the same interface in Python).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace qccl {

// Identifies a transfer; poll() returns it when the transfer has completed.
using Token = std::uint64_t;

struct Wire {
  virtual ~Wire() = default;
  // A run of a collective begins.
  virtual void begin_run() {}
  virtual void send(int peer, int tag, const void* data, std::size_t nbytes, Token token) = 0;
  // Without `arrived` the message must have `nbytes`. Otherwise it may have fewer, and `*arrived` is set before poll()
  // returns the token.
  virtual void receive(int peer, int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived) = 0;
  // Appends the tokens of completed transfers. `idle` is the number of preceding polls in a row that found nothing: the
  // larger it is, the longer the thread may nap, but at most about a millisecond.
  virtual void poll(std::uint64_t idle, std::vector<Token>& completed) = 0;
};

}  // namespace qccl
