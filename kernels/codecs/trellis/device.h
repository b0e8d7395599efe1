// The trellis codec on the device: a block of threads for each bucket. One warp does the search, one sequence per lane. A
// Reduce decodes here, too; a Decode takes the tile.
#pragma once

#include "../../cuda/team.h"
#include "codec.h"
#include "device_tile.h"

namespace QCCL_NAMESPACE {

// The shared memory of a block of threads.
struct TrellisScratch {
  float x[kTrellisBucket];  // values, then distances from the centre, then positions
  u8 codes[kTrellisBucket];  // first the decisions: a bit per state, set if its second predecessor is better
  float low[kTrellisBlocks], high[kTrellisBlocks];  // the ends of each block
};

QCCL_FN TrellisScratch& trellis_scratch() {
  __shared__ TrellisScratch scratch;
  return scratch;
}

// Like BlockTeam::each(), but not unrolled, because registers are scarce here.
template <class Body>
QCCL_FN void trellis_each(u32 n, const Body& body) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < n; i += kThreads) body(i);
}

// The least and the greatest value of each block. Threads start at different offsets to avoid bank conflicts.
QCCL_FN void trellis_find_ends(const BlockTeam& team, TrellisScratch& scratch, const TrellisOptions& o, u32 n) {
  trellis_each(trellis_blocks(o, n), [&](u32 b) {
    const u32 begin = b * o.block, size = n - begin < o.block ? n - begin : o.block;
    float low = scratch.x[begin], high = low;
#pragma unroll 1
    for (u32 k = 0; k < size; ++k) {
      const float x = scratch.x[begin + (k + b) % size];
      low = x < low ? x : low, high = x > high ? x : high;
    }
    scratch.low[b] = low, scratch.high[b] = high;
  });
  team.sync();
}

// Finds the ends of each block of distances; returns the greatest distance of all.
QCCL_FN float trellis_find_distances(const BlockTeam& team, TrellisScratch& scratch, const TrellisOptions& o, u32 n) {
  trellis_find_ends(team, scratch, o, n);
  float largest = 0.0f;
#pragma unroll 1
  for (u32 b = 0; b < trellis_blocks(o, n); ++b) {
    const float below = absolute(scratch.low[b]), above = absolute(scratch.high[b]), size = below > above ? below : above;
    largest = size > largest ? size : largest;
  }
  return largest;
}

// The median of the blocks' middles. Overwrites `low` and high[0].
QCCL_FN float trellis_find_centre(const BlockTeam& team, TrellisScratch& scratch, u32 blocks) {
  trellis_each(blocks, [&](u32 b) { scratch.low[b] = trellis_middle(scratch.low[b], scratch.high[b]); });
  team.sync();
  trellis_each(blocks, [&](u32 b) {
    if (trellis_rank(scratch.low, blocks, b) == trellis_median(blocks)) scratch.high[0] = scratch.low[b];
  });
  team.sync();
  return scratch.high[0];
}

// Stores the outliers, the largest distances, and replaces them by 0; of equal ones the first is taken.
QCCL_FN void trellis_take_outliers(const BlockTeam& team, TrellisScratch& scratch, const TrellisOptions& o, u32 n, u8* words) {
  bool some = true;
#pragma unroll 1
  for (u32 k = 0; k < o.outliers; ++k) {
    const i32 largest = some ? team.greatest(n, [&](u32 i) { return magnitude(scratch.x[i]); }) : 0;
    some = largest > 0 && (k > 0 || float_of((u32)largest) >= kTrellisTiny);
    u32 word = kTrellisNoOutlier;
    if (some) {
      const i32 found = team.greatest(n, [&](u32 i) { return magnitude(scratch.x[i]) == largest ? -(i32)i : -(i32)n; });
      word = trellis_outlier((u32)-found, scratch.x[-found]);
      team.sync();
      if (team.leads()) scratch.x[-found] = 0.0f;
    }
    if (team.leads()) store_word(words + 4 * k, word);
    team.sync();
  }
}

// The Viterbi algorithm for one sequence: the best paths to the four states, then back along the best of all.
QCCL_FN void trellis_search(TrellisScratch& scratch, u32 sequence, u32 steps, const TrellisLevels& levels) {
  float cost[4] = {0.0f, 1e30f, 1e30f, 1e30f};
#pragma unroll 1
  for (u32 t = 0; t < steps; ++t) {
    const u32 at = t * kTrellisSequences + sequence;
    const float position = scratch.x[at];
    const i32 window = trellis_window(position, levels);
    float error[4], next[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      error[c] = position - trellis_level(trellis_candidate(window, c), levels);
      error[c] = error[c] * error[c];
    }
    u32 decisions = 0;
#pragma unroll
    for (u32 state = 0; state < 4; ++state) {
      const u32 bit = state / 2, before = state % 2;
      const float first = cost[2 * before] + error[trellis_class(bit, before, 0)];
      const float second = cost[2 * before + 1] + error[trellis_class(bit, before, 1)];
      decisions |= (u32)(second < first) << state;
      next[state] = second < first ? second : first;
    }
#pragma unroll
    for (u32 state = 0; state < 4; ++state) cost[state] = next[state];
    scratch.codes[at] = (u8)decisions;
  }
  const bool odd01 = cost[1] < cost[0], odd23 = cost[3] < cost[2];
  u32 bit = (odd23 ? cost[3] : cost[2]) < (odd01 ? cost[1] : cost[0]);
  u32 before = bit ? odd23 : odd01;
#pragma unroll 1
  for (u32 t = steps; t-- > 0;) {
    const u32 at = t * kTrellisSequences + sequence;
    const u32 before_that = scratch.codes[at] >> (2 * bit + before) & 1;
    const i32 window = trellis_window(scratch.x[at], levels);
    scratch.codes[at] = (u8)trellis_code(trellis_candidate(window, trellis_class(bit, before, before_that)), bit);
    bit = before, before = before_that;
  }
}

// Replaces values by positions and stores the meta section; returns whether all values are finite.
QCCL_FN bool trellis_positions(const BlockTeam& team, TrellisScratch& scratch, const TrellisOptions& o, u32 n, u8* meta,
                           const TrellisLevels& levels) {
  const u32 blocks = trellis_blocks(o, n), padded = (n + kTrellisSequences - 1) / kTrellisSequences * kTrellisSequences;
  u8* shares = meta + kTrellisOutlierOffset + 4 * o.outliers;
  const i32 size = team.greatest(n, [&](u32 i) { return magnitude(scratch.x[i]); });
  const bool finite = size < kInfinite;
  float centre = finite ? 0.0f : float_of(kQuietNan);
  if (finite && float_of((u32)size) < kTrellisHuge) {
    trellis_find_ends(team, scratch, o, n);
    centre = trellis_find_centre(team, scratch, blocks);
  }
  trellis_each(padded, [&](u32 i) { scratch.x[i] = finite && i < n ? scratch.x[i] - centre : 0.0f; });
  team.sync();
  trellis_take_outliers(team, scratch, o, n, meta + kTrellisOutlierOffset);
  const TrellisFrame frame = trellis_frame(centre, trellis_find_distances(team, scratch, o, n));
  if (team.leads()) store_float(meta, centre), store_float(meta + 4, frame.scale);
  trellis_each((blocks + 3) / 4 * 4, [&](u32 b) {
    const float below = absolute(scratch.low[b]), above = absolute(scratch.high[b]);
    shares[b] = b < blocks ? (u8)trellis_share(below > above ? below : above, frame) : 0;
  });
  team.sync();
  trellis_each(padded, [&](u32 i) {
    const float inverse = trellis_inverse(trellis_unit(shares[i / o.block], frame, levels));
    scratch.x[i] = scratch.x[i] * frame.pre * inverse;
  });
  team.sync();
  return finite;
}

template <class Values>
QCCL_FN void trellis_encode(const BlockTeam& team, const TrellisOptions& o, const Values& x, u32 n, u8* codes, u8* meta) {
  TrellisScratch& scratch = trellis_scratch();
  const TrellisLevels levels = trellis_levels(o.bits);
  const u32 steps = (n + kTrellisSequences - 1) / kTrellisSequences;
  trellis_each(n, [&](u32 i) { scratch.x[i] = x[i]; });
  team.sync();
  const bool finite = trellis_positions(team, scratch, o, n, meta, levels);
  if (finite) {
    trellis_each(kTrellisSequences, [&](u32 sequence) { trellis_search(scratch, sequence, steps, levels); });
  } else {
    trellis_each(n, [&](u32 i) { scratch.codes[i] = 0; });
  }
  team.sync();
  const auto code = [&](u32 i) { return (u32)scratch.codes[i]; };
  with_bits(o.bits, [&](auto bits) QCCL_INLINE { team.template pack<bits.value>(n, code, codes); });
  team.sync();
}

template <class Take>
QCCL_FN void trellis_decode(const BlockTeam& team, const TrellisOptions& o, const u8* codes, const u8* meta, u32 n,
                            const Take& take) {
  TrellisScratch& scratch = trellis_scratch();
  const TrellisLevels levels = trellis_levels(o.bits);
  const TrellisFrame frame = trellis_frame(load_float(meta), load_float(meta + 4));
  const u8* shares = meta + kTrellisOutlierOffset + 4 * o.outliers;
  const auto keep = [&](u32 i, u32 code) { scratch.codes[i] = (u8)code; };
  with_bits(o.bits, [&](auto bits) QCCL_INLINE { team.template unpack<bits.value>(codes, n, keep); });
  team.sync();
  trellis_each(n, [&](u32 i) {
    const u32 before = i >= kTrellisSequences ? scratch.codes[i - kTrellisSequences] : 0;
    const u32 before_that = i >= 2 * kTrellisSequences ? scratch.codes[i - 2 * kTrellisSequences] : 0;
    const i32 level = trellis_level_of(scratch.codes[i], before, before_that);
    float value = trellis_value(level, trellis_unit(shares[i / o.block], frame, levels), frame, levels);
#pragma unroll 1
    for (u32 k = o.outliers; k-- > 0;) {  // of two outliers for the same element, the first is valid
      const u32 word = load_word(meta + kTrellisOutlierOffset + 4 * k);
      const float distance = trellis_outlier_distance(word);
      if (trellis_outlier_element(word) == i && distance != 0.0f) value = distance + frame.centre;
    }
    take(i, value);
  });
  team.sync();
}

}  // namespace QCCL_NAMESPACE
