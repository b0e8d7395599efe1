// Random numbers for many elements at once.
#pragma once

#include "../shared/bucket.h"
#include "blocking.h"
#include "codes.h"

namespace QCCL_NAMESPACE {

// random_word(key, index + i) >> 8 for kRandomLanes lanes; `index` is a multiple of kRandomLanes. Adding a lane's number
// then sets bits that were zero, so the first product is the sum of two products: of the bits that differ between lanes,
// computed once, and of the others.
constexpr u32 kRandomLanes = kTogether * kLanes;

struct RandomLanes {
  static constexpr u32 factor = 0xed5ad4bbu, own_bits = kRandomLanes - 1;
  RandomKey key;
  u32xN lanes[kTogether];

  QCCL_FN RandomLanes make(const RandomKey& key) {
    RandomLanes maker;
    maker.key = key;
    for (u32 g = 0; g < kTogether; ++g) {
      maker.lanes[g] = ((lane_numbers() + g * kLanes) ^ (key.low & own_bits)) * factor;
    }
    return maker;
  }

  QCCL_FN void random(const RandomLanes& maker, u32 index, u32xN (&x)[kTogether]) {
    const u32 common = (index ^ (maker.key.low & ~own_bits)) * factor, high = maker.key.high;
    for (u32 g = 0; g < kTogether; ++g) x[g] = maker.lanes[g] + common;
    for (u32 g = 0; g < kTogether; ++g) x[g] = (x[g] ^ (x[g] >> 14u) ^ high) * 0xac4c1b51u;
    for (u32 g = 0; g < kTogether; ++g) x[g] = ((x[g] ^ (x[g] >> 14u)) * 0x31848babu) >> 8u;
  }
};

// Fills `random` for n elements, rounded up to a multiple of kRandomLanes.
static QCCL_LOOP void make_random(const RandomKey key, u32 index, u32 n, u32* random) {
  const RandomLanes maker = RandomLanes::make(key);
  for (u32 i = 0; i < n; i += kRandomLanes) {
    u32xN x[kTogether];
    RandomLanes::random(maker, index + i, x);
    for (u32 g = 0; g < kTogether; ++g) store_lanes(x[g], random + i + g * kLanes);
  }
}

// The random numbers of a call's elements.
class RandomBlock {
 public:
  RandomBlock(u64 seed, const RngCounter& counter) : seed_(seed), counter_(counter) {}

  // The index of an element of the call in the whole vector.
  u64 index_of(u64 element) const { return counter_.index + element; }

  // The key of the elements whose index has the same upper half.
  const RandomKey& key_of(u64 index) {
    const u32 high = (u32)(index >> 32);
    if (high != keyed_) keyed_ = high, key_ = key(high);
    return key_;
  }

  // The random numbers of n elements from element `begin` of the call on, kBlock at most; valid until the next of().
  const u32* of(u64 begin, u32 n) {
    const u64 index = index_of(begin);
    const u32 before = (u32)index % kRandomLanes, aligned = (u32)index - before, count = before + n;
    const u32 high = (u32)(index >> 32);
    make_random(key_of(index), aligned, count, some_);
    const u32 until = 0u - aligned;  // elements until the lower half of the index wraps
    if (until && until < count) make_random(key(high + 1), 0, count - until, some_ + until);
    return some_ + before;
  }

 private:
  RandomKey key(u32 high) const { return random_key(seed_, counter_.call, counter_.round, counter_.rank, high); }

  u64 seed_;
  RngCounter counter_;
  u64 keyed_ = ~0ull;  // the upper half of the indices of key_; at first none
  RandomKey key_;
  alignas(64) u32 some_[kBlock + kRandomLanes];
};

}  // namespace QCCL_NAMESPACE
