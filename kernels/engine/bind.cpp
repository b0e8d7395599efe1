#include "bind.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <time.h>

#include "mpi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qccl {

namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

std::string text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Handles and constants by name, as qccl/transports/mpi.py finds them.
std::shared_ptr<MpiWire> make_mpi(const nb::dict& functions, const nb::dict& handles, const nb::dict& constants,
                                  nb::callable fault) {
  const auto at = [&](const char* name) { return nb::cast<std::uintptr_t>(functions[name]); };
  const auto constant = [&](const char* name) { return nb::cast<int>(constants[name]); };
  const auto bytes = [&](const char* name) { return text(nb::cast<nb::bytes>(handles[name])); };
  const MpiLibrary library = {
      {at("MPI_Isend"), at("MPI_Irecv"), at("MPI_Testsome"), at("MPI_Get_count"), at("MPI_Cancel"), at("MPI_Finalized")},
      bytes("communicator"),
      bytes("byte"),
      bytes("null_request"),
      static_cast<std::size_t>(constant("status_nbytes")),
      static_cast<std::size_t>(constant("status_error")),
      constant("undefined"),
      constant("in_status"),
      constant("pending")};
  // Held until the process ends: the last owner may be gone after the interpreter.
  auto* raise = new nb::callable(std::move(fault));
  return make_mpi_wire(library, [raise](const MpiFault& found) {
    const nb::gil_scoped_acquire held;
    (*raise)(found.code, found.peer, found.got, found.expected);
    throw std::logic_error("a fault was not raised");
  });
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<MpiWire>(m, "MpiWire", "Transfers of an MPI library.")
      .def(nb::new_(&make_mpi), "functions"_a, "handles"_a, "constants"_a, "fault"_a)
      .def_rw("spins", &MpiWire::spins)
      .def_prop_ro("under_way", &MpiWire::under_way)
      .def(
          "send",
          [](MpiWire& wire, int peer, int tag, std::uintptr_t address, std::size_t nbytes, Token token) {
            wire.send(peer, tag, reinterpret_cast<const void*>(address), nbytes, token);
          },
          Release())
      .def(
          "receive",
          [](MpiWire& wire, int peer, int tag, std::uintptr_t address, std::size_t nbytes, Token token, bool at_most) {
            wire.receive(peer, tag, reinterpret_cast<void*>(address), nbytes, token, at_most);
          },
          Release())
      .def(
          "poll",
          [](MpiWire& wire, std::uint64_t idle) {
            std::vector<Token> completed;
            wire.poll(idle, completed);
            return completed;
          },
          Release())
      .def("cancel", &MpiWire::cancel, Release());
}

}  // namespace qccl
