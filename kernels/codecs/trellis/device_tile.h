// The trellis codec's tile, which only decodes. Each thread itself loads the codes that its values depend on: its own, and
// those 32 and 64 elements earlier in the bucket.
#pragma once

#include "../../cuda/coded.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

template <int Bits, u32 Bucket, u32 Block, int Outliers>
struct TrellisTile {
  static constexpr int decode_blocks = Bits > 6 ? 3 : 4;  // longer codes need more registers than four leave

  // The part of a wire that a thread loads.
  template <class T, class S>
  struct Wire {
    u32 first;               // the number of the thread's first value in the bucket
    TrellisFrame frame;
    const u8* outliers;      // the bucket's words
    u32 own;                 // bit k is set if outlier k is a value of this thread
    bool finite;             // centre, scale and outliers are finite, so no value is NaN
    u32 shares[S::vectors];  // shares of the vectors' blocks
    Pieces<Bits, T, S> codes, before, before_that;
  };

  template <class T, class S>
  QCCL_FN void load_wire(const u8* wire, u64 count, const Unit& unit, Wire<T, S>& to) {
    const BucketOptions options = {Bucket, 0, {Bits, Block, Outliers}};
    const u64 bucket_first = (u64)unit.bucket * Bucket;
    const u64 meta_begin = meta_offset(packed_nbytes(count, Bits));
    const u8* meta = wire + meta_begin + unit.bucket * Trellis::meta_nbytes<T>(options, Bucket);
    const u8* shares = meta + kTrellisOutlierOffset + 4 * Outliers;
    to.first = (u32)(unit.first - bucket_first) + unit.offset;
    load_frame<T, S>(meta, to);
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      // equal to (to.first + j * kPerRow<T>) / Block: a row is some whole blocks, or a block some whole rows
      to.shares[j] = j < unit.vectors ? shares[to.first / Block + j * kPerRow<T> / Block] : 0;
    }
    load_codes<T, S>(wire + code_offset(bucket_first, Bits), unit, to);
  }

  template <class Wire>
  QCCL_FN u32 outlier(const Wire& wire, int k) {
    return bits_of(load_meta<1>(wire.outliers + 4 * k).at[0]);
  }

  // Loads centre and scale, and finds this thread's outliers. Their words are not kept, because registers are scarce.
  template <class T, class S>
  QCCL_FN void load_frame(const u8* meta, Wire<T, S>& to) {
    const Meta<2> pair = load_meta<2>(meta);
    to.frame = trellis_frame(pair.at[0], pair.at[1]);
    to.outliers = meta + kTrellisOutlierOffset;
    to.own = 0;
    to.finite = is_finite(pair.at[0]) && is_finite(pair.at[1]);
#pragma unroll 4
    for (int k = 0; k < Outliers; ++k) {
      const u32 word = outlier(to, k), at = trellis_outlier_element(word) - to.first;
      const float distance = trellis_outlier_distance(word);
      const bool inside = at % kPerRow<T> < kPerVector<T> && at / kPerRow<T> < S::vectors;
      to.own |= (u32)(inside && distance != 0.0f) << k;
      to.finite &= is_finite(distance);
    }
  }

  // Loads pieces from the codes of the bucket, by bytes if they are not direct and aligned.
  template <class T, class S>
  QCCL_FN void load_codes(const u8* codes, const Unit& unit, Wire<T, S>& to) {
    using P = Piece<Bits, T>;
    const u32 bit = to.first * Bits;
    const u8* own = codes + bit / 8;
    if constexpr (P::direct) {
      using Direct = UnsignedOf<P::bits / 8>;
      const auto load = [](const u8* at) { return *reinterpret_cast<const Direct*>(at); };
      if (is_aligned(codes, P::bits / 8)) {
        // a constant number of vectors needs no predicates, which are scarce
        if (has_all_values<T, S>(unit)) return load_pieces<T, S>(own, S::vectors, to, load);
        return load_pieces<T, S>(own, unit.vectors, to, load);
      }
    }
    load_pieces<T, S>(own, unit.vectors, to, [=](const u8* at) { return get_bytes<(P::bits + 7) / 8>(at) >> bit % 8; });
  }

  // Loads this thread's pieces, the first one at `own`, and the earlier ones, zeros where the bucket has none.
  template <class T, class S, class Load>
  QCCL_FN void load_pieces(const u8* own, u32 vectors, Wire<T, S>& to, Load load) {
    static_assert(kPerRow<T> >= 2 * kTrellisSequences, "only a thread's first vector can lack earlier codes");
    using Word = typename Piece<Bits, T>::Word;
    constexpr u32 step = kTrellisSequences / 8 * Bits;  // bytes
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      const u8* at = own + j * (kPerRow<T> / 8 * Bits);
      const bool one = j > 0 || to.first >= kTrellisSequences, two = j > 0 || to.first >= 2 * kTrellisSequences;
      to.codes[j] = j < vectors ? (Word)load(at) : 0;
      to.before[j] = j < vectors && one ? (Word)load(at - step) : 0;
      to.before_that[j] = j < vectors && two ? (Word)load(at - 2 * step) : 0;
    }
  }

  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Wire<T, S>& wire, const Unit&, Take take) {
    constexpr TrellisLevels levels = trellis_levels(Bits);
    constexpr u32 mask = (1u << Bits) - 1;
    Values<T, S> y;
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      const float unit = trellis_unit(wire.shares[j], wire.frame, levels);
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) {
        const auto code = [&](const Pieces<Bits, T, S>& pieces) { return (u32)(pieces[j] >> Bits * i) & mask; };
        const i32 level = trellis_level_of(code(wire.codes), code(wire.before), code(wire.before_that));
        y[j][i] = trellis_value(level, unit, wire.frame, levels);
      }
    }
    replace_outliers<T, S>(wire, y);
    for_each_element<T, S>([&](u32 j, u32 i) { take(j, i, y[j][i]); });
  }

  // Replaces this thread's values that are outliers, the last outlier first: of two for the same element, the first is
  // valid. A thread seldom has more than one, so all lanes replace theirs in one round.
  template <class T, class S>
  QCCL_FN void replace_outliers(const Wire<T, S>& wire, Values<T, S>& y) {
    u32 own = wire.own;
#pragma unroll 1
    while (own) {
      const int k = 31 - __clz((int)own);
      const u32 word = outlier(wire, k), at = trellis_outlier_element(word) - wire.first;
      const float value = trellis_outlier_distance(word) + wire.frame.centre;
      for_each_element<T, S>([&](u32 j, u32 i) { y[j][i] = at == j * kPerRow<T> + i ? value : y[j][i]; });
      own ^= 1u << k;
    }
  }

  template <class T, class S>
  QCCL_FN bool has_nan(const Wire<T, S>& wire, const Values<T, S>&) {
    return !wire.finite;
  }
};

}  // namespace QCCL_NAMESPACE
