// What the module and the loops say to each other: plain data, the same in every instruction set's build.
#pragma once

#include <cstdint>

namespace qccl {

// Who makes a code, and from which element on: what its random numbers are keyed by.
struct RandomPlace {
  std::uint64_t call = 0;
  std::uint64_t index = 0;
  std::uint32_t round = 0;
  std::uint32_t rank = 0;
};

// The buckets of a call that loops work on, all of which are independent: threads share a call by them.
struct BucketRange {
  std::uint64_t first, last;  // `last` is the one after
};

struct EncodeCall {
  const void* src;
  unsigned char* wire;
  std::uint64_t count;
  std::uint32_t dtype;
  RandomPlace place;
  float* scratch;
  BucketRange buckets;
};

// `place`: of the wire's maker.
struct DecodeCall {
  const unsigned char* wire;
  void* dst;
  std::uint64_t count;
  std::uint32_t dtype;
  bool accumulate;
  RandomPlace place;
  float* scratch;
  BucketRange buckets;
};

enum class Combine : std::uint32_t { sum = 0, min = 1, max = 2, replace = 3 };

// What a Reduce remembers, in fp32, one value per element: read from the old, written to the new. Both of a pair may be
// null.
struct StateCall {
  const float* residual;
  float* new_residual;
  const float* momentum;
  float* new_momentum;
  float mu, lr;
};

// `own` and `out` may be null; so may `wire` where `out` is not. own == out is allowed, other overlap is not. The sources
// were made by `source_ranks` (null: rank 0 made all) in round `source_round`. `state` is usually null.
struct ReduceCall {
  const unsigned char* const* sources;
  const std::uint32_t* source_ranks;
  std::uint32_t source_count;
  std::uint32_t source_round;
  std::uint32_t own_index;
  const void* own;
  unsigned char* wire;
  void* out;
  std::uint64_t count;
  std::uint32_t dtype;
  Combine op;
  float scale;
  RandomPlace place;
  float* scratch;
  const StateCall* state;
  BucketRange buckets;
};

using ReduceLoop = void (*)(const void* parameters, const ReduceCall&);

// The loops of one codec. `parameters` is the codec's own struct below.
struct CodecLoops {
  void (*encode)(const void* parameters, const EncodeCall&);
  void (*decode)(const void* parameters, const DecodeCall&);
  ReduceLoop reduce;
};

struct MinMaxParameters {
  std::uint32_t bits;
  std::uint64_t bucket;  // elements; 0: the whole call
  bool stochastic;
  std::uint64_t seed;
};

// Elements of a bucket of the codec `none`.
constexpr std::uint64_t kRawBucket = 2048;

// The parameters of every codec in per-bucket form (../bucket.h).
struct BucketParameters {
  std::uint64_t bucket;
  std::uint64_t seed;
  std::uint32_t options[6];
};

struct BucketCodecLoops {
  const char* name;
  bool sparse;
  CodecLoops loops;
};

// How many floats of scratch the loops of such a codec need for a call.
inline std::uint64_t bucket_scratch(const BucketParameters& codec, std::uint64_t count) {
  const std::uint64_t bucket = codec.bucket < count ? codec.bucket : count;
  return 4 * (bucket + 64);
}

// Everything one instruction set's build offers.
struct Isa {
  const char* name;
  CodecLoops minmax;
  CodecLoops raw;
  // reductions with state, of codecs whose loops have none; the parameters are those of the per-bucket form
  ReduceLoop minmax_state;
  ReduceLoop raw_state;
  const BucketCodecLoops* buckets;
  std::uint32_t bucket_count;
};

}  // namespace qccl
