// The min-max codec: codes are evenly spaced from the least to the greatest value of a bucket.
#pragma once

#include "../../shared/bucket.h"
#include "../../shared/pack.h"
#include "scalar.h"

namespace QCCL_NAMESPACE {

// Options: bits, and whether the rounding is stochastic.
struct MinMax : CodecDefaults {
  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    return packed_nbytes(n, options.options[0]);
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions&, u64) {
    return sizeof(Range);
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const RngCounter& counter, const Values& x, u32 n,
                      u8* codes, u8* meta) {
    const i32 highest = team.greatest(n, [&](u32 i) { return order_key(bits_of(x[i])); });
    const i32 lowest = ~team.greatest(n, [&](u32 i) { return ~order_key(bits_of(x[i])); });
    const Range range = finite_range(lowest, highest);
    if (team.leads()) {
      store_float(meta, range.low);
      store_float(meta + 4, range.high);
    }
    const u32 bits = options.options[0];
    const MinMaxScale scale = minmax_scale(range, (1u << bits) - 1);
    if (minmax_is_nan(scale)) {
      pack(team, bits, n, [](u32) { return 0u; }, codes);
    } else if (options.options[1]) {
      const Draws draws = make_draws(options.seed, counter);
      pack(team, bits, n, [=, &x](u32 i) { return minmax_stochastic(x[i], scale, draws.word(i)); }, codes);
    } else {
      pack(team, bits, n, [=, &x](u32 i) { return minmax_nearest(x[i], scale); }, codes);
    }
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const RngCounter&, const u8* codes, const u8* meta,
                      u32 n, const Take& take) {
    const MinMaxScale scale = minmax_scale({load_float(meta), load_float(meta + 4)}, (1u << options.options[0]) - 1);
    const auto give = [&](u32 i, u32 code) { take(i, minmax_value(code, scale)); };
    with_bits(options.options[0], [&](auto bits) QCCL_INLINE { team.template unpack<bits.value>(codes, n, give); });
  }

  template <class Team, class Code>
  QCCL_FN void pack(const Team& team, u32 bits, u32 n, const Code& code, u8* to) {
    with_bits(bits, [&](auto bits) QCCL_INLINE { team.template pack<bits.value>(n, code, to); });
  }
};

}  // namespace QCCL_NAMESPACE
