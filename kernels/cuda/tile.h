// Distributes the elements of a job over threads, loads them into registers and stores them.
//
// A *unit* of work is the values that a group of `Lanes` threads holds in registers, `Vectors` times 16 bytes in each
// thread: a bucket, or a part of a large one. Groups of 32 lanes or fewer are within a warp; a group of 256 is a block. Each
// warp has consecutive elements, in rows of one vector per lane, so that the lanes' accesses of 16 bytes coalesce.
#pragma once

#include "instructions.h"
#include "jobs.h"

namespace QCCL_NAMESPACE {

template <int Lanes, int Vectors>
struct Shape {
  static_assert(Lanes == kThreads || Lanes == 32 || (Lanes < 32 && Vectors == 1));
  static constexpr u32 lanes = Lanes, vectors = Vectors;
  static constexpr u32 groups = kThreads / Lanes;  // groups in a block
};

constexpr u32 kLargestUnit = kThreads * 32;  // elements

// Values in a vector, and in a row of a warp's vectors.
template <class T>
constexpr u32 kPerVector = 16 / sizeof(typename T::Storage);
template <class T>
constexpr u32 kPerRow = 32 * kPerVector<T>;

// The part of an encoding that a kernel does. A bucket of one unit takes one kernel (`whole`). Otherwise a first kernel
// gathers the bucket's range (`range`), and a second one does the rest (`codes`).
enum class Pass { whole, range, codes };

// The job of a tile's encode(). Memory::call points to the number of the call.
struct TileJob {
  u64 count, index;
  u32 round, rank;
  u32 scratch;  // the number of its first bucket in the scratch
};

// A thread's values.
template <class T, class S>
using Values = float[S::vectors][kPerVector<T>];

QCCL_FN u32 lane_number() { return threadIdx.x % 32; }

// The shuffle shows the compiler that all lanes have the same value, so branches that depend on it do not diverge.
QCCL_FN u32 warp_number() { return __shfl_sync(kAllLanes, threadIdx.x / 32, 0); }

// A thread's part of a unit. If a warp has several units and the job ends within the warp, the other threads repeat the
// last unit without storing anything, because all lanes of a warp work together.
struct Unit {
  u64 first;         // its first element in the call
  u32 size;          // elements, at least 1
  u32 bucket;        // its number in the call
  u32 offset;        // offset in the unit of this thread's first vector; the next vectors follow a row apart
  u32 vectors;       // this thread's vectors in the unit, the last perhaps partly
  u32 stored;        // vectors to store: the same, or 0
  bool leads, last;  // this thread stores the data that a bucket, or a call, has once
  u64 warp_first;    // first element of this warp
  u32 warp_size;     // elements of this warp
};

template <class Number>
QCCL_FN Number smaller(Number a, Number b) {
  return a < b ? a : b;
}

// Finds this thread's unit among `units` of a job, in block number `block` of it; false if the warp has none. In a block
// that is one group, all warps have one or none has.
template <class T, class S>
QCCL_FN bool find_unit(u32 block, u32 units, u64 count, const Parameters& parameters, Unit& unit) {
  constexpr u32 per_warp = S::vectors * kPerRow<T>, capacity = S::lanes * S::vectors * kPerVector<T>;
  const u32 warp = warp_number(), lane = lane_number();
  const u32 of_warp = block * S::groups + warp * 32 / S::lanes;  // the warp's first unit
  if (of_warp >= units) return false;
  const u32 wanted = of_warp + (S::lanes < 32 ? lane / S::lanes : 0), number = smaller(wanted, units - 1);
  const u64 bucket_size = parameters.bucket ? parameters.bucket : count;
  u32 part = 0;
  unit.bucket = number;
  if (parameters.units_per_bucket != 1) {
    unit.bucket = number / parameters.units_per_bucket;
    part = number % parameters.units_per_bucket;
  }
  const u64 start = unit.bucket * bucket_size, stop = smaller(start + bucket_size, count);
  unit.first = start + (u64)part * capacity;
  unit.size = (u32)smaller<u64>(stop - unit.first, capacity);
  if constexpr (S::lanes < 32) {
    unit.warp_first = of_warp * bucket_size;
    unit.warp_size = (u32)smaller<u64>(32 / S::lanes * bucket_size, count - unit.warp_first);
  } else {
    const u32 skipped = S::lanes == 32 ? 0 : smaller(warp * per_warp, unit.size);
    unit.warp_first = unit.first + skipped;
    unit.warp_size = smaller(unit.size - skipped, per_warp);
  }
  unit.offset = (S::lanes == kThreads ? warp * per_warp : 0) + lane % S::lanes * kPerVector<T>;
  unit.vectors = unit.offset < unit.size ? (unit.size - unit.offset + kPerRow<T> - 1) / kPerRow<T> : 0;
  unit.stored = wanted < units ? unit.vectors : 0;
  unit.leads = unit.offset == 0 && wanted < units && part == 0;
  unit.last = unit.offset == 0 && wanted == units - 1;
  return true;
}

// The number of this thread's first vector among its warp's vectors; the next follow at intervals of 32.
template <class T, class S>
QCCL_FN u32 vector_number(const Unit& unit) {
  if constexpr (S::lanes < 32) return ((u32)(unit.first - unit.warp_first) + unit.offset) / kPerVector<T>;
  return lane_number();
}

// Whether the warp has whole vectors only.
template <class T>
QCCL_FN bool is_whole(const Unit& unit) {
  return unit.warp_size % kPerVector<T> == 0;
}

// Whether all values of the warp's threads are in the unit.
template <class T, class S>
QCCL_FN bool has_all_values(const Unit& unit) {
  return unit.warp_size == S::vectors * kPerRow<T>;
}

QCCL_FN bool is_aligned(const void* address, u32 alignment) {
  return (reinterpret_cast<u64>(address) & (alignment - 1)) == 0;
}

// This warp's shared memory, for data that wide accesses cannot move between registers and global memory.
constexpr u32 kStagedRows = 4;
QCCL_FN u8* staging() {
  __shared__ __align__(16) u8 memory[kWarps][kStagedRows * 32 * 16];
  return memory[threadIdx.x / 32];
}

// Rows of a unit that are loaded and stored together.
template <class S>
constexpr u32 kRows = S::vectors < kStagedRows ? S::vectors : kStagedRows;

template <class T>
QCCL_FN void prefetch_raw(const u8* values, const Unit& unit) {
  constexpr u32 itemsize = sizeof(typename T::Storage);
  prefetch(values + unit.warp_first * itemsize, unit.warp_size * itemsize, lane_number());
}

// Loads kRows rows of the unit from `row` on; `values` are the call's, aligned to Step. A vector that is partly outside the
// unit is filled with copies of a value in it; a vector outside is undefined. All lanes of the warp take part.
template <class T, class S, class Step = typename T::Storage>
QCCL_FN void load_rows(const u8* values, const Unit& unit, u32 row, uint4 (&vectors)[kRows<S>]) {
  using Storage = typename T::Storage;
  if (is_aligned(values, 16) && is_whole<T>(unit)) {
    const uint4* from = reinterpret_cast<const uint4*>(values + (unit.first + unit.offset) * sizeof(Storage));
#pragma unroll
    for (u32 j = 0; j < kRows<S>; ++j) {
      vectors[j] = {};
      if (row + j < unit.vectors) vectors[j] = from[(row + j) * 32];
    }
    return;
  }
  if (unit.warp_size == 0) return;
  constexpr u32 steps = sizeof(Storage) / sizeof(Step);
  const Step* from = reinterpret_cast<const Step*>(values) + unit.warp_first * steps;
  Step* stage = reinterpret_cast<Step*>(staging());
#pragma unroll 4
  for (u32 i = lane_number(); i < kRows<S> * kPerRow<T> * steps; i += 32) {
    stage[i] = from[smaller(row * kPerRow<T> + i / steps, unit.warp_size - 1) * steps + i % steps];
  }
  __syncwarp();
#pragma unroll
  for (u32 j = 0; j < kRows<S>; ++j) {
    vectors[j] = reinterpret_cast<const uint4*>(stage)[vector_number<T, S>(unit) + j * 32];
  }
  __syncwarp();
}

// The inverse; stores only the elements in the unit.
template <class T, class S, class Step = typename T::Storage>
QCCL_FN void store_rows(u8* values, const Unit& unit, u32 row, const uint4 (&vectors)[kRows<S>]) {
  using Storage = typename T::Storage;
  if (is_aligned(values, 16) && is_whole<T>(unit)) {
    uint4* to = reinterpret_cast<uint4*>(values + (unit.first + unit.offset) * sizeof(Storage));
#pragma unroll
    for (u32 j = 0; j < kRows<S>; ++j) {
      if (row + j < unit.stored) to[(row + j) * 32] = vectors[j];
    }
    return;
  }
  constexpr u32 steps = sizeof(Storage) / sizeof(Step);
  Step* to = reinterpret_cast<Step*>(values) + (unit.warp_first + row * kPerRow<T>) * steps;
  Step* stage = reinterpret_cast<Step*>(staging());
#pragma unroll
  for (u32 j = 0; j < kRows<S>; ++j) {
    if (row + j < unit.stored) reinterpret_cast<uint4*>(stage)[vector_number<T, S>(unit) + j * 32] = vectors[j];
  }
  __syncwarp();
#pragma unroll 4
  for (u32 i = lane_number(); i < kRows<S> * kPerRow<T> * steps; i += 32) {
    if (row * kPerRow<T> + i / steps < unit.warp_size) to[i] = stage[i];
  }
  __syncwarp();
}

// A vector's values.
template <class T>
QCCL_FN void widen(const uint4& vector, float (&x)[kPerVector<T>]) {
  const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    if constexpr (T::code == Float32::code) {
      x[i] = float_of(words[i]);
    } else {
      x[2 * i] = widen_half<T>((u16)words[i]);
      x[2 * i + 1] = widen_half<T>((u16)(words[i] >> 16));
    }
  }
}

// Rounds values to 16 bits. `nan`: there may be NaNs; all become the quiet one.
template <class W, u32 N>
QCCL_FN void narrow_halves(const float (&x)[N], bool nan, u32* words) {
#pragma unroll
  for (u32 i = 0; i < N; i += 2) words[i / 2] = round_pair<W>(x[i], x[i + 1]);
  if (nan) {
    const u32 quiet = W::from_float(float_of(kQuietNan));
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      u32& word = words[i / 2];
      const u32 mended = i % 2 ? (word & 0xffffu) | quiet << 16 : (word & 0xffff0000u) | quiet;
      word = is_nan(x[i]) ? mended : word;
    }
  }
}

// A value rounded to an element type; a NaN may become another NaN.
template <class T>
QCCL_FN float rounded(float x) {
  if constexpr (T::code == Float32::code) {
    return x;
  } else {
    return widen_half<T>((u16)round_pair<T>(x, 0.0f));
  }
}

// Rounds the values to the element type, as narrow_halves().
template <class T>
QCCL_FN uint4 narrow(const float (&x)[kPerVector<T>], bool nan) {
  u32 words[4];
  if constexpr (T::code != Float32::code) {
    narrow_halves<T>(x, nan, words);
  } else {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) words[i] = bits_of(x[i]);
    if (nan) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) words[i] = bits_of(T::from_float(x[i]));
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// take(j, i, x) for each of the unit's values that this thread has.
template <class T, class S, class Step = typename T::Storage, class Take>
QCCL_FN void load_values(const u8* values, const Unit& unit, Take take) {
#pragma unroll
  for (u32 row = 0; row < S::vectors; row += kRows<S>) {
    uint4 vectors[kRows<S>];
    load_rows<T, S, Step>(values, unit, row, vectors);
#pragma unroll
    for (u32 j = 0; j < kRows<S>; ++j) {
      float x[kPerVector<T>];
      widen<T>(vectors[j], x);
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) take(row + j, i, x[i]);
    }
  }
}

template <class T, class S, class Step = typename T::Storage>
QCCL_FN void store_values(u8* values, const Unit& unit, const Values<T, S>& x, bool nan) {
#pragma unroll
  for (u32 row = 0; row < S::vectors; row += kRows<S>) {
    uint4 vectors[kRows<S>];
#pragma unroll
    for (u32 j = 0; j < kRows<S>; ++j) vectors[j] = narrow<T>(x[row + j], nan);
    store_rows<T, S, Step>(values, unit, row, vectors);
  }
}

// The bits of four elements of type R as floats; those from number n on are 0. If `wide`, one load suffices for all.
template <class R>
QCCL_FN uint4 load_four(const typename R::Storage* at, u32 n, bool wide) {
  if (!wide) {
    const auto bits = [&](u32 i) { return n > i ? bits_of(R::to_float(at[i])) : 0; };
    return {bits(0), bits(1), bits(2), bits(3)};
  }
  if (!n) return {};
  if constexpr (R::code == Float32::code) {
    return *reinterpret_cast<const uint4*>(at);
  } else {
    static_assert(R::code == BFloat16::code, "state is float32 or bfloat16");
    const u64 x = *reinterpret_cast<const u64*>(at);
    return {(u32)x << 16, (u32)x & 0xffff0000u, (u32)(x >> 32) << 16, (u32)(x >> 32) & 0xffff0000u};
  }
}

// Stores four floats, which R has, with one store.
template <class R>
QCCL_FN void store_four(typename R::Storage* at, const float* x) {
  if constexpr (R::code == Float32::code) {
    *reinterpret_cast<uint4*>(at) = {bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])};
  } else {
    const auto two = [&](u32 i) { return (u32)R::from_float(x[i]) | (u32)R::from_float(x[i + 1]) << 16; };
    *reinterpret_cast<u64*>(at) = two(0) | (u64)two(2) << 32;
  }
}

// take(j, i, x) for the state of each of a thread's values as a float; `state` is the call's, of type R. Outside the unit it
// is 0.
template <class R, class T, class S, class Take>
QCCL_FN void load_state(const typename R::Storage* state, const Unit& unit, Take take) {
  const auto* from = state + unit.first + unit.offset;
  const bool wide = is_aligned(from, 4 * sizeof *from) && is_whole<T>(unit);
#pragma unroll
  for (u32 j = 0; j < S::vectors; ++j) {
#pragma unroll
    for (u32 i = 0; i < kPerVector<T>; i += 4) {
      const u32 place = unit.offset + j * kPerRow<T> + i, n = place < unit.size ? unit.size - place : 0;
      const uint4 x = load_four<R>(from + j * kPerRow<T> + i, n, wide);
      take(j, i, float_of(x.x)), take(j, i + 1, float_of(x.y)), take(j, i + 2, float_of(x.z)), take(j, i + 3, float_of(x.w));
    }
  }
}

// Stores the state of each of a thread's values in the unit.
template <class R, class T, class S>
QCCL_FN void store_state(typename R::Storage* state, const Unit& unit, const Values<T, S>& x) {
  auto* to = state + unit.first + unit.offset;
  const bool wide = is_aligned(to, 4 * sizeof *to) && is_whole<T>(unit);
#pragma unroll
  for (u32 j = 0; j < S::vectors; ++j) {
    if (j >= unit.stored) break;
#pragma unroll
    for (u32 i = 0; i < kPerVector<T>; i += 4) {
      const float(&y)[kPerVector<T>] = x[j];
      if (wide) {
        store_four<R>(to + j * kPerRow<T> + i, y + i);
      } else {
#pragma unroll
        for (u32 k = i; k < i + 4; ++k) {
          if (unit.offset + j * kPerRow<T> + k < unit.size) to[j * kPerRow<T> + k] = R::from_float(y[k]);
        }
      }
    }
  }
}

// body(j, i) for each of a thread's values.
template <class T, class S, class Body>
QCCL_FN void for_each_element(Body body) {
#pragma unroll
  for (u32 j = 0; j < S::vectors; ++j) {
#pragma unroll
    for (u32 i = 0; i < kPerVector<T>; ++i) body(j, i);
  }
}

template <class T, class S>
QCCL_FN bool any_nan(const Values<T, S>& x) {
  bool found = false;
  for_each_element<T, S>([&](u32 j, u32 i) { found |= x[j][i] != x[j][i]; });
  return found;
}

// Fills the rest of a vector that is partly outside the unit with its first value.
template <class T, class S>
QCCL_FN void repeat_first(Values<T, S>& x, const Unit& unit) {
  if (is_whole<T>(unit)) return;
  for_each_element<T, S>([&](u32 j, u32 i) {
    if (unit.offset + j * kPerRow<T> + i >= unit.size) x[j][i] = x[j][0];
  });
}

}  // namespace QCCL_NAMESPACE
