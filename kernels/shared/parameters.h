// A codec's parameters and random counter: plain data, the same in every instruction set's build and on the device.
#pragma once

namespace qccl {

// A codec's parameters. Each codec gives its own meaning to `options`.
struct BucketOptions {
  unsigned long long bucket;  // elements; 0: one bucket per call
  unsigned long long seed;
  unsigned options[6];
};

// The counter of the random number generator: the collective call, the index of the first element in the whole vector,
// the round of the algorithm, and the rank that encodes.
struct RngCounter {
  unsigned long long call, index;
  unsigned round, rank;
};

}  // namespace qccl
