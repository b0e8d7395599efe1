// The scalar math of scalar.h on sixteen values at a time, bit for bit the same.
#pragma once

#include "../../host/codes.h"
#include "../../host/elements.h"
#include "../../random.h"
#include "scalar.h"

namespace QCCL_NAMESPACE {

// Values become codes.

// With `Plain`, where `pre` is 1.
template <bool Plain = false>
QCCL_FN Floats minmax_position(const Floats& x, const MinMaxScale& scale) {
  if constexpr (Plain) return (x - scale.low) * scale.inverse;
  return (x * scale.pre - scale.low) * scale.inverse;
}

// random_word(key, index + i) >> 8 for as many lanes as are stored together; `index` is a multiple of their number. So
// adding a lane's number sets bits that were zero, and the first product is a sum of two: of the bits that differ
// between lanes, and of the others.
constexpr u32 kChancesAtOnce = kTogether * kLanes;

struct ChanceMaker {
  static constexpr u32 factor = 0xed5ad4bbu, own_bits = kChancesAtOnce - 1;
  RandomKey key;
  Words lanes[kTogether];

  QCCL_FN ChanceMaker make(const RandomKey& key) {
    ChanceMaker maker;
    maker.key = key;
    for (u32 g = 0; g < kTogether; ++g) {
      maker.lanes[g] = ((lane_numbers() + g * kLanes) ^ (key.low & own_bits)) * factor;
    }
    return maker;
  }

  QCCL_FN void chances(const ChanceMaker& maker, u32 index, Words (&x)[kTogether]) {
    const u32 common = (index ^ (maker.key.low & ~own_bits)) * factor, high = maker.key.high;
    for (u32 g = 0; g < kTogether; ++g) x[g] = maker.lanes[g] + common;
    for (u32 g = 0; g < kTogether; ++g) x[g] = (x[g] ^ (x[g] >> 14u) ^ high) * 0xac4c1b51u;
    for (u32 g = 0; g < kTogether; ++g) x[g] = ((x[g] ^ (x[g] >> 14u)) * 0x31848babu) >> 8u;
  }
};

// Those of n elements, and on up to a multiple of kChancesAtOnce.
static QCCL_LOOP void make_chances(const RandomKey key, u32 index, u32 n, u32* chances) {
  const ChanceMaker maker = ChanceMaker::make(key);
  for (u32 i = 0; i < n; i += kChancesAtOnce) {
    Words x[kTogether];
    ChanceMaker::chances(maker, index + i, x);
    for (u32 g = 0; g < kTogether; ++g) store_lanes(x[g], chances + i + g * kLanes);
  }
}

// By `chance`, the upper 24 bits of a random word.
QCCL_FN Ints minmax_stochastic(const Floats& x, const MinMaxScale& scale, const Words& chance) {
  const Floats position = minmax_position(x, scale);
#if defined(QCCL_AVX512)
  // In steps of 2^-24. Of a finer part it only matters whether it is zero, so that becomes a whole step. Then the sum
  // carries into the code if the chance is less than the steps beyond it.
  const Words steps = least(ceil_to_words(position * 0x1p24f), all_lanes(scale.levels << 24));
  return cast<i32>((steps + (all_lanes(0xffffffu) - chance)) >> 24u);
#else
  const Ints below = truncate(position);
  const Mask up = is_less(to_floats(cast<i32>(chance)) * 0x1p-24f, position - to_floats(below));
  return least(subtract_where(up, below, all_lanes(-1)), all_lanes((i32)scale.levels));
#endif
}

// Ways to round the values of one block: of sixteen of them, of which `i` is the first one's place in the block, or of as
// many as are stored together.
template <class Rounding>
struct OneByOne {
  QCCL_FN ManyBytes codes_together(const Rounding& to, const Floats (&x)[kTogether], u32 i) {
    Ints codes[kTogether];
    for (u32 g = 0; g < kTogether; ++g) codes[g] = Rounding::codes(to, x[g], i + g * kLanes);
    return narrow_together(codes);
  }
};

// The scalar function's clamp has no work here: x is in the range, so the position is at most fl(width * fl(L / width)),
// which is L or its neighbour.
template <bool Plain>
struct Nearest : OneByOne<Nearest<Plain>> {
  MinMaxScale scale;
  explicit Nearest(const MinMaxScale& s) : scale(s) {}
  QCCL_FN Ints codes(const Nearest& to, const Floats& x, u32) { return to_nearest(minmax_position<Plain>(x, to.scale)); }
};

// By chances that were made before: what makes one is a long chain of operations.
struct Stochastic : OneByOne<Stochastic> {
  MinMaxScale scale;
  const u32* chances;  // of all values of the block
  Stochastic(const MinMaxScale& s, const u32* c) : scale(s), chances(c) {}
  QCCL_FN Ints codes(const Stochastic& to, const Floats& x, u32 i) {
    return minmax_stochastic(x, to.scale, load_lanes<u32>(to.chances + i));
  }
};

#if defined(QCCL_AVX512)
// By chances that are made on the way; for values that are rounded together only, from a multiple of as many elements on.
// Positions are in steps of 2^-24 at once. With `Clamp`, the highest one is beyond L.
template <bool Clamp>
struct StochasticTogether {
  float low, steps_per_unit;
  u32 most, index;
  ChanceMaker maker;

  StochasticTogether(const MinMaxScale& scale, const RandomKey& key, u32 first)
      : low(scale.low), steps_per_unit(scale.inverse * 0x1p24f), most(scale.levels << 24), index(first) {
    maker = ChanceMaker::make(key);
  }

  // Whether there are as many steps as in minmax_stochastic: whether the positions are exactly 2^24 times as great. Those
  // that are below the normal numbers there only have to be above zero on both sides.
  static bool fits(const MinMaxScale& scale) {
    const bool never_tiny = scale.inverse >= 0x1p-50f && absolute(scale.low) >= 0x1p-50f;
    return scale.pre == 1.0f && scale.inverse <= 0x1p100f && (scale.inverse >= 1.0f || never_tiny);
  }

  static bool clamps(const MinMaxScale& scale) { return (scale.high - scale.low) * scale.inverse > (float)scale.levels; }

  QCCL_FN ManyBytes codes_together(const StochasticTogether& to, const Floats (&x)[kTogether], u32 i) {
    Words chances[kTogether];
    ChanceMaker::chances(to.maker, to.index + i, chances);
    return round(to, x, chances);
  }
  QCCL_FN ManyBytes round(const StochasticTogether& to, const Floats (&x)[kTogether], const Words (&chances)[kTogether]) {
    Ints negative[kTogether];  // less than 0, and so the highest byte is 256 less the code, once the steps are more
    for (u32 g = 0; g < kTogether; ++g) {
      const Words steps = ceil_to_words((x[g] - to.low) * to.steps_per_unit);
      negative[g] = cast<i32>((chances[g] - (Clamp ? least(steps, all_lanes(to.most)) : steps)) >> 24u);
    }
    return _mm512_sub_epi8(ManyBytes{}, narrow_together(negative));
  }
};
#endif

// Codes become values: by a table in registers where all codes fit one, else by arithmetic.

#if defined(QCCL_AVX512)
template <int Bits>
constexpr bool kLookUp = Bits <= 5;
#else
template <int Bits>
constexpr bool kLookUp = false;
#endif

template <int Bits, bool = kLookUp<Bits>>
struct Line {
  static constexpr i32 levels = (1 << Bits) - 1;
  MinMaxScale scale;

  void set(const MinMaxScale& s) { scale = s; }

  QCCL_FN Floats values(const Line& line, const Ints& codes) {
    const Mask upper = is_less(all_lanes(levels / 2), codes);
    return walk(line.scale, upper, subtract_where(upper, codes, all_lanes(levels)));
  }

  QCCL_FN Floats load(const Line& line, const u8* wire) {
#if defined(QCCL_AVX512)
    if constexpr (Bits == 8) {  // while they are bytes: as signed ones, the upper half lacks 1 to be less its levels
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(wire));
      const __mmask16 upper = _mm_movepi8_mask(bytes);
      const __m128i steps = _mm_mask_sub_epi8(bytes, upper, bytes, _mm_set1_epi8(-1));
      return walk(line.scale, upper, {(Ints::Part)_mm512_cvtepi8_epi32(steps)});
    }
#endif
    return values(line, load_codes<Bits>(wire));
  }

 private:
  // From the upper or the lower end.
  QCCL_FN Floats walk(const MinMaxScale& s, const Mask& upper, const Ints& steps) {
    return (select(upper, all_lanes(s.high), all_lanes(s.low)) + to_floats(steps) * s.unit) * s.post;
  }
};

#if defined(QCCL_AVX512)
// The table repeats, so what is above a code's own bits does not matter.
template <int Bits>
struct Line<Bits, true> {
  static constexpr u32 size = Bits == 5 ? 32 : 16;
  alignas(64) float value[size];

  void set(const MinMaxScale& scale) {
    for (u32 i = 0; i < size; ++i) value[i] = minmax_value(i & ((1u << Bits) - 1), scale);
  }

  QCCL_FN Floats values(const Line& line, const Ints& codes) {
    const __m512 low = _mm512_load_ps(line.value);
    const __m512i which = (__m512i)codes.part[0];
    if constexpr (size == 16) return {_mm512_permutexvar_ps(which, low)};
    return {_mm512_permutex2var_ps(low, which, _mm512_load_ps(line.value + size - 16))};
  }

  QCCL_FN Floats load(const Line& line, const u8* wire) { return values(line, load_codes_with_others<Bits>(wire)); }
};
#endif

}  // namespace QCCL_NAMESPACE
