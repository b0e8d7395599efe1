// The team that runs a codec's functions (../bucket.h) on the host: one thread, whose loops the compiler vectorises.
#pragma once

#include "../bucket.h"
#include "codes.h"
#include "blocking.h"

namespace QCCL_NAMESPACE {

// The lanes of a sum (../bucket.h); a pair has two arrays.
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
  // `limit`: the end of the memory that unpack() may read. `scratch`: floats for twice a bucket.
  explicit HostTeam(const u8* limit, float* scratch = nullptr) : limit_(limit), scratch_(scratch) {}

  // Whether this thread stores what a bucket has once; here always.
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

  // Packs code(i) of n elements, Bits each, as in ../pack.h. Separate loops compute and pack the codes, because the
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
#pragma GCC ivdep
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
#pragma GCC ivdep
      for (i32 j = 0; j < size; ++j) take(first + j, halves[j]);
    }
  }

  // emit(j, i) for the `keep` elements of greatest key(i), in the order of i; of equal keys the lower i is kept. Keys are
  // not negative. A radix select among candidates: the elements whose key is not below a bound.
  template <class Key, class Emit>
  QCCL_MEMBER void select(u32 n, u32 keep, const Key& key, const Emit& emit) const {
    i32* found = reinterpret_cast<i32*>(scratch_);
    const auto any = [](i32) { return true; };
    i32 bound = sampled_bound(n, keep, key);
    if (bound == 0) bound = 1;  // zeros, of which there may be many, are no candidates
    u32 count = filter(n, bound, key, found);
    if (count < keep) {
      if (bound == 1) return with_zeros(found, count, keep, emit);
      u32 above = 0;  // the sample misled: the bound comes from all elements
      count = filter(n, digit_of(20, (u32)greatest(n, key) >> 20, n, keep, above, key, any), key, found);
    }
    const auto key_of = [&](i32 c) { return key(found[c]); };
    u32 above = 0;  // keys above the digits so far
    i32 least = digit_of(20, (u32)greatest(count, key_of) >> 20, count, keep, above, key_of, any);
    i32 prefix = least >> 20;
    least |= digit_of(10, 1023, count, keep, above, key_of, [&](i32 k) { return k >> 20 == prefix; });
    prefix = least >> 10;
    least |= digit_of(0, 1023, count, keep, above, key_of, [&](i32 k) { return k >> 10 == prefix; });
    u32 ties = keep - above;
    for (u32 c = 0, j = 0; c < count; ++c) {
      const i32 k = key_of((i32)c);
      if (k < least || (k == least && ties == 0)) continue;
      ties -= k == least;
      emit(j++, found[c]);
    }
  }

  // body(j, index(j)) for each of n indices that is greater than all indices before it.
  template <class Index, class Body>
  QCCL_MEMBER void ascending(u32 n, const Index& index, const Body& body) const {
    u64 next = 0;
    for (u32 j = 0; j < n; ++j) {
      const u32 i = index(j);
      if (i < next) continue;
      next = (u64)i + 1;
      body(j, i);
    }
  }

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

  static constexpr u32 kDigits = 1 << 11, kSample = 512;
  static constexpr i32 kStage = 256;

  // emit(j, i) for the `count` indices found, which ascend, and for the lowest others, `keep` together.
  template <class Emit>
  QCCL_MEMBER static void with_zeros(const i32* found, u32 count, u32 keep, const Emit& emit) {
    u32 others = keep - count;
    for (u32 i = 0, c = 0, j = 0; j < keep;) {
      if (c < count && (others == 0 || (u32)found[c] == i)) {
        i = (u32)found[c++];
      } else {
        --others;
      }
      emit(j++, i++);
    }
  }

  // One step of a radix select: the digit at `shift`, `most` or less, of the last key that is kept; returned in place.
  // `above` counts the keys with a greater digit. Keys for which belongs() is false are ignored.
  template <class Key, class Belongs>
  QCCL_MEMBER static i32 digit_of(u32 shift, u32 most, u32 n, u32 keep, u32& above, const Key& key, const Belongs& belongs) {
    u32 counts[kDigits];
    __builtin_memset(counts, 0, (most + 1) * sizeof counts[0]);
    const u32 mask = shift == 20 ? kDigits - 1 : kDigits / 2 - 1;
    for (i32 i = 0; i < (i32)n; ++i) {
      const i32 k = key(i);
      counts[(u32)k >> shift & mask] += belongs(k);
    }
    u32 digit = most;
    while (above + counts[digit] < keep) above += counts[digit--];
    return (i32)(digit << shift);
  }

  // A key that probably not many more than `keep` of n elements reach: of a sample, one whose rank is three standard
  // deviations beyond the rank expected of the last key that is kept. 0 where a sample saves nothing.
  template <class Key>
  QCCL_MEMBER i32 sampled_bound(u32 n, u32 keep, const Key& key) const {
    if (n < 8 * kSample || keep > n / 8) return 0;
    const u32 expected = (u32)((u64)keep * kSample / n);
    u32 spread = 1, above = 0;
    while (spread * spread < 9 * expected) ++spread;
    const i32 stride = (i32)(n / kSample);
    const auto sampled = [&](i32 i) { return key(i * stride); };
    const u32 top = (u32)greatest(kSample, sampled) >> 20, rank = expected + spread + 2;
    const i32 digit = digit_of(20, top, kSample, rank, above, sampled, [](i32) { return true; });
    return digit | digit_of(10, 1023, kSample, rank, above, sampled, [&](i32 k) { return k >> 20 == digit >> 20; });
  }

  // Stores the indices of the elements whose key is not below `least`, which is not negative; returns their number.
  template <class Key>
  QCCL_MEMBER static u32 filter(u32 n, i32 least, const Key& key, i32* to) {
    u32 count = 0;
    i32 first = 0;
    alignas(64) i32 keys[kStage], below[kLanes];
    for (i32 j = 0; j < (i32)kLanes; ++j) below[j] = least - 1;
    for (; (i32)n - first >= kStage; first += kStage) {
      for (i32 j = 0; j < kStage; ++j) keys[j] = key(first + j);
      for (i32 j = 0; j < kStage; j += kLanes) {
        for (u32 bits = bits_of(is_less(load_lanes<i32>(below), load_lanes<i32>(keys + j))); bits; bits &= bits - 1) {
          to[count++] = first + j + __builtin_ctz(bits);
        }
      }
    }
    for (; first < (i32)n; ++first) {
      to[count] = first;
      count += key(first) >= least;
    }
    return count;
  }

  const u8* limit_;
  float* scratch_;
};

}  // namespace QCCL_NAMESPACE
