// What the sparse codecs share: how many elements of a block they keep, and the kept values on the wire.
#pragma once

#include "../bucket.h"

namespace QCCL_NAMESPACE {

struct SparseCodec {
  static constexpr bool sparse = true, typed = true;
};

// The first two options: elements of a whole block, and whether a shorter one has its share of them (1) or as many (0).
QCCL_FN u64 kept(const BucketOptions& options, u64 n) {
  const u64 most = options.options[0];
  if (options.options[1]) return (most * n + options.bucket - 1) / options.bucket;
  return most < n ? most : n;
}

// Of a block with a NaN or an infinity all values on the wire are NaN; the first tells the decoder.
template <class T, class Team, class Values>
QCCL_FN bool encode_spoiled(const Team& team, const Values& x, u32 n, u32 keep, u8* codes) {
  if (team.greatest(n, [&](i32 i) { return magnitude(x[i]); }) < kInfinite) return false;
  team.each(keep, [&](i32 j) { store_element<T>(codes, j, float_of(kQuietNan)); });
  return true;
}
template <class T, class Team, class Take>
QCCL_FN bool decode_spoiled(const Team& team, const u8* codes, u32 n, const Take& take) {
  if (!is_nan(load_element<T>(codes, 0))) return false;
  team.each(n, [&](i32 i) { take(i, float_of(kQuietNan)); });
  return true;
}

}  // namespace QCCL_NAMESPACE
