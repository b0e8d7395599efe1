// No compression: the wire is the values themselves, in their own type.
#pragma once

#include "../../shared/bucket.h"

namespace QCCL_NAMESPACE {

struct NoCodec : CodecDefaults {
  static constexpr bool typed = true;

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions&, u64 n) {
    return n * sizeof(typename T::Storage);
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions&, u64) {
    return 0;
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions&, const RngCounter&, const Values& x, u32 n, u8* codes, u8*) {
    team.each(n, [&](u32 i) { store_element<T>(codes, i, x[i]); });
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions&, const RngCounter&, const u8* codes, const u8*, u32 n,
                      const Take& take) {
    team.each(n, [&](u32 i) { take(i, load_element<T>(codes, i)); });
  }
};

}  // namespace QCCL_NAMESPACE
