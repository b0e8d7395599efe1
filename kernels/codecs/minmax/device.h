// The min-max codec on the device: ranges by all threads of a group, then codes from registers.
#pragma once

#include "../../cuda/codes.h"
#include "../../random.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

template <int Bits>
constexpr u32 kLevels = (1u << Bits) - 1;

// Codes become values by looking them up in the lanes of the warp where these are enough, else by arithmetic.
template <int Bits, class S>
constexpr bool kLookUp = Bits <= 5 && S::lanes >= 32;

// The line that a unit's codes are on.
struct Line {
  MinMaxScale scale;
  float of_lane;  // the value of the code that is this lane's number, repeated
};

template <int Bits, class S>
QCCL_FN Line make_line(const MinMaxScale& scale) {
  return {scale, kLookUp<Bits, S> ? minmax_value(lane_number() & kLevels<Bits>, scale) : 0.0f};
}

// 2^23 + code i of a piece, as a float, whose last places the code's bits are.
template <int Bits>
QCCL_FN float shifted_code(u64 piece, u32 i) {
  if constexpr (Bits == 8) return float_of(__byte_perm((u32)(piece >> i / 4 * 32), 0x4b000000u, 0x7440u + i % 4));
  return float_of(((u32)(piece >> Bits * i) & kLevels<Bits>) | 0x4b000000u);
}

// The value of code i of a piece: minmax_value, but for how it gets there. All lanes of a warp take part.
template <int Bits, class S>
QCCL_FN float value_of(const Line& line, u64 piece, u32 i) {
  if constexpr (kLookUp<Bits, S>) {
    return __shfl_sync(kAllLanes, line.of_lane, (int)((u32)(piece >> Bits * i) % 32));  // any copy of the value will do
  }
  const MinMaxScale& scale = line.scale;
  const float code = shifted_code<Bits>(piece, i);
  const bool lower = code < 0x1p23f + (1 << (Bits - 1));
  const float steps = code - (lower ? 0x1p23f : 0x1p23f + kLevels<Bits>);
  return ((lower ? scale.low : scale.high) + steps * scale.unit) * scale.post;
}

// The two words of the scratch for a bucket: its least key so far, turned over, and its greatest, so that both grow
// from zero.
QCCL_FN u32 turn_over(i32 key) { return ~((u32)key ^ 0x80000000u); }
QCCL_FN u32 turn_up(i32 key) { return (u32)key ^ 0x80000000u; }

// The keys of the ends of the values that the group has. All threads of the group take part.
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

// Where the range of a bucket lies on the wire.
QCCL_FN u64 range_place(u64 count, u32 bits, u64 bucket) { return meta_offset(packed_nbytes(count, bits)) + 8 * bucket; }

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

// The zeros between the codes and the ranges, three bytes at most.
QCCL_FN void clear_padding(u8* wire, u64 count, u32 bits) {
  const u64 begin = packed_nbytes(count, bits);
  const u32 nbytes = (u32)(meta_offset(packed_nbytes(count, bits)) - begin);
  for (u32 i = 0; i < 3; ++i) {
    if (i < nbytes) wire[begin + i] = 0;
  }
}

// Random words for the elements of a unit. Within it the upper half of the index changes at most once, and that between
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
  // The codes of a unit from another rank.
  template <class T, class S>
  struct Wire {
    Pieces<Bits, T, S> pieces;
    Range range;
  };

  template <class T, class S>
  QCCL_FN void load_wire(const u8* wire, u64 count, const Unit& unit, Wire<T, S>& to) {
    load_codes<Bits, T, S>(wire, unit, to.pieces);
    to.range = load_range(wire + range_place(count, Bits, unit.bucket));
  }

  template <class T>
  QCCL_FN void prefetch_wire(const u8* wire, const Unit& unit) {
    prefetch(wire + warp_place<Bits>(unit), (u32)packed_nbytes(unit.warp_size, Bits), lane_number());
  }

  // take(j, i, value) for each of this thread's values. Where values are computed, it is in two steps with a branch
  // between them, or the compiler has more of them under way than there are registers.
  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Line& line, const Pieces<Bits, T, S>& pieces, const Unit& unit, Take take) {
    constexpr u32 together = kLookUp<Bits, S> || S::vectors == 1 ? S::vectors : S::vectors / 2;
#pragma unroll
    for (u32 begin = 0; begin < S::vectors; begin += together) {
      if (!kLookUp<Bits, S> && begin >= unit.vectors) break;
#pragma unroll
      for (u32 j = begin; j < begin + together; ++j) {
#pragma unroll
        for (u32 i = 0; i < kPerVector<T>; ++i) take(j, i, value_of<Bits, S>(line, pieces[j], i));
      }
    }
  }

  // Whether all values of the wire are NaN; none is otherwise.
  template <class T, class S>
  QCCL_FN bool is_nan_wire(const Wire<T, S>& wire) {
    return !is_finite(wire.range.low) || !is_finite(wire.range.high);
  }

  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Wire<T, S>& wire, const Unit& unit, Take take) {
    for_each_value<T, S>(make_line<Bits, S>(minmax_scale(wire.range, kLevels<Bits>)), wire.pieces, unit, take);
  }

  // x encoded to `wire`, and replaced by what a decoder of it gets if `Back`; whether there is a NaN among that. All
  // threads of the group take part.
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
        atomicMax(gathered, turn_over(keys.lowest));
        atomicMax(gathered + 1, turn_up(keys.highest));
      }
      return false;
    }
    const Range range = finite_range(keys.lowest, keys.highest);
    const MinMaxScale scale = minmax_scale(range, kLevels<Bits>);
    if (unit.leads) store_range(wire + range_place(job.count, Bits, unit.bucket), range);
    if (unit.last) clear_padding(wire, job.count, Bits);
    Pieces<Bits, T, S> pieces;
    make_codes<T, S>(x, scale, unit, job, parameters, memory, pieces);
    store_codes<Bits, T, S>(wire, unit, pieces);
    if constexpr (Back) {
      const Line line = make_line<Bits, S>(scale);
      for_each_value<T, S>(line, pieces, unit, [&](u32 j, u32 i, float value) { x[j][i] = value; });
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
