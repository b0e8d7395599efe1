// The picks of the random-k codec, sixteen at a time, equal to those of codec.h.
#pragma once

#include "../../host/team.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

// picked(first), picked(first + 1), ...; n is a multiple of sixteen.
static QCCL_LOOP void make_picks(const RandomPick pick, u32 first, u32 n, u32* picks) {
  const i32xN below = all_lanes((i32)pick.n);  // numbers are below 2^25
  for (u32 i = 0; i < n; i += kLanes) {
    // lanes behind the last element repeat it: from a number outside the network's bits the loop might not end
    const i32xN numbers = least(cast<i32>(lane_numbers() + (first + i)), all_lanes((i32)pick.n - 1));
    u32xN number = shuffle(pick, cast<u32>(numbers));
    while (bits_of(is_less(cast<i32>(number), below)) != 0xffff) {
      const u32xN again = shuffle(pick, number);
      number = cast<u32>(select(is_less(cast<i32>(number), below), cast<i32>(number), cast<i32>(again)));
    }
    const i32xN turned = cast<i32>(number + pick.rotation);
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
