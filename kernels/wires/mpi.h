// Transfers by the MPI library that mpi4py has loaded. Its functions are called by address, so nothing here depends on
// one library or its headers.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "wire.h"

namespace qccl {

// Addresses of the library's functions.
struct MpiFunctions {
  std::uintptr_t isend, irecv, testsome, get_count, cancel, finalized;
};

// The differences between libraries. Handles have 4 bytes (MPICH) or 8 (Open MPI), stored as they are in memory.
struct MpiLibrary {
  MpiFunctions functions;
  std::string communicator, byte, null_request;
  std::size_t status_nbytes;
  std::size_t status_error;  // offset of the error in a status
  int undefined, in_status, pending;  // MPI_UNDEFINED, MPI_ERR_IN_STATUS, MPI_ERR_PENDING
};

// A failure, for the callback that throws it.
struct MpiFault {
  int code = 0;  // the library's error, with the rank of its transfer where that is known, or
  int peer = -1;  // the rank whose message had another size:
  std::int64_t got = 0, expected = 0;
};

struct MpiWire : Wire {
  // Number of empty polls during which the thread keeps the processor; 0: it yields at once.
  std::uint64_t spins = 0;
  // Cancels the receives. Memory that the library still uses must be kept alive.
  virtual void cancel() = 0;
  virtual std::size_t under_way() const = 0;
};

// `fault` throws; it is also called, with code 0 and no peer, after MPI was finalized.
std::unique_ptr<MpiWire> make_mpi_wire(const MpiLibrary& library, std::function<void(const MpiFault&)> fault);

}  // namespace qccl
