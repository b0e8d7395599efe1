// Transfers by an MPI library that somebody else has loaded: its functions are called by address, so that nothing here
// depends on one library, nor on its headers.
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

// What differs between libraries. Handles are 4 bytes (MPICH) or 8 (Open MPI), given and kept as they are in memory.
struct MpiLibrary {
  MpiFunctions functions;
  std::string communicator, byte, null_request;
  std::size_t status_nbytes;
  std::size_t status_error;  // where a status has its error
  int undefined, in_status, pending;  // MPI_UNDEFINED, MPI_ERR_IN_STATUS, MPI_ERR_PENDING
};

// What went wrong; whoever is told throws.
struct MpiFault {
  int code = 0;  // of the library, or
  int peer = -1;  // a message had another size:
  std::int64_t got = 0, expected = 0;
};

struct MpiWire : Wire {
  // Polls without news in which the processor is kept; 0: it is yielded at once.
  std::uint64_t spins = 0;
  // Withdraw the receives. What the library still works on must be kept alive.
  virtual void cancel() = 0;
  virtual std::size_t under_way() const = 0;
};

// `fault` throws; it is also told (with code 0 and no peer) when MPI is not there any more.
std::unique_ptr<MpiWire> make_mpi_wire(const MpiLibrary& library, std::function<void(const MpiFault&)> fault);

}  // namespace qccl
