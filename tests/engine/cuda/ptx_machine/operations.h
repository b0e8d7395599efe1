// The table of the instructions in arithmetic.h, by the names that tests/engine/cuda/ptx_program.py gives them: PTX's own
// without flags that change nothing here, and with the type's letter b where its sign does not matter.
#pragma once

#include <vector>

#include "arithmetic.h"

namespace ptx {

// An entry: its name, its Spread, the types of the result and the sources, and the function.
#define QCCL_TYPES(...) __VA_ARGS__
#define QCCL_OPERATION(name, spread, types, ...) \
  Entry<types>::make<(__VA_ARGS__)>(name, Spread::spread)
#define QCCL_MOVED(name, data, types, ...) \
  Entry<types>::make<(__VA_ARGS__)>(name, Spread::moved, data)

// Entries for an unsigned type T of N bits.
#define QCCL_BITS(T, N)                                                                                      \
  QCCL_MOVED("mov.b" N, 1, QCCL_TYPES(T, T), [](T a) -> T { return a; }),                                    \
  QCCL_OPERATION("add.b" N, upwards, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return (T)(a + b); }),         \
  QCCL_OPERATION("sub.b" N, upwards, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return (T)(a - b); }),         \
  QCCL_OPERATION("neg.b" N, upwards, QCCL_TYPES(T, T), [](T a) -> T { return (T)(0 - a); }),                 \
  QCCL_OPERATION("mul.lo.b" N, product, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return (T)((u64)a * b); }), \
  QCCL_OPERATION("mad.lo.b" N, product, QCCL_TYPES(T, T, T, T),                                              \
                 [](T a, T b, T c) -> T { return (T)((u64)a * b + c); }),                                    \
  QCCL_OPERATION("and.b" N, both, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return (T)(a & b); }),            \
  QCCL_OPERATION("or.b" N, either, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return (T)(a | b); }),           \
  QCCL_OPERATION("xor.b" N, any, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return (T)(a ^ b); }),             \
  QCCL_OPERATION("not.b" N, any, QCCL_TYPES(T, T), [](T a) -> T { return (T)~a; }),                          \
  QCCL_MOVED("shl.b" N, 1, QCCL_TYPES(T, T, u32), [](T a, u32 b) -> T { return shifted_left(a, b); }),       \
  QCCL_OPERATION("selp.b" N, select, QCCL_TYPES(T, T, T, bool), [](T a, T b, bool c) -> T { return c ? a : b; }), \
  QCCL_OPERATION("setp.eq.b" N, all, QCCL_TYPES(bool, T, T), [](T a, T b) -> bool { return a == b; }),       \
  QCCL_OPERATION("setp.ne.b" N, all, QCCL_TYPES(bool, T, T), [](T a, T b) -> bool { return a != b; })

// Entries for a type T, signed or not, of the name N.
#define QCCL_INTEGERS(T, N)                                                                                  \
  QCCL_MOVED("shr." N, 1, QCCL_TYPES(T, T, u32), [](T a, u32 b) -> T { return shifted_right(a, b); }),       \
  QCCL_OPERATION("mul.hi." N, all, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return product_high(a, b); }),   \
  QCCL_OPERATION("div." N, all, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return quotient(a, b); }),          \
  QCCL_OPERATION("rem." N, all, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return remainder_of(a, b); }),      \
  QCCL_OPERATION("min." N, all, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return a < b ? a : b; }),           \
  QCCL_OPERATION("max." N, all, QCCL_TYPES(T, T, T), [](T a, T b) -> T { return a > b ? a : b; }),           \
  QCCL_OPERATION("setp.lt." N, all, QCCL_TYPES(bool, T, T), [](T a, T b) -> bool { return a < b; }),         \
  QCCL_OPERATION("setp.le." N, all, QCCL_TYPES(bool, T, T), [](T a, T b) -> bool { return a <= b; }),        \
  QCCL_OPERATION("setp.gt." N, all, QCCL_TYPES(bool, T, T), [](T a, T b) -> bool { return a > b; }),         \
  QCCL_OPERATION("setp.ge." N, all, QCCL_TYPES(bool, T, T), [](T a, T b) -> bool { return a >= b; })

#define QCCL_WIDE(T, N, W)                                                                                   \
  QCCL_OPERATION("mul.wide." N, product, QCCL_TYPES(W, T, T), [](T a, T b) -> W { return (W)a * (W)b; }),    \
  QCCL_OPERATION("mad.wide." N, product, QCCL_TYPES(W, T, T, W),                                             \
                 [](T a, T b, W c) -> W { return (W)((std::make_unsigned_t<W>)((W)a * (W)b) + (std::make_unsigned_t<W>)c); })

// An integer's lower bits, with their sign or zeros above: to a type of 16, 32 or 64 bits.
#define QCCL_EXTENDED(T, N)                                                                                  \
  QCCL_MOVED("extend." N ".b16", 1, QCCL_TYPES(u16, T), [](T a) -> u16 { return (u16)a; }),                  \
  QCCL_MOVED("extend." N ".b32", 1, QCCL_TYPES(u32, T), [](T a) -> u32 { return (u32)a; }),                  \
  QCCL_MOVED("extend." N ".b64", 1, QCCL_TYPES(u64, T), [](T a) -> u64 { return (u64)a; })

// Between floats and integers. A result narrower than 16 bits fills a register of 16.
#define QCCL_CONVERTED(T, N)                                                                                 \
  QCCL_OPERATION("cvt.rn.f32." N, all, QCCL_TYPES(float, T), [](T a) -> float { return (float)a; }),         \
  QCCL_OPERATION("cvt.rzi." N ".f32", all, QCCL_TYPES(T, float), integer_of<T>)

#define QCCL_COMPARED(name, test) \
  QCCL_OPERATION("setp." name ".f32", all, QCCL_TYPES(bool, float, float), [](float a, float b) -> bool { return test; })

inline std::vector<Operation> operations() {
  return {
      QCCL_BITS(u8, "8"), QCCL_BITS(u16, "16"), QCCL_BITS(u32, "32"), QCCL_BITS(u64, "64"),
      QCCL_INTEGERS(u16, "u16"), QCCL_INTEGERS(u32, "u32"), QCCL_INTEGERS(u64, "u64"),
      QCCL_INTEGERS(s16, "s16"), QCCL_INTEGERS(s32, "s32"), QCCL_INTEGERS(s64, "s64"),
      QCCL_WIDE(u16, "u16", u32), QCCL_WIDE(u32, "u32", u64), QCCL_WIDE(s16, "s16", s32), QCCL_WIDE(s32, "s32", s64),
      QCCL_EXTENDED(u8, "u8"), QCCL_EXTENDED(u16, "u16"), QCCL_EXTENDED(u32, "u32"), QCCL_EXTENDED(u64, "u64"),
      QCCL_EXTENDED(s8, "s8"), QCCL_EXTENDED(s16, "s16"), QCCL_EXTENDED(s32, "s32"), QCCL_EXTENDED(s64, "s64"),
      QCCL_CONVERTED(u8, "u8"), QCCL_CONVERTED(u16, "u16"), QCCL_CONVERTED(u32, "u32"), QCCL_CONVERTED(u64, "u64"),
      QCCL_CONVERTED(s8, "s8"), QCCL_CONVERTED(s16, "s16"), QCCL_CONVERTED(s32, "s32"), QCCL_CONVERTED(s64, "s64"),

      // bits
      QCCL_OPERATION("abs.s32", all, QCCL_TYPES(u32, s32), [](s32 a) -> u32 { return a < 0 ? 0 - (u32)a : (u32)a; }),
      QCCL_OPERATION("abs.s64", all, QCCL_TYPES(u64, s64), [](s64 a) -> u64 { return a < 0 ? 0 - (u64)a : (u64)a; }),
      QCCL_OPERATION("abs.s16", all, QCCL_TYPES(u16, s16), [](s16 a) -> u16 { return (u16)(a < 0 ? -a : a); }),
      QCCL_OPERATION("popc.b32", all, QCCL_TYPES(u32, u32), [](u32 a) -> u32 { return (u32)std::popcount(a); }),
      QCCL_OPERATION("popc.b64", all, QCCL_TYPES(u32, u64), [](u64 a) -> u32 { return (u32)std::popcount(a); }),
      QCCL_OPERATION("clz.b32", all, QCCL_TYPES(u32, u32), [](u32 a) -> u32 { return (u32)std::countl_zero(a); }),
      QCCL_OPERATION("clz.b64", all, QCCL_TYPES(u32, u64), [](u64 a) -> u32 { return (u32)std::countl_zero(a); }),
      QCCL_MOVED("prmt.b32", 2, QCCL_TYPES(u32, u32, u32, u32), permuted),
      QCCL_MOVED("shf.l.wrap.b32", 2, QCCL_TYPES(u32, u32, u32, u32), funnel<true>),
      QCCL_MOVED("shf.r.wrap.b32", 2, QCCL_TYPES(u32, u32, u32, u32), funnel<false>),
      QCCL_MOVED("bfe.u32", 1, QCCL_TYPES(u32, u32, u32, u32), field<u32>),
      QCCL_MOVED("bfe.u64", 1, QCCL_TYPES(u64, u64, u32, u32), field<u64>),
      QCCL_MOVED("bfe.s32", 1, QCCL_TYPES(s32, s32, u32, u32), field<s32>),
      QCCL_MOVED("bfe.s64", 1, QCCL_TYPES(s64, s64, u32, u32), field<s64>),
      QCCL_MOVED("bfi.b32", 2, QCCL_TYPES(u32, u32, u32, u32, u32), with_field<u32>),
      QCCL_MOVED("bfi.b64", 2, QCCL_TYPES(u64, u64, u64, u32, u32), with_field<u64>),
      QCCL_MOVED("pack.b16", 2, QCCL_TYPES(u16, u8, u8), [](u8 a, u8 b) -> u16 { return (u16)(a | b << 8); }),
      QCCL_MOVED("pack.b32", 2, QCCL_TYPES(u32, u16, u16), [](u16 a, u16 b) -> u32 { return a | (u32)b << 16; }),
      QCCL_MOVED("pack.b64", 2, QCCL_TYPES(u64, u32, u32), [](u32 a, u32 b) -> u64 { return a | (u64)b << 32; }),
      QCCL_MOVED("pack4.b32", 4, QCCL_TYPES(u32, u8, u8, u8, u8),
                 [](u8 a, u8 b, u8 c, u8 d) -> u32 { return a | (u32)b << 8 | (u32)c << 16 | (u32)d << 24; }),
      QCCL_MOVED("pack4.b64", 4, QCCL_TYPES(u64, u16, u16, u16, u16),
                 [](u16 a, u16 b, u16 c, u16 d) -> u64 { return a | (u64)b << 16 | (u64)c << 32 | (u64)d << 48; }),

      // predicates
      QCCL_MOVED("mov.pred", 1, QCCL_TYPES(bool, bool), [](bool a) -> bool { return a; }),
      QCCL_OPERATION("not.pred", any, QCCL_TYPES(bool, bool), [](bool a) -> bool { return !a; }),
      QCCL_OPERATION("and.pred", both, QCCL_TYPES(bool, bool, bool), [](bool a, bool b) -> bool { return a && b; }),
      QCCL_OPERATION("or.pred", either, QCCL_TYPES(bool, bool, bool), [](bool a, bool b) -> bool { return a || b; }),
      QCCL_OPERATION("xor.pred", any, QCCL_TYPES(bool, bool, bool), [](bool a, bool b) -> bool { return a != b; }),

      // fp32; the names that end in u are true for NaN
      QCCL_OPERATION("add.rn.f32", all, QCCL_TYPES(float, float, float), [](float a, float b) -> float { return a + b; }),
      QCCL_OPERATION("sub.rn.f32", all, QCCL_TYPES(float, float, float), [](float a, float b) -> float { return a - b; }),
      QCCL_OPERATION("mul.rn.f32", all, QCCL_TYPES(float, float, float), [](float a, float b) -> float { return a * b; }),
      QCCL_OPERATION("div.rn.f32", all, QCCL_TYPES(float, float, float), [](float a, float b) -> float { return a / b; }),
      QCCL_OPERATION("rcp.rn.f32", all, QCCL_TYPES(float, float), [](float a) -> float { return 1.0f / a; }),
      QCCL_OPERATION("sqrt.rn.f32", all, QCCL_TYPES(float, float), [](float a) -> float { return std::sqrt(a); }),
      QCCL_OPERATION("fma.rn.f32", all, QCCL_TYPES(float, float, float, float),
                     [](float a, float b, float c) -> float { return std::fma(a, b, c); }),
      QCCL_OPERATION("neg.f32", any, QCCL_TYPES(u32, u32), [](u32 a) -> u32 { return a ^ 0x80000000u; }),
      QCCL_MOVED("abs.f32", 1, QCCL_TYPES(u32, u32), [](u32 a) -> u32 { return a & 0x7fffffffu; }),
      QCCL_OPERATION("min.f32", all, QCCL_TYPES(u32, u32, u32), extreme<false, false>),
      QCCL_OPERATION("max.f32", all, QCCL_TYPES(u32, u32, u32), extreme<true, false>),
      QCCL_OPERATION("min.NaN.f32", all, QCCL_TYPES(u32, u32, u32), extreme<false, true>),
      QCCL_OPERATION("max.NaN.f32", all, QCCL_TYPES(u32, u32, u32), extreme<true, true>),
      QCCL_COMPARED("eq", a == b), QCCL_COMPARED("ne", a < b || a > b), QCCL_COMPARED("lt", a < b),
      QCCL_COMPARED("le", a <= b), QCCL_COMPARED("gt", a > b), QCCL_COMPARED("ge", a >= b),
      QCCL_COMPARED("equ", !(a < b || a > b)), QCCL_COMPARED("neu", !(a == b)), QCCL_COMPARED("ltu", !(a >= b)),
      QCCL_COMPARED("leu", !(a > b)), QCCL_COMPARED("gtu", !(a <= b)), QCCL_COMPARED("geu", !(a < b)),
      QCCL_COMPARED("num", a == a && b == b), QCCL_COMPARED("nan", a != a || b != b),

      // 16-bit floats; of a pair the first source becomes the upper half
      QCCL_OPERATION("cvt.f32.f16", all, QCCL_TYPES(u32, u16), of_half),
      QCCL_MOVED("cvt.f32.bf16", 1, QCCL_TYPES(u32, u16), [](u16 a) -> u32 { return (u32)a << 16; }),
      QCCL_OPERATION("cvt.rn.f16.f32", all, QCCL_TYPES(u16, u32), half_of),
      QCCL_OPERATION("cvt.rn.bf16.f32", all, QCCL_TYPES(u16, u32), bfloat16_of),
      QCCL_OPERATION("cvt.rz.bf16.f32", all, QCCL_TYPES(u16, u32), bfloat16_toward_zero),
      QCCL_OPERATION("cvt.rn.f16x2.f32", halves, QCCL_TYPES(u32, u32, u32),
                     [](u32 a, u32 b) -> u32 { return (u32)half_of(a) << 16 | half_of(b); }),
      QCCL_OPERATION("cvt.rn.bf16x2.f32", halves, QCCL_TYPES(u32, u32, u32),
                     [](u32 a, u32 b) -> u32 { return (u32)bfloat16_of(a) << 16 | bfloat16_of(b); }),
      QCCL_OPERATION("cvt.rz.bf16x2.f32", halves, QCCL_TYPES(u32, u32, u32),
                     [](u32 a, u32 b) -> u32 { return (u32)bfloat16_toward_zero(a) << 16 | bfloat16_toward_zero(b); }),
  };
}

}  // namespace ptx
