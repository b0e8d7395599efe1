// The min-max codec's tile: the threads of a group find the range together, then encode from registers.
#pragma once

#include "../../cuda/codes.h"
#include "../../random.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

template <int Bits>
constexpr u32 kLevels = (1u << Bits) - 1;

// Up to 5 bits, a warp's lanes hold a table of the values of all codes; otherwise values are computed.
template <int Bits, class S>
constexpr bool kLookUp = Bits <= 5 && S::lanes >= 32;

// Turns the codes of a unit into values.
struct Dequantizer {
  MinMaxScale scale;
  float of_lane;  // this lane's entry of the table, which repeats every 2^Bits lanes
};

template <int Bits, class S>
QCCL_FN Dequantizer make_dequantizer(const MinMaxScale& scale) {
  return {scale, kLookUp<Bits, S> ? minmax_value(lane_number() & kLevels<Bits>, scale) : 0.0f};
}

// 2^23 + code i of a piece as a float: the code's bits are the lowest of the mantissa.
template <int Bits>
QCCL_FN float shifted_code(u64 piece, u32 i) {
  if constexpr (Bits == 8) return float_of(__byte_perm((u32)(piece >> i / 4 * 32), 0x4b000000u, 0x7440u + i % 4));
  return float_of(((u32)(piece >> Bits * i) & kLevels<Bits>) | 0x4b000000u);
}

// The value of code i of a piece, equal to minmax_value. All lanes of a warp take part.
template <int Bits, class S>
QCCL_FN float value_of(const Dequantizer& dequantizer, u64 piece, u32 i) {
  if constexpr (kLookUp<Bits, S>) {
    // bits above the code select a copy of the same value
    return __shfl_sync(kAllLanes, dequantizer.of_lane, (int)((u32)(piece >> Bits * i) % 32));
  }
  const MinMaxScale& scale = dequantizer.scale;
  const float code = shifted_code<Bits>(piece, i);
  const bool lower = code < 0x1p23f + (1 << (Bits - 1));
  const float steps = code - (lower ? 0x1p23f : 0x1p23f + kLevels<Bits>);
  return ((lower ? scale.low : scale.high) + steps * scale.unit) * scale.post;
}

// A bucket has two words of scratch, which atomicMax raises from zero: its least key so far in reversed order, and its
// greatest key.
QCCL_FN u32 reversed_order(i32 key) { return ~((u32)key ^ 0x80000000u); }
QCCL_FN u32 unsigned_order(i32 key) { return (u32)key ^ 0x80000000u; }

// The least and the greatest key of the group's values. All threads of the group take part.
template <class T, class S>
QCCL_FN KeyPair find_ends(const Values<T, S>& x, const Unit& unit) {
  Extent extent = no_values();
#pragma unroll
  for (u32 j = 0; j < S::vectors; ++j) {
    if (j < unit.vectors) {
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) include(extent, x[j][i]);
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

// The offset of a bucket's range on the wire.
QCCL_FN u64 range_offset(u64 count, u32 bits, u64 bucket) { return meta_offset(packed_nbytes(count, bits)) + 8 * bucket; }

QCCL_FN Range load_range(const u8* at) {
  if (!is_aligned(at, 4)) return {float_of((u32)get_bytes<4>(at)), float_of((u32)get_bytes<4>(at + 4))};
  const u32* words = reinterpret_cast<const u32*>(at);
  return {float_of(words[0]), float_of(words[1])};
}

QCCL_FN void store_range(u8* at, Range range) {
  if (!is_aligned(at, 4)) return put_bytes<8>(at, bits_of(range.low) | (u64)bits_of(range.high) << 32);
  u32* words = reinterpret_cast<u32*>(at);
  words[0] = bits_of(range.low), words[1] = bits_of(range.high);
}

// Stores the zeros between the codes and the ranges, three bytes at most.
QCCL_FN void clear_padding(u8* wire, u64 count, u32 bits) {
  const u64 begin = packed_nbytes(count, bits);
  const u32 nbytes = (u32)(meta_offset(packed_nbytes(count, bits)) - begin);
  for (u32 i = 0; i < 3; ++i) {
    if (i < nbytes) wire[begin + i] = 0;
  }
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

template <int Bits, bool Stochastic>
struct MinMaxTile {
  // What a thread loads of a received wire.
  template <class T, class S>
  struct Wire {
    Pieces<Bits, T, S> pieces;
    Range range;
  };

  template <class T, class S>
  QCCL_FN void load_wire(const u8* wire, u64 count, const Unit& unit, Wire<T, S>& to) {
    load_codes<Bits, T, S>(wire, unit, to.pieces);
    to.range = load_range(wire + range_offset(count, Bits, unit.bucket));
  }

  template <class T>
  QCCL_FN void prefetch_wire(const u8* wire, const Unit& unit) {
    prefetch(wire + warp_offset<Bits>(unit), (u32)packed_nbytes(unit.warp_size, Bits), lane_number());
  }

  // take(j, i, value) for each of this thread's values. If values are computed, a branch separates the two halves of the
  // vectors: without it the compiler keeps more values in flight than there are registers.
  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Dequantizer& dequantizer, const Pieces<Bits, T, S>& pieces, const Unit& unit, Take take) {
    constexpr u32 together = kLookUp<Bits, S> || S::vectors == 1 ? S::vectors : S::vectors / 2;
#pragma unroll
    for (u32 begin = 0; begin < S::vectors; begin += together) {
      if (!kLookUp<Bits, S> && begin >= unit.vectors) break;
#pragma unroll
      for (u32 j = begin; j < begin + together; ++j) {
#pragma unroll
        for (u32 i = 0; i < kPerVector<T>; ++i) take(j, i, value_of<Bits, S>(dequantizer, pieces[j], i));
      }
    }
  }

  // Whether all of the bucket's values are NaN; otherwise none is.
  template <class T, class S>
  QCCL_FN bool is_nan_wire(const Wire<T, S>& wire) {
    return !is_finite(wire.range.low) || !is_finite(wire.range.high);
  }

  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Wire<T, S>& wire, const Unit& unit, Take take) {
    for_each_value<T, S>(make_dequantizer<Bits, S>(minmax_scale(wire.range, kLevels<Bits>)), wire.pieces, unit, take);
  }

  // Encodes x to `wire`; with `Back`, replaces x by the decoded values. Returns whether these have a NaN. All threads of
  // the group take part.
  template <bool Back, Pass P, class T, class S>
  QCCL_FN bool encode(Values<T, S>& x, u8* wire, const Unit& unit, const TileJob& job, const Parameters& parameters,
                      const Memory& memory) {
    u32* gathered = parameters.scratch + 2 * (job.scratch + unit.bucket);
    KeyPair keys;
    if constexpr (P == Pass::codes) {
      keys = {(i32)(~gathered[0] ^ 0x80000000u), (i32)(gathered[1] ^ 0x80000000u)};
    } else {
      keys = find_ends<T, S>(x, unit);
    }
    if constexpr (P == Pass::range) {
      if (threadIdx.x % S::lanes == 0) {
        atomicMax(gathered, reversed_order(keys.lowest));
        atomicMax(gathered + 1, unsigned_order(keys.highest));
      }
      return false;
    }
    const Range range = finite_range(keys.lowest, keys.highest);
    const MinMaxScale scale = minmax_scale(range, kLevels<Bits>);
    if (unit.leads) store_range(wire + range_offset(job.count, Bits, unit.bucket), range);
    if (unit.last) clear_padding(wire, job.count, Bits);
    Pieces<Bits, T, S> pieces;
    make_codes<T, S>(x, scale, unit, job, parameters, memory, pieces);
    store_codes<Bits, T, S>(wire, unit, pieces);
    if constexpr (Back) {
      const Dequantizer dequantizer = make_dequantizer<Bits, S>(scale);
      for_each_value<T, S>(dequantizer, pieces, unit, [&](u32 j, u32 i, float value) { x[j][i] = value; });
    }
    return minmax_is_nan(scale);
  }

  template <class T, class S>
  QCCL_FN void make_codes(const Values<T, S>& x, const MinMaxScale& scale, const Unit& unit, const TileJob& job,
                          const Parameters& parameters, const Memory& memory, Pieces<Bits, T, S>& pieces) {
    using Word = typename Piece<Bits, T>::Word;
    RandomWords random = {};
    if constexpr (Stochastic) random = random_words(parameters, memory, job, unit.first);
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      const u32 index = random.index + unit.offset + j * kPerRow<T>;
      const RandomKey key = index < random.index ? random.next_key : random.key;
      Word piece = 0;
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) {
        const u32 code = Stochastic ? minmax_stochastic(x[j][i], scale, random_word(key, index + i))
                                    : minmax_nearest(x[j][i], scale);
        piece |= (Word)code << Bits * i;
      }
      pieces[j] = minmax_is_nan(scale) ? 0 : piece;
    }
  }
};

}  // namespace QCCL_NAMESPACE
