// The random-k codec: some values of a block, drawn at random without replacement, in the call's element type.
//
// The seed and the RngCounter determine the indices, so these are not sent. Value j is element (P(j) + R) mod n, where R is
// a random number and P a permutation of 0, ..., n-1: a Feistel network on as many bits as n - 1 has, applied until the
// result is below n (cycle walking).
#pragma once

#include "../sparse.h"

namespace QCCL_NAMESPACE {

struct RandomPick {
  RandomKey key;
  u32 n, low_bits, high_bits, rotation;
};

QCCL_FN RandomPick make_pick(u64 seed, const RngCounter& counter, u32 n) {
  const u64 key = mix(mix(mix(mix(0, seed), counter.call), (u64)counter.round << 32 | counter.rank), counter.index);
  u32 bits = 0;
  while ((n - 1) >> bits) ++bits;
  return {{(u32)key, (u32)(key >> 32)}, n, bits - bits / 2, bits / 2, (u32)(key % n)};
}

// One pass through the network. `Word` is u32 or a vector of u32.
template <class Word>
QCCL_FN Word shuffle(const RandomPick& pick, Word number) {
  const u32 low_mask = (1u << pick.low_bits) - 1, high_mask = (1u << pick.high_bits) - 1;
  Word low = number & low_mask, high = number >> pick.low_bits;
  for (u32 round = 0; round < 6; round += 2) {
    low = low ^ ((random_word(pick.key, high ^ (round << 24)) >> 8u) & low_mask);
    high = high ^ ((random_word(pick.key, low ^ ((round + 1) << 24)) >> 8u) & high_mask);
  }
  return (high << pick.low_bits) ^ low;
}

QCCL_FN u32 picked(const RandomPick& pick, u32 j) {
  u32 number = j;
  do {
    number = shuffle(pick, number);
  } while (number >= pick.n);
  const u32 turned = number + pick.rotation;
  return turned < pick.n ? turned : turned - pick.n;
}

// body(j, picked(j)) for j < n. host.h overloads it.
template <class Team, class Body>
QCCL_FN void each_picked(const Team& team, const RandomPick& pick, u32 n, const Body& body) {
  team.each(n, [&](u32 j) { body(j, picked(pick, j)); });
}

// All values on the wire are NaN if the block has a NaN or an infinity; the decoder tests the first.
struct RandomK : CodecDefaults {
  static constexpr bool sparse = true, typed = true;

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    return kept(options, n) * sizeof(typename T::Storage);
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions&, u64) {
    return 0;
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const RngCounter& counter, const Values& x, u32 n,
                      u8* codes, u8*) {
    const u32 keep = (u32)kept(options, n);
    if (team.greatest(n, [&](i32 i) { return magnitude(x[i]); }) >= kInfinite) {
      return team.each(keep, [&](i32 j) { store_element<T>(codes, j, float_of(kQuietNan)); });
    }
    const RandomPick pick = make_pick(options.seed, counter, n);
    each_picked(team, pick, keep, [&](u32 j, u32 i) { store_element<T>(codes, j, x[i]); });
  }

  // The third option: multiply values by n / keep, so that the result is unbiased.
  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const RngCounter& counter, const u8* codes, const u8*,
                      u32 n, const Take& take) {
    if (is_nan(load_element<T>(codes, 0))) return team.each(n, [&](i32 i) { take(i, float_of(kQuietNan)); });
    const u32 keep = (u32)kept(options, n);
    const float factor = options.options[2] ? (float)n / (float)keep : 1.0f;
    const RandomPick pick = make_pick(options.seed, counter, n);
    each_picked(team, pick, keep, [&](u32 j, u32 i) { take(i, load_element<T>(codes, j) * factor); });
  }
};

}  // namespace QCCL_NAMESPACE
