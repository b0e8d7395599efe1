// The min-max codec over a block of up to kBlock values, sixteen at a time.
#pragma once

#include "../../host/blocking.h"
#include "../../host/combine.h"
#include "codec.h"
#include "host_lanes.h"

namespace QCCL_NAMESPACE {

// The next functions loop over n values of a block; n is a multiple of kLanes. Left-over values go through them in a copy.
// Constants are passed by value: the compiler would reload them after each store if they were references.

// `n` is a multiple of kTogether * kLanes. `Ahead` is the prefetch distance in blocks: the hardware prefetcher fails if a
// block is read twice.
template <class T, int Bits, u32 Ahead = 0, class Rounding>
QCCL_FN void encode_together(const typename T::Storage* x, u32 n, const Rounding& rounding, u32 first, u8* wire) {
  constexpr u32 nbytes = kTogether * kLanes * sizeof *x;
  for (u32 i = 0; i < n; i += kTogether * kLanes) {
    const auto* ahead = reinterpret_cast<const u8*>(x + i + (u64)Ahead * n);
    for (u32 line = 0; Ahead && line < nbytes; line += 64) __builtin_prefetch(ahead + line);
    f32xN values[kTogether];
    for (u32 g = 0; g < kTogether; ++g) values[g] = Elements<T>::load(x + i + g * kLanes);
    store_together<Bits>(Rounding::codes_together(rounding, values, first + i), wire + code_offset(i, Bits));
  }
}

template <class T, int Bits, class Rounding>
QCCL_LOOP void encode_lanes(const typename T::Storage* x, u32 n, const Rounding rounding, u32 first, u8* wire) {
  const u32 together = n / (kTogether * kLanes) * (kTogether * kLanes);
  encode_together<T, Bits>(x, together, rounding, first, wire);
  for (u32 i = together; i < n; i += kLanes) {
    store_codes<Bits>(Rounding::codes(rounding, Elements<T>::load(x + i), first + i), wire + code_offset(i, Bits));
  }
}

template <class T, int Bits>
QCCL_LOOP void decode_lanes(const u8* wire, u32 n, const Dequantizer<Bits> dequantizer, bool accumulate,
                            typename T::Storage* dst) {
  const auto values = [&](u32 i) QCCL_INLINE { return Dequantizer<Bits>::load(dequantizer, wire + code_offset(i, Bits)); };
  if (accumulate) {
    for (u32 i = 0; i < n; i += kLanes) {
      Elements<T>::store(quiet_nans(Elements<T>::load(dst + i) + values(i)), dst + i);
    }
  } else {
    for (u32 i = 0; i < n; i += kLanes) Elements<T>::store(values(i), dst + i);
  }
}

// Some sources of a reduction, and the dequantizers of one bucket.
template <int Bits, u32 Most>
struct Sources {
  const u8* codes[Most];
  Dequantizer<Bits> dequantizers[Most];
};
constexpr u32 kMostSources = 16;

template <int Bits>
using ManySources = Sources<Bits, kMostSources>;

template <int Bits, u32 Few>
QCCL_FN Sources<Bits, Few> first_of(const ManySources<Bits>& sources) {
  Sources<Bits, Few> first;
  __builtin_memcpy(&first.codes, sources.codes, sizeof first.codes);
  __builtin_memcpy(&first.dequantizers, sources.dequantizers, sizeof first.dequantizers);
  return first;
}

template <class T, int Bits, Combine op, u32 Few>
QCCL_LOOP void total_lanes(const ManySources<Bits>& all, const typename T::Storage* own, const Terms terms, float scale,
                           u32 n, float* total) {
  const auto sources = first_of<Bits, Few ? Few : kMostSources>(all);
  for (u32 i = 0; i < n; i += kLanes) {
    const auto source = [&](u32 s) QCCL_INLINE {
      return Dequantizer<Bits>::load(sources.dequantizers[s], sources.codes[s] + code_offset(i, Bits));
    };
    const auto own_values = [&]() QCCL_INLINE { return Elements<T>::load(own + i); };
    f32xN sum;
    if constexpr (Few > 0) {
      sum = combine_few_terms<op, Few>(terms.own, source, own_values);
    } else {
      const auto earlier = [&]() QCCL_INLINE { return load_lanes<float>(total + i); };
      sum = combine_terms<op>(terms, source, own_values, earlier);
    }
    store_lanes(sum * scale, total + i);
  }
}

// Stores the codes of the totals to `wire` and the decoded values to `out`, which may be null.
template <class T, int Bits, class Rounding>
QCCL_LOOP void finish_lanes(const float* total, u32 n, const Rounding rounding, const Dequantizer<Bits> dequantizer, u32 first,
                            u8* wire, typename T::Storage* out) {
  for (u32 i = 0; i < n; i += kLanes) {
    const i32xN codes = Rounding::codes(rounding, load_lanes<float>(total + i), first + i);
    store_codes<Bits>(codes, wire + code_offset(i, Bits));
    if (out) Elements<T>::store(Dequantizer<Bits>::values(dequantizer, codes), out + i);
  }
}

// The same for any number n of values: whole lanes, then the left-over values.

template <class T, int Bits, class Rounding>
void encode_block(const typename T::Storage* x, u32 n, const Rounding& rounding, u8* wire) {
  const u32 whole = n / kLanes * kLanes, rest = n - whole;
  encode_lanes<T, Bits>(x, whole, rounding, 0, wire);
  if (!rest) return;
  typename T::Storage some[kLanes] = {};
  SomeCodes<Bits> codes;
  __builtin_memcpy(some, x + whole, rest * sizeof some[0]);
  encode_lanes<T, Bits>(some, kLanes, rounding, whole, codes.bytes);
  codes.write(wire + code_offset(whole, Bits), rest);
}

template <class T, int Bits>
void decode_block(const u8* wire, u32 n, const Dequantizer<Bits>& dequantizer, bool accumulate, typename T::Storage* dst) {
  const u32 whole = n / kLanes * kLanes, rest = n - whole;
  decode_lanes<T, Bits>(wire, whole, dequantizer, accumulate, dst);
  if (!rest) return;
  typename T::Storage some[kLanes] = {};
  SomeCodes<Bits> codes;
  codes.read(wire + code_offset(whole, Bits), rest);
  __builtin_memcpy(some, dst + whole, rest * sizeof some[0]);
  decode_lanes<T, Bits>(codes.bytes, kLanes, dequantizer, accumulate, some);
  __builtin_memcpy(dst + whole, some, rest * sizeof some[0]);
}

// `total` has space for n rounded up to a multiple of kLanes.
template <class T, int Bits, Combine op, u32 Few>
void total_block(const ManySources<Bits>& sources, const typename T::Storage* own, const Terms& terms, float scale, u32 n,
                 float* total) {
  const u32 whole = n / kLanes * kLanes, rest = n - whole;
  total_lanes<T, Bits, op, Few>(sources, own, terms, scale, whole, total);
  if (!rest) return;
  typename T::Storage some[kLanes] = {};
  SomeCodes<Bits> codes[kMostSources];
  ManySources<Bits> staged = sources;
  for (u32 s = 0; s < terms.sources; ++s) {
    codes[s].read(sources.codes[s] + code_offset(whole, Bits), rest);
    staged.codes[s] = codes[s].bytes;
  }
  if (terms.own != kNoOwn) __builtin_memcpy(some, own + whole, rest * sizeof some[0]);
  total_lanes<T, Bits, op, Few>(staged, some, terms, scale, kLanes, total + whole);
}

// Sums of one to three sources have specialised loops.
template <class T, int Bits>
void total_block(Combine op, const ManySources<Bits>& sources, const typename T::Storage* own, const Terms& terms,
                 float scale, u32 n, float* total) {
  const u32 few = op == Combine::sum && !terms.resumed ? terms.sources : 0;
  const auto run = op == Combine::min   ? total_block<T, Bits, Combine::min, 0>
                   : op == Combine::max ? total_block<T, Bits, Combine::max, 0>
                   : few == 1           ? total_block<T, Bits, Combine::sum, 1>
                   : few == 2           ? total_block<T, Bits, Combine::sum, 2>
                   : few == 3           ? total_block<T, Bits, Combine::sum, 3>
                                        : total_block<T, Bits, Combine::sum, 0>;
  run(sources, own, terms, scale, n, total);
}

template <class T, int Bits, class Rounding>
void finish_block(const float* total, u32 n, const Rounding& rounding, const Dequantizer<Bits>& dequantizer, u8* wire,
                  typename T::Storage* out) {
  const u32 whole = n / kLanes * kLanes, rest = n - whole;
  finish_lanes<T, Bits>(total, whole, rounding, dequantizer, 0, wire, out);
  if (!rest) return;
  typename T::Storage some[kLanes];
  SomeCodes<Bits> codes;
  finish_lanes<T, Bits>(total + whole, kLanes, rounding, dequantizer, whole, codes.bytes, out ? some : nullptr);
  codes.write(wire + code_offset(whole, Bits), rest);
  if (out) __builtin_memcpy(out + whole, some, rest * sizeof some[0]);
}

#if defined(QCCL_AVX512)
template <class T, int Bits, bool Clamp>
QCCL_LOOP void encode_stochastic(const typename T::Storage* x, u32 n, const MinMaxScale& scale, const RandomKey& key,
                                 u32 index, u8* wire) {
  encode_together<T, Bits, 2>(x, n, StochasticTogether<Clamp>(scale, key, index), 0, wire);
}
#endif

// Encodes n values from element `begin` of a call, all in one bucket and kBlock at most; null `random` rounds to nearest.
template <class T, int Bits>
void encode_values(const typename T::Storage* x, u32 n, const MinMaxScale& scale, RandomBlock* random, u64 begin, u8* wire) {
  if (minmax_is_nan(scale)) {
    __builtin_memset(wire, 0, packed_nbytes(n, Bits));
    return;
  }
  if (!random) {
    if (scale.pre == 1.0f) return encode_block<T, Bits>(x, n, Nearest<true>(scale), wire);
    return encode_block<T, Bits>(x, n, Nearest<false>(scale), wire);
  }
  u32 done = 0;
#if defined(QCCL_AVX512)
  const u64 index = random->index_of(begin);
  if (index % kRandomLanes == 0 && (u32)index <= 0u - kBlock && StochasticTogether<true>::fits(scale)) {
    done = n / kRandomLanes * kRandomLanes;
    const auto run = StochasticTogether<true>::clamps(scale) ? encode_stochastic<T, Bits, true>
                                                             : encode_stochastic<T, Bits, false>;
    run(x, done, scale, random->key_of(index), (u32)index, wire);
    if (done == n) return;
  }
#endif
  encode_block<T, Bits>(x + done, n - done, Stochastic(scale, random->of(begin + done, n - done)),
                        wire + code_offset(done, Bits));
}

}  // namespace QCCL_NAMESPACE
