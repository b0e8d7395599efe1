// Loops over the elements of a call in lanes and in blocks that fit L1.
#pragma once

#include "lanes.h"

namespace QCCL_NAMESPACE {

QCCL_FN u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

template <class T>
const typename T::Storage* element(const void* base, u64 index) {
  return static_cast<const typename T::Storage*>(base) + index;
}

template <class T>
typename T::Storage* element(void* base, u64 index) {
  return static_cast<typename T::Storage*>(base) + index;
}

// Calls body(i, lanes) for each sixteen of n elements, and for the left-over elements.
template <class Count, class Body>
QCCL_FN void for_lanes(Count n, const Body& body) {
  Count i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, (u32)(n - i));
}

// Elements that one loop handles before the next loop reads them from L1; a bucket of the usual sizes fits.
constexpr u32 kBlock = 2048;

// Calls body(begin, n) for each block of `size` elements.
template <class Body>
QCCL_FN void for_blocks(u64 size, const Body& body) {
  for (u64 at = 0; at < size; at += kBlock) body(at, (u32)smaller(kBlock, size - at));
}

}  // namespace QCCL_NAMESPACE
