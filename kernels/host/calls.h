// What the module and the loops say to each other: plain data, the same in every instruction set's build.
#pragma once

#include <cstdint>

namespace qccl {

// Who asks for random numbers, and for which element first.
struct RandomPlace {
  std::uint64_t call = 0;
  std::uint64_t index = 0;
  std::uint32_t round = 0;
  std::uint32_t rank = 0;
};

struct EncodeCall {
  const void* src;
  unsigned char* wire;
  std::uint64_t count;
  std::uint32_t dtype;
  RandomPlace place;
};

struct DecodeCall {
  const unsigned char* wire;
  void* dst;
  std::uint64_t count;
  std::uint32_t dtype;
  bool accumulate;
};

enum class Combine : std::uint32_t { sum = 0, min = 1, max = 2, replace = 3 };

// `own` and `out` may be null; so may `wire` where `out` is not. own == out is allowed, other overlap is not.
struct ReduceCall {
  const unsigned char* const* sources;
  std::uint32_t source_count;
  std::uint32_t own_index;
  const void* own;
  unsigned char* wire;
  void* out;
  std::uint64_t count;
  std::uint32_t dtype;
  Combine op;
  float scale;
  RandomPlace place;
};

// The loops of one codec. `parameters` is the codec's own struct below.
struct CodecLoops {
  void (*encode)(const void* parameters, const EncodeCall&);
  void (*decode)(const void* parameters, const DecodeCall&);
  void (*reduce)(const void* parameters, const ReduceCall&);
};

struct MinMaxParameters {
  std::uint32_t bits;
  std::uint64_t bucket;  // elements; 0: the whole call
  bool stochastic;
  std::uint64_t seed;
};

// Everything one instruction set's build offers.
struct Isa {
  const char* name;
  CodecLoops minmax;
  CodecLoops raw;
};

}  // namespace qccl
