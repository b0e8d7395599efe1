// The least and the greatest of many values, in the order of order_key().
#pragma once

#include "../shared/numeric.h"
#include "lanes.h"

namespace QCCL_NAMESPACE {

// The signed integer of 2 or 4 bytes.
template <u32 Nbytes>
using SignedOf = Choose<Nbytes == 2, short, i32>;

// Compares the values' bits without computing keys. As signed integers the bits of positive values are in order and above
// all others; as unsigned integers those of negative values are in reverse order and above all others.
template <class T>
struct Extremes {
  using Storage = typename T::Storage;
  using Signed = SignedOf<sizeof(Storage)>;
  using Unsigned = UnsignedOf<sizeof(Storage)>;
  static constexpr u32 at_once = sizeof(Lanes<Unsigned>) / sizeof(Unsigned);
  static constexpr Signed least_signed = (Signed)((Unsigned)1 << (8 * sizeof(Unsigned) - 1));

  Signed top_signed = least_signed;
  Unsigned top = 0, bottom = (Unsigned)-1;

  QCCL_LOOP void extend(const Storage* x, u32 n) {
    const u32 whole = n / at_once * at_once;
    if (whole) extend_lanes(x, whole);
    for (u32 i = whole; i < n; ++i) extend_one(__builtin_bit_cast(Unsigned, x[i]));
  }

  // Valid after one value or more.
  Range range() const {
    const bool some_negative = (Signed)top < 0, some_positive = top_signed >= 0;
    return finite_range(key_of(some_negative ? top : bottom), key_of(some_positive ? (Unsigned)top_signed : bottom));
  }

 private:
  static i32 key_of(Unsigned bits) { return order_key(bits_of(T::to_float(__builtin_bit_cast(Storage, bits)))); }

  void extend_one(Unsigned bits) { extend_with((Signed)bits, bits, bits); }

  void extend_with(Signed s, Unsigned high, Unsigned low) {
    top_signed = s > top_signed ? s : top_signed;
    top = high > top ? high : top;
    bottom = low < bottom ? low : bottom;
  }

  void extend_lanes(const Storage* x, u32 n) {
    Lanes<Signed> tops_signed = load_lanes<Signed>(x);
    Lanes<Unsigned> tops = load_lanes<Unsigned>(x), bottoms = tops;
    for (u32 i = at_once; i < n; i += at_once) {
      Lanes<Unsigned> bits = load_lanes<Unsigned>(x + i);
#if defined(__x86_64__)
      QCCL_EACH_PART asm("" : "+v"(bits.part[p]));  // otherwise the compiler loads it three times
#endif
      tops_signed = greatest(tops_signed, cast<Signed>(bits));
      tops = greatest(tops, bits);
      bottoms = least(bottoms, bits);
    }
    Signed s[at_once];
    Unsigned high[at_once], low[at_once];
    store_lanes(tops_signed, s), store_lanes(tops, high), store_lanes(bottoms, low);
    for (u32 i = 0; i < at_once; ++i) extend_with(s[i], high[i], low[i]);
  }
};

}  // namespace QCCL_NAMESPACE
