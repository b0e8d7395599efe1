// Prepared operations: each is constructed once and run many times over parts of numbered buffers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernel_args.h"

namespace qccl {

// The base addresses of a program's buffers, and the number of the current call. Storing an address rebinds the buffer
// for every operation of the program.
struct Memory {
  // A buffer whose address the caller gives for each run.
  struct Caller {
    std::size_t buffer, nbytes;
    bool is_written;
  };
  explicit Memory(std::size_t buffers) : addresses(buffers, 0) {}
  // Whether one of two runs, with this memory and with `other`, writes memory of the caller that both use.
  bool conflicts(const Memory& other) const;
  std::vector<std::uintptr_t> addresses;
  std::vector<Caller> callers;
  std::uint64_t call = 0;
  float lr = 1.0f;            // learning rate of the call, for residuals
  std::uint32_t threads = 1;  // threads that may share an operation
};

// A codec with its parameters.
struct Codec {
  virtual ~Codec() = default;
  // Elements of a bucket in a call of `count`.
  virtual std::uint64_t bucket(std::uint64_t count) const = 0;
  // Whether its wires can be summed only, without min and max.
  virtual bool sparse() const { return false; }
  // Floats of scratch for a call.
  virtual std::uint64_t scratch(std::uint64_t count, bool state) const = 0;
  virtual void encode(const EncodeArgs&) const = 0;
  virtual void decode(const DecodeArgs&) const = 0;
  virtual void reduce(const ReduceArgs&) const = 0;
};

// A codec of the registry (../codecs/all.h), by its name there.
class CompiledCodec final : public Codec {
 public:
  CompiledCodec(const std::string& name, std::uint64_t bucket, std::uint64_t seed,
                const std::vector<std::uint32_t>& options);
  std::uint64_t bucket(std::uint64_t count) const override { return options_.bucket ? options_.bucket : count; }
  bool sparse() const override { return entry_->sparse; }
  std::uint64_t scratch(std::uint64_t count, bool state) const override {
    return entry_->whole_call && !state ? 0 : bucket_scratch(std::min(bucket(count), count));
  }
  void encode(const EncodeArgs& args) const override { entry_->loops.encode(options_, args); }
  void decode(const DecodeArgs& args) const override { entry_->loops.decode(options_, args); }
  void reduce(const ReduceArgs& args) const override {
    (args.state ? entry_->loops.reduce_with_state : entry_->loops.reduce)(options_, args);
  }
  std::uint64_t wire_nbytes(std::uint64_t count, std::uint32_t dtype) const;

 private:
  BucketOptions options_;
  const CodecEntry* entry_ = nullptr;
};

// The loops chosen for this process.
const Isa& loops();

// A buffer's number and an offset in bytes.
using BufferRef = std::pair<std::uint32_t, std::uint64_t>;
using MemoryPointer = std::shared_ptr<Memory>;
using CodecPointer = std::shared_ptr<const Codec>;

// Where a Reduce reads its state, and where it writes the new state.
using StateBuffer = std::optional<std::pair<BufferRef, BufferRef>>;

template <class T>
std::size_t held(const std::vector<T>& items) {
  return items.capacity() * sizeof(T);
}

// Each constructor throws std::invalid_argument; run() throws std::runtime_error where a buffer has no address.
struct Operation {
  virtual ~Operation() = default;
  virtual void run() = 0;
  virtual std::unique_ptr<Operation> copy() const = 0;
  virtual std::size_t nbytes() const = 0;  // memory that it takes
};

class Encode final : public Operation {
 public:
  Encode(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, BufferRef src, BufferRef wire, std::uint64_t count,
         std::uint64_t index, std::uint32_t round, std::uint32_t rank);
  void run() override;
  std::unique_ptr<Operation> copy() const override { return std::make_unique<Encode>(*this); }
  std::size_t nbytes() const override { return sizeof *this; }

 private:
  MemoryPointer memory_;
  CodecPointer codec_;
  BufferRef src_, wire_;
  EncodeArgs args_;
};

class Decode final : public Operation {
 public:
  Decode(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, BufferRef wire, BufferRef dst, std::uint64_t count,
         bool accumulate, std::uint64_t index, std::uint32_t round, std::uint32_t rank);
  void run() override;
  std::unique_ptr<Operation> copy() const override { return std::make_unique<Decode>(*this); }
  std::size_t nbytes() const override { return sizeof *this; }

 private:
  MemoryPointer memory_;
  CodecPointer codec_;
  BufferRef wire_, dst_;
  DecodeArgs args_;
};

class Reduce final : public Operation {
 public:
  Reduce(MemoryPointer memory, CodecPointer codec, std::uint32_t dtype, std::vector<BufferRef> sources,
         std::optional<BufferRef> own, std::uint32_t own_index, std::optional<BufferRef> wire, std::optional<BufferRef> out,
         std::uint64_t count, std::uint32_t op, float scale, std::uint64_t index, std::uint32_t round,
         std::uint32_t rank, std::vector<std::uint32_t> source_ranks, std::uint32_t source_round, StateBuffer residual,
         StateBuffer momentum, float mu, float beta, std::uint32_t residual_dtype);
  void run() override;
  std::unique_ptr<Operation> copy() const override { return std::make_unique<Reduce>(*this); }
  std::size_t nbytes() const override { return sizeof *this + held(sources_) + held(addresses_) + held(source_ranks_); }

 private:
  StateArgs resolve_state() const;

  MemoryPointer memory_;
  CodecPointer codec_;
  std::vector<BufferRef> sources_;
  std::vector<const unsigned char*> addresses_;
  std::vector<std::uint32_t> source_ranks_;
  std::optional<BufferRef> own_, wire_, out_;
  StateBuffer residual_, momentum_;
  float mu_, beta_;
  std::uint32_t residual_dtype_;
  ReduceArgs args_;
};

// Copies between buffers if all values of `guard` are finite; otherwise does nothing.
class Commit final : public Operation {
 public:
  // `guard`: element type, buffer, elements. `copies`: from, to, bytes.
  Commit(MemoryPointer memory, std::vector<std::tuple<std::uint32_t, BufferRef, std::uint64_t>> guard,
         std::vector<std::tuple<BufferRef, BufferRef, std::uint64_t>> copies);
  void run() override;
  std::unique_ptr<Operation> copy() const override { return std::make_unique<Commit>(*this); }
  std::size_t nbytes() const override { return sizeof *this + held(guard_) + held(copies_); }

 private:
  MemoryPointer memory_;
  std::vector<std::tuple<std::uint32_t, BufferRef, std::uint64_t>> guard_;
  std::vector<std::tuple<BufferRef, BufferRef, std::uint64_t>> copies_;
};

}  // namespace qccl
