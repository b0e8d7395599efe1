// What the sparse codecs share: the number of elements that they keep, and blocks that are not finite.
#pragma once

#include "../bucket.h"

namespace QCCL_NAMESPACE {

struct SparseCodec {
  static constexpr bool sparse = true, typed = true;
};

// Elements that are kept of n. The options: how many of a whole block, and whether a shorter block keeps the same fraction
// (1) or as many (0).
QCCL_FN u64 kept(const BucketOptions& options, u64 n) {
  const u64 most = options.options[0];
  if (options.options[1]) return (most * n + options.bucket - 1) / options.bucket;
  return most < n ? most : n;
}

// All values on the wire are NaN if the block has a NaN or an infinity; the decoder tests the first. Both return whether
// they did the work.
template <class T, class Team, class Values>
QCCL_FN bool encode_if_not_finite(const Team& team, const Values& x, u32 n, u32 keep, u8* codes) {
  if (team.greatest(n, [&](i32 i) { return magnitude(x[i]); }) < kInfinite) return false;
  team.each(keep, [&](i32 j) { store_element<T>(codes, j, float_of(kQuietNan)); });
  return true;
}
template <class T, class Team, class Take>
QCCL_FN bool decode_if_not_finite(const Team& team, const u8* codes, u32 n, const Take& take) {
  if (!is_nan(load_element<T>(codes, 0))) return false;
  team.each(n, [&](i32 i) { take(i, float_of(kQuietNan)); });
  return true;
}

}  // namespace QCCL_NAMESPACE
