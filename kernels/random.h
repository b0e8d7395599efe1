// Random words as a pure function of who asks for what: seed, call, round, rank and element index (no state).
#pragma once

#include "numeric.h"

namespace QCCL_NAMESPACE {

struct RandomKey {
  u32 low, high;
};

// One step of splitmix64 (Steele, Lea, Flood 2014) with `word` taken in: a bijection of `state` for a given word, so
// two calls of one seed, or two ranks of one call, never share a key.
QCCL_FN u64 mix(u64 state, u64 word) {
  u64 z = (state ^ word) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// The key of all elements whose index has the same upper half.
QCCL_FN RandomKey random_key(u64 seed, u64 call, u32 round, u32 rank, u32 index_high) {
  u64 key = mix(0, seed);
  key = mix(key, call);
  key = mix(key, ((u64)round << 32) | rank);
  key = mix(key, index_high);
  return {(u32)key, (u32)(key >> 32)};
}

// A random word for the element with the lower index half `index`; its upper 24 bits are the good ones. Three rounds of
// multiplication, with the multipliers of Wellons' triple32 and the key taken in before the first and the second; 32-bit
// multiplications only, because those vectorise, and nothing spent on bits that rounding does not see.
QCCL_FN u32 random_word(RandomKey key, u32 index) {
  u32 x = (index ^ key.low) * 0xed5ad4bbu;
  x = (x ^ (x >> 14) ^ key.high) * 0xac4c1b51u;
  return (x ^ (x >> 14)) * 0x31848babu;
}

}  // namespace QCCL_NAMESPACE
