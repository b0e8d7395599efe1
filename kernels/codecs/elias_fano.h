// Ascending indices of a block in Elias-Fano form, whose size depends on their number alone.
//
// The lower bits of the indices are packed, each in the same number of bits. The upper bits are a bitmap: the bit at the
// index's upper part plus its number among the indices is set. So the indices of equal upper part are bits in a row, and a
// bit that is not set separates two parts. 64 of 4,096 indices take 6 lower bits each and a bitmap of 127 bits.
#pragma once

#include "../shared/bucket.h"

namespace QCCL_NAMESPACE {

struct EliasFano {
  u32 keep, n;  // the number of indices, all below n
  u32 low_bits;

  QCCL_FN EliasFano make(u32 keep, u32 n) {
    u32 bits = 0;
    while ((u64)keep << (bits + 1) <= n) ++bits;
    return {keep, n, bits};
  }

  QCCL_MEMBER u64 lows_nbytes() const { return ((u64)keep * low_bits + 7) / 8; }
  QCCL_MEMBER u64 bitmap_nbytes() const { return ((u64)keep + ((n - 1) >> low_bits) + 7) / 8; }
  QCCL_MEMBER u64 nbytes() const { return lows_nbytes() + bitmap_nbytes(); }

  // Stores the indices. The lower parts of eight are whole bytes, so no two threads store to one byte.
  template <class Team>
  QCCL_MEMBER void encode(const Team& team, const u32* indices, u8* to) const {
    team.each((keep + 7) / 8, [&](i32 g) { store_lows(indices, 8 * (u32)g, to + (u64)g * low_bits); });
    team.set_bits(keep, [&](u32 j) { return (indices[j] >> low_bits) + j; }, to + lows_nbytes(), (u32)bitmap_nbytes());
  }

  // body(j, i) for each index i and its number j. Returns whether the bytes are `keep` ascending indices below n; if they
  // are not, body has been called for some elements of the block, or for none.
  template <class Team, class Body>
  QCCL_MEMBER bool decode(const Team& team, const u8* from, const Body& body) const {
    if constexpr (Team::is_one_thread) {
      return decode_words(team, from, body);
    } else {
      if (!valid(team, from)) return false;
      team.each_set_bit(from + lows_nbytes(), (u32)bitmap_nbytes(), [&](u32 j, u32 p) {
        body(j, ((p - j) << low_bits) | low_of(from, j));
      });
      return true;
    }
  }

 private:
  // decode() in one pass: the indices of one word of the bitmap at a time, which are checked before they are used.
  template <class Team, class Body>
  QCCL_MEMBER bool decode_words(const Team& team, const u8* from, const Body& body) const {
    i32 indices[65] = {-1};  // the last one of the words before, then those of this word
    u32 number = 0;
    const bool checked = team.each_word(from + lows_nbytes(), (u32)bitmap_nbytes(), [&](u64 word, u32 first) {
      const u32 count = (u32)__builtin_popcountll(word);
      if (count > keep - number) return false;
      for (u32 c = 0; c < count; ++c, word &= word - 1) {
        const u32 j = number + c, upper = first + (u32)__builtin_ctzll(word) - j;
        indices[c + 1] = (i32)(upper << low_bits | low_of(from, j));
      }
      u32 wrong = indices[count] >= (i32)n;
      for (u32 c = 0; c < count; ++c) wrong |= indices[c + 1] <= indices[c];
      if (wrong) return false;
      for (u32 c = 0; c < count; ++c) body(number + c, (u32)indices[c + 1]);
      indices[0] = indices[count];
      number += count;
      return true;
    });
    return checked && number == keep;
  }

  // Whether the bytes are `keep` ascending indices below n, by all threads of a team.
  template <class Team>
  QCCL_MEMBER bool valid(const Team& team, const u8* from) const {
    const u8* bitmap = from + lows_nbytes();
    bool bad = false;
    const u32 found = team.each_set_bit(bitmap, (u32)bitmap_nbytes(), [&](u32 j, u32 p) {
      if (j >= keep) return;
      const u32 low = low_of(from, j), before = low_of(from, j - (j > 0)), bit = p - (j > 0);
      const u32 same_upper_part = (j > 0) & bitmap[bit / 8] >> bit % 8;
      bad |= ((((p - j) << low_bits) | low) >= n) | (same_upper_part & (before >= low));
    });
    return !team.any(bad) && found == keep;
  }

  // The lower parts of eight indices, or of the rest, in whole bytes.
  QCCL_MEMBER void store_lows(const u32* indices, u32 first, u8* to) const {
    const u32 end = keep - first < 8 ? keep : first + 8;
    u64 bits = 0;
    u32 count = 0;
    for (u32 j = first; j < end; ++j) {
      bits |= (u64)(indices[j] & ((1u << low_bits) - 1)) << count;
      for (count += low_bits; count >= 8; count -= 8, bits >>= 8) *to++ = (u8)bits;
    }
    if (count) *to = (u8)bits;
  }

  // Four bytes may be read: at least three others follow the lower parts, of the bitmap and what follows it. There are 24 lower
  // bits at most.
  QCCL_MEMBER u32 low_of(const u8* from, u32 j) const {
    if (!low_bits) return 0;
    const u32 bit = j * low_bits;
    return load_word(from + bit / 8) >> bit % 8 & ((1u << low_bits) - 1);
  }
};

}  // namespace QCCL_NAMESPACE
