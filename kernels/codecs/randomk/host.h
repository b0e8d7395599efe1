// Which elements the random-k codec picks, sixteen at a time; the numbers are those of codec.h.
#pragma once

#include "../../host/team.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

QCCL_FN Words shuffle(const RandomPick& pick, const Words& number) {
  const u32 low_mask = (1u << pick.low_bits) - 1, high_mask = (1u << pick.high_bits) - 1;
  const auto word = [&](const Words& index) QCCL_INLINE {
    Words x = (index ^ pick.key.low) * 0xed5ad4bbu;
    x = (x ^ (x >> 14u) ^ pick.key.high) * 0xac4c1b51u;
    return ((x ^ (x >> 14u)) * 0x31848babu) >> 8u;
  };
  Words low = number & low_mask, high = number >> pick.low_bits;
  for (u32 turn = 0; turn < 6; turn += 2) {
    low = low ^ (word(high ^ (turn << 24)) & low_mask);
    high = high ^ (word(low ^ ((turn + 1) << 24)) & high_mask);
  }
  return (high << pick.low_bits) ^ low;
}

// Elements first, first + 1, ... of a pick, a multiple of sixteen of them.
static QCCL_LOOP void make_picks(const RandomPick pick, u32 first, u32 n, u32* picks) {
  const Ints below = all_lanes((i32)pick.n);  // numbers are below 2^25
  for (u32 i = 0; i < n; i += kLanes) {
    // lanes behind the last element have its pick: the walk from a number that the network has no bits for might not end
    const Ints numbers = least(cast<i32>(lane_numbers() + (first + i)), all_lanes((i32)pick.n - 1));
    Words number = shuffle(pick, cast<u32>(numbers));
    while (bits_of(is_less(cast<i32>(number), below)) != 0xffff) {
      const Words again = shuffle(pick, number);
      number = cast<u32>(select(is_less(cast<i32>(number), below), cast<i32>(number), cast<i32>(again)));
    }
    const Ints turned = cast<i32>(number + pick.rotation);
    store_lanes(select(is_less(turned, below), turned, turned - below), picks + i);
  }
}

// body(j, picked(j)) for j < n.
template <class Body>
QCCL_FN void each_picked(const HostTeam&, const RandomPick& pick, u32 n, const Body& body) {
  constexpr u32 stage = 256;
  alignas(64) u32 picks[stage];
  for (u32 first = 0; first < n; first += stage) {
    const u32 size = n - first < stage ? n - first : stage;
    make_picks(pick, first, (size + kLanes - 1) / kLanes * kLanes, picks);
    for (u32 j = 0; j < size; ++j) body(first + j, picks[j]);
  }
}

}  // namespace QCCL_NAMESPACE
