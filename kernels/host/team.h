// The team that runs a codec's functions (../shared/bucket.h) on the host: one thread, whose loops the compiler vectorises.
#pragma once

#include "../shared/bucket.h"
#include "codes.h"
#include "blocking.h"

namespace QCCL_NAMESPACE {

// The lanes of a sum (../shared/bucket.h); a pair has two arrays.
template <class Number>
struct SumLanes {
  using Value = Number;
  alignas(64) float at[kSumLanes];
  QCCL_MEMBER float get(i32 j) const { return at[j]; }
  QCCL_MEMBER void set(i32 j, float x) { at[j] = x; }
};
template <>
struct SumLanes<FloatPair> {
  using Value = FloatPair;
  SumLanes<float> first, second;
  QCCL_MEMBER FloatPair get(i32 j) const { return {first.get(j), second.get(j)}; }
  QCCL_MEMBER void set(i32 j, const FloatPair& x) { first.set(j, x.first), second.set(j, x.second); }
};

class HostTeam {
 public:
  static constexpr bool is_one_thread = true;

  // `limit`: the end of the memory that unpack() may read. `scratch`: floats for twice a bucket.
  explicit HostTeam(const u8* limit, float* scratch = nullptr) : limit_(limit), scratch_(scratch) {}

  // Whether this thread stores the data that a bucket has once; here always.
  bool leads() const { return true; }

  // A barrier of the team's threads; here nothing to do.
  void sync() const {}

  // body(i) for each of n, in any order. Indices are signed, here and below: an unsigned index may wrap, which keeps the
  // compiler from vectorising.
  template <class Body>
  QCCL_MEMBER void each(u32 n, const Body& body) const {
    for (i32 i = 0; i < (i32)n; ++i) body(i);
  }

  // The sum of term(i), a float or FloatPair, as bucket.h defines it.
  template <class Term>
  QCCL_MEMBER auto sum(u32 n, const Term& term) const {
    constexpr i32 tile_size = (i32)kSumTile;
    SumLanes<decltype(term(0))> total, part;
    add_tile((i32)n < tile_size ? (i32)n : tile_size, term, total);
    for (i32 tile = tile_size; tile < (i32)n; tile += tile_size) {
      add_tile((i32)n - tile < tile_size ? (i32)n - tile : tile_size, [&](i32 i) { return term(tile + i); }, part);
      for (i32 j = 0; j < (i32)kSumLanes; ++j) total.set(j, total.get(j) + part.get(j));
    }
    fold<(i32)kSumLanes / 2>(total);
    return total.get(0);
  }

  // The greatest key(i); n is 1 or more.
  template <class Key>
  QCCL_MEMBER i32 greatest(u32 n, const Key& key) const {
    constexpr i32 lanes = 64;
    alignas(64) i32 best[lanes];
    for (i32 j = 0; j < lanes; ++j) best[j] = -0x7fffffff - 1;
    i32 at = 0;
    for (; (i32)n - at >= lanes; at += lanes) {
      for (i32 j = 0; j < lanes; ++j) {
        const i32 k = key(at + j);
        best[j] = k > best[j] ? k : best[j];
      }
    }
    for (i32 j = 0; j < (i32)n - at; ++j) {
      const i32 k = key(at + j);
      best[j] = k > best[j] ? k : best[j];
    }
    i32 all = best[0];
    for (i32 j = 1; j < lanes; ++j) all = best[j] > all ? best[j] : all;
    return all;
  }

  // The number of i for which which(i) is true.
  template <class Which>
  QCCL_MEMBER u32 count(u32 n, const Which& which) const {
    u32 number = 0;
    for (i32 i = 0; i < (i32)n; ++i) number += which(i) ? 1u : 0u;
    return number;
  }

  // Packs code(i) of n elements, Bits each, as in ../shared/pack.h. Separate loops compute and pack the codes, because the
  // compiler vectorises those.
  template <int Bits, class Code>
  QCCL_MEMBER void pack(u32 n, const Code& code, u8* to) const {
    alignas(64) i32 codes[kStage];
    i32 first = 0;
    for (; (i32)n - first >= kStage; first += kStage) {
      for (i32 j = 0; j < kStage; ++j) codes[j] = (i32)code(first + j);
      for (i32 j = 0; j < kStage; j += kLanes) store_codes<Bits>(load_lanes<i32>(codes + j), to + (first + j) / 8 * Bits);
    }
    const i32 rest = (i32)n - first, whole = rest / (i32)kLanes * (i32)kLanes;
    for (i32 j = 0; j < rest; ++j) codes[j] = (i32)code(first + j);
    for (i32 j = 0; j < whole; j += kLanes) store_codes<Bits>(load_lanes<i32>(codes + j), to + (first + j) / 8 * Bits);
    if (whole == rest) return;
    for (i32 j = rest; j < whole + (i32)kLanes; ++j) codes[j] = 0;
    SomeCodes<Bits> some;
    store_codes<Bits>(load_lanes<i32>(codes + whole), some.bytes);
    some.write(to + (first + whole) / 8 * Bits, (u32)(rest - whole));
  }

  // take(i, code) for each of n packed codes.
  template <int Bits, class Take>
  QCCL_MEMBER void unpack(const u8* from, u32 n, const Take& take) const {
    alignas(64) i32 codes[kStage];
    i32 first = 0;
    for (; (i32)n - first >= kStage && from + (first + kStage) / 8 * Bits + 16 <= limit_; first += kStage) {
      for (i32 j = 0; j < kStage; j += kLanes) store_lanes(load_codes<Bits>(from + (first + j) / 8 * Bits), codes + j);
      QCCL_INDEPENDENT
      for (i32 j = 0; j < kStage; ++j) take(first + j, (u32)codes[j]);
    }
    for (; first < (i32)n; first += kStage) {
      const i32 size = (i32)n - first < kStage ? (i32)n - first : kStage;
      for (i32 j = 0; j < size; j += kLanes) {
        SomeCodes<Bits> some;
        some.read(from + (first + j) / 8 * Bits, size - j < (i32)kLanes ? (u32)(size - j) : kLanes);
        store_lanes(load_codes<Bits>(some.bytes), codes + j);
      }
      for (i32 j = 0; j < size; ++j) take(first + j, (u32)codes[j]);
    }
  }

  // pack() and unpack() for numbers of two bytes.
  template <class Half>
  QCCL_MEMBER void pack_halves(u32 n, const Half& half, u8* to) const {
    u16 halves[kStage];
    for (i32 first = 0; first < (i32)n; first += kStage) {
      const i32 size = (i32)n - first < kStage ? (i32)n - first : kStage;
      for (i32 j = 0; j < size; ++j) halves[j] = half(first + j);
      __builtin_memcpy(to + 2 * first, halves, (u64)size * sizeof halves[0]);
    }
  }
  template <class Take>
  QCCL_MEMBER void unpack_halves(const u8* from, u32 n, const Take& take) const {
    u16 halves[kStage];
    for (i32 first = 0; first < (i32)n; first += kStage) {
      const i32 size = (i32)n - first < kStage ? (i32)n - first : kStage;
      __builtin_memcpy(halves, from + 2 * first, (u64)size * sizeof halves[0]);
      QCCL_INDEPENDENT
      for (i32 j = 0; j < size; ++j) take(first + j, halves[j]);
    }
  }

  // The indices of the `keep` elements of greatest key(i), in ascending order, in the team's scratch; of equal keys the
  // lower i is kept. Keys are not negative. First a bound is found that at least `keep` keys reach, but not many more: of
  // the greatest keys of 2 * keep groups, `keep` ones reach it. Then the elements that reach it are the candidates.
  template <class Key>
  QCCL_MEMBER const u32* select(u32 n, u32 keep, const Key& key) const {
    u32* found = reinterpret_cast<u32*>(scratch_);
    i32* keys = reinterpret_cast<i32*>(scratch_) + n + kStage / 4;
    const i32 groups = (i32)((2 * keep + kLanes - 1) / kLanes * kLanes);
    i32 bound = 1;  // zeros, of which there may be many, are no candidates
    if (groups <= (i32)n / 4) {
      for (i32 g = 0; g < groups; ++g) keys[g] = 1;
      for (i32 first = 0; first + groups <= (i32)n; first += groups) {
        for (i32 g = 0; g < groups; ++g) {
          const i32 k = key(first + g);
          keys[g] = k > keys[g] ? k : keys[g];
        }
      }
      bound = reached_by(keys, (u32)groups, keep, keep / 8, 1);
    }
    const u32 count = filter(n, bound, key, found);
    if (count <= keep) return with_zeros(found, count, keep, reinterpret_cast<u32*>(keys));
    for (u32 c = 0; c < count; ++c) keys[c] = key((i32)found[c]);
    const i32 least = reached_by(keys, count, keep, 0, bound);
    u32 ties = keep;  // elements whose key is `least` that are kept
    for (u32 c = 0; c < count; ++c) ties -= keys[c] > least;
    u32 chosen = 0;
    for (u32 c = 0; c < count; ++c) {
      const bool tie = keys[c] == least && ties > 0;
      found[chosen] = found[c];
      chosen += keys[c] > least || tie;
      ties -= tie;
    }
    return found;
  }

  // Sets the bits position(j), which ascend with j, of nbytes bytes, for each of n; the other bits are 0.
  template <class Position>
  QCCL_MEMBER void set_bits(u32 n, const Position& position, u8* to, u32 nbytes) const {
    __builtin_memset(to, 0, nbytes);
    for (u32 j = 0; j < n; ++j) {
      const u32 p = position(j);
      to[p / 8] |= (u8)(1u << p % 8);
    }
  }

  // body(j, p) for each bit p that is set in the bytes, least significant bit first; j is its number among them. Returns
  // how many are set.
  template <class Body>
  QCCL_MEMBER u32 each_set_bit(const u8* from, u32 nbytes, const Body& body) const {
    u32 number = 0;
    each_word(from, nbytes, [&](u64 word, u32 first) {
      for (; word; word &= word - 1) body(number++, first + (u32)__builtin_ctzll(word));
      return true;
    });
    return number;
  }

  // Calls body(word, first) for the bytes in words of 64 bits until it returns false; `first` is the number of the word's
  // first bit. Returns true if no call returned false.
  template <class Body>
  QCCL_MEMBER bool each_word(const u8* from, u32 nbytes, const Body& body) const {
    for (u32 at = 0; at < nbytes; at += 8) {
      u64 word = 0;
      if (nbytes - at >= 8) {
        __builtin_memcpy(&word, from + at, 8);
      } else {
        for (u32 i = at; i < nbytes; ++i) word |= (u64)from[i] << 8 * (i - at);
      }
      if (!body(word, 8 * at)) return false;
    }
    return true;
  }

  // Whether `mine` is true in one of the team's threads.
  bool any(bool mine) const { return mine; }

 private:
  // Adds one tile of n terms to the lanes, four rows at a time to load and store the lanes less often.
  template <class Term, class Sums>
  QCCL_MEMBER static void add_tile(i32 n, const Term& term, Sums& sums) {
    constexpr i32 lanes = (i32)kSumLanes;
    const auto add_four = [&](i32 j, typename Sums::Value sum, i32 at) QCCL_INLINE {
      return sum + term(at + j) + term(at + lanes + j) + term(at + 2 * lanes + j) + term(at + 3 * lanes + j);
    };
    i32 at = 0;
    if (n >= 4 * lanes) {
      for (i32 j = 0; j < lanes; ++j) sums.set(j, add_four(j, {}, 0));
      at = 4 * lanes;
    } else {
      for (i32 j = 0; j < lanes; ++j) sums.set(j, {});
    }
    for (; n - at >= 4 * lanes; at += 4 * lanes) {
      for (i32 j = 0; j < lanes; ++j) sums.set(j, add_four(j, sums.get(j), at));
    }
    for (; n - at >= lanes; at += lanes) {
      for (i32 j = 0; j < lanes; ++j) sums.set(j, sums.get(j) + term(at + j));
    }
    for (i32 j = 0; j < n - at; ++j) sums.set(j, sums.get(j) + term(at + j));
  }

  // Adds the upper half of the lanes to the lower half. Each step is a loop of constant length, which the compiler
  // vectorises.
  template <i32 Half, class Sums>
  QCCL_MEMBER static void fold(Sums& sums) {
    for (i32 j = 0; j < Half; ++j) sums.set(j, sums.get(j) + sums.get(j + Half));
    if constexpr (Half > 1) fold<Half / 2>(sums);
  }

  static constexpr i32 kStage = 256;

  // A number that `keep` to `keep` + `more` of the n keys reach; if there is none, because keys are equal, the greatest that
  // at least `keep` reach. All keys reach `least`. Keys up to a multiple of kLanes are overwritten.
  QCCL_LOOP static i32 reached_by(i32* keys, u32 n, u32 keep, u32 more, i32 least) {
    for (u32 i = n; i % kLanes; ++i) keys[i] = -1;
    i32xN lowest = all_lanes(0x7fffffff), highest = all_lanes(least);
    for (u32 i = 0; i < n; i += kLanes) {
      lowest = QCCL_NAMESPACE::least(lowest, load_lanes<i32>(keys + i));
      highest = QCCL_NAMESPACE::greatest(highest, load_lanes<i32>(keys + i));
    }
    const i32 all_reach = -greatest_lane(all_lanes(0) - lowest);
    u32 reached = (u32)(all_reach > least ? all_reach : least), beyond = (u32)greatest_lane(highest) + 1;
    while (beyond - reached > 1) {
      const u32 middle = reached + (beyond - reached) / 2;
      const i32xN below = all_lanes((i32)middle - 1), minus_one = all_lanes(-1);
      i32xN counts = all_lanes(0);
      for (u32 i = 0; i < n; i += kLanes) {
        counts = subtract_where(is_less(below, load_lanes<i32>(keys + i)), counts, minus_one);
      }
      const u32 count = (u32)sum_of_lanes(counts);
      if (count >= keep && count <= keep + more) return (i32)middle;
      (count > keep ? reached : beyond) = middle;
    }
    return (i32)reached;
  }

  // Stores `keep` indices to `to`, in ascending order: the `count` indices found, which ascend, and the lowest others.
  static const u32* with_zeros(const u32* found, u32 count, u32 keep, u32* to) {
    if (count == keep) return found;
    u32 others = keep - count;
    for (u32 i = 0, c = 0, j = 0; j < keep;) {
      if (c < count && (others == 0 || found[c] == i)) {
        i = found[c++];
      } else {
        --others;
      }
      to[j++] = i++;
    }
    return to;
  }

  // Stores the indices of the elements whose key is not below `least`, which is 1 or more; returns their number. Sixteen may
  // be stored behind the last one.
  template <class Key>
  QCCL_MEMBER static u32 filter(u32 n, i32 least, const Key& key, u32* to) {
    u32 count = 0;
    i32 first = 0;
    alignas(64) i32 keys[kStage];
    for (; (i32)n - first >= kStage; first += kStage) {
      for (i32 j = 0; j < kStage; ++j) keys[j] = key(first + j);
      for (i32 j = 0; j < kStage; j += kLanes) {
        const Mask enough = is_less(all_lanes(least - 1), load_lanes<i32>(keys + j));
        count += store_numbers(enough, (u32)(first + j), to + count);
      }
    }
    for (; first < (i32)n; ++first) {
      to[count] = (u32)first;
      count += key(first) >= least;
    }
    return count;
  }

  const u8* limit_;
  float* scratch_;
};

}  // namespace QCCL_NAMESPACE
