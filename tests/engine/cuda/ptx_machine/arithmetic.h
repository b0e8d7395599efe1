// The PTX instructions that compute each lane's result from its operands alone, and which bits of the result are
// undefined if bits of the operands are.
//
// Registers are 64 bits wide here; a narrower PTX register has zeros above. Source of the semantics: NVIDIA, "Parallel
// Thread Execution ISA", chapter 9.7. Instructions with results that it leaves open (.approx, .ftz) are not here.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

namespace ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;

constexpr unsigned kLanes = 32;
constexpr unsigned kSources = 4;
using Sources = std::array<u64, kSources>;

// A bit pattern of 32 bits; float's own NaNs are not kept by all compilers.
inline bool is_nan(u32 bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

template <class T>
T value_of(u64 bits) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<float>((u32)bits);
  } else if constexpr (std::is_same_v<T, bool>) {
    return bits != 0;
  } else {
    return (T)bits;
  }
}

// The NaN that arithmetic makes is 0x7fffffff (section 9.7.3).
template <class T>
u64 bits_of(T value) {
  if constexpr (std::is_same_v<T, float>) {
    const u32 bits = std::bit_cast<u32>(value);
    return is_nan(bits) ? 0x7fffffffu : bits;
  } else {
    return (u64)(std::make_unsigned_t<std::conditional_t<std::is_same_v<T, bool>, u8, T>>)value;
  }
}

// How undefined bits of the sources spread to the result.
enum class Spread {
  all,      // one undefined bit makes the whole result undefined
  upwards,  // sums: from the lowest undefined bit on
  product,  // of the first two sources, plus the third: from the lowest bit on to which an undefined one adds
  both,     // and: unless the other bit is a zero
  either,   // or: unless the other bit is a one
  any,      // xor, not: the same bits
  moved,    // the instruction moves the bits of its first `data` sources; the others say where
  halves,   // of the first source to the upper 16 bits, of the second to the lower
  select,   // selp: the bits that differ, if the predicate is undefined
};

struct Operation {
  std::string_view name;
  unsigned sources;
  u64 width;  // the bits of the result
  void (*lanes)(u64* to, const u64* const* from, u32 active);
  u64 (*one)(const Sources& from);
  Spread spread;
  unsigned data;  // see Spread::moved
};

// An operation with the result D of sources A.
template <class D, class... A>
struct Entry {
  template <auto F, std::size_t... I>
  static u64 apply(const Sources& from, std::index_sequence<I...>) {
    return bits_of<D>(F(value_of<A>(from[I])...));
  }

  template <auto F, std::size_t... I>
  static void apply_lanes(u64* to, const u64* const* from, u32 active, std::index_sequence<I...>) {
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (active >> lane & 1) to[lane] = bits_of<D>(F(value_of<A>(from[I][lane])...));
    }
  }

  template <auto F>
  static u64 one(const Sources& from) {
    return apply<F>(from, std::index_sequence_for<A...>());
  }

  template <auto F>
  static void lanes(u64* to, const u64* const* from, u32 active) {
    apply_lanes<F>(to, from, active, std::index_sequence_for<A...>());
  }

  template <auto F>
  static Operation make(std::string_view name, Spread spread, unsigned data = 0) {
    const u64 width = std::is_same_v<D, bool> ? 1 : ~0ull >> (64 - 8 * sizeof(D));
    return {name, sizeof...(A), width, lanes<F>, one<F>, spread, data};
  }
};

// The bits of the result that are undefined; `undefined` has those of the sources, at least one.
inline u64 undefined_result(const Operation& op, const Sources& x, const Sources& undefined) {
  const auto [a, b, c, d] = x;
  const auto [ua, ub, uc, ud] = undefined;
  switch (op.spread) {
    case Spread::all:
      return op.width;
    case Spread::upwards: {
      const u64 any = ua | ub | uc;
      return (any | -any) & op.width;
    }
    case Spread::product: {
      const auto lowest = [](u64 bits) { return bits & -bits; };
      const u64 any = lowest(ua) * lowest(b | ub) | lowest(ub) * lowest(a | ua) | uc;
      return (any | -any) & op.width;
    }
    case Spread::both:
      return ((ua & ub) | (ua & b) | (ub & a)) & op.width;
    case Spread::either:
      return ((ua & ub) | (ua & ~b) | (ub & ~a)) & op.width;
    case Spread::any:
      return (ua | ub) & op.width;
    case Spread::moved: {
      Sources moved = x;
      for (unsigned i = 0; i < kSources; ++i) {
        if (i < op.data) {
          moved[i] = undefined[i];
        } else if (undefined[i]) {
          return op.width;
        }
      }
      return op.one(moved);
    }
    case Spread::halves:
      return (ua ? 0xffff0000u : 0u) | (ub ? 0xffffu : 0u);
    case Spread::select:
      return uc ? ((a ^ b) | ua | ub) & op.width : c ? ua : ub;
  }
  return op.width;
}

// ---- floating point --------------------------------------------------------------------------------------------------

inline u32 order_of(u32 bits) { return bits >> 31 ? ~bits : bits | 0x80000000u; }  // -0 comes before +0

template <bool Greatest, bool KeepsNan>
u32 extreme(u32 a, u32 b) {
  if (is_nan(a) || is_nan(b)) {
    if (KeepsNan || (is_nan(a) && is_nan(b))) return 0x7fffffffu;
    return is_nan(a) ? b : a;
  }
  return (order_of(a) < order_of(b)) != Greatest ? a : b;
}

inline u16 bfloat16_of(u32 bits) {
  if (is_nan(bits)) return 0x7fff;
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline u16 half_of(u32 bits) {
  if (is_nan(bits)) return 0x7fff;
  return std::bit_cast<u16>((_Float16)std::bit_cast<float>(bits));
}

inline u32 of_half(u16 half) {
  if ((half & 0x7fff) > 0x7c00) return 0x7fffffffu;
  return std::bit_cast<u32>((float)std::bit_cast<_Float16>(half));
}

// Toward zero; a positive number that is too large becomes the largest finite one.
inline u16 bfloat16_toward_zero(u32 bits) {
  if (is_nan(bits)) return 0x7fff;
  return (u16)(bits >> 16);
}

// Toward zero to an integer, limited to its range; NaN becomes 0 (section 9.7.9, cvt).
template <class T>
T integer_of(float x) {
  if (x != x) return 0;
  const float whole = std::trunc(x);
  constexpr float limit = (float)(1ull << (8 * sizeof(T) - 1)) * (std::is_signed_v<T> ? 1.0f : 2.0f);
  if (whole >= limit) return (T)(std::is_signed_v<T> ? ~0ull >> (65 - 8 * sizeof(T)) : ~0ull);
  if (whole <= (std::is_signed_v<T> ? -limit : 0.0f)) return std::is_signed_v<T> ? (T)(1ull << (8 * sizeof(T) - 1)) : (T)0;
  return (T)whole;
}

// ---- integers --------------------------------------------------------------------------------------------------------

template <class T>
T shifted_left(T x, u32 by) {
  return by < 8 * sizeof(T) ? (T)(x << by) : (T)0;
}

template <class T>
T shifted_right(T x, u32 by) {
  constexpr u32 most = 8 * sizeof(T) - 1;
  if constexpr (std::is_signed_v<T>) return (T)(x >> (by < most ? by : most));
  return by <= most ? (T)(x >> by) : (T)0;
}

template <bool Left>
u32 funnel(u32 low, u32 high, u32 by) {
  const u64 both = low | (u64)high << 32;
  return (u32)(Left ? both << by % 32 >> 32 : both >> by % 32);
}

inline u32 permuted(u32 low, u32 high, u32 selector) {
  const u64 bytes = low | (u64)high << 32;
  u32 result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const u32 nibble = selector >> 4 * i & 15, byte = (u32)(bytes >> 8 * (nibble & 7)) & 0xff;
    result |= (nibble & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return result;
}

template <class T>
T field(T x, u32 position, u32 length) {
  constexpr u32 bits = 8 * sizeof(T);
  position &= 0xff, length &= 0xff;
  if (length == 0) return 0;
  const u64 extended = std::is_signed_v<T> ? (u64)(s64)x : (u64)x;
  const u32 last = position + length - 1 < bits - 1 ? position + length - 1 : bits - 1;
  const bool negative = std::is_signed_v<T> && extended >> last & 1;
  const u64 mask = length >= 64 ? ~0ull : (1ull << length) - 1;
  const u64 inside = position >= bits ? 0 : ((u64)(std::make_unsigned_t<T>)x >> position) & mask;
  const u32 known = position >= bits ? 0 : bits - position < length ? bits - position : length;
  const u64 above = known >= 64 ? 0 : ~0ull << known;
  return (T)(negative ? inside | above : inside & ~above);
}

template <class T>
T with_field(T x, T into, u32 position, u32 length) {
  constexpr u32 bits = 8 * sizeof(T);
  position &= 0xff, length &= 0xff;
  if (position >= bits) return into;
  const T mask = (T)((length >= bits ? ~(T)0 : (T)(((T)1 << length) - 1)) << position);
  return (T)((into & ~mask) | ((T)(x << position) & mask));
}

template <class T>
auto product_high(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return (T)((Wide)a * (Wide)b >> 8 * sizeof(T));
}

// The hardware's results without a fault: all ones for a division by zero.
template <class T>
T quotient(T a, T b) {
  if (b == 0) return (T)~(T)0;
  if (std::is_signed_v<T> && b == (T)-1) return (T)(0 - (std::make_unsigned_t<T>)a);
  return (T)(a / b);
}

template <class T>
T remainder_of(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == (T)-1) return 0;
  return (T)(a % b);
}

}  // namespace ptx
