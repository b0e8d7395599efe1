// The functions of scalar.h on sixteen values at a time, with the same results bit for bit.
#pragma once

#include "../../host/elements.h"
#include "../../host/random.h"
#include "scalar.h"

namespace QCCL_NAMESPACE {

// Values to codes.

// `Plain`: `pre` is 1.
template <bool Plain = false>
QCCL_FN f32xN minmax_position(const f32xN& x, const MinMaxScale& scale) {
  if constexpr (Plain) return (x - scale.low) * scale.inverse;
  return (x * scale.pre - scale.low) * scale.inverse;
}

// `uniform` is the upper 24 bits of a random word.
QCCL_FN i32xN minmax_stochastic(const f32xN& x, const MinMaxScale& scale, const u32xN& uniform) {
  const f32xN position = minmax_position(x, scale);
#if defined(QCCL_AVX512)
  // Positions in steps of 2^-24, rounded up: of the rest it only matters whether it is zero. The sum carries into the code
  // if the random number is less than the steps above the code.
  const u32xN steps = least(ceil_to_u32(position * 0x1p24f), all_lanes(scale.levels << 24));
  return cast<i32>((steps + (all_lanes(0xffffffu) - uniform)) >> 24u);
#else
  const i32xN below = truncate(position);
  const Mask up = is_less(to_floats(cast<i32>(uniform)) * 0x1p-24f, position - to_floats(below));
  return least(subtract_where(up, below, all_lanes(-1)), all_lanes((i32)scale.levels));
#endif
}

// Roundings of the values of one block: codes() takes sixteen values, codes_together() kTogether times as many. `i` is the
// number of the first value in the block.
template <class Rounding>
struct OneByOne {
  QCCL_FN ManyBytes codes_together(const Rounding& to, const f32xN (&x)[kTogether], u32 i) {
    i32xN codes[kTogether];
    for (u32 g = 0; g < kTogether; ++g) codes[g] = Rounding::codes(to, x[g], i + g * kLanes);
    return narrow_together(codes);
  }
};

// No clamp is needed: x is in the range, so the position is at most fl(width * fl(L / width)), which is L or its
// neighbour.
template <bool Plain>
struct Nearest : OneByOne<Nearest<Plain>> {
  MinMaxScale scale;
  explicit Nearest(const MinMaxScale& s) : scale(s) {}
  QCCL_FN i32xN codes(const Nearest& to, const f32xN& x, u32) { return to_nearest(minmax_position<Plain>(x, to.scale)); }
};

// Takes random numbers from memory: computing one is a long chain of dependent operations.
struct Stochastic : OneByOne<Stochastic> {
  MinMaxScale scale;
  const u32* random;  // one number for each value of the block
  Stochastic(const MinMaxScale& s, const u32* c) : scale(s), random(c) {}
  QCCL_FN i32xN codes(const Stochastic& to, const f32xN& x, u32 i) {
    return minmax_stochastic(x, to.scale, load_lanes<u32>(to.random + i));
  }
};

#if defined(QCCL_AVX512)
// Computes random numbers on the fly; for codes_together() only, from a multiple of kRandomLanes elements on. Positions are
// computed in steps of 2^-24. `Clamp`: the highest position exceeds L.
template <bool Clamp>
struct StochasticTogether {
  float low, steps_per_unit;
  u32 most, index;
  RandomLanes maker;

  StochasticTogether(const MinMaxScale& scale, const RandomKey& key, u32 first)
      : low(scale.low), steps_per_unit(scale.inverse * 0x1p24f), most(scale.levels << 24), index(first) {
    maker = RandomLanes::make(key);
  }

  // Whether the steps equal those of minmax_stochastic, that is, whether scaling by 2^24 is exact. Positions that are
  // subnormal there only need to be above zero here too.
  static bool fits(const MinMaxScale& scale) {
    const bool never_tiny = scale.inverse >= 0x1p-50f && absolute(scale.low) >= 0x1p-50f;
    return scale.pre == 1.0f && scale.inverse <= 0x1p100f && (scale.inverse >= 1.0f || never_tiny);
  }

  static bool clamps(const MinMaxScale& scale) { return (scale.high - scale.low) * scale.inverse > (float)scale.levels; }

  QCCL_FN ManyBytes codes_together(const StochasticTogether& to, const f32xN (&x)[kTogether], u32 i) {
    u32xN random[kTogether];
    RandomLanes::random(to.maker, to.index + i, random);
    return round(to, x, random);
  }
  QCCL_FN ManyBytes round(const StochasticTogether& to, const f32xN (&x)[kTogether], const u32xN (&random)[kTogether]) {
    i32xN negative[kTogether];  // below 0 if the steps are more than the random number; the highest byte is 256 less the code
    for (u32 g = 0; g < kTogether; ++g) {
      const u32xN steps = ceil_to_u32((x[g] - to.low) * to.steps_per_unit);
      negative[g] = cast<i32>((random[g] - (Clamp ? least(steps, all_lanes(to.most)) : steps)) >> 24u);
    }
    return _mm512_sub_epi8(ManyBytes{}, narrow_together(negative));
  }
};
#endif

// Codes to values: by a table in registers if all codes fit, otherwise by arithmetic.

#if defined(QCCL_AVX512)
template <int Bits>
constexpr bool kLookUp = Bits <= 5;
#else
template <int Bits>
constexpr bool kLookUp = false;
#endif

template <int Bits, bool = kLookUp<Bits>>
struct Dequantizer {
  static constexpr i32 levels = (1 << Bits) - 1;
  MinMaxScale scale;

  void set(const MinMaxScale& s) { scale = s; }

  QCCL_FN f32xN values(const Dequantizer& dequantizer, const i32xN& codes) {
    const Mask upper = is_less(all_lanes(levels / 2), codes);
    return from_end(dequantizer.scale, upper, subtract_where(upper, codes, all_lanes(levels)));
  }

  QCCL_FN f32xN load(const Dequantizer& dequantizer, const u8* wire) {
#if defined(QCCL_AVX512)
    if constexpr (Bits == 8) {  // subtract while they are bytes: as a signed byte, code - 256 lacks 1 to code - levels
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(wire));
      const __mmask16 upper = _mm_movepi8_mask(bytes);
      const __m128i steps = _mm_mask_sub_epi8(bytes, upper, bytes, _mm_set1_epi8(-1));
      return from_end(dequantizer.scale, upper, {(i32xN::Part)_mm512_cvtepi8_epi32(steps)});
    }
#endif
    return values(dequantizer, load_codes<Bits>(wire));
  }

 private:
  // The value `steps` from the upper or the lower end.
  QCCL_FN f32xN from_end(const MinMaxScale& s, const Mask& upper, const i32xN& steps) {
    return (select(upper, all_lanes(s.high), all_lanes(s.low)) + to_floats(steps) * s.unit) * s.post;
  }
};

#if defined(QCCL_AVX512)
// The table repeats, so bits above a code's own bits are ignored.
template <int Bits>
struct Dequantizer<Bits, true> {
  static constexpr u32 size = Bits == 5 ? 32 : 16;
  alignas(64) float value[size];

  void set(const MinMaxScale& scale) {
    for (u32 i = 0; i < size; ++i) value[i] = minmax_value(i & ((1u << Bits) - 1), scale);
  }

  QCCL_FN f32xN values(const Dequantizer& dequantizer, const i32xN& codes) {
    const __m512 low = _mm512_load_ps(dequantizer.value);
    const __m512i which = (__m512i)codes.part[0];
    if constexpr (size == 16) return {_mm512_permutexvar_ps(which, low)};
    return {_mm512_permutex2var_ps(low, which, _mm512_load_ps(dequantizer.value + size - 16))};
  }

  QCCL_FN f32xN load(const Dequantizer& dequantizer, const u8* wire) {
    return values(dequantizer, load_codes_with_others<Bits>(wire));
  }
};
#endif

}  // namespace QCCL_NAMESPACE
