// The Python module qccl._host.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "../engine/bind.h"
#include "../arrays/call_table.h"
#include "choose_isa.h"
#include "../arrays/dlpack.h"
#include "factors.h"
#include "../arrays/mappings.h"
#include "operations.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

std::uintptr_t& slot(qccl::Memory& memory, std::size_t buffer) {
  if (buffer >= memory.addresses.size()) throw nb::index_error("no such buffer");
  return memory.addresses[buffer];
}

void bind_memory(nb::module_& m) {
  nb::class_<qccl::Memory>(m, "Memory", "The base addresses of a program's buffers, shared by its operations.")
      .def(nb::init<std::size_t>(), "buffers"_a)
      .def("__len__", [](const qccl::Memory& memory) { return memory.addresses.size(); })
      .def("__getitem__", [](qccl::Memory& memory, std::size_t buffer) { return slot(memory, buffer); })
      .def("__setitem__",
           [](qccl::Memory& memory, std::size_t buffer, std::uintptr_t address) { slot(memory, buffer) = address; })
      .def(
          "add_caller",
          [](qccl::Memory& memory, std::size_t buffer, std::size_t nbytes, bool is_written) {
            slot(memory, buffer);  // raises IndexError where there is none
            memory.callers.push_back({buffer, nbytes, is_written});
          },
          "buffer"_a, "nbytes"_a, "is_written"_a, "Buffer whose address the caller gives for each run.")
      .def("conflicts", &qccl::Memory::conflicts, "other"_a,
           "Whether one of two runs with these memories writes memory of the caller that both use.")
      .def_rw("call", &qccl::Memory::call, "Number of the collective call; keys the random numbers.")
      .def_rw("lr", &qccl::Memory::lr, "Learning rate of the call, for residuals; 1 if there is none.")
      .def_rw("threads", &qccl::Memory::threads, "Threads that may share an operation.");
}

// A codec whose arithmetic is Python functions of addresses. The operation raises what they raise.
struct CallbackCodec final : qccl::Codec {
  CallbackCodec(nb::object encode, nb::object decode, nb::object reduce)
      : encode_(std::move(encode)), decode_(std::move(decode)), reduce_(std::move(reduce)) {}

  std::uint64_t bucket(std::uint64_t count) const override { return count; }
  std::uint64_t scratch(std::uint64_t, bool) const override { return 0; }
  void encode(const qccl::EncodeArgs& c) const override {
    const nb::gil_scoped_acquire held;
    encode_(address(c.src), address(c.wire), c.count, c.dtype);
  }
  void decode(const qccl::DecodeArgs& c) const override {
    const nb::gil_scoped_acquire held;
    decode_(address(c.wire), address(c.dst), c.count, c.dtype, c.accumulate);
  }
  void reduce(const qccl::ReduceArgs& c) const override {
    const nb::gil_scoped_acquire held;
    nb::object state = nb::none();
    if (const qccl::StateArgs* s = c.state) {
      state = nb::make_tuple(address(s->residual), address(s->new_residual), address(s->momentum),
                             address(s->new_momentum), s->mu, s->beta, s->lr, s->residual_dtype);
    }
    nb::list sources;
    for (std::uint32_t i = 0; i < c.source_count; ++i) sources.append(address(c.sources[i]));
    reduce_(sources, address(c.own), c.own_index, address(c.wire), address(c.out), c.count, c.dtype,
            static_cast<std::uint32_t>(c.op), c.scale, state);
  }

 private:
  static std::uintptr_t address(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }
  nb::object encode_, decode_, reduce_;
};

void bind_codecs(nb::module_& m) {
  nb::class_<qccl::Codec>(m, "Codec", "A codec's loops with its parameters.");
  nb::class_<qccl::CompiledCodec, qccl::Codec>(m, "CompiledCodec", "A codec of kernels/codecs/all.h, by its name there.")
      .def(nb::init<const std::string&, std::uint64_t, std::uint64_t, const std::vector<std::uint32_t>&>(), "name"_a,
           "bucket"_a, "seed"_a, "options"_a)
      .def("wire_nbytes", &qccl::CompiledCodec::wire_nbytes, "count"_a, "dtype_code"_a, "Bytes of a wire.");
  nb::class_<CallbackCodec, qccl::Codec>(m, "CallbackCodec", "A codec of Python functions of addresses.")
      .def(nb::init<nb::object, nb::object, nb::object>(), "encode"_a, "decode"_a, "reduce"_a);
}

void bind_operations(nb::module_& m) {
  using namespace qccl;
  using u32 = std::uint32_t;
  using u64 = std::uint64_t;
  nb::class_<Operation>(m, "Operation", "A prepared computation.").def("__call__", &Operation::run, Release());
  nb::class_<Encode, Operation>(m, "Encode", "Values -> wire; ``src`` and ``wire`` are (buffer, byte offset).")
      .def(nb::init<MemoryPointer, CodecPointer, u32, BufferRef, BufferRef, u64, u64, u32, u32>(), "memory"_a, "codec"_a,
           "dtype_code"_a, "src"_a, "wire"_a, "count"_a, "index"_a, "round"_a, "rank"_a);
  nb::class_<Decode, Operation>(m, "Decode", "Wire -> values, or added to them.")
      .def(nb::init<MemoryPointer, CodecPointer, u32, BufferRef, BufferRef, u64, bool, u64, u32, u32>(), "memory"_a, "codec"_a,
           "dtype_code"_a, "wire"_a, "dst"_a, "count"_a, "accumulate"_a, "index"_a = 0, "round"_a = 0, "rank"_a = 0);
  nb::class_<Reduce, Operation>(m, "Reduce",
                     "Several wires and ``own`` values, combined in order in fp32, to a wire and its values, or to "
                     "values alone.\n\n``op``: 0 sum, 1 min, 2 max. One object may not run in two threads at once.")
      .def(nb::init<MemoryPointer, CodecPointer, u32, std::vector<BufferRef>, std::optional<BufferRef>, u32,
                    std::optional<BufferRef>, std::optional<BufferRef>, u64, u32, float, u64, u32, u32, std::vector<u32>, u32,
                    StateBuffer, StateBuffer, float, float, u32>(),
           "memory"_a, "codec"_a, "dtype_code"_a, "srcs"_a, "own"_a.none(), "own_index"_a, "wire"_a.none(),
           "out"_a.none(), "count"_a, "op"_a, "scale"_a, "index"_a, "round"_a, "rank"_a,
           "source_ranks"_a = std::vector<u32>(), "source_round"_a = 0, "residual"_a = nb::none(),
           "momentum"_a = nb::none(), "mu"_a = 0.0f, "beta"_a = 1.0f, "residual_dtype"_a = 0);
  nb::class_<Commit, Operation>(m, "Commit",
                                "Copies (from, to, bytes) if all of ``guard`` (dtype_code, buffer, count) is finite.")
      .def(nb::init<MemoryPointer, std::vector<std::tuple<u32, BufferRef, u64>>,
                    std::vector<std::tuple<BufferRef, BufferRef, u64>>>(),
           "memory"_a, "guard"_a, "copies"_a);
}

void copy(std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes) {
  std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes);
}

}  // namespace

NB_MODULE(_host, m) {
  nb::set_leak_warnings(false);  // failed transports and the memory that their library still uses are kept on purpose
  m.doc() = "qccl's host kernels: prepared encode, decode and reduce operations over raw memory.";
  bind_memory(m);
  bind_codecs(m);
  bind_operations(m);
  qccl::bind_dlpack(m);
  qccl::bind_call_table(m);
  qccl::bind_factors(m);
  qccl::bind_engine(m);
  m.def("memcpy", &copy, "dst"_a, "src"_a, "nbytes"_a, Release(), "Copy between addresses; they may not overlap.");
  m.def("may_access", &qccl::may_access, "address"_a, "nbytes"_a, "writes"_a,
           "Whether so many bytes (at least one) may be read, or written; asks the kernel. No value changes. "
           "Linux only.");
  m.attr("isa") = qccl::loops().name;
  nb::list usable;
  for (const qccl::Isa* isa : qccl::usable_isas()) usable.append(isa->name);
  m.attr("usable_isas") = nb::tuple(usable);
}
