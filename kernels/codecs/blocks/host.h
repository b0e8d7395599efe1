// The codecs of blocks on the host: sixteen values, or the scales of sixteen blocks, at a time.
#pragma once

#include <type_traits>

#include "../../host/bucket_loops.h"
#include "../../host/random.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

QCCL_FN f32xN alike(const f32xN&, float x) { return all_lanes(x); }
QCCL_FN i32xN alike(const i32xN&, i32 x) { return all_lanes(x); }
QCCL_FN i32xN as_integer(const f32xN& x) { return cast<i32>(x); }
QCCL_FN f32xN as_float(const i32xN& x) { return cast<float>(x); }
QCCL_FN f32xN within_one(const f32xN& x) {
#if defined(QCCL_AVX512)
  return {_mm512_range_ps(x.part[0], _mm512_set1_ps(1.0f), 2)};  // the lesser magnitude, with the sign of x
#else
  return greatest(least(x, all_lanes(1.0f)), all_lanes(-1.0f));
#endif
}

// Positions are divided into cells with at most one edge of levels each: a cell has the edge, and the code below it.
#if defined(QCCL_AVX512)
// The cell of a position is it times `scale`, rounded; cells below 0 follow the others.
template <class Table>
struct LevelCells {
  static constexpr i32 count = Table::bits == 4 ? 32 : 16;
  static constexpr float scale = Table::bits == 4 ? 14.5f : 7.4f;
  alignas(64) float edges[count] = {};
  alignas(64) i32 codes[count] = {};

  constexpr LevelCells() {
    for (i32 i = 0; i < count; ++i) {
      const float low = ((float)(i < count / 2 ? i : i - count) - 0.5f) / scale, high = low + 1.0f / scale;
      codes[i] = 0, edges[i] = __builtin_inff();
      for (i32 k = -(Table::top / 2); k <= Table::top / 2; ++k) {
        const float edge = k < 0 ? -Table::edge(-k) : k > 0 ? Table::edge(k) : 0.0f;
        if (edge < low) codes[i] += 1;
        // an edge below 0 belongs to the lower level
        if (edge >= low && edge < high) edges[i] = k < 0 ? __builtin_bit_cast(float, __builtin_bit_cast(u32, edge) - 1) : edge;
      }
    }
  }
};

template <class Table>
QCCL_FN i32xN level_code_by_cell(const f32xN& position) {
  static constexpr LevelCells<Table> cells;
  const auto half = [](const void* from) QCCL_INLINE { return _mm512_load_ps(from); };
  const __m512i cell = _mm512_cvtps_epi32((position * cells.scale).part[0]);
  __m512 edge;
  __m512i code;
  if constexpr (cells.count == 32) {
    edge = _mm512_permutex2var_ps(half(cells.edges), cell, half(cells.edges + 16));
    code = _mm512_permutex2var_epi32(_mm512_load_si512(cells.codes), cell, _mm512_load_si512(cells.codes + 16));
  } else {
    edge = _mm512_permutexvar_ps(cell, half(cells.edges));
    code = _mm512_permutexvar_epi32(cell, _mm512_load_si512(cells.codes));
  }
  const __mmask16 above = _mm512_cmp_ps_mask(position.part[0], edge, _CMP_GE_OQ);
  return {(i32xN::Part)_mm512_mask_sub_epi32(code, above, code, _mm512_set1_epi32(-1))};
}
#elif defined(QCCL_AVX2)
// The cell is the magnitude of a position times 8; `codes` are one more than that of the level below the edge.
template <class Table>
struct LevelCells {
  alignas(32) float edges[8] = {};
  alignas(32) i32 codes[8] = {};

  constexpr LevelCells() {
    for (i32 i = 0; i < 8; ++i) {
      const float low = (float)i / 8.0f;
      codes[i] = 1, edges[i] = __builtin_inff();
      for (i32 k = 1; k <= Table::top / 2; ++k) {
        if (Table::edge(k) < low) codes[i] += 1;
        if (Table::edge(k) >= low && Table::edge(k) < low + 0.125f) edges[i] = Table::edge(k);
      }
    }
  }
};

template <class Table>
QCCL_FN i32xN level_code_by_cell(const f32xN& position) {
  static constexpr LevelCells<Table> cells;
  const f32xN size = absolute(position);
  const i32xN cell = truncate(least(size, all_lanes(0.999f)) * 8.0f);
  i32xN code;
  QCCL_EACH_PART {
    const __m256 edge = _mm256_permutevar8x32_ps(_mm256_load_ps(cells.edges), (__m256i)cell.part[p]);
    const __m256i most = _mm256_permutevar8x32_epi32(*reinterpret_cast<const __m256i*>(cells.codes), (__m256i)cell.part[p]);
    const __m256i below = _mm256_castps_si256(_mm256_cmp_ps((__m256)size.part[p], edge, _CMP_LT_OQ));
    code.part[p] = (i32xN::Part)_mm256_add_epi32(most, below);
  }
  return (code ^ is_less(position, all_lanes(0.0f))) + (Table::top / 2 + 1);
}
#endif

template <class Table>
QCCL_FN i32xN level_code(const f32xN& position) {
#if defined(QCCL_AVX512)
  if constexpr (Table::bits == 4) return level_code_by_cell<Table>(position);  // at most 1.04, which has a cell
  if constexpr (Table::bits == 3) return level_code_by_cell<Table>(within_one(position));
#elif defined(QCCL_AVX2)
  if constexpr (Table::bits > 2) return level_code_by_cell<Table>(position);
#endif
  const f32xN size = absolute(position);
  i32xN above = all_lanes(Table::top / 2);
  for (i32 k = 1; k <= Table::top / 2; ++k) {
    above = subtract_where(is_less(size, all_lanes(Table::edge(k))), above, all_lanes(1));
  }
  const i32xN upper = above + (Table::top / 2 + 1);
  return select(is_less(position, all_lanes(0.0f)), all_lanes(Table::top) - upper, upper);
}

// The numbers of sixteen codes on the wire. `table` has the number of each code, again and again in all lanes.
#if defined(QCCL_AVX512) || defined(QCCL_AVX2)
constexpr bool kTablesFit = true;
template <int Bits>
QCCL_FN f32xN look_up(const f32xN& table, const u8* from) {
  const i32xN code = load_codes_with_others<Bits>(from);
#if defined(QCCL_AVX512)
  return {_mm512_permutexvar_ps((__m512i)code.part[0], table.part[0])};
#else
  f32xN found;
  QCCL_EACH_PART {
    const __m256i which = (__m256i)code.part[p];
    found.part[p] = _mm256_permutevar8x32_ps(table.part[0], which);
    if constexpr (Bits == 4) {
      const __m256 upper = _mm256_permutevar8x32_ps(table.part[1], which);
      found.part[p] = _mm256_blendv_ps(found.part[p], upper, _mm256_castsi256_ps(_mm256_slli_epi32(which, 28)));
    }
  }
  return found;
#endif
}
#else
constexpr bool kTablesFit = false;
template <int Bits>
f32xN look_up(const f32xN& table, const u8* from);
#endif

constexpr u32 kBlocksBucket = 1024;                 // the most elements of a bucket
constexpr u32 kMostBlocks = kBlocksBucket / kLanes;  // in a bucket
constexpr u32 kBlocksStep = kTogether * kLanes;     // elements that are encoded together

// The loops over a bucket whose blocks are `Rows` times kLanes elements.
template <class Format, u32 Rows>
struct BlockLoops {
  using Table = typename Format::Table;
  using Scale = typename Format::Scale;
  static constexpr u32 block = Rows * kLanes;
  static constexpr bool draws = Table::draws;

  // Data of the blocks, padded to whole lanes.
  alignas(64) i32 sizes[kMostBlocks];   // bits of the greatest magnitudes
  alignas(64) i32 kept[kMostBlocks];    // masks of the codes: 0 makes the codes of a block that is not finite 0
  alignas(64) float scales[kMostBlocks], inverses[kMostBlocks];
  alignas(64) u8 bytes[kMostBlocks];

  // Finds the sizes of the blocks of x, and stores the bucket's number.
  QCCL_LOOP BlockFrame survey(const float* x, u32 blocks, u8* meta) {
    i32xN most = all_lanes(0);
    for (u32 b = 0; b < blocks; b += kLanes) {
      i32xN of[kLanes];
      for (u32 i = 0; i < kLanes; ++i) {
        of[i] = all_lanes(0);
        if (b + i >= blocks) continue;
        for (u32 r = 0; r < Rows; ++r) of[i] = greatest(of[i], as_integer(absolute(row(x, b + i, r))));
      }
      store_lanes(across_lanes(of, [](auto a, auto c) QCCL_INLINE { return a > c ? a : c; }), sizes + b);
      most = greatest(most, finite_sizes(b));
    }
    const float number = Scale::number(greatest_lane(most));
    if (Scale::number_nbytes) store_float(meta, number);
    return block_frame(number);
  }

  QCCL_FN f32xN row(const float* x, u32 b, u32 r) { return load_lanes<float>(x + b * block + r * kLanes); }

  // The sizes of sixteen blocks, 0 for those that are not finite.
  QCCL_MEMBER i32xN finite_sizes(u32 b) const {
    const i32xN size = load_lanes<i32>(sizes + b);
    return select(is_less(size, all_lanes(kInfinite)), size, all_lanes(0));
  }

  QCCL_MEMBER f32xN first_scales(u32 b, const BlockFrame& frame) const {
    return as_float(finite_sizes(b)) * frame.pre * Table::reach;
  }

  QCCL_FN f32xN inverse_of(const f32xN& scale) {
    return select(is_less(all_lanes(0.0f), scale), all_lanes(1.0f) / scale, all_lanes(0.0f));
  }

  // Corrects the scales, which begin with first_scales(); the last block has `last` elements. `Plain`: frame.pre is 1.
  template <bool Plain>
  QCCL_LOOP void fit(const float* x, u32 blocks, u32 last, const BlockFrame frame) {
    constexpr i32 edges = Table::top / 2 + 1;
    for (u32 b = 0; b < blocks; b += kLanes) {
      alignas(64) float factors[kLanes];
      alignas(64) i32 counted[edges][kLanes] = {};
      store_lanes(all_lanes(1.0f) / greatest(first_scales(b, frame), all_lanes(kLeastFitted)) * kFitUnit, factors);
      i32xN sums[edges][kLanes], total[edges], counts[edges];
      for (u32 i = 0; i < kLanes; ++i) {
        for (auto& sum : sums) sum[i] = all_lanes(0);
        if (b + i >= blocks || sizes[b + i] >= kInfinite) continue;
        counted[0][i] = (i32)(b + i == blocks - 1 ? last : block);
        for (u32 r = 0; r < Rows; ++r) {
          const f32xN value = absolute(row(x, b + i, r));
          const f32xN size = (Plain ? value : value * frame.pre) * factors[i];
          const i32xN term = to_nearest(size);
          sums[0][i] = sums[0][i] - term;
          for (i32 k = 1; k < edges; ++k) {
            const Mask above = is_less(all_lanes(Table::edge(k) * kFitUnit), size);
            sums[k][i] = subtract_where(above, sums[k][i], term);
            counted[k][i] += __builtin_popcount(bits_of(above));
          }
        }
      }
      for (i32 k = 0; k < edges; ++k) {
        counts[k] = load_lanes<i32>(counted[k]);
        total[k] = all_lanes(0) - across_lanes(sums[k], [](auto a, auto c) QCCL_INLINE { return a + c; });
      }
      store_lanes(first_scales(b, frame) * fit_ratio<Table>(total, counts), scales + b);
    }
  }

  // Chooses the scales' bytes.
  template <bool Stochastic>
  QCCL_LOOP void choose(u32 blocks, const BlockFrame frame) {
    for (u32 b = 0; b < blocks; b += kLanes) {
      const i32xN size = load_lanes<i32>(sizes + b), finite = finite_sizes(b);
      const bool fitted = Table::least_squares && !Stochastic;
      const f32xN wanted = fitted ? load_lanes<float>(scales + b) : Stochastic ? as_float(finite) * frame.pre : first_scales(b, frame);
      i32xN found;
      if constexpr (Stochastic) {
        found = Scale::code_above(wanted, frame);
      } else {
        found = Scale::code(wanted, frame);
      }
      const i32xN code = select(is_less(all_lanes(0), finite), found, all_lanes(Scale::zero));
      const Mask is_finite = is_less(size, all_lanes(kInfinite));
      const Bytes narrowed = narrow(select(is_finite, code, all_lanes(Scale::nan)));
      __builtin_memcpy(bytes + b, &narrowed, sizeof narrowed);
      store_lanes(select(is_finite, inverse_of(Scale::scale(code, frame)), all_lanes(0.0f)), inverses + b);
      store_lanes(select(is_finite, all_lanes(-1), all_lanes(0)), kept + b);
    }
  }

  // `Plain`: frame.pre is 1. `random` has a number for each element, if `Stochastic`. n is a multiple of kBlocksStep.
  template <bool Plain, bool Stochastic>
  QCCL_LOOP void encode_values(const float* x, u32 n, float pre, const u32* random, u8* codes) const {
    for (u32 i = 0; i < n; i += kBlocksStep) {
      i32xN code[kTogether];
      for (u32 g = 0; g < kTogether; ++g) {
        const u32 at = i + g * kLanes, b = at / block;
        f32xN value = load_lanes<float>(x + at);
        if constexpr (!Plain) value = value * pre;
        const f32xN position = value * inverses[b];
        if constexpr (Stochastic) {
          code[g] = Table::stochastic(position, to_floats(load_lanes<i32>(random + at)) * 0x1p-24f);
        } else {
          code[g] = Table::code(position);
        }
        code[g] = code[g] & kept[b];
      }
      store_together<Table::bits>(narrow_together(code), codes + code_offset(i, Table::bits));
    }
  }

  // x has n elements and `padding` zeros, together whole blocks and a multiple of kBlocksStep.
  template <bool Stochastic>
  void encode(const float* x, u32 n, u32 padding, const u32* random, u8* codes, u8* meta) {
    const u32 blocks = (n + block - 1) / block, padded = n + padding;
    const BlockFrame frame = survey(x, blocks, meta);
    const bool plain = frame.pre == 1.0f;
    if constexpr (Table::least_squares && !Stochastic) {
      const u32 last = n - (blocks - 1) * block;
      plain ? fit<true>(x, blocks, last, frame) : fit<false>(x, blocks, last, frame);
    }
    choose<Stochastic>(blocks, frame);
    plain ? encode_values<true, Stochastic>(x, padded, 1.0f, random, codes)
          : encode_values<false, Stochastic>(x, padded, frame.pre, random, codes);
    u8* to = meta + Scale::number_nbytes;
    __builtin_memcpy(to, bytes, blocks);
    for (u32 b = blocks; b % 4; ++b) to[b] = 0;
  }

  // Values of `codes` times the scale of their block. Every NaN is the quiet one.
  template <bool Plain>
  QCCL_LOOP void decode_values(const u8* codes, u32 n, float post, float* y) const {
    constexpr bool looks_up = kTablesFit && Table::bits < 5;
    const f32xN table = Table::value(cast<i32>(lane_numbers()) & (looks_up ? (1 << Table::bits) - 1 : 0));
    const auto decode_row = [&](const u8* from, [[maybe_unused]] const f32xN& scaled_table, float scale) QCCL_INLINE {
      if constexpr (looks_up) return look_up<Table::bits>(scaled_table, from);
      return scaled<Plain>(Table::value(load_codes<Table::bits>(from)), scale, post);
    };
    u32 at = 0;
    for (; at + block <= n; at += block) {
      const float scale = scales[at / block];
      const f32xN scaled_table = scaled<Plain>(table, scale, post);
      for (u32 r = 0; r < Rows; ++r) {
        const u32 i = at + r * kLanes;
        store_lanes(decode_row(codes + code_offset(i, Table::bits), scaled_table, scale), y + i);
      }
    }
    const float scale = scales[at / block % kMostBlocks];
    const f32xN scaled_table = scaled<Plain>(table, scale, post);
    for (; at < n; at += kLanes) {
      const u32 lanes = n - at < kLanes ? n - at : kLanes;
      SomeCodes<Table::bits> some;
      some.read(codes + code_offset(at, Table::bits), lanes);
      store_values<Float32>(decode_row(some.bytes, scaled_table, scale), y + at, lanes);
    }
  }

  template <bool Plain>
  QCCL_FN f32xN scaled(const f32xN& x, float scale, float post) {
    const f32xN value = x * scale;
    return quiet_nans(Plain ? value : value * post);
  }

  void decode(const u8* codes, const u8* meta, u32 n, float* y) {
    const u32 blocks = (n + block - 1) / block;
    const BlockFrame frame = block_frame(Scale::number_nbytes ? load_float(meta) : 1.0f);
    __builtin_memset(bytes, 0, sizeof bytes);
    __builtin_memcpy(bytes, meta + Scale::number_nbytes, blocks);
    for (u32 b = 0; b < blocks; b += kLanes) {
      Bytes some;
      __builtin_memcpy(&some, bytes + b, sizeof some);
      store_lanes(Scale::scale(widen(some), frame), scales + b);
    }
    frame.post == 1.0f ? decode_values<true>(codes, n, 1.0f, y) : decode_values<false>(codes, n, frame.post, y);
  }
};

// body(loops), with the loops for a codec's options.
template <u32 Format, u32 Rows, class Body>
void with_loops(const Body& body) {
  BlockLoops<FormatOf<Format>, Rows> loops;
  body(loops);
}
template <u32 Format, class Body>
void with_rows(u32 block, const Body& body) {
  switch (block / kLanes) {
    case 1: return with_loops<Format, 1>(body);
    case 2: return with_loops<Format, 2>(body);
    case 4: return with_loops<Format, 4>(body);
    default: return with_loops<Format, 8>(body);
  }
}
template <class Body>
void with_block_loops(const BucketOptions& options, const Body& body) {
  const u32 block = options.options[1];
  switch (options.options[0]) {
    case 0: return with_loops<0, 2>(body);
    case 1: return with_loops<1, 2>(body);
    case 2: return with_rows<2>(block, body);
    case 3: return with_rows<3>(block, body);
    case 4: return with_rows<4>(block, body);
    case 5: return with_loops<5, 2>(body);
    case 6: return with_loops<6, 1>(body);
    default: return with_loops<7, 1>(body);
  }
}

template <class T>
struct OneBucket<Blocks, T> {
  using Format = WireFormat<Blocks, T>;

  static void decode(const Format& format, const u8* wire, u64 b, const RngCounter&, bool, float* y) {
    with_block_loops(format.options, [&](auto& loops) {
      loops.decode(wire + Format::codes_of(format, b), wire + Format::meta_of(format, b), (u32)Format::size_of(format, b), y);
    });
  }
  static void decode_to_values(const Format& format, const u8* wire, u64 b, const RngCounter& counter, float* y) {
    decode(format, wire, b, counter, false, y);
  }

  static void encode(const Format& format, const float* x, u64 b, const RngCounter& counter, u8* wire, float*) {
    u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    const u32 block = format.options.options[1], unit = block > kBlocksStep ? block : kBlocksStep;
    const u32 n = (u32)Format::size_of(format, b), padding = (0u - n) % unit;
    const u32 bits = Blocks::bits(format.options.options[0]);
    alignas(64) float padded[kBlocksBucket];
    alignas(64) u8 padded_codes[kBlocksBucket];
    if (padding) {
      __builtin_memcpy(padded, x, n * sizeof *x);
      __builtin_memset(padded + n, 0, padding * sizeof *x);
    }
    RandomBlock random(format.options.seed, counter);
    with_block_loops(format.options, [&](auto& loops) {
      const float* from = padding ? padded : x;
      u8* to = padding ? padded_codes : codes;
      if constexpr (std::remove_reference_t<decltype(loops)>::draws) {
        if (format.options.options[2]) return loops.template encode<true>(from, n, padding, random.of(0, n + padding), to, meta);
      }
      loops.template encode<false>(from, n, padding, nullptr, to, meta);
    });
    if (!padding) return;
    const u32 nbytes = (u32)packed_nbytes(n, bits), used = n * bits % 8;
    if (used) padded_codes[nbytes - 1] &= (u8)((1u << used) - 1);  // zeros behind the last code
    __builtin_memcpy(codes, padded_codes, nbytes);
  }
};

}  // namespace QCCL_NAMESPACE
