// Loads and stores codes of `Bits` bits between a thread's registers and the wire. A *piece* is the packed codes of one
// vector of values.
//
// A piece of 1, 2, 4 or 8 bytes is loaded and stored directly. If each lane has one word of codes of one bit, the lanes of
// a warp transpose them by shuffles, and each loads or stores a word. Others go through shared memory, so that accesses to
// global memory are wide.
#pragma once

#include "../shared/pack.h"
#include "tile.h"

namespace QCCL_NAMESPACE {

template <int Bits, class T>
struct Piece {
  static constexpr u32 bits = Bits * kPerVector<T>;
  static constexpr bool shares_byte = bits % 8 != 0;  // with the piece of the neighbouring lane
  static constexpr bool direct = bits == 8 || bits == 16 || bits == 32 || bits == 64;
  using Word = UnsignedOf<(bits > 32 ? 8 : 4)>;
};

template <int Bits, class T, class S>
using Pieces = typename Piece<Bits, T>::Word[S::vectors];

template <u32 Nbytes>
QCCL_FN u64 get_bytes(const u8* from) {
  u64 word = 0;
#pragma unroll
  for (u32 i = 0; i < Nbytes; ++i) word |= (u64)from[i] << 8 * i;
  return word;
}

template <u32 Nbytes>
QCCL_FN void put_bytes(u8* to, u64 word) {
#pragma unroll
  for (u32 i = 0; i < Nbytes; ++i) to[i] = (u8)(word >> 8 * i);
}

// Copies a thread's pieces to its warp's shared memory, and back. If two lanes' pieces share a byte, the even lane stores
// both.
template <int Bits, class T, class S>
QCCL_FN void stage_pieces(const Unit& unit, const Pieces<Bits, T, S>& pieces) {
  using P = Piece<Bits, T>;
  const u32 number = vector_number<T, S>(unit);
  u8* first = staging() + (P::shares_byte ? number / 2 * Bits : number * P::bits / 8);
#pragma unroll
  for (u32 j = 0; j < S::vectors; ++j) {
    u8* to = first + j * 4 * P::bits;
    if constexpr (P::shares_byte) {
      const u64 pair = pieces[j] | (u64)__shfl_xor_sync(kAllLanes, (u32)pieces[j], 1) << P::bits;
      if (j < unit.stored && number % 2 == 0) put_bytes<Bits>(to, pair);
    } else {
      if (j < unit.stored) put_bytes<P::bits / 8>(to, pieces[j]);
    }
  }
}

template <int Bits, class T, class S>
QCCL_FN void unstage_pieces(const Unit& unit, Pieces<Bits, T, S>& pieces) {
  using P = Piece<Bits, T>;
  const u32 bit = vector_number<T, S>(unit) * P::bits;
  const u32* first = reinterpret_cast<const u32*>(staging()) + bit / 32;
#pragma unroll
  for (u32 j = 0; j < S::vectors; ++j) {
    const u32* words = first + j * P::bits;
    pieces[j] = __funnelshift_r(words[0], words[1], bit % 32);
    if constexpr (P::bits > 32) pieces[j] |= (u64)__funnelshift_r(words[1], words[2], bit % 32) << 32;
  }
}

// Copies at most `Most` bytes by all lanes of a warp, in steps of 16 bytes if both addresses are aligned.
template <u32 Most>
QCCL_FN void copy_bytes(u8* to, const u8* from, u32 nbytes) {
  const u32 wide = is_aligned(to, 16) && is_aligned(from, 16) ? nbytes / 16 * 16 : 0;
#pragma unroll
  for (u32 begin = 0; begin < Most; begin += 32 * 16) {
    const u32 i = begin + lane_number() * 16;
    if (i < wide) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
  }
#pragma unroll 1
  for (u32 i = wide + lane_number(); i < nbytes; i += 32) to[i] = from[i];
}

// The offset of this warp's codes on the wire of the call.
template <int Bits>
QCCL_FN u64 warp_offset(const Unit& unit) {
  return code_offset(unit.warp_first, Bits);
}

// The offset of this thread's first piece, if it is direct. Its next pieces follow at intervals of 32 pieces.
template <int Bits, class T, class S>
QCCL_FN u64 piece_offset(const Unit& unit) {
  return code_offset(unit.first, Bits) + unit.offset / kPerVector<T> * (Piece<Bits, T>::bits / 8);
}

// Whether the lanes transpose their codes, one word each.
template <int Bits, class T, class S>
constexpr bool kTransposed = Bits == 1 && S::lanes >= 32 && S::vectors * kPerVector<T> == 32;

// Transposes blocks of bits among groups of S::vectors lanes: from the codes of one lane, row by row, to the codes of one
// row, lane by lane, and back. All lanes of the warp take part.
template <class S>
QCCL_FN u32 transpose(u32 word) {
  constexpr u32 block = 32 / S::vectors;
#pragma unroll
  for (u32 distance = 1; distance < S::vectors; distance *= 2) {
    const u32 shift = distance * block, lower = (u32)(0xffffffffull / ((1ull << shift) + 1));  // the lower of each two
    const bool upper = lane_number() & distance;
    const u32 other = __shfl_xor_sync(kAllLanes, word, (int)distance), kept = upper ? ~lower : lower;
    word = (word & kept) | ((upper ? other >> shift : other << shift) & ~kept);
  }
  return word;
}

// The offset of this lane's transposed word.
template <int Bits, class S>
QCCL_FN u64 transposed_offset(const Unit& unit) {
  return warp_offset<Bits>(unit) + 4 * (lane_number() % S::vectors * (32 / S::vectors) + lane_number() / S::vectors);
}

// Stores codes to the wire of the call. All lanes of the warp take part.
template <int Bits, class T, class S>
QCCL_FN void store_codes(u8* wire, const Unit& unit, const Pieces<Bits, T, S>& pieces) {
  using P = Piece<Bits, T>;
  if constexpr (P::direct && !kTransposed<Bits, T, S>) {
    if (is_whole<T>(unit) && is_aligned(wire, P::bits / 8)) {
      using Direct = UnsignedOf<P::bits / 8>;
      Direct* to = reinterpret_cast<Direct*>(wire + piece_offset<Bits, T, S>(unit));
#pragma unroll
      for (u32 j = 0; j < S::vectors; ++j) {
        if (j < unit.stored) to[j * 32] = (Direct)pieces[j];
      }
      return;
    }
  } else if constexpr (kTransposed<Bits, T, S>) {
    u8* at = wire + transposed_offset<Bits, S>(unit);
    if (has_all_values<T, S>(unit) && is_aligned(at, 4)) {
      u32 word = 0;
#pragma unroll
      for (u32 j = 0; j < S::vectors; ++j) word |= (u32)pieces[j] << j * P::bits;
      word = transpose<S>(word);
      *reinterpret_cast<u32*>(at) = word;
      return;
    }
  }
  stage_pieces<Bits, T, S>(unit, pieces);
  __syncwarp();
  const u32 bits = unit.warp_size * Bits, nbytes = (bits + 7) / 8;
  if (bits % 8 != 0 && lane_number() == 0) staging()[nbytes - 1] &= (1u << bits % 8) - 1;  // zeros behind the last code
  __syncwarp();
  copy_bytes<4 * S::vectors * P::bits>(wire + warp_offset<Bits>(unit), staging(), nbytes);
  __syncwarp();
}

// Loads codes from the wire of the call; those outside the unit are undefined. All lanes of the warp take part. A direct
// piece that is partly outside the unit is loaded whole if a meta section follows, which begins at a multiple of 4 bytes
// and has 4 or more. Codes of 16 bits have none: the wire may end behind the last code.
template <int Bits, class T, class S>
QCCL_FN void load_codes(const u8* wire, const Unit& unit, Pieces<Bits, T, S>& pieces) {
  using P = Piece<Bits, T>;
  if constexpr (P::direct && !kTransposed<Bits, T, S>) {
    if (is_aligned(wire, P::bits / 8) && (Bits < 16 || is_whole<T>(unit))) {
      using Direct = UnsignedOf<P::bits / 8>;
      const Direct* from = reinterpret_cast<const Direct*>(wire + piece_offset<Bits, T, S>(unit));
#pragma unroll
      for (u32 j = 0; j < S::vectors; ++j) pieces[j] = j < unit.vectors ? from[j * 32] : 0;
      return;
    }
  } else if constexpr (kTransposed<Bits, T, S>) {
    const u8* at = wire + transposed_offset<Bits, S>(unit);
    if (has_all_values<T, S>(unit) && is_aligned(at, 4)) {
      const u32 word = transpose<S>(*reinterpret_cast<const u32*>(at));
#pragma unroll
      for (u32 j = 0; j < S::vectors; ++j) pieces[j] = word >> j * P::bits & ((1u << P::bits) - 1);
      return;
    }
  }
  const u32 nbytes = (u32)packed_nbytes(unit.warp_size, Bits);
  copy_bytes<4 * S::vectors * P::bits>(staging(), wire + warp_offset<Bits>(unit), nbytes);
  __syncwarp();
  unstage_pieces<Bits, T, S>(unit, pieces);
  __syncwarp();
}

}  // namespace QCCL_NAMESPACE
