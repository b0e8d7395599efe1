// Eight codes of b bits as b bytes: code i is bits [i*b, (i+1)*b) of a little-endian integer. `Word` is that integer, or
// a vector of such.
#pragma once

#include "numeric.h"

namespace QCCL_NAMESPACE {

// `pattern` repeated in every lane of `width` bits.
QCCL_FN constexpr u64 repeat(u64 pattern, int width) {
  u64 all = 0;
  for (int shift = 0; shift < 64; shift += width) all |= pattern << shift;
  return all;
}

// From eight codes, one per byte, to 8*b packed bits: three steps join pairs, fours and eights within a 64-bit word.
template <int Bits, class Word = u64>
QCCL_FN Word pack8(Word codes) {
  if constexpr (Bits == 8) return codes;
  constexpr u64 one = (1ull << Bits) - 1, two = (1ull << 2 * Bits) - 1, four = (1ull << 4 * Bits) - 1;
  Word x = codes;
  x = (x & repeat(one, 16)) | ((x >> (8 - Bits)) & repeat(one << Bits, 16));
  x = (x & repeat(two, 32)) | ((x >> (16 - 2 * Bits)) & repeat(two << 2 * Bits, 32));
  return (x & four) | ((x >> (32 - 4 * Bits)) & (four << 4 * Bits));
}

// The inverse of pack8; bits above 8*b are ignored.
template <int Bits, class Word = u64>
QCCL_FN Word unpack8(Word packed) {
  if constexpr (Bits == 8) return packed;
  constexpr u64 one = (1ull << Bits) - 1, two = (1ull << 2 * Bits) - 1, four = (1ull << 4 * Bits) - 1;
  Word x = packed;
  x = (x & four) | ((x & (four << 4 * Bits)) << (32 - 4 * Bits));
  x = (x & repeat(two, 32)) | ((x & repeat(two << 2 * Bits, 32)) << (16 - 2 * Bits));
  return (x & repeat(one, 16)) | ((x & repeat(one << Bits, 16)) << (8 - Bits));
}

// The size of n packed codes.
QCCL_FN u64 packed_nbytes(u64 n, u32 bits) { return n / 8 * bits + (n % 8 * bits + 7) / 8; }

// The byte offset of the code of `element`, a multiple of eight.
QCCL_FN u64 code_offset(u64 element, u32 bits) { return element / 8 * bits; }

template <int N>
struct Constant {
  static constexpr int value = N;
};

// body(Constant<bits>{}), for 1 to 8 bits: makes the number of bits a compile-time constant.
template <class Body>
QCCL_FN void with_bits(u32 bits, const Body& body) {
  switch (bits) {
    case 1: return body(Constant<1>{});
    case 2: return body(Constant<2>{});
    case 3: return body(Constant<3>{});
    case 4: return body(Constant<4>{});
    case 5: return body(Constant<5>{});
    case 6: return body(Constant<6>{});
    case 7: return body(Constant<7>{});
    default: return body(Constant<8>{});
  }
}

}  // namespace QCCL_NAMESPACE
