// The arguments of the loops: plain data, the same in every instruction set's build.
#pragma once

#include <cstdint>

#include "../shared/parameters.h"

namespace qccl {

// The buckets that a thread works on. Buckets are independent.
struct BucketRange {
  std::uint64_t first, last;  // `last` is one past the last bucket
};

struct EncodeArgs {
  const void* src;
  unsigned char* wire;
  std::uint64_t count;
  std::uint32_t dtype;
  RngCounter counter;
  float* scratch;
  BucketRange buckets;
};

// `counter` is the one of the Encode that made the wire.
struct DecodeArgs {
  const unsigned char* wire;
  void* dst;
  std::uint64_t count;
  std::uint32_t dtype;
  bool accumulate;
  RngCounter counter;
  float* scratch;
  BucketRange buckets;
};

enum class Combine : std::uint32_t { sum = 0, min = 1, max = 2, replace = 3 };

// The state of a Reduce, one value per element: residuals of the element type `residual_dtype` (float32 or bfloat16), and
// momenta in fp32. Both pointers of a pair may be null.
struct StateArgs {
  const void* residual;
  void* new_residual;
  const float* momentum;
  float* new_momentum;
  float mu, beta, lr;
  std::uint32_t residual_dtype;
};

// `own` and `out` may be null, and `wire` if `out` is not. own == out is allowed, other overlap is not. `source_ranks` (null:
// all 0) encoded the sources in round `source_round`. `state` is usually null.
struct ReduceArgs {
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
  RngCounter counter;
  float* scratch;
  const StateArgs* state;
  BucketRange buckets;
};

// The loops of one codec.
struct CodecLoops {
  void (*encode)(const BucketOptions&, const EncodeArgs&);
  void (*decode)(const BucketOptions&, const DecodeArgs&);
  void (*reduce)(const BucketOptions&, const ReduceArgs&);
  void (*reduce_with_state)(const BucketOptions&, const ReduceArgs&);
};

struct CodecEntry {
  const char* name;
  bool sparse;
  bool whole_call;  // the codec specialises CallLoops; its loops need no scratch
  CodecLoops loops;
  std::uint64_t (*wire_nbytes)(const BucketOptions&, std::uint64_t count, std::uint32_t dtype);
};

// Floats of scratch that BucketLoops need for a bucket size.
inline std::uint64_t bucket_scratch(std::uint64_t bucket) { return 4 * (bucket + 64); }

struct FactorLoops;  // factor_loops.h

// The build for one instruction set.
struct Isa {
  const char* name;
  const FactorLoops* factors;
  const CodecEntry* codecs;
  std::uint32_t codec_count;
};

}  // namespace qccl
