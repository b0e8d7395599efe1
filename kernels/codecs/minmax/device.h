// The min-max codec's tile.
#pragma once

#include "../../cuda/coded.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

template <int Bits, bool Stochastic>
struct MinMaxCoder {
  static constexpr int bits = Bits;
  static constexpr u32 floats = 2, levels = (1u << Bits) - 1;
  static constexpr bool draws = Stochastic;
  // Up to 5 bits, a warp's lanes hold a table of the values of all codes; otherwise values are computed.
  template <class S>
  static constexpr bool shuffles = Bits <= 5 && S::lanes >= 32;

  using Encoder = MinMaxScale;
  struct Decoder {
    MinMaxScale scale;
    float of_lane;  // this lane's entry of the table, which repeats every 2^Bits lanes
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
    return {scale, shuffles<S> ? minmax_value(lane_number() & levels, scale) : 0.0f};
  }

  // A factor of 1 needs no multiplication.
  QCCL_FN bool is_common(const MinMaxScale& scale) { return scale.pre == 1.0f; }
  template <class T, class S>
  QCCL_FN bool is_common(const Decoder& decoder, const Pieces<Bits, T, S>&) {
    return shuffles<S> || decoder.scale.pre == 1.0f;
  }

  template <bool Common>
  QCCL_FN void insert(u64& piece, u32 i, float x, MinMaxScale scale, u32 random) {
    if constexpr (Common) scale.pre = 1.0f;
    const u32 code = Stochastic ? minmax_stochastic(x, scale, random) : minmax_nearest(x, scale);
    piece |= (u64)code << Bits * i;
  }

  // 2^23 + code i of a piece as a float: the code's bits are the lowest of the mantissa.
  QCCL_FN float shifted_code(u64 piece, u32 i) {
    if constexpr (Bits == 8) return float_of(__byte_perm((u32)(piece >> i / 4 * 32), 0x4b000000u, 0x7440u + i % 4));
    return float_of(((u32)(piece >> Bits * i) & levels) | 0x4b000000u);
  }

  // Equal to minmax_value. All lanes of a warp take part if it shuffles.
  template <bool Common, class S>
  QCCL_FN float value(const Decoder& decoder, u64 piece, u32 i) {
    if constexpr (shuffles<S>) {
      // bits above the code select a copy of the same value
      return __shfl_sync(kAllLanes, decoder.of_lane, (int)((u32)(piece >> Bits * i) % 32));
    }
    const MinMaxScale& scale = decoder.scale;
    const float code = shifted_code(piece, i);
    const bool lower = code < 0x1p23f + (1 << (Bits - 1));
    const float steps = code - (lower ? 0x1p23f : 0x1p23f + levels);
    const float scaled = (lower ? scale.low : scale.high) + steps * scale.unit;
    return Common ? scaled : scaled * scale.post;
  }
};

template <int Bits, bool Stochastic>
struct MinMaxTile : CodedTile<MinMaxCoder<Bits, Stochastic>> {};

}  // namespace QCCL_NAMESPACE
