// A counter-based random number generator: a word is a pure function of seed, call, round, rank and element index.
#pragma once

#include "numeric.h"

namespace QCCL_NAMESPACE {

struct RandomKey {
  u32 low, high;
};

// One step of splitmix64 (Steele, Lea, Flood 2014) that absorbs `word`. For a given word it is a bijection of `state`, so
// two calls with one seed, or two ranks in one call, never share a key.
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

// A random word for the element whose lower index half is `index`; use its upper 24 bits. There are three multiplications,
// with the multipliers of Wellons' triple32; the key enters before the first and the second. They have 32 bits, because
// those vectorise. `Word` is u32 or a vector of u32.
template <class Word>
QCCL_FN Word random_word(RandomKey key, Word index) {
  Word x = (index ^ key.low) * 0xed5ad4bbu;
  x = (x ^ (x >> 14u) ^ key.high) * 0xac4c1b51u;
  return (x ^ (x >> 14u)) * 0x31848babu;
}

}  // namespace QCCL_NAMESPACE
