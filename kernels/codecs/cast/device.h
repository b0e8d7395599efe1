// The cast codec's tiles.
#pragma once

#include "../../cuda/coded.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

// 8-bit floats, with few instructions for all but codes of NaNs and infinities: a float has a code's sign, exponent and
// mantissa at their places, and a multiplication by a power of two corrects the exponent. So subnormals are no special case.
template <class F>
struct Float8Coder {
  static constexpr int bits = 8;
  static constexpr u32 floats = 1;
  static constexpr bool draws = false, magnitudes = true;
  static constexpr int reduce_blocks = 2;
  template <class S>
  static constexpr bool shuffles = false;

  static constexpr float correction = F::bias == 7 ? 0x1p120f : 0x1p112f;  // 2^(127 - bias)
  static_assert(F::bias == 7 || F::bias == 15, "the correction is known");

  struct Encoder {
    float inverse, most;
  };
  using Decoder = float;  // the scale

  template <class T, class S>
  QCCL_FN Meta<1> find(const Values<T, S>&, const Unit&, const KeyPair& keys) {
    const i32 greatest = greatest_magnitude(keys);
    return {greatest < kInfinite ? F::unit(greatest) : float_of(kQuietNan)};
  }

  QCCL_FN bool is_nan(const Meta<1>& meta) { return !is_finite(meta.at[0]); }
  template <class T, class S>
  QCCL_FN bool has_nan(const Meta<1>&, const Values<T, S>& x) {
    return any_nan<T, S>(x);
  }

  QCCL_FN Encoder encoder(const Meta<1>& meta) { return {F::inverse(meta.at[0]), float_of(F::most(meta.at[0]))}; }
  template <class S>
  QCCL_FN Decoder decoder(const Meta<1>& meta) {
    return meta.at[0];
  }

  // Equal to F::from_float. To round, add and subtract a number whose last place is the step of the codes around x.
  template <bool>
  QCCL_FN void insert(u64& piece, u32 i, float x, const Encoder& encoder, u32) {
    const float size = lesser(absolute(x * encoder.inverse), encoder.most);
    const u32 exponent = bits_of(size) & 0x7f800000u, least = (128u - F::bias) << 23;
    const float large = float_of(exponent > least ? exponent : least) * (1.5f * (1 << F::shift));
    const u32 magnitude = bits_of((size + large - large) * (1.0f / correction)) << (24 - F::shift);
    const u32 code = (bits_of(x) & 0x80000000u) | magnitude;  // in the highest byte
    const u32 here = __byte_perm((u32)(piece >> i / 4 * 32), code, 0x3210u ^ (i % 4 ^ 7u) << i % 4 * 4);
    piece = i < 4 ? (piece & 0xffffffff00000000ull) | here : (u32)piece | (u64)here << 32;
  }

  QCCL_FN bool is_common(const Encoder&) { return true; }
  // No code is a NaN or an infinity, and a factor has room for the correction.
  template <class T, class S>
  QCCL_FN bool is_common(const Decoder& scale, const Pieces<8, T, S>& pieces) {
    u32 found = is_finite(scale * correction) ? 0 : 0x80u;
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; i += 4) {
        found |= ((u32)((u64)pieces[j] >> 8 * i) & 0x7f7f7f7fu) + (0x80u - F::special) * 0x01010101u;
      }
    }
    return !(found & 0x80808080u);
  }

  template <bool Common, class S>
  QCCL_FN float value(const Decoder& scale, u64 piece, u32 i) {
    if constexpr (!Common) return F::to_float((u32)(piece >> 8 * i) & 0xffu) * scale;
    const u32 code = __byte_perm((u32)(piece >> i / 4 * 32), 0, i % 4 << 12 | 0x0444u);  // in the highest byte
    return float_of((u32)((i32)code >> (24 - F::shift)) & (0x80000000u | 0x7fu << F::shift)) * (scale * correction);
  }
};

// float16 and bfloat16.
template <class W>
struct HalfTile {
  static constexpr int encode_blocks = 4, decode_blocks = 4, reduce_blocks = 2, state_blocks = 2;

  template <class T, class S>
  struct Wire {
    Values<T, S> x;
  };
  template <class T>
  static constexpr bool same_size = sizeof(typename T::Storage) == sizeof(typename W::Storage);

  template <class T, class S>
  QCCL_FN void load_wire(const u8* wire, u64, const Unit& unit, Wire<T, S>& to) {
    if constexpr (same_size<T>) {
      load_values<W, S, u8>(wire, unit, [&](u32 j, u32 i, float value) { to.x[j][i] = value; });
    } else {
      Pieces<16, T, S> pieces;
      load_codes<16, T, S>(wire, unit, pieces);
      widen_pieces<T, S>(pieces, to.x);
    }
  }

  template <class T>
  QCCL_FN void prefetch_wire(const u8* wire, const Unit& unit) {
    prefetch_raw<W>(wire, unit);
  }

  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Wire<T, S>& wire, const Unit&, Take take) {
    for_each_element<T, S>([&](u32 j, u32 i) { take(j, i, wire.x[j][i]); });
  }

  template <class T, class S>
  QCCL_FN bool has_nan(const Wire<T, S>&, const Values<T, S>& x) {
    return any_nan<T, S>(x);
  }

  template <Pass, class T, class S>
  QCCL_FN bool encode(const Values<T, S>& x, u8* wire, const Unit& unit, const TileJob&, const Parameters&, const Memory&,
                      Wire<T, S>& made) {
    const bool nan = any_nan<T, S>(x);
    if constexpr (same_size<T>) {
      store_values<W, S, u8>(wire, unit, x, nan);
      for_each_element<T, S>([&](u32 j, u32 i) { made.x[j][i] = rounded<W>(x[j][i]); });
    } else {
      Pieces<16, T, S> pieces;
#pragma unroll
      for (u32 j = 0; j < S::vectors; ++j) {
        u32 words[2];
        narrow_halves<W>(x[j], nan, words);
        pieces[j] = words[0] | (u64)words[1] << 32;
      }
      store_codes<16, T, S>(wire, unit, pieces);
      widen_pieces<T, S>(pieces, made.x);
    }
    return nan;
  }

  template <class T, class S>
  QCCL_FN void widen_pieces(const Pieces<16, T, S>& pieces, Values<T, S>& x) {
    for_each_element<T, S>([&](u32 j, u32 i) { x[j][i] = widen_half<W>((u16)(pieces[j] >> 16 * i)); });
  }
};

template <u32 Type>
struct CastTile;
template <>
struct CastTile<Cast::kFloat16> : HalfTile<Float16> {};
template <>
struct CastTile<Cast::kBFloat16> : HalfTile<BFloat16> {};
template <>
struct CastTile<Cast::kE4M3> : CodedTile<Float8Coder<Float8E4M3>> {};
template <>
struct CastTile<Cast::kE5M2> : CodedTile<Float8Coder<Float8E5M2>> {};

}  // namespace QCCL_NAMESPACE
