// The trellis codec on the device: a block of threads for a bucket, of which a warp does the search, a sequence in each
// lane.
#pragma once

#include "../../cuda/team.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

// Shared by the threads of a block.
struct TrellisRoom {
  float x[kTrellisBucket];  // values, then distances from the centre, then positions
  u8 codes[kTrellisBucket];  // first the turns: for each state, whether the second way there is the better
  float low[kTrellisBlocks], high[kTrellisBlocks];  // of a block; later `low` is its largest distance
};

QCCL_FN TrellisRoom& trellis_room() {
  __shared__ TrellisRoom room;
  return room;
}

// What a team's each() does, but not unrolled: registers are scarce where much is known of a bucket.
template <class Body>
QCCL_FN void trellis_each(u32 n, const Body& body) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < n; i += kThreads) body(i);
}

// The least and the greatest of each block. The threads begin at different places, for the sake of the memory's banks.
QCCL_FN void trellis_find_ends(const BlockTeam& team, TrellisRoom& room, const TrellisOptions& o, u32 n) {
  trellis_each(trellis_blocks(o, n), [&](u32 b) {
    const u32 begin = b * o.block, size = n - begin < o.block ? n - begin : o.block;
    float low = room.x[begin], high = low;
#pragma unroll 1
    for (u32 k = 0; k < size; ++k) {
      const float x = room.x[begin + (k + b) % size];
      low = x < low ? x : low, high = x > high ? x : high;
    }
    room.low[b] = low, room.high[b] = high;
  });
  team.sync();
}

// What is greatest in each block of distances, to `low`; returns the greatest of all.
QCCL_FN float trellis_find_distances(const BlockTeam& team, TrellisRoom& room, const TrellisOptions& o, u32 n) {
  trellis_find_ends(team, room, o, n);
  float largest = 0.0f;
#pragma unroll 1
  for (u32 b = 0; b < trellis_blocks(o, n); ++b) {
    const float below = absolute(room.low[b]), above = absolute(room.high[b]), size = below > above ? below : above;
    largest = size > largest ? size : largest;
  }
  return largest;
}

// The median of the blocks' middles, which go to `low`.
QCCL_FN float trellis_find_centre(const BlockTeam& team, TrellisRoom& room, u32 blocks) {
  trellis_each(blocks, [&](u32 b) { room.low[b] = trellis_middle(room.low[b], room.high[b]); });
  team.sync();
  trellis_each(blocks, [&](u32 b) {
    if (trellis_rank(room.low, blocks, b) == trellis_median(blocks)) room.high[0] = room.low[b];
  });
  team.sync();
  return room.high[0];
}

// Takes the largest distances away, each time the first of the largest.
QCCL_FN void trellis_take_outliers(const BlockTeam& team, TrellisRoom& room, const TrellisOptions& o, u32 n, u8* words) {
  bool some = true;
#pragma unroll 1
  for (u32 k = 0; k < o.outliers; ++k) {
    const i32 largest = some ? team.greatest(n, [&](u32 i) { return magnitude(room.x[i]); }) : 0;
    some = largest > 0 && (k > 0 || float_of((u32)largest) >= kTrellisTiny);
    u32 word = kTrellisNoOutlier;
    if (some) {
      const i32 found = team.greatest(n, [&](u32 i) { return magnitude(room.x[i]) == largest ? -(i32)i : -(i32)n; });
      word = trellis_outlier((u32)-found, room.x[-found]);
      team.sync();
      if (team.leads()) room.x[-found] = 0.0f;
    }
    if (team.leads()) store_word(words + 4 * k, word);
    team.sync();
  }
}

// One sequence: the best ways to the four states, and back along the best of all.
QCCL_FN void trellis_search(TrellisRoom& room, u32 sequence, u32 steps, const TrellisLevels& levels) {
  float cost[4] = {0.0f, 1e30f, 1e30f, 1e30f};
#pragma unroll 1
  for (u32 t = 0; t < steps; ++t) {
    const u32 at = t * kTrellisSequences + sequence;
    const float position = room.x[at];
    const i32 window = trellis_window(position, levels);
    float error[4], next[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      error[c] = position - trellis_level(trellis_candidate(window, c), levels);
      error[c] = error[c] * error[c];
    }
    u32 turns = 0;
#pragma unroll
    for (u32 state = 0; state < 4; ++state) {
      const u32 bit = state / 2, before = state % 2;
      const float first = cost[2 * before] + error[trellis_class(bit, before, 0)];
      const float second = cost[2 * before + 1] + error[trellis_class(bit, before, 1)];
      turns |= (u32)(second < first) << state;
      next[state] = second < first ? second : first;
    }
#pragma unroll
    for (u32 state = 0; state < 4; ++state) cost[state] = next[state];
    room.codes[at] = (u8)turns;
  }
  const bool odd01 = cost[1] < cost[0], odd23 = cost[3] < cost[2];
  u32 bit = (odd23 ? cost[3] : cost[2]) < (odd01 ? cost[1] : cost[0]);
  u32 before = bit ? odd23 : odd01;
#pragma unroll 1
  for (u32 t = steps; t-- > 0;) {
    const u32 at = t * kTrellisSequences + sequence;
    const u32 before_that = room.codes[at] >> (2 * bit + before) & 1;
    const i32 window = trellis_window(room.x[at], levels);
    room.codes[at] = (u8)trellis_code(trellis_candidate(window, trellis_class(bit, before, before_that)), bit);
    bit = before, before = before_that;
  }
}

// From values to positions, and the second part of the wire; whether all values are finite.
QCCL_FN bool trellis_place(const BlockTeam& team, TrellisRoom& room, const TrellisOptions& o, u32 n, u8* meta,
                           const TrellisLevels& levels) {
  const u32 blocks = trellis_blocks(o, n), padded = (n + kTrellisSequences - 1) / kTrellisSequences * kTrellisSequences;
  u8* shares = meta + kTrellisOutlierPlace + 4 * o.outliers;
  const i32 size = team.greatest(n, [&](u32 i) { return magnitude(room.x[i]); });
  const bool finite = size < kInfinite;
  float centre = finite ? 0.0f : float_of(kQuietNan);
  if (finite && float_of((u32)size) < kTrellisHuge) {
    trellis_find_ends(team, room, o, n);
    centre = trellis_find_centre(team, room, blocks);
  }
  trellis_each(padded, [&](u32 i) { room.x[i] = finite && i < n ? room.x[i] - centre : 0.0f; });
  team.sync();
  trellis_take_outliers(team, room, o, n, meta + kTrellisOutlierPlace);
  const TrellisFrame frame = trellis_frame(centre, trellis_find_distances(team, room, o, n));
  if (team.leads()) store_float(meta, centre), store_float(meta + 4, frame.scale);
  trellis_each((blocks + 3) / 4 * 4, [&](u32 b) {
    const float below = absolute(room.low[b]), above = absolute(room.high[b]);
    shares[b] = b < blocks ? (u8)trellis_share(below > above ? below : above, frame) : 0;
  });
  team.sync();
  trellis_each(padded, [&](u32 i) {
    const float inverse = trellis_inverse(trellis_unit(shares[i / o.block], frame, levels));
    room.x[i] = room.x[i] * frame.pre * inverse;
  });
  team.sync();
  return finite;
}

template <class Values>
QCCL_FN void trellis_encode(const BlockTeam& team, const TrellisOptions& o, const Values& x, u32 n, u8* codes, u8* meta) {
  TrellisRoom& room = trellis_room();
  const TrellisLevels levels = trellis_levels(o.bits);
  const u32 steps = (n + kTrellisSequences - 1) / kTrellisSequences;
  trellis_each(n, [&](u32 i) { room.x[i] = x[i]; });
  team.sync();
  const bool finite = trellis_place(team, room, o, n, meta, levels);
  if (finite) {
    trellis_each(kTrellisSequences, [&](u32 sequence) { trellis_search(room, sequence, steps, levels); });
  } else {
    trellis_each(n, [&](u32 i) { room.codes[i] = 0; });
  }
  team.sync();
  const auto code = [&](u32 i) { return (u32)room.codes[i]; };
  with_bits(o.bits, [&](auto bits) QCCL_INLINE { team.template pack<bits.value>(n, code, codes); });
  team.sync();
}

template <class Take>
QCCL_FN void trellis_decode(const BlockTeam& team, const TrellisOptions& o, const u8* codes, const u8* meta, u32 n,
                            const Take& take) {
  TrellisRoom& room = trellis_room();
  const TrellisLevels levels = trellis_levels(o.bits);
  const TrellisFrame frame = trellis_frame(load_float(meta), load_float(meta + 4));
  const u8* shares = meta + kTrellisOutlierPlace + 4 * o.outliers;
  const auto keep = [&](u32 i, u32 code) { room.codes[i] = (u8)code; };
  with_bits(o.bits, [&](auto bits) QCCL_INLINE { team.template unpack<bits.value>(codes, n, keep); });
  team.sync();
  trellis_each(n, [&](u32 i) {
    const u32 before = i >= kTrellisSequences ? room.codes[i - kTrellisSequences] : 0;
    const u32 before_that = i >= 2 * kTrellisSequences ? room.codes[i - 2 * kTrellisSequences] : 0;
    const i32 level = trellis_level_of(room.codes[i], before, before_that);
    float value = trellis_value(level, trellis_unit(shares[i / o.block], frame, levels), frame, levels);
#pragma unroll 1
    for (u32 k = o.outliers; k-- > 0;) {  // of two for the same element, the first is valid
      const u32 word = load_word(meta + kTrellisOutlierPlace + 4 * k);
      const float distance = trellis_outlier_distance(word);
      if (trellis_outlier_element(word) == i && distance != 0.0f) value = distance + frame.centre;
    }
    take(i, value);
  });
  team.sync();
}

}  // namespace QCCL_NAMESPACE
