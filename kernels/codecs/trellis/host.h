// The trellis codec on the host: sixteen sequences at a time, equal to the scalar functions of codec.h bit for bit.
#pragma once

#include "../../host/codes.h"
#include "../../host/team.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

// `number` in the lanes whose bits are set, 0 in the others.
QCCL_FN i32xN where(u32 bits, i32 number) {
#if defined(QCCL_AVX512)
  return {(i32xN::Part)_mm512_maskz_set1_epi32((__mmask16)bits, number)};
#else
  alignas(64) static constexpr i32 places[kLanes] = {1,   2,   4,    8,    16,   32,   64,    128,
                                                     256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  i32xN lanes = load_lanes<i32>(places);
  QCCL_EACH_PART lanes.part[p] = ((lanes.part[p] & (i32)bits) != 0) & number;
  return lanes;
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

QCCL_FN i32xN trellis_window(const f32xN& position, const TrellisLevels& levels) {
  const f32xN z = least(greatest(position, all_lanes(-2.0f)), all_lanes(2.0f));
  const f32xN s = z * z;
  f32xN u = z * (s * 0.9056f + 0.987f);
  const f32xN below = s * (s * 0.093f + 1.6856f) + 1.0f;
  QCCL_EACH_PART u.part[p] /= below.part[p];
  const float half = 0.5f * (float)levels.top;
  return least(greatest(truncate(u * half + half) - 1, all_lanes(0)), all_lanes(levels.top - 3));
}

constexpr u32 kTrellisSteps = kTrellisBucket / kTrellisSequences;
constexpr u32 kTrellisParts = kTrellisSequences / kLanes;

// The bits of 1.5 * 2^23: adding a small integer to the bits adds it to the number.
constexpr i32 kTrellisWindow = 0x4b400000;
constexpr float kTrellisWindowFloat = 12582912.0f;

// The encoder's memory for a bucket. Arrays have space for a last step of all sequences.
struct TrellisScratch {
  alignas(64) float x[kTrellisBucket];  // values, then distances from the centre, then positions
  alignas(64) i32 windows[kTrellisBucket];  // kTrellisWindow + twice the number of the first level
  u16 decisions[kTrellisSteps][kTrellisParts][4];  // for each state, the sequences where its second predecessor is better
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
  alignas(64) i32 each[kLanes];
  store_lanes(keys, each);
  i32 size = 0;
  for (const i32 key : each) size = key > size ? key : size;
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

// Replaces distances by positions in units, and finds their windows.
QCCL_LOOP static void trellis_positions(TrellisScratch& scratch, TrellisBlock block, float pre, float inverse,
                                    const TrellisLevels levels) {
  for (u32 i = block.begin; i < block.end; i += kLanes) {
    const f32xN position = load_lanes<float>(scratch.x + i) * pre * inverse;
    store_lanes(position, scratch.x + i);
    store_lanes((trellis_window(position, levels) << 1) + kTrellisWindow, scratch.windows + i);
  }
}

// The sequences where the lowest bit of the last code, and of the code before it, is set.
struct TrellisEnds {
  u32 bit, before;
};

// One register of lanes: the search's costs and errors of more would not fit the registers.
using FloatPart = f32xN::Part;
using IntPart = i32xN::Part;
constexpr u32 kPartLanes = kLanes / kParts;

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

// The best paths to each state, for the sequences of register p. A state is the lowest bits of the last two codes.
QCCL_FN TrellisEnds trellis_search_part(TrellisScratch& scratch, u32 steps, u32 part, u32 p, const TrellisLevels& levels) {
  FloatPart cost[4] = {FloatPart{}, 1e30f - FloatPart{}, 1e30f - FloatPart{}, 1e30f - FloatPart{}};
  const u32 shift = p * kPartLanes;
  for (u32 t = 0; t < steps; ++t) {
    const u32 at = t * kTrellisSequences + part * kLanes + shift;
    FloatPart position;
    IntPart window;
    __builtin_memcpy(&position, scratch.x + at, sizeof position);
    __builtin_memcpy(&window, scratch.windows + at, sizeof window);
    FloatPart error[4];
    for (i32 c = 0; c < 4; ++c) {  // the window's level of class c, less c, is a multiple of four
      const FloatPart twice = (FloatPart)((window + 2 * (3 - c)) & ~7);
      const FloatPart u = (twice - (kTrellisWindowFloat - (float)(2 * c - levels.top))) * levels.step;
      error[c] = position - u * (u * u + 1.0f);
      error[c] = error[c] * error[c];
    }
    FloatPart next[4];
    u16* decisions = scratch.decisions[t][part];
    for (u32 state = 0; state < 4; ++state) {
      const u32 bit = state / 2, before = state % 2;
      const FloatPart first = cost[2 * before] + error[trellis_class(bit, before, 0)];
      const FloatPart second = cost[2 * before + 1] + error[trellis_class(bit, before, 1)];
      const u32 turn = bits_of_less(second, first);
      decisions[state] = (u16)(p ? decisions[state] | turn << shift : turn);
      next[state] = second < first ? second : first;
    }
    for (u32 state = 0; state < 4; ++state) cost[state] = next[state];
  }
  const auto lesser = [](const FloatPart& a, const FloatPart& b) QCCL_INLINE { return a < b ? a : b; };
  const u32 odd01 = bits_of_less(cost[1], cost[0]), odd23 = bits_of_less(cost[3], cost[2]);
  const u32 bit = bits_of_less(lesser(cost[3], cost[2]), lesser(cost[1], cost[0]));
  return {bit << shift, ((bit & odd23) | (~bit & odd01)) << shift};
}

QCCL_LOOP static TrellisEnds trellis_search(TrellisScratch& scratch, u32 steps, u32 part, const TrellisLevels levels) {
  TrellisEnds all = trellis_search_part(scratch, steps, part, 0, levels);
  for (u32 p = 1; p < kParts; ++p) {
    const TrellisEnds some = trellis_search_part(scratch, steps, part, p, levels);
    all = {all.bit | some.bit, all.before | some.before};
  }
  return all;
}

// Follows the best paths backwards and stores the codes, the last step first.
template <int Bits>
QCCL_LOOP void trellis_trace(const TrellisScratch& scratch, u32 steps, const TrellisEnds (&ends)[kTrellisParts], u32 n,
                             u8* codes) {
  u32 bit[kTrellisParts], before[kTrellisParts];
  for (u32 part = 0; part < kTrellisParts; ++part) bit[part] = ends[part].bit, before[part] = ends[part].before;
  for (u32 t = steps; t-- > 0;) {
    for (u32 part = 0; part < kTrellisParts; ++part) {
      const u32 at = t * kTrellisSequences + part * kLanes, last = bit[part], other = before[part];
      const u16* decisions = scratch.decisions[t][part];
      const u32 that = (last & ((other & decisions[3]) | (~other & decisions[2]))) |
                       (~last & ((other & decisions[1]) | (~other & decisions[0])));
      const i32xN window = load_lanes<i32>(scratch.windows + at);
      const i32xN twice = window + ((where(last ^ that, 4) + where(other, 2) - window) & 6);
      const i32xN code = ((twice & 0x3f8) >> 2) + where(last, 1);
      if (at + kLanes <= n) {
        store_codes<Bits>(code, codes + at / 8 * Bits);
      } else if (at < n) {
        SomeCodes<Bits> some;
        store_codes<Bits>(code, some.bytes);
        some.write(codes + at / 8 * Bits, n - at);
      }
      bit[part] = other, before[part] = that;
    }
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
    const u32 steps = padded / kTrellisSequences;
    TrellisEnds ends[kTrellisParts];
    for (u32 part = 0; part < kTrellisParts; ++part) ends[part] = trellis_search(scratch, steps, part, levels);
    trellis_trace<Bits>(scratch, steps, ends, n, codes);
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
  i32xN before[kTrellisParts], before_that[kTrellisParts];
};

// Decodes a block to y. Codes are readable up to whole lanes.
template <int Bits>
QCCL_LOOP void trellis_decode_lanes(const u8* codes, TrellisBlock block, float unit, const TrellisFrame frame,
                                    TrellisPast& past, float* y) {
  constexpr TrellisLevels levels = trellis_levels(Bits);
  TrellisPast p = past;
  for (u32 i = block.begin; i < block.end; i += kTrellisSequences) {
    for (u32 part = 0; part < kTrellisParts; ++part) {
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
