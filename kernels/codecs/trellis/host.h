// The trellis codec on the host: sixteen sequences at a time, equal to the scalar functions of codec.h bit for bit.
#pragma once

#include "../../host/codes.h"
#include "../../host/team.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

using u16xN = Lanes<u16>;  // one lane for each of the 32 sequences

// x, with `number` subtracted in the lanes whose bits are set.
QCCL_FN u16xN subtract_where(u32 bits, u16xN x, u16 number) {
#if defined(QCCL_AVX512)
  x.part[0] = (u16xN::Part)_mm512_mask_sub_epi16((__m512i)x.part[0], bits, (__m512i)x.part[0], _mm512_set1_epi16((short)number));
#else
  alignas(32) static constexpr u16 places[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                                 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  constexpr u32 lanes = kRegisterBytes / 2;
  QCCL_EACH_PART {
    const u16 of_part = (u16)(bits >> p * lanes / 16 * 16);
    x.part[p] -= (u16xN::Part)((load_part<u16xN::Part>(places + p * lanes % 16) & of_part) != 0) & number;
  }
#endif
  return x;
}

// The numbers of two registers, 0 to 32767, in one.
QCCL_FN u16xN::Part halve(const i32xN::Part& a, const i32xN::Part& b) {
#if defined(QCCL_AVX512)
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return (u16xN::Part)_mm512_permutexvar_epi64(order, _mm512_packus_epi32((__m512i)a, (__m512i)b));
#elif defined(QCCL_AVX2)
  return (u16xN::Part)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8);
#elif defined(__SSE2__)
  return (u16xN::Part)_mm_packs_epi32((__m128i)a, (__m128i)b);
#else
  return __builtin_shufflevector((u16xN::Part)a, (u16xN::Part)b, 0, 2, 4, 6, 8, 10, 12, 14);
#endif
}

// The greatest of the lanes.
QCCL_FN float greatest_lane(const f32xN& x) {
#if defined(QCCL_AVX512)
  return _mm512_reduce_max_ps((__m512)x.part[0]);
#else
  alignas(64) float lanes[kLanes];
  store_lanes(x, lanes);
  for (u32 half = kLanes / 2; half; half /= 2) {
    for (u32 i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
#endif
}

QCCL_FN f32xN trellis_level(const i32xN& odd, const TrellisLevels& levels) {
  const f32xN u = to_floats(odd) * levels.step;
  return u * (u * u + 1.0f);
}

// The bits of 1.5 * 2^23: adding a small integer to the bits adds it to the number.
constexpr i32 kTrellisWindow = 0x4b400000;
constexpr float kTrellisWindowFloat = 12582912.0f;

// The encoder's memory for a bucket. Arrays have space for a last step of all sequences.
struct TrellisScratch {
  alignas(64) float x[kTrellisBucket];                   // values, then distances from the centre, then positions
  alignas(64) i32 windows[kTrellisBucket];               // the number of the first candidate level, plus one
  u32 decisions[kTrellisBucket / kTrellisSequences][4];  // for each state, the sequences where its second predecessor is better
  float distances[kTrellisBlocks];
  u32 words[kTrellisOutliers];
  u8 shares[kTrellisBlocks];
};

QCCL_FN u32 whole_steps(u32 n) { return (n + kTrellisSequences - 1) / kTrellisSequences * kTrellisSequences; }

// The greatest magnitude from x to `end`.
QCCL_LOOP static float trellis_distance(const float* x, const float* end) {
  f32xN most = all_lanes(0.0f);
  for (; x < end; x += kLanes) most = greatest(absolute(load_lanes<float>(x)), most);
  return greatest_lane(most);
}

// The elements of a block, padded to whole steps in the last one.
struct TrellisBlock {
  u32 begin, end;
};
QCCL_FN TrellisBlock trellis_block(u32 b, u32 block, u32 padded) {
  return {b * block, (b + 1) * block < padded ? (b + 1) * block : padded};
}

struct TrellisSurvey {
  float centre;
  bool finite;
};

// Finds the centre and the blocks' largest distances from it.
QCCL_LOOP static TrellisSurvey trellis_survey(TrellisScratch& scratch, const TrellisOptions& o, u32 n, u32 padded) {
  float low[kTrellisBlocks], high[kTrellisBlocks];
  const u32 blocks = trellis_blocks(o, n);
  i32xN keys = all_lanes(0);
  for (u32 b = 0; b < blocks; ++b) {
    const TrellisBlock block = trellis_block(b, o.block, padded);
    f32xN bottom = load_lanes<float>(scratch.x + block.begin), top = bottom;
    for (u32 i = block.begin; i < block.end; i += kLanes) {
      const f32xN x = load_lanes<float>(scratch.x + i);
      bottom = least(x, bottom), top = greatest(x, top);
      keys = greatest(cast<i32>(absolute(x)), keys);
    }
    low[b] = -greatest_lane(all_lanes(-0.0f) - bottom), high[b] = greatest_lane(top);
  }
  const i32 size = greatest_lane(keys);
  if (size >= kInfinite) return {float_of(kQuietNan), false};
  float centre = 0.0f;
  if (float_of((u32)size) < kTrellisHuge) {
    float middles[kTrellisBlocks];
    for (u32 b = 0; b < blocks; ++b) middles[b] = trellis_middle(low[b], high[b]);
    u32 b = 0;
    while (trellis_rank(middles, blocks, b) != trellis_median(blocks)) ++b;
    centre = middles[b];
  }
  for (u32 b = 0; b < blocks; ++b) {
    const float above = high[b] - centre, below = centre - low[b];
    scratch.distances[b] = above > below ? above : below;
  }
  return {centre, true};
}

static inline float trellis_largest(const TrellisScratch& scratch, u32 blocks) {
  float largest = 0.0f;
  for (u32 b = 0; b < blocks; ++b) largest = scratch.distances[b] > largest ? scratch.distances[b] : largest;
  return largest;
}

// Stores the outliers and replaces them by 0; returns the largest distance of the rest.
static inline float trellis_take_outliers(TrellisScratch& scratch, const TrellisOptions& o, u32 blocks, u32 padded) {
  for (u32 k = 0; k < o.outliers; ++k) scratch.words[k] = kTrellisNoOutlier;
  float largest = trellis_largest(scratch, blocks);
  if (largest < kTrellisTiny) return largest;
  for (u32 k = 0; k < o.outliers && largest > 0.0f; ++k) {
    u32 b = 0;
    while (scratch.distances[b] != largest) ++b;
    const TrellisBlock block = trellis_block(b, o.block, padded);
    u32 i = block.begin, less;
    while ((less = bits_of(is_less(absolute(load_lanes<float>(scratch.x + i)), all_lanes(largest)))) == 0xffff) i += kLanes;
    i += (u32)__builtin_ctz(~less);
    scratch.words[k] = trellis_outlier(i, scratch.x[i]);
    scratch.x[i] = 0.0f;
    scratch.distances[b] = trellis_distance(scratch.x + block.begin, scratch.x + block.end);
    largest = trellis_largest(scratch, blocks);
  }
  return largest;
}

// One register of lanes: the search's costs and errors of more would not fit the registers.
using FloatPart = f32xN::Part;
using IntPart = i32xN::Part;
constexpr u32 kPartLanes = kLanes / kParts;

// Replaces distances by positions in units, and finds their windows like trellis_window(). The position needs no limits here:
// it is at most 2 / reach, and for positions beyond 2 the formula gives the first or last window.
QCCL_LOOP static void trellis_positions(TrellisScratch& scratch, TrellisBlock block, float pre, float inverse,
                                        const TrellisLevels levels) {
  const float half = 0.5f * (float)levels.top;
  for (u32 i = block.begin; i < block.end; i += kLanes) {
    const f32xN position = load_lanes<float>(scratch.x + i) * pre * inverse, s = position * position;
    const f32xN u = position * (s * 0.9056f + 0.987f) / (s * (s * 0.093f + 1.6856f) + 1.0f);
    store_lanes(position, scratch.x + i);
    store_lanes(least(greatest(truncate(u * half + half), all_lanes(1)), all_lanes(levels.top - 2)), scratch.windows + i);
  }
}

// The sequences where the lowest bit of the last code, and of the code before it, is set.
struct TrellisEnds {
  u32 bit, before;
};

QCCL_FN u32 bits_of_less(const FloatPart& a, const FloatPart& b) {
#if defined(QCCL_AVX512)
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
#elif defined(QCCL_AVX2)
  return (u32)_mm256_movemask_ps((__m256)(a < b));
#elif defined(__SSE2__)
  return (u32)_mm_movemask_ps((__m128)(a < b));
#else
  const IntPart less = a < b;
  u32 bits = 0;
  for (u32 i = 0; i < kPartLanes; ++i) bits |= (u32)(less[i] & 1) << i;
  return bits;
#endif
}

// The values of the candidate levels of each class: for AVX-512 by the number in scratch.windows, for AVX2 by a quarter of
// the level's number. Up to 4 bits they fit the two registers of a permutation, or one.
template <int Bits>
struct TrellisTable {
  float at[4][2 * kLanes] = {};

  constexpr TrellisTable() {
    for (i32 i = 0; i < (i32)(2 * kLanes); ++i) {
      const i32 window = kParts == 1 ? i - 1 : 4 * i;
      for (u32 c = 0; c < 4; ++c) at[c][i] = trellis_level(trellis_candidate(window, c), trellis_levels(Bits));
    }
  }
};

// The values of the candidate levels of class c. `first` is a number in scratch.windows.
template <int Bits>
QCCL_FN FloatPart trellis_candidates(const IntPart& first, i32 c) {
#if defined(QCCL_AVX512) || defined(QCCL_AVX2)
  if constexpr (Bits <= 4) {
    alignas(64) static constexpr TrellisTable<Bits> table;
#if defined(QCCL_AVX512)
    const __m512 low = _mm512_load_ps(table.at[c]), high = _mm512_load_ps(table.at[c] + kLanes);
    return (FloatPart)_mm512_permutex2var_ps(low, (__m512i)first, high);
#else
    return (FloatPart)_mm256_permutevar8x32_ps(_mm256_load_ps(table.at[c]), (__m256i)((first + (2 - c)) >> 2));
#endif
  }
#endif
  // the level of class c, less c, is a multiple of four
  constexpr TrellisLevels levels = trellis_levels(Bits);
  const FloatPart twice = (FloatPart)(((first << 1) + (kTrellisWindow + 2 * (2 - c))) & ~7);
  const FloatPart u = (twice - (kTrellisWindowFloat - (float)(2 * c - levels.top))) * levels.step;
  return u * (u * u + 1.0f);
}

// The best paths to each state, for the sequences of register q. A state is the lowest bits of the last two codes.
template <int Bits>
QCCL_LOOP void trellis_search(TrellisScratch& scratch, u32 padded, u32 q, TrellisEnds& ends) {
  FloatPart cost[4] = {FloatPart{}, 1e30f - FloatPart{}, 1e30f - FloatPart{}, 1e30f - FloatPart{}};
  const u32 shift = q * kPartLanes;
  for (u32 i = 0; i < padded; i += kTrellisSequences) {
    const auto position = load_part<FloatPart>(scratch.x + i + shift);
    const auto first = load_part<IntPart>(scratch.windows + i + shift);
    FloatPart next[4], error[4];
    for (i32 c = 0; c < 4; ++c) {
      error[c] = position - trellis_candidates<Bits>(first, c);
      error[c] = error[c] * error[c];
    }
    u32* decisions = scratch.decisions[i / kTrellisSequences];
    for (u32 state = 0; state < 4; ++state) {
      const u32 bit = state / 2, before = state % 2;
      const FloatPart one = cost[2 * before] + error[trellis_class(bit, before, 0)];
      const FloatPart two = cost[2 * before + 1] + error[trellis_class(bit, before, 1)];
      next[state] = two < one ? two : one;
      const u32 turn = bits_of_less(next[state], one);  // for `two` the compiler would use no minimum instruction
      if constexpr (kPartLanes >= 8) {
        __builtin_memcpy(reinterpret_cast<u8*>(decisions + state) + shift / 8, &turn, kPartLanes / 8);
      } else {
        decisions[state] = q ? decisions[state] | turn << shift : turn;
      }
    }
    for (u32 state = 0; state < 4; ++state) cost[state] = next[state];
  }
  const auto lesser = [](const FloatPart& a, const FloatPart& b) QCCL_INLINE { return a < b ? a : b; };
  const u32 odd01 = bits_of_less(cost[1], cost[0]), odd23 = bits_of_less(cost[3], cost[2]);
  const u32 bit = bits_of_less(lesser(cost[3], cost[2]), lesser(cost[1], cost[0]));
  ends.bit |= bit << shift, ends.before |= ((bit & odd23) | (~bit & odd01)) << shift;
}

// Stores the codes of a step.
template <int Bits>
QCCL_FN void trellis_store(const u16xN& codes, u8* to) {
#if defined(QCCL_AVX2)
  const __m256i bytes = _mm256_packus_epi16((__m256i)codes.part[0], (__m256i)codes.part[1]);
  store_together<Bits>(_mm256_permute4x64_epi64(bytes, 0xd8), to);
#else
#if defined(QCCL_AVX512)
  const __m256i bytes = _mm512_cvtepi16_epi8((__m512i)codes.part[0]);
  const Bytes first = (Bytes)_mm256_castsi256_si128(bytes), second = (Bytes)_mm256_extracti128_si256(bytes, 1);
#else
  const auto lower = [](const u16xN::Part& a, const u16xN::Part& b) QCCL_INLINE {
    return __builtin_shufflevector((Bytes)a, (Bytes)b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  };
  const Bytes first = lower(codes.part[0], codes.part[1]), second = lower(codes.part[2], codes.part[3]);
#endif
  store_bytes<Bits>(first, to);
  store_bytes<Bits>(second, to + 2 * Bits);
#endif
}

// Follows the best paths backwards and stores the codes, the last step first.
template <int Bits>
QCCL_LOOP void trellis_trace(const TrellisScratch& scratch, u32 steps, TrellisEnds ends, u32 n, u8* codes) {
  u32 bit = ends.bit, before = ends.before;
  for (u32 t = steps; t-- > 0;) {
    const u32 at = t * kTrellisSequences;
    const u32* d = scratch.decisions[t];
    const u32 even = d[0] ^ (bit & (d[0] ^ d[2])), odd = d[1] ^ (bit & (d[1] ^ d[3])), that = even ^ (before & (even ^ odd));
    u16xN first;
    QCCL_EACH_PART {
      const i32* windows = scratch.windows + at + 2 * p * kPartLanes;
      first.part[p] = halve(load_part<IntPart>(windows), load_part<IntPart>(windows + kPartLanes));
    }
    // The level of class c, less c, is the first multiple of four from `first` - 1 - c on.
    const u16xN level = subtract_where(bit ^ that, subtract_where(before, first + (u16)2, 1), 2);
    const u16xN code = subtract_where(~bit, ((level >> (u16)2) << (u16)1) + (u16)1, 1);
    if (at + kTrellisSequences <= n) {
      trellis_store<Bits>(code, codes + at / 8 * Bits);
    } else {
      SomeCodes<Bits> some;
      trellis_store<Bits>(code, some.bytes);
      some.write(codes + at / 8 * Bits, n - at);
    }
    bit = before, before = that;
  }
}

template <int Bits>
void trellis_encode_bits(TrellisScratch& scratch, const TrellisOptions& o, u32 n, u8* codes, u8* meta) {
  constexpr TrellisLevels levels = trellis_levels(Bits);
  const u32 blocks = trellis_blocks(o, n), padded = whole_steps(n);
  for (u32 i = n; i < padded; ++i) scratch.x[i] = scratch.x[n - 1];
  __builtin_memset(scratch.shares, 0, sizeof scratch.shares);
  const TrellisSurvey survey = trellis_survey(scratch, o, n, padded);
  float largest = 0.0f;
  if (survey.finite) {
    for (u32 i = 0; i < padded; i += kLanes) store_lanes(load_lanes<float>(scratch.x + i) - survey.centre, scratch.x + i);
    for (u32 i = n; i < padded; ++i) scratch.x[i] = 0.0f;
    largest = trellis_take_outliers(scratch, o, blocks, padded);
    const TrellisFrame frame = trellis_frame(survey.centre, largest);
    float inverses[kTrellisBlocks];  // the divisions of all blocks overlap
    for (u32 b = 0; b < blocks; ++b) {
      scratch.shares[b] = (u8)trellis_share(scratch.distances[b], frame);
      inverses[b] = trellis_inverse(trellis_unit(scratch.shares[b], frame, levels));
    }
    for (u32 b = 0; b < blocks; ++b) {
      trellis_positions(scratch, trellis_block(b, o.block, padded), frame.pre, inverses[b], levels);
    }
    TrellisEnds ends = {};
    for (u32 q = 0; q < kTrellisSequences / kPartLanes; ++q) trellis_search<Bits>(scratch, padded, q, ends);
    trellis_trace<Bits>(scratch, padded / kTrellisSequences, ends, n, codes);
  } else {
    for (u32 k = 0; k < o.outliers; ++k) scratch.words[k] = kTrellisNoOutlier;
    __builtin_memset(codes, 0, packed_nbytes(n, Bits));
  }
  store_float(meta, survey.centre);
  store_float(meta + 4, largest);
  __builtin_memcpy(meta + kTrellisOutlierOffset, scratch.words, 4 * o.outliers);
  __builtin_memcpy(meta + kTrellisOutlierOffset + 4 * o.outliers, scratch.shares, (blocks + 3) / 4 * 4);
}

static inline void trellis_encode(const HostTeam&, const TrellisOptions& o, const float* x, u32 n, u8* codes, u8* meta) {
  TrellisScratch scratch;
  __builtin_memcpy(scratch.x, x, n * sizeof *x);
  with_bits(o.bits, [&](auto bits) QCCL_INLINE { trellis_encode_bits<bits.value>(scratch, o, n, codes, meta); });
}

// The codes of the two steps before.
struct TrellisPast {
  i32xN before[kTrellisSequences / kLanes], before_that[kTrellisSequences / kLanes];
};

// Decodes a block to y. Codes are readable up to whole lanes.
template <int Bits>
QCCL_LOOP void trellis_decode_lanes(const u8* codes, TrellisBlock block, float unit, const TrellisFrame frame,
                                    TrellisPast& past, float* y) {
  constexpr TrellisLevels levels = trellis_levels(Bits);
  TrellisPast p = past;
  for (u32 i = block.begin; i < block.end; i += kTrellisSequences) {
    for (u32 part = 0; part < kTrellisSequences / kLanes; ++part) {
      const u32 at = i + part * kLanes;
      const i32xN code = load_codes<Bits>(codes + at / 8 * Bits);
      const i32xN level = ((code & ~1) << 1) + (((code ^ p.before_that[part]) & 1) << 1) + (p.before[part] & 1);
      p.before_that[part] = p.before[part], p.before[part] = code;
      const f32xN value = trellis_level((level << 1) - levels.top, levels) * unit * frame.post + frame.centre;
      store_lanes(value, y + at);
    }
  }
  past = p;
}

template <int Bits>
void trellis_decode_bits(const TrellisOptions& o, const u8* codes, const u8* meta, u32 n, float* y) {
  const u8* shares = meta + kTrellisOutlierOffset + 4 * o.outliers;
  const TrellisFrame frame = trellis_frame(load_float(meta), load_float(meta + 4));
  TrellisPast past = {};
  const u32 padded = whole_steps(n);
  u8 staged[kTrellisBucket * Bits / 8 + 16];
  if (padded != n) {
    __builtin_memcpy(staged, codes, packed_nbytes(n, Bits));
    __builtin_memset(staged + packed_nbytes(n, Bits), 0, packed_nbytes(padded, Bits) - packed_nbytes(n, Bits));
    codes = staged;
  }
  for (u32 b = 0; b < trellis_blocks(o, n); ++b) {
    const float unit = trellis_unit(shares[b], frame, trellis_levels(Bits));
    trellis_decode_lanes<Bits>(codes, trellis_block(b, o.block, padded), unit, frame, past, y);
  }
}

template <class Take>
QCCL_FN void trellis_decode(const HostTeam&, const TrellisOptions& o, const u8* codes, const u8* meta, u32 n,
                            const Take& take) {
  alignas(64) float y[kTrellisBucket];
  with_bits(o.bits, [&](auto bits) QCCL_INLINE { trellis_decode_bits<bits.value>(o, codes, meta, n, y); });
  const float centre = load_float(meta);
  for (u32 k = o.outliers; k-- > 0;) {  // of two outliers for the same element, the first is valid
    const u32 word = load_word(meta + kTrellisOutlierOffset + 4 * k), element = trellis_outlier_element(word);
    const float distance = trellis_outlier_distance(word);
    if (element < n && distance != 0.0f) y[element] = distance + centre;
  }
  for (u32 i = 0; i < n; ++i) take(i, y[i]);
}

}  // namespace QCCL_NAMESPACE
