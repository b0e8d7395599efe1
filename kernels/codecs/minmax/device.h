// The min-max codec's tile.
#pragma once

#include "../../cuda/coded.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

template <int Bits, bool Stochastic>
struct MinMaxCoder {
  static constexpr int bits = Bits;
  static constexpr u32 floats = 2, levels = (1u << Bits) - 1;
  static constexpr bool draws = Stochastic, magnitudes = false;
  static constexpr int reduce_blocks = 2;
  // Up to 5 bits, a warp's lanes hold a table of the values of all codes; otherwise values are computed.
  template <class S>
  static constexpr bool shuffles = Bits <= 5 && S::lanes >= 32;

  using Encoder = MinMaxScale;
  struct Decoder {
    MinMaxScale scale;
    float of_lane;  // this lane's entry of the table, which repeats every 2^Bits lanes; for 8 bits 2^23
  };

  template <class T, class S>
  QCCL_FN Meta<2> find(const Values<T, S>&, const Unit&, const KeyPair& keys) {
    const Range range = finite_range(keys.lowest, keys.highest);
    return {range.low, range.high};
  }

  QCCL_FN bool is_nan(const Meta<2>& meta) { return !is_finite(meta.at[0]) || !is_finite(meta.at[1]); }
  template <class T, class S>
  QCCL_FN bool has_nan(const Meta<2>& meta, const Values<T, S>&) {
    return is_nan(meta);
  }

  QCCL_FN MinMaxScale encoder(const Meta<2>& meta) { return minmax_scale({meta.at[0], meta.at[1]}, levels); }
  template <class S>
  QCCL_FN Decoder decoder(const Meta<2>& meta) {
    const MinMaxScale scale = encoder(meta);
    if constexpr (shuffles<S>) return {scale, minmax_value(lane_number() & levels, scale)};
    // The shuffle hides the constant from the compiler, which would move selectors of bytes to registers instead.
    if constexpr (Bits == 8) return {scale, __shfl_sync(kAllLanes, 0x1p23f, 0)};
    return {scale, 0.0f};
  }

  // A factor of 1 needs no multiplication, and value_of_byte() does not hold for all scales.
  QCCL_FN bool is_common(const MinMaxScale& scale) { return scale.pre == 1.0f; }
  template <class T, class S>
  QCCL_FN bool is_common(const Decoder& decoder, const Pieces<Bits, T, S>&) {
    const MinMaxScale& scale = decoder.scale;
    const bool ordinary = (scale.unit >= 0.0f) & (scale.unit <= 0x1p100f) & (bits_of(scale.high) != 0x80000000u);
    return shuffles<S> || (scale.pre == 1.0f && (Bits != 8 || ordinary));
  }

  template <bool Common>
  QCCL_FN void insert(u64& piece, u32 i, float x, MinMaxScale scale, u32 random) {
    if constexpr (Common) scale.pre = 1.0f;
    const u32 code = Stochastic ? minmax_stochastic(x, scale, random) : minmax_nearest(x, scale);
    piece |= (u64)code << Bits * i;
  }

  // 2^23 + byte i of a word as a float: the byte's bits are the lowest of the mantissa.
  QCCL_FN float shifted_byte(const Decoder& decoder, u32 word, u32 i) {
    return float_of(__byte_perm(word, bits_of(decoder.of_lane), 0x7440u + i));
  }

  // The value of a code of 8 bits with fewer instructions than minmax_value(). A code is as far from the nearer end as it, or
  // its complement, is from 0. The sum and the product are exact but for one rounding, as that of the product alone.
  QCCL_FN float value_of_byte(const Decoder& decoder, u32 word, u32 i) {
    const MinMaxScale& scale = decoder.scale;
    const u32 signs = spread_signs(word), steps = word ^ signs;
    const float distance = fused(shifted_byte(decoder, steps, i), scale.unit, -0x1p23f * scale.unit);
    return signs >> 8 * i & 1 ? scale.high - distance : scale.low + distance;
  }

  // Equal to minmax_value. All lanes of a warp take part if it shuffles.
  template <bool Common, class S>
  QCCL_FN float value(const Decoder& decoder, u64 piece, u32 i) {
    if constexpr (shuffles<S>) {
      // bits above the code select a copy of the same value
      return __shfl_sync(kAllLanes, decoder.of_lane, (int)(u32)(piece >> Bits * i));
    }
    const MinMaxScale& scale = decoder.scale;
    const u32 word = (u32)(piece >> i / 4 * 32);
    if constexpr (Bits == 8 && Common) return value_of_byte(decoder, word, i % 4);
    const float packed = float_of(((u32)(piece >> Bits * i) & levels) | 0x4b000000u);
    const float code = Bits == 8 ? shifted_byte(decoder, word, i % 4) : packed;
    const bool lower = code < 0x1p23f + (1 << (Bits - 1));
    const float steps = code - (lower ? 0x1p23f : 0x1p23f + levels);
    const float scaled = (lower ? scale.low : scale.high) + steps * scale.unit;
    return Common ? scaled : scaled * scale.post;
  }
};

template <int Bits, bool Stochastic>
struct MinMaxTile : CodedTile<MinMaxCoder<Bits, Stochastic>> {};

}  // namespace QCCL_NAMESPACE
