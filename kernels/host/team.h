// The team of a codec in per-bucket form (../bucket.h) on the host: one thread, whose loops over sixteen elements become
// vectors.
#pragma once

#include "../bucket.h"
#include "codes.h"
#include "walk.h"

namespace QCCL_NAMESPACE {

class HostTeam {
 public:
  // `limit`: up to where the memory that unpack() reads from may be read. `room`: floats for twice a bucket.
  explicit HostTeam(const u8* limit, float* room = nullptr) : limit_(limit), room_(room) {}

  // Whether this thread is the one that stores what there is once.
  bool leads() const { return true; }

  // All threads wait for each other; what one stored before, others may load afterwards.
  void sync() const {}

  // body(i) for each of n, in any order.
  template <class Body>
  QCCL_MEMBER void each(u32 n, const Body& body) const {
    for (u32 i = 0; i < n; ++i) body(i);
  }

  // The sum of term(i), as bucket.h defines it.
  template <class Term>
  QCCL_MEMBER float sum(u32 n, const Term& term) const {
    alignas(64) float total[kSumLanes] = {};
    for (u32 tile = 0; tile < n; tile += kSumTile) {
      const u32 size = (u32)smaller(kSumTile, n - tile);
      alignas(64) float part[kSumLanes] = {};
      u32 at = tile;
      for (; at + kSumLanes <= tile + size; at += kSumLanes) {
        for (u32 j = 0; j < kSumLanes; ++j) part[j] += term(at + j);
      }
      for (u32 j = 0; at + j < tile + size; ++j) part[j] += term(at + j);
      for (u32 j = 0; j < kSumLanes; ++j) total[j] += part[j];
    }
    for (u32 half = kSumLanes / 2; half > 0; half /= 2) {
      for (u32 j = 0; j < half; ++j) total[j] += total[j + half];
    }
    return total[0];
  }

  // The greatest key(i), of one or more.
  template <class Key>
  QCCL_MEMBER i32 greatest(u32 n, const Key& key) const {
    constexpr u32 lanes = 64;
    alignas(64) i32 best[lanes];
    for (u32 j = 0; j < lanes; ++j) best[j] = -0x7fffffff - 1;
    u32 i = 0;
    for (; i + lanes <= n; i += lanes) {
      for (u32 j = 0; j < lanes; ++j) {
        const i32 k = key(i + j);
        best[j] = k > best[j] ? k : best[j];
      }
    }
    for (u32 j = 0; i + j < n; ++j) {
      const i32 k = key(i + j);
      best[j] = k > best[j] ? k : best[j];
    }
    i32 all = best[0];
    for (u32 j = 1; j < lanes; ++j) all = best[j] > all ? best[j] : all;
    return all;
  }

  // code(i) of n elements, Bits each, packed as in ../pack.h.
  template <int Bits, class Code>
  QCCL_MEMBER void pack(u32 n, const Code& code, u8* to) const {
    u32 i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      alignas(64) i32 codes[kLanes];
      for (u32 j = 0; j < kLanes; ++j) codes[j] = (i32)code(i + j);
      store_codes<Bits>(load_lanes<i32>(codes), to + i / 8 * Bits);
    }
    if (i == n) return;
    alignas(64) i32 codes[kLanes] = {};
    for (u32 j = 0; i + j < n; ++j) codes[j] = (i32)code(i + j);
    SomeCodes<Bits> some;
    store_codes<Bits>(load_lanes<i32>(codes), some.bytes);
    some.write(to + i / 8 * Bits, n - i);
  }

  // take(i, code) for each of n packed codes.
  template <int Bits, class Take>
  QCCL_MEMBER void unpack(const u8* from, u32 n, const Take& take) const {
    alignas(64) i32 codes[kLanes];
    u32 i = 0;
    for (; i + kLanes <= n && from + i / 8 * Bits + 16 <= limit_; i += kLanes) {
      store_lanes(load_codes<Bits>(from + i / 8 * Bits), codes);
      for (u32 j = 0; j < kLanes; ++j) take(i + j, (u32)codes[j]);
    }
    for (; i < n; i += kLanes) {
      const u32 lanes = (u32)smaller(kLanes, n - i);
      SomeCodes<Bits> some;
      some.read(from + i / 8 * Bits, lanes);
      store_lanes(load_codes<Bits>(some.bytes), codes);
      for (u32 j = 0; j < lanes; ++j) take(i + j, (u32)codes[j]);
    }
  }

  // The same for numbers of two bytes.
  template <class Half>
  QCCL_MEMBER void pack_halves(u32 n, const Half& half, u8* to) const {
    u32 i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      u16 halves[kLanes];
      for (u32 j = 0; j < kLanes; ++j) halves[j] = half(i + j);
      __builtin_memcpy(to + 2 * i, halves, sizeof halves);
    }
    for (; i < n; ++i) {
      const u16 one = half(i);
      __builtin_memcpy(to + 2 * i, &one, sizeof one);
    }
  }
  template <class Take>
  QCCL_MEMBER void unpack_halves(const u8* from, u32 n, const Take& take) const {
    u32 i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      u16 halves[kLanes];
      __builtin_memcpy(halves, from + 2 * i, sizeof halves);
      for (u32 j = 0; j < kLanes; ++j) take(i + j, halves[j]);
    }
    for (; i < n; ++i) {
      u16 one;
      __builtin_memcpy(&one, from + 2 * i, sizeof one);
      take(i, one);
    }
  }

  // emit(j, i) for the `keep` elements of greatest key(i), which is not negative, in the order of i; of equal keys the
  // lower i is kept.
  template <class Key, class Emit>
  QCCL_MEMBER void select(u32 n, u32 keep, const Key& key, const Emit& emit) const {
    i32* found = reinterpret_cast<i32*>(room_);
    u32 above = 0, count = 0;  // keys above the digits so far; elements that may be kept
    i32 least = digit_of(20, 11, n, keep, above, [&](u32 i) { return key(i); }, [](i32) { return true; });
    for (u32 i = 0; i < n; ++i) {
      found[count] = (i32)i;
      count += key(i) >= least;
    }
    const auto key_of = [&](u32 c) { return key((u32)found[c]); };
    i32 prefix = least >> 20;
    least |= digit_of(10, 10, count, keep, above, key_of, [&](i32 k) { return k >> 20 == prefix; });
    prefix = least >> 10;
    least |= digit_of(0, 10, count, keep, above, key_of, [&](i32 k) { return k >> 10 == prefix; });
    u32 ties = keep - above;
    for (u32 c = 0, j = 0; c < count; ++c) {
      const i32 k = key_of(c);
      if (k < least || (k == least && ties == 0)) continue;
      ties -= k == least;
      emit(j++, (u32)found[c]);
    }
  }

  // body(j, index(j)) for each of n indices that is greater than all before it.
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
  static constexpr u32 kDigits = 1 << 11;

  // The digit at `shift` of the last key that is kept, in place; `above` counts the keys that have greater ones. Only the
  // keys that belong to those are looked at.
  template <class Key, class Belongs>
  QCCL_MEMBER static i32 digit_of(u32 shift, u32 bits, u32 n, u32 keep, u32& above, const Key& key, const Belongs& belongs) {
    u32 counts[kDigits] = {};
    const u32 mask = (1u << bits) - 1;
    for (u32 i = 0; i < n; ++i) {
      const i32 k = key(i);
      counts[(u32)k >> shift & mask] += belongs(k);
    }
    u32 digit = mask;
    while (above + counts[digit] < keep) above += counts[digit--];
    return (i32)(digit << shift);
  }

  const u8* limit_;
  float* room_;
};

}  // namespace QCCL_NAMESPACE
