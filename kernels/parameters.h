// What a call passes to a codec: plain data, the same in every instruction set's build and on the device.
#pragma once

namespace qccl {

// A codec's parameters. Each codec gives its own meaning to `options`.
struct BucketOptions {
  unsigned long long bucket;  // elements; 0: one bucket per call
  unsigned long long seed;
  unsigned options[6];
};

// The counter of the random number generator: who makes a code, and from which element of the whole vector on.
struct RngCounter {
  unsigned long long call, index;
  unsigned round, rank;
};

}  // namespace qccl
