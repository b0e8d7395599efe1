// The codecs that have loops and device kernels of their own, in per-bucket form as well (bucket.h): for reductions with
// state, which are put together bucket by bucket. The bytes are the same.
#pragma once

#include "bucket.h"
#include "minmax.h"
#include "sparse.h"

namespace QCCL_NAMESPACE {

// Options: bits, and whether the rounding is stochastic.
struct MinMaxBuckets {
  static constexpr bool sparse = false;

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    return (n * options.options[0] + 7) / 8;
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions&, u64) {
    return 8;
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const Stamp& stamp, const Values& x, u32 n, u8* codes,
                      u8* meta) {
    const i32 highest = team.greatest(n, [&](u32 i) { return order_key(bits_of(x[i])); });
    const i32 lowest = ~team.greatest(n, [&](u32 i) { return ~order_key(bits_of(x[i])); });
    const MinMaxRange range = minmax_range(lowest, highest);
    if (team.leads()) {
      store_float(meta, range.low);
      store_float(meta + 4, range.high);
    }
    const u32 bits = options.options[0];
    const MinMaxScale scale = minmax_scale(range, (1u << bits) - 1);
    if (minmax_is_nan(scale)) {
      pack(team, bits, n, [](u32) { return 0u; }, codes);
    } else if (options.options[1]) {
      const Draws draws = make_draws(options.seed, stamp);
      pack(team, bits, n, [=, &x](u32 i) { return minmax_stochastic(x[i], scale, draws.word(i)); }, codes);
    } else {
      pack(team, bits, n, [=, &x](u32 i) { return minmax_nearest(x[i], scale); }, codes);
    }
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const Stamp&, const u8* codes, const u8* meta, u32 n,
                      const Take& take) {
    const MinMaxScale scale = minmax_scale({load_float(meta), load_float(meta + 4)}, (1u << options.options[0]) - 1);
    const auto give = [&](u32 i, u32 code) { take(i, minmax_value(code, scale)); };
    switch (options.options[0]) {
      case 1: return team.template unpack<1>(codes, n, give);
      case 2: return team.template unpack<2>(codes, n, give);
      case 3: return team.template unpack<3>(codes, n, give);
      case 4: return team.template unpack<4>(codes, n, give);
      case 5: return team.template unpack<5>(codes, n, give);
      case 6: return team.template unpack<6>(codes, n, give);
      case 7: return team.template unpack<7>(codes, n, give);
      default: return team.template unpack<8>(codes, n, give);
    }
  }

  template <class Team, class Code>
  QCCL_FN void pack(const Team& team, u32 bits, u32 n, const Code& code, u8* to) {
    switch (bits) {
      case 1: return team.template pack<1>(n, code, to);
      case 2: return team.template pack<2>(n, code, to);
      case 3: return team.template pack<3>(n, code, to);
      case 4: return team.template pack<4>(n, code, to);
      case 5: return team.template pack<5>(n, code, to);
      case 6: return team.template pack<6>(n, code, to);
      case 7: return team.template pack<7>(n, code, to);
      default: return team.template pack<8>(n, code, to);
    }
  }
};

// The values themselves, in their own type.
struct RawBuckets {
  static constexpr bool sparse = false;

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions&, u64 n) {
    return n * sizeof(typename T::Storage);
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions&, u64) {
    return 0;
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions&, const Stamp&, const Values& x, u32 n, u8* codes, u8*) {
    team.each(n, [&](u32 i) { store_kept<T>(codes, i, x[i]); });
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions&, const Stamp&, const u8* codes, const u8*, u32 n,
                      const Take& take) {
    team.each(n, [&](u32 i) { take(i, load_kept<T>(codes, i)); });
  }
};

}  // namespace QCCL_NAMESPACE
