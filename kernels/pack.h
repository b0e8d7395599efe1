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

// From eight codes, one per byte, to 8*b packed bits: neighbours join in three steps, as lanes of a 64-bit word.
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

}  // namespace QCCL_NAMESPACE
