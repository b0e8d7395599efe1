// The tile of codecs whose codes all have the same number of bits and depend on a statistic of their bucket, the floats of
// its meta section: the threads of a group find the statistic together, then encode from registers.
//
// A *coder* is a struct of static functions and constants:
//   bits, floats                         // of a code; of a bucket's meta section
//   draws                                // codes take random words
//   reduce_blocks                        // of a Reduce on a multiprocessor: more hide loads better, but have fewer registers
//   Encoder, Decoder                     // factors derived from the meta section
//   magnitudes                           // the statistic needs the greatest magnitude only, not both ends
//   find<T, S>(x, unit, keys) -> Meta    // the statistic; `keys` are the bucket's ends
//   is_nan(meta)                         // all values of an encoded bucket decode to NaN; otherwise none does
//   encoder(meta), decoder<S>(meta)
//   is_common(encoder), insert<Common>(piece, i, x, encoder, random)         // sets code i of a piece; the last comes first
//   is_common<T, S>(decoder, pieces), value<Common, S>(decoder, piece, i)    // the value of code i
//                                        // Common: in a cheaper way, if is_common()
//   shuffles<S>                          // value() shuffles, so all lanes of a warp take part
//   has_nan<T, S>(meta, x)               // whether any of the decoded values is NaN; the bytes may be any
#pragma once

#include "../shared/random.h"
#include "codes.h"

namespace QCCL_NAMESPACE {

// The floats of a bucket's meta section.
template <u32 N>
struct Meta {
  float at[N];
};

template <u32 N>
QCCL_FN Meta<N> load_meta(const u8* from) {
  Meta<N> meta;
#pragma unroll
  for (u32 i = 0; i < N; ++i) {
    meta.at[i] = is_aligned(from, 4) ? reinterpret_cast<const float*>(from)[i] : float_of((u32)get_bytes<4>(from + 4 * i));
  }
  return meta;
}

template <u32 N>
QCCL_FN void store_meta(u8* to, const Meta<N>& meta) {
#pragma unroll
  for (u32 i = 0; i < N; ++i) {
    if (is_aligned(to, 4)) {
      reinterpret_cast<float*>(to)[i] = meta.at[i];
    } else {
      put_bytes<4>(to + 4 * i, bits_of(meta.at[i]));
    }
  }
}

// Stores the zeros between the codes and the meta section, three bytes at most.
QCCL_FN void clear_padding(u8* wire, u64 count, u32 bits) {
  const u64 begin = packed_nbytes(count, bits);
  const u32 nbytes = (u32)(meta_offset(begin) - begin);
  for (u32 i = 0; i < 3; ++i) {
    if (i < nbytes) wire[begin + i] = 0;
  }
}

// A bucket has two words of scratch, which atomicMax raises from zero: its least key so far in reversed order, and its
// greatest key.
QCCL_FN u32 reversed_order(i32 key) { return ~((u32)key ^ 0x80000000u); }
QCCL_FN u32 unsigned_order(i32 key) { return (u32)key ^ 0x80000000u; }

// The least and the greatest key of the group's values, or 0 and the greatest of their magnitudes. All threads of the group
// take part.
template <bool Magnitudes, class T, class S>
QCCL_FN KeyPair find_ends(const Values<T, S>& x, const Unit& unit) {
  Extent extent = no_values();
  if (Magnitudes) extent.low = 0;
#pragma unroll
  for (u32 j = 0; j < S::vectors; ++j) {
    if (j < unit.vectors) {
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) Magnitudes ? include_magnitude(extent, x[j][i]) : include(extent, x[j][i]);
    }
  }
  KeyPair keys = gather_lanes<(S::lanes < 32 ? S::lanes : 32)>(keys_of(extent));
  if constexpr (S::lanes == kThreads) {
    __shared__ KeyPair of_warps[kWarps];
    if (lane_number() == 0) of_warps[threadIdx.x / 32] = keys;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kWarps; ++i) widen(keys, of_warps[i]);
  }
  return keys;
}

// The greatest magnitude() of values between two keys.
QCCL_FN i32 greatest_magnitude(const KeyPair& keys) {
  const i32 low = order_key((u32)keys.lowest) & 0x7fffffff, high = order_key((u32)keys.highest) & 0x7fffffff;
  return low > high ? low : high;
}

// Random words for the elements of a unit. The upper half of the index changes at most once within a unit, and between
// two vectors.
struct RandomWords {
  RandomKey key, next_key;
  u32 index;
};

QCCL_FN RandomWords random_words(const Parameters& parameters, const Memory& memory, const TileJob& job, u64 first) {
  const u64 index = job.index + first, call = *memory.call;
  const u32 high = (u32)(index >> 32);
  const RandomKey key = random_key(parameters.seed, call, job.round, job.rank, high);
  if ((u32)((index + kLargestUnit) >> 32) == high) return {key, key, (u32)index};
  return {key, random_key(parameters.seed, call, job.round, job.rank, high + 1), (u32)index};
}

template <class Coder>
struct CodedTile {
  static constexpr int bits = Coder::bits;
  using BucketMeta = Meta<Coder::floats>;

  static constexpr int encode_blocks = 4, decode_blocks = 4, reduce_blocks = Coder::reduce_blocks;
  static constexpr int state_blocks = Coder::draws ? 1 : 2;  // random words and state need more registers than two leave

  // The part of a received wire that a thread loads.
  template <class T, class S>
  struct Wire {
    Pieces<bits, T, S> pieces;
    BucketMeta meta;
  };

  QCCL_FN u64 offset_of_meta(u64 count, u64 bucket) {
    return meta_offset(packed_nbytes(count, bits)) + sizeof(BucketMeta) * bucket;
  }

  template <class T, class S>
  QCCL_FN void load_wire(const u8* wire, u64 count, const Unit& unit, Wire<T, S>& to) {
    to.meta = load_meta<Coder::floats>(wire + offset_of_meta(count, unit.bucket));
    load_codes<bits, T, S>(wire, unit, to.pieces);
  }

  template <class T>
  QCCL_FN void prefetch_wire(const u8* wire, const Unit& unit) {
    prefetch(wire + warp_offset<bits>(unit), (u32)packed_nbytes(unit.warp_size, bits), lane_number());
  }

  // take(j, i, value) for each of this thread's values. A branch separates the two halves of the vectors: without it the
  // compiler keeps more values in flight than there are registers. Shuffles allow no branch.
  template <bool Common, class T, class S, class Take>
  QCCL_FN void for_each_value(const typename Coder::Decoder& decoder, const Pieces<bits, T, S>& pieces, const Unit& unit,
                              Take take) {
    constexpr bool shuffles = Coder::template shuffles<S>;
    constexpr u32 together = shuffles || S::vectors == 1 ? S::vectors : S::vectors / 2;
#pragma unroll
    for (u32 begin = 0; begin < S::vectors; begin += together) {
      if (!shuffles && begin >= unit.vectors) break;
#pragma unroll
      for (u32 j = begin; j < begin + together; ++j) {
#pragma unroll
        for (u32 i = 0; i < kPerVector<T>; ++i) take(j, i, Coder::template value<Common, S>(decoder, pieces[j], i));
      }
    }
  }

  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Wire<T, S>& wire, const Unit& unit, Take take) {
    const typename Coder::Decoder decoder = Coder::template decoder<S>(wire.meta);
    if (Coder::template is_common<T, S>(decoder, wire.pieces)) {
      for_each_value<true, T, S>(decoder, wire.pieces, unit, take);
    } else {
      for_each_value<false, T, S>(decoder, wire.pieces, unit, take);
    }
  }

  // Whether any of the values x of a wire is NaN.
  template <class T, class S>
  QCCL_FN bool has_nan(const Wire<T, S>& wire, const Values<T, S>& x) {
    return Coder::template has_nan<T, S>(wire.meta, x);
  }

  // Encodes x to `wire`, unless the pass finds ranges only; `made` is what a decoder would load. Returns whether the decoded
  // values have a NaN. All threads of the group take part.
  template <Pass P, class T, class S>
  QCCL_FN bool encode(const Values<T, S>& x, u8* wire, const Unit& unit, const TileJob& job, const Parameters& parameters,
                      const Memory& memory, Wire<T, S>& made) {
    u32* gathered = parameters.scratch + 2 * (job.scratch + unit.bucket);
    KeyPair keys;
    if constexpr (P == Pass::codes) {
      keys = {(i32)(~gathered[0] ^ 0x80000000u), (i32)(gathered[1] ^ 0x80000000u)};
    } else {
      keys = find_ends<Coder::magnitudes, T, S>(x, unit);
    }
    if constexpr (P == Pass::range) {
      if (threadIdx.x % S::lanes == 0) {
        atomicMax(gathered, reversed_order(keys.lowest));
        atomicMax(gathered + 1, unsigned_order(keys.highest));
      }
      return false;
    }
    made.meta = Coder::template find<T, S>(x, unit, keys);
    if (unit.leads) store_meta(wire + offset_of_meta(job.count, unit.bucket), made.meta);
    if (unit.last) clear_padding(wire, job.count, bits);
    const typename Coder::Encoder encoder = Coder::encoder(made.meta);
    if (Coder::is_common(encoder)) {
      make_codes<true, T, S>(x, encoder, unit, job, parameters, memory, made.pieces);
    } else {
      make_codes<false, T, S>(x, encoder, unit, job, parameters, memory, made.pieces);
    }
    const bool nan = Coder::is_nan(made.meta);
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) made.pieces[j] = nan ? 0 : made.pieces[j];
    store_codes<bits, T, S>(wire, unit, made.pieces);
    return nan;
  }

  template <bool Common, class T, class S>
  QCCL_FN void make_codes(const Values<T, S>& x, const typename Coder::Encoder& encoder, const Unit& unit, const TileJob& job,
                          const Parameters& parameters, const Memory& memory, Pieces<bits, T, S>& pieces) {
    RandomWords random = {};
    if constexpr (Coder::draws) random = random_words(parameters, memory, job, unit.first);
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      const u32 index = random.index + unit.offset + j * kPerRow<T>;
      const RandomKey key = index < random.index ? random.next_key : random.key;
      u64 piece = 0;
#pragma unroll
      for (u32 i = kPerVector<T>; i-- > 0;) {
        const u32 word = Coder::draws ? random_word(key, index + i) : 0;
        Coder::template insert<Common>(piece, i, x[j][i], encoder, word);
      }
      pieces[j] = (typename Piece<bits, T>::Word)piece;
    }
  }
};

}  // namespace QCCL_NAMESPACE
