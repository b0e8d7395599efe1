// The top-k codec: the values of greatest magnitude of a block, with their indices.
//
// Of equal magnitudes the lower index is kept. The codes section has the values in the order of their indices, in
// the call's element type. The meta section has the indices, of one, two or four bytes. A decoder ignores an index that is
// outside the block or not greater than all indices before it.
#pragma once

#include "../sparse.h"

namespace QCCL_NAMESPACE {

struct TopK : SparseCodec {
  QCCL_FN u32 index_nbytes(const BucketOptions& options) {
    return options.bucket <= 256 ? 1 : options.bucket <= 65536 ? 2 : 4;
  }

  template <class T>
  QCCL_FN u64 codes_nbytes(const BucketOptions& options, u64 n) {
    return kept(options, n) * sizeof(typename T::Storage);
  }
  template <class T>
  QCCL_FN u64 meta_nbytes(const BucketOptions& options, u64 n) {
    return kept(options, n) * index_nbytes(options);
  }

  QCCL_FN void store_index(u8* at, u32 nbytes, u32 j, u32 index) {
    if (nbytes == 1) return store_number<1>(at + j, index);
    if (nbytes == 2) return store_number<2>(at + 2 * j, index);
    store_number<4>(at + 4 * j, index);
  }
  QCCL_FN u32 load_index(const u8* at, u32 nbytes, u32 j) {
    if (nbytes == 1) return load_number<1>(at + j);
    if (nbytes == 2) return load_number<2>(at + 2 * j);
    return load_number<4>(at + 4 * j);
  }

  template <class T, class Team, class Values>
  QCCL_FN void encode(const Team& team, const BucketOptions& options, const RngCounter&, const Values& x, u32 n, u8* codes,
                      u8* meta) {
    const u32 keep = (u32)kept(options, n), nbytes = index_nbytes(options);
    if (encode_if_not_finite<T>(team, x, n, keep, codes)) {
      return team.each(keep, [&](i32 j) { store_index(meta, nbytes, j, 0); });
    }
    team.select(n, keep, [&](i32 i) { return magnitude(x[i]); }, [&](u32 j, u32 i) {
      store_element<T>(codes, j, x[i]);
      store_index(meta, nbytes, j, i);
    });
  }

  template <class T, class Team, class Take>
  QCCL_FN void decode(const Team& team, const BucketOptions& options, const RngCounter&, const u8* codes, const u8* meta, u32 n,
                      const Take& take) {
    if (decode_if_not_finite<T>(team, codes, n, take)) return;
    const u32 keep = (u32)kept(options, n), nbytes = index_nbytes(options);
    team.ascending(keep, [&](i32 j) { return load_index(meta, nbytes, j); }, [&](u32 j, u32 i) {
      if (i < n) take(i, load_element<T>(codes, j));
    });
  }
};

}  // namespace QCCL_NAMESPACE
