// Transfers between ranks, as the run loop asks for them (qccl/transports/base.py says the same for Python).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace qccl {

// What comes back when a transfer has completed.
using Token = std::uint64_t;

struct Wire {
  virtual ~Wire() = default;
  virtual void send(int peer, int tag, const void* data, std::size_t nbytes, Token token) = 0;
  virtual void receive(int peer, int tag, void* data, std::size_t nbytes, Token token, bool at_most) = 0;
  // Adds the tokens of what has completed. `idle` is the number of polls in a row, before this one, that found nothing:
  // the longer, the more the processor is left to others, but for no more than about a millisecond.
  virtual void poll(std::uint64_t idle, std::vector<Token>& completed) = 0;
};

}  // namespace qccl
