#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "loop.h"
#include "../wires/mixed.h"
#include "../wires/mpi.h"
#include "../wires/ucx.h"
#include "../wires/wan/wire.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qccl {

namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

std::string text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

std::vector<std::string> all(const std::vector<nb::bytes>& each) {
  std::vector<std::string> found;
  for (const nb::bytes& bytes : each) found.push_back(text(bytes));
  return found;
}

// Handles and constants by name, from qccl/transports/mpi.py.
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
  return make_mpi_wire(library, [fault = std::move(fault)](const MpiFault& found) {
    const nb::gil_scoped_acquire held;
    fault(found.code, found.peer, found.got, found.expected);
    throw std::logic_error("a fault was not raised");
  });
}

OnFault python_fault(nb::callable fault) {
  return [fault = std::move(fault)](const WireFault& found) {
    const nb::gil_scoped_acquire held;
    fault(found.rank, found.status, found.reason, found.peer, found.lost, found.got, found.expected);
    throw std::logic_error("a fault was not raised");
  };
}

std::shared_ptr<GroupWire> make_ucx(const UcxFunctions& functions,
                                    const std::vector<std::pair<std::string, std::string>>& config, nb::callable fault) {
  return make_ucx_wire(functions, config, python_fault(std::move(fault)));
}

std::shared_ptr<GroupWire> make_wan(int listener, const nb::bytes& address, const TlsFunctions& functions,
                                    const std::optional<nb::bytes>& secret, const std::string& congestion_control,
                                    int connections, double away_seconds, std::size_t most_guests, double hello_seconds,
                                    nb::callable fault) {
  WanSettings settings;
  settings.listener = listener;
  settings.address = text(address);
  if (secret) settings.tls = make_tls_context(functions, text(*secret));
  settings.congestion_control = congestion_control;
  settings.connections = connections;
  settings.away_seconds = away_seconds;
  settings.most_guests = most_guests;
  settings.hello_seconds = hello_seconds;
  return make_wan_wire(settings, python_fault(std::move(fault)));
}

// A transport written in Python.
struct PythonWire final : Wire {
  explicit PythonWire(nb::object transport) : transport_(std::move(transport)) {}

  void send(int peer, int tag, const void* data, std::size_t nbytes, Token token) override {
    const nb::gil_scoped_acquire held;
    transport_.attr("send")(peer, tag, address(data), nbytes, token);
  }
  void receive(int peer, int tag, void* data, std::size_t nbytes, Token token,
               std::size_t* arrived) override {
    const nb::gil_scoped_acquire held;
    transport_.attr("receive")(peer, tag, address(data), nbytes, token, "arrived"_a = address(arrived));
  }
  void poll(std::uint64_t idle, std::vector<Token>& completed) override {
    const nb::gil_scoped_acquire held;
    for (const nb::handle token : transport_.attr("poll")("idle"_a = idle)) completed.push_back(nb::cast<Token>(token));
  }

  static std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

  nb::object transport_;
};

// The transport refers to its engine, and the engine to the loop: the garbage collector must see the references back.
int visit_python_wire(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PythonWire>(self)->transport_.ptr());
  return 0;
}

int clear_python_wire(PyObject* self) {
  nb::inst_ptr<PythonWire>(self)->transport_.reset();
  return 0;
}

int visit_loop(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self) || !nb::inst_ptr<Loop>(self)->wire) return 0;
  Py_VISIT(nb::find(nb::inst_ptr<Loop>(self)->wire).ptr());
  return 0;
}

int clear_loop(PyObject* self) {
  nb::inst_ptr<Loop>(self)->wire.reset();
  return 0;
}

PyType_Slot kPythonWireSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&visit_python_wire)},
                                  {Py_tp_clear, reinterpret_cast<void*>(&clear_python_wire)},
                                  {0, nullptr}};
PyType_Slot kLoopSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&visit_loop)},
                            {Py_tp_clear, reinterpret_cast<void*>(&clear_loop)},
                            {0, nullptr}};

// Raises MismatchError for a MessageError.
void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const MessageError& found) {
    PyErr_SetString(nb::module_::import_("qccl.base.errors").attr("MismatchError").ptr(), found.what());
  } catch (const std::system_error& found) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(found.code().value(), found.what()).ptr());
  }
}

// Python's function, called with the GIL.
OnControl python_function(const nb::callable& function) {
  return [&function](int peer, std::string_view message) {
    const nb::gil_scoped_acquire held;
    function(peer, nb::bytes(message.data(), message.size()));
  };
}

// Runs Python's signal handlers, so that Ctrl-C ends a wait.
void check_signals() {
  const nb::gil_scoped_acquire held;
  if (PyErr_CheckSignals()) throw nb::python_error();
}

std::vector<std::string> texts(const nb::sequence& headers) {
  std::vector<std::string> found;
  for (const nb::handle each : headers) found.push_back(text(nb::cast<nb::bytes>(each)));
  return found;
}

Outcome start(Loop& loop, std::shared_ptr<Run> run, const nb::object& headers, std::uint64_t sequence, std::uint64_t call,
              std::optional<float> lr, double timeout, bool traced, bool waits, const nb::callable& on_control) {
  nb::bytes common;
  if (nb::try_cast(headers, common)) {
    run->set_headers({text(common)});
  } else if (!headers.is_none()) {
    run->set_headers(texts(nb::cast<nb::sequence>(headers)));
  }
  run->set_call(call, lr.value_or(1.0f));
  const nb::gil_scoped_release released;
  const OnControl function = python_function(on_control);
  const bool is_alone = !loop.active();
  loop.begin(std::move(run), sequence, timeout, traced, waits, function);
  if (loop.has_ended()) return Outcome::ended;
  if (!waits && is_alone) return Outcome::pause;
  Turn turn;
  turn.brief = !waits;
  turn.attended = waits;
  turn.check_signals = &check_signals;
  return loop.advance(turn, function);
}

Outcome run_until(Loop& loop, double limit, const nb::callable& on_control) {
  Turn turn;
  turn.limit = limit;
  turn.attended = true;
  turn.check_signals = &check_signals;
  return loop.advance(turn, python_function(on_control));
}

Outcome drive(Loop& loop, const nb::callable& on_control) {
  Turn turn;
  turn.yields = true;
  return loop.advance(turn, python_function(on_control));
}

Outcome step(Loop& loop, const nb::callable& on_control) {
  Turn turn;
  turn.once = true;
  return loop.advance(turn, python_function(on_control));
}

Outcome advance_briefly(Loop& loop, const nb::callable& on_control) {
  Turn turn;
  turn.brief = true;
  return loop.advance(turn, python_function(on_control));
}

std::vector<std::tuple<Number, double, double>> trace(const Run& run) {
  std::vector<std::tuple<Number, double, double>> found;
  for (const TraceRecord& each : run.trace()) found.emplace_back(each.step, each.start, each.stop);
  return found;
}

std::optional<std::pair<bool, int>> transfer(const Steps& steps, Number i) {
  if (i >= steps.count()) throw nb::index_error("no such step");
  if (steps[i].operation) return std::nullopt;
  return std::pair(steps[i].is_send, steps[i].peer);
}

using PythonRecord = std::tuple<std::uint64_t, std::uint64_t, nb::bytes, std::size_t, std::size_t, double, double, double>;

std::vector<PythonRecord> records(const Loop& loop) {
  std::vector<PythonRecord> found;
  for (const auto& [sequence, each] : loop.records())
    found.emplace_back(sequence, each.call, nb::bytes(each.header->data(), each.header->size()), each.sent, each.received,
                       each.begun, each.ended, each.still);
  return found;
}

using PythonTransfer = std::tuple<bool, int, std::size_t, double>;
using PythonProgress =
    std::tuple<std::uint64_t, std::size_t, std::size_t, bool, std::vector<int>, std::vector<PythonTransfer>>;

std::vector<PythonProgress> under_way(const Loop& loop) {
  std::vector<PythonProgress> found;
  for (const std::shared_ptr<Run>& run : loop.runs()) {
    std::vector<PythonTransfer> transfers;
    for (const TransferRecord& each : run->under_way())
      transfers.emplace_back(each.is_send, each.peer, each.nbytes, each.since);
    const auto [sent, received] = run->transferred();
    found.emplace_back(run->sequence(), sent, received, run->can_compute(), run->missing_ranks(), std::move(transfers));
  }
  return found;
}

const Token kSetUp = GroupWire::kSetUp;

void bind_wires(nb::module_& m) {
  nb::class_<Wire>(m, "Wire", "Transfers between ranks.")
      .def(
          "send",
          [](Wire& wire, int peer, int tag, std::uintptr_t address, std::size_t nbytes, Token token) {
            wire.send(peer, tag, reinterpret_cast<const void*>(address), nbytes, token);
          },
          Release())
      .def(
          "receive",
          [](Wire& wire, int peer, int tag, std::uintptr_t address, std::size_t nbytes, Token token,
             std::uintptr_t arrived) {
            wire.receive(peer, tag, reinterpret_cast<void*>(address), nbytes, token,
                         reinterpret_cast<std::size_t*>(arrived));
          },
          Release())
      .def(
          "poll",
          [](Wire& wire, std::uint64_t idle) {
            std::vector<Token> completed;
            wire.poll(idle, completed);
            return completed;
          },
          Release());
  nb::class_<PythonWire, Wire>(m, "PythonWire", nb::type_slots(kPythonWireSlots), "Transfers of a Python transport.")
      .def(nb::init<nb::object>(), "transport"_a);
  nb::class_<MpiWire, Wire>(m, "MpiWire", "Transfers of an MPI library.")
      .def(nb::new_(&make_mpi), "functions"_a, "handles"_a, "constants"_a, "fault"_a)
      .def("set_spins", [](MpiWire& wire, std::uint64_t spins) { wire.spins = spins; }, "spins"_a,
           "The number of empty polls during which the thread keeps the processor; 0, at first: it yields at "
           "once.")
      .def_prop_ro("under_way", &MpiWire::under_way)
      .def("cancel", &MpiWire::cancel, Release());
  nb::exception<WireError>(m, "WireError");
  nb::class_<GroupWire, Wire>(m, "GroupWire", "Transfers of a group that connects itself.")
      .def_ro_static("SET_UP", &kSetUp)
      .def("set_spins", &GroupWire::set_spins, "spins"_a,
           "The number of empty polls during which a thread keeps the processor; 0, at first: it yields. Then it "
           "sleeps until a message arrives. A wire between sites sleeps at once.")
      .def_prop_ro("set_up_completed", &GroupWire::set_up_completed)
      .def("address",
           [](GroupWire& wire) {
             const std::string found = wire.address();
             return nb::bytes(found.data(), found.size());
           })
      .def("connect",
           [](GroupWire& wire, int rank, const std::vector<nb::bytes>& addresses, nb::callable ended) {
             wire.connect(rank, all(addresses), [ended = std::move(ended)](const std::vector<int>& ranks) {
               const nb::gil_scoped_acquire held;
               return nb::cast<std::vector<int>>(ended(ranks));
             });
           },
           "Connect a rank to the others. ended() returns those of some ranks whose processes have ended; it is "
           "called when nothing has completed for a while, and then each second. Raises WireError; OSError if "
           "the system refuses a thread.")
      .def("progress", &GroupWire::progress, "idle"_a, Release())
      .def("close", &GroupWire::close, "seconds"_a, Release());
  m.def("mixed_wire", &make_mixed_wire, "memory"_a, "sites"_a,
        "Transfers by shared memory, to ranks whose address for connect() has a part for it behind a zero byte, and "
        "between sites.");
  m.def("ucx_function_names", &ucx_function_names);
  m.def("ucx_wire", &make_ucx, "functions"_a, "config"_a, "fault"_a,
           "Transfers by UCX. functions: addresses, in the order of ucx_function_names(); config: settings by "
           "name. Raises WireError; OSError if the system refuses a descriptor.");
  m.def("wan_wire", &make_wan, "listener"_a, "address"_a, "functions"_a, "secret"_a.none(), "congestion_control"_a,
        "connections"_a, "away_seconds"_a, "most_guests"_a, "hello_seconds"_a, "fault"_a,
           "Transfers between sites. listener: a socket's descriptor, which the wire owns. Encrypted with a "
           "secret, by OpenSSL's functions.");
}

using PythonTally =
    std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, double, double, double, double>;

PythonTally totals(const Tally& tally) {
  const Tally::Traffic traffic = tally.traffic();
  const Tally::Times times = tally.times();
  return {tally.calls(), traffic.elements, traffic.raw_nbytes, traffic.sent_nbytes,
          times.total,   times.computing,  times.waiting,      times.hidden};
}

void bind_runs(nb::module_& m) {
  nb::class_<Tally>(m, "Tally", "Totals of the calls of one collective with one codec.")
      .def(nb::init<>())
      .def(
          "add",
          [](Tally& tally, std::uint64_t elements, std::uint64_t raw, std::uint64_t sent) {
            tally.add(Tally::Traffic{elements, raw, sent});
          },
          "elements"_a, "raw_nbytes"_a, "sent_nbytes"_a,
           "Count a call, without times.")
      .def("totals", &totals,
           "Calls, elements, raw bytes and sent bytes; seconds in all, computing, waiting and hidden.");
  nb::class_<Steps>(m, "Steps", "A compiled schedule: operations, transfers, and their dependencies.")
      .def(nb::init<int, int, std::size_t, const std::vector<int>&>(), "rank"_a, "size"_a, "most_eager"_a,
           "sends_ahead"_a = std::vector<int>())
      .def("__len__", &Steps::count)
      .def("add_operation", &Steps::add_operation, "operation"_a, "needs"_a, "writes_output"_a,
           "Add a copy of the operation.")
      .def("add_transfer", &Steps::add_transfer, "is_send"_a, "peer"_a, "tag"_a, "address"_a, "nbytes"_a, "needs"_a)
      .def("set_source", &Steps::set_source, "step"_a, "address"_a,
           "Make a send take its bytes from the address, from the next run on; not for data that is sent with "
           "headers.")
      .def("link", &Steps::link)
      .def_prop_ro("nbytes", &Steps::nbytes)
      .def("transfer", &transfer, "Whether a transfer is a send, and the other rank; None for an operation.");
  nb::class_<Run>(m, "Run", "One run of Steps at a time.")
      .def("__init__",
           [](Run* self, std::shared_ptr<Steps> steps, MemoryPointer memory) {
             new (self) Run(std::move(steps), std::move(memory));
           },
           "steps"_a, "memory"_a)
      .def(
          "count_in",
          [](Run& run, std::shared_ptr<Tally> tally, std::uint64_t elements, std::uint64_t raw, std::uint64_t sent) {
            run.count_in(std::move(tally), {elements, raw, sent});
          },
          "tally"_a, "elements"_a, "raw_nbytes"_a, "sent_nbytes"_a,
           "Add each run that ends to a Tally: so many elements and bytes, and its times.")
      .def("data_nbytes", &Run::data_nbytes, "peer"_a, "Bytes of data that the peer's header may bring.")
      .def("missing_ranks", &Run::missing_ranks, "The ranks whose header has not arrived.")
      .def("waits_for", &Run::waits_for, "is_send"_a, "The ranks of sends, or receives, under way.")
      .def("trace", &trace, "Step, start and end, in time.perf_counter() seconds.");
}

void bind_loop(nb::module_& m) {
  nb::enum_<Outcome>(m, "Outcome", "How a turn of the loop ended.")
      .value("PAUSE", Outcome::pause)
      .value("OVERDUE", Outcome::overdue)
      .value("ENDED", Outcome::ended);
  nb::class_<Loop>(m, "Loop", nb::type_slots(kLoopSlots), "Advances all runs of a transport together.")
      .def(
          "__init__",
          [](Loop* self, std::shared_ptr<Wire> wire, int rank, int size, std::size_t most_eager, const nb::bytes& call) {
            new (self) Loop(std::move(wire), rank, size, most_eager, text(call));
          },
          "wire"_a, "rank"_a, "size"_a, "most_eager"_a, "call"_a)
      .def_prop_ro("wanted", [](const Loop& loop) { return loop.wanted.load(); })
      .def_prop_ro("early", &Loop::early, "Number of headers of calls that this rank has not made yet.")
      .def_prop_ro("control_sends", &Loop::control_sends, "Sends of broadcast_control() under way.")
      .def_prop_ro("refused", &Loop::refused,
           "Number of ranks of which nothing more is received, because they sent what no rank of this version "
           "sends.")
      .def("start", &start, "run"_a, "headers"_a.none(), "sequence"_a, "call"_a,
           "lr"_a.none(), "timeout"_a, "traced"_a, "waits"_a, "on_control"_a,
           "Begin a run; then advance until any run has ended if the caller waits, or else briefly, if other "
           "runs are under way. headers: one for all ranks, or one for each; None for those of the last run, "
           "with a new number in them. call and lr are for its operations. timeout: seconds from now to its "
           "deadline. ENDED: take_ended() has some.")
      .def("run", &run_until, Release(), "Advance until a run has ended, or the limit; signal handlers run meanwhile.")
      .def("drive", &drive, Release(), "Advance until a run has ended, or another thread wants to drive.")
      .def("step", &step, Release(), "Run one operation if one is ready, and poll once.")
      .def("advance_briefly", &advance_briefly, Release(),
           "Do all that can be done now; begin nothing more after 0.1 ms.")
      .def("take_ended", &Loop::take_ended, "The sequence numbers of the runs that have ended since the last call.")
      .def_prop_ro("overdue", &Loop::overdue,
           "The sequence number of the run that made a turn end with Outcome.OVERDUE.")
      .def("records", &records,
           "The last 1,024 runs: number, call, header for rank 0, bytes to send and to receive, begin, end or 0, "
           "and the longest time in which the loop stood still.")
      .def("under_way", &under_way,
           "Each run under way: its number, bytes sent and received, whether an operation is ready, and missing "
           "ranks; and of its transfers under way: whether it is a send, the other rank, bytes, and begin.")
      .def(
          "broadcast_control", [](Loop& loop, const nb::bytes& message) { loop.broadcast_control(text(message)); },
           "Start sending a control message to all other ranks, at most once.")
      .def(
          "drain",
          [](Loop& loop, std::uint64_t idle, const nb::callable& on_control) {
            loop.drain(idle, python_function(on_control));
          },
          Release(),
          "Poll for control messages after the last run.")
      .def("want", [](Loop& loop, int callers) { loop.wanted += callers; },
           "Change the number of threads that want to drive; any thread may call this.")
      .def("halt", &Loop::halt, "End all present and later turns; any thread may call this.")
      .def_prop_ro("halted", &Loop::halted)
      .def_ro("size", &Loop::size);
  m.attr("HEADER_NBYTES") = kHeaderNbytes;
  m.attr("AGREED_NBYTES") = kAgreedNbytes;
  m.attr("SEQUENCE_OFFSET") = kSequenceOffset;
  m.attr("CONTROL_TAG") = kControlTag;
  m.attr("RUNS_IN_FLIGHT") = kRunsInFlight;
  m.attr("TAGS_PER_RUN") = kTagsPerRun;
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::register_exception_translator(&translate);
  bind_wires(m);
  bind_tls(m);
  bind_runs(m);
  bind_loop(m);
}

}  // namespace qccl
