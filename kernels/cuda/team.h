// The team that runs a codec's functions (../shared/bucket.h) on the device: all threads of a block, each on every 256th element.
// All threads call each function.
#pragma once

#include "../shared/bucket.h"
#include "../shared/pack.h"
#include "instructions.h"
#include "jobs.h"

namespace QCCL_NAMESPACE {

static_assert(kThreads == kSumLanes, "a lane of a sum is a thread");

// Shared memory for a value of each thread.
QCCL_FN float* float_lanes() {
  __shared__ float lanes[kThreads];
  return lanes;
}
QCCL_FN i32* integer_lanes() {
  __shared__ i32 lanes[kThreads];
  return lanes;
}

class BlockTeam {
 public:
  static constexpr bool is_one_thread = false;

  // `scratch`: device memory for the words that the codec's Kernel asks for (qccl/codecs/base.py).
  QCCL_MEMBER explicit BlockTeam(u32* scratch = nullptr) : scratch_(scratch) {}

  QCCL_MEMBER bool leads() const { return threadIdx.x == 0; }
  QCCL_MEMBER void sync() const { __syncthreads(); }

  template <class Body>
  QCCL_MEMBER void each(u32 n, const Body& body) const {
    for (u32 i = threadIdx.x; i < n; i += kThreads) body(i);
  }

  template <class Term>
  QCCL_MEMBER auto sum(u32 n, const Term& term) const {
    decltype(term(0)) total{};
    for (u32 tile = 0; tile < n; tile += kSumTile) {
      decltype(term(0)) part{};
      for (u32 i = tile + threadIdx.x; i < n && i < tile + kSumTile; i += kThreads) part = part + term(i);
      total = total + part;
    }
    return fold_sum(total);
  }

  template <class Key>
  QCCL_MEMBER i32 greatest(u32 n, const Key& key) const {
    i32 most = -0x7fffffff - 1;
    for (u32 i = threadIdx.x; i < n; i += kThreads) {
      const i32 k = key(i);
      most = k > most ? k : most;
    }
    return fold(integer_lanes(), most, [](i32 a, i32 b) { return a > b ? a : b; });
  }

  template <class Which>
  QCCL_MEMBER u32 count(u32 n, const Which& which) const {
    i32 number = 0;
    for (u32 i = threadIdx.x; i < n; i += kThreads) number += which(i) ? 1 : 0;
    return (u32)fold(integer_lanes(), number, [](i32 a, i32 b) { return a + b; });
  }

  template <int Bits, class Code>
  QCCL_MEMBER void pack(u32 n, const Code& code, u8* to) const {
    for (u32 first = 8 * threadIdx.x; first < n; first += 8 * kThreads) {
      const u32 size = n - first < 8 ? n - first : 8;
      u64 codes = 0;
      for (u32 j = 0; j < size; ++j) codes |= (u64)(code(first + j) & 0xffu) << 8 * j;
      const u64 packed = pack8<Bits>(codes);
      for (u32 j = 0; j < (size * Bits + 7) / 8; ++j) to[first / 8 * Bits + j] = (u8)(packed >> 8 * j);
    }
  }

  template <int Bits, class Take>
  QCCL_MEMBER void unpack(const u8* from, u32 n, const Take& take) const {
    for (u32 first = 8 * threadIdx.x; first < n; first += 8 * kThreads) {
      const u32 size = n - first < 8 ? n - first : 8;
      u64 packed = 0;
      for (u32 j = 0; j < (size * Bits + 7) / 8; ++j) packed |= (u64)from[first / 8 * Bits + j] << 8 * j;
      const u64 codes = unpack8<Bits>(packed);
      for (u32 j = 0; j < size; ++j) take(first + j, (u32)(codes >> 8 * j) & 0xffu);
    }
  }

  template <class Half>
  QCCL_MEMBER void pack_halves(u32 n, const Half& half, u8* to) const {
    for (u32 i = threadIdx.x; i < n; i += kThreads) {
      const u16 bits = half(i);
      to[2 * i] = (u8)bits, to[2 * i + 1] = (u8)(bits >> 8);
    }
  }
  template <class Take>
  QCCL_MEMBER void unpack_halves(const u8* from, u32 n, const Take& take) const {
    for (u32 i = threadIdx.x; i < n; i += kThreads) take(i, (u16)(from[2 * i] | (u32)from[2 * i + 1] << 8));
  }

  // Indices in the scratch. A radix select: each step finds eight more bits of the last key that is kept. The digit 0 is what remains and is not
  // counted: threads that count many zeros would wait for each other.
  template <class Key>
  QCCL_MEMBER const u32* select(u32 n, u32 keep, const Key& key) const {
    u32 least = 0, above = 0;  // the bits found so far; the number of keys above all keys with these bits
    u32* counts = reinterpret_cast<u32*>(integer_lanes());
    for (int shift = 24; shift >= 0; shift -= 8) {
      counts[threadIdx.x] = 0;
      sync();
      for (u32 i = threadIdx.x; i < n; i += kThreads) {
        const u32 k = (u32)key(i);
        const u32 digit = k >> shift & 0xffu;
        if (digit && (u64)k >> (shift + 8) == (u64)least >> (shift + 8)) atomicAdd(&counts[digit], 1u);
      }
      sync();
      u32 digit = 0xff;
      while (digit && above + counts[digit] < keep) above += counts[digit--];
      least |= digit << shift;
      sync();
    }
    const Share share = share_of(n);
    u32 greater = 0, equal = 0;
    for (u32 i = share.begin; i < share.end; ++i) {
      const u32 k = (u32)key(i);
      greater += k > least;
      equal += k == least;
    }
    u32 ties = sum_before(equal);
    greater = sum_before(greater);
    for (u32 i = share.begin; i < share.end; ++i) {
      const u32 k = (u32)key(i);
      if (k > least || (k == least && ties < keep - above)) scratch_[greater + (ties < keep - above ? ties : keep - above)] = i;
      greater += k > least;
      ties += k == least;
    }
    sync();
    return scratch_;
  }

  // A thread stores whole bytes, and looks for the first bit of each.
  template <class Position>
  QCCL_MEMBER void set_bits(u32 n, const Position& position, u8* to, u32 nbytes) const {
    each(nbytes, [&](u32 b) {
      u32 j = 0, end = n;
      while (j < end) {
        const u32 middle = (j + end) / 2;
        if (position(middle) < 8 * b) {
          j = middle + 1;
        } else {
          end = middle;
        }
      }
      u32 bits = 0;
      for (; j < n && position(j) < 8 * b + 8; ++j) bits |= 1u << position(j) % 8;
      to[b] = (u8)bits;
    });
  }

  template <class Body>
  QCCL_MEMBER u32 each_set_bit(const u8* from, u32 nbytes, const Body& body) const {
    const Share share = share_of(nbytes);
    u32 mine = 0;
    for (u32 i = share.begin; i < share.end; ++i) mine += (u32)__popc(from[i]);
    u32 number = sum_before(mine);
    for (u32 i = share.begin; i < share.end; ++i) {
      for (u32 bits = from[i]; bits; bits &= bits - 1) body(number++, 8 * i + 31 - (u32)__clz((int)(bits & -bits)));
    }
    return (u32)fold(integer_lanes(), (i32)mine, [](i32 a, i32 b) { return a + b; });
  }

  QCCL_MEMBER bool any(bool mine) const {
    return fold(integer_lanes(), (i32)mine, [](i32 a, i32 b) { return a | b; }) != 0;
  }

 private:
  // The consecutive elements of this thread, of n.
  struct Share {
    u32 begin, end;
  };
  QCCL_MEMBER Share share_of(u32 n) const {
    const u32 size = (n + kThreads - 1) / kThreads, begin = size * threadIdx.x < n ? size * threadIdx.x : n;
    return {begin, begin + size < n ? begin + size : n};
  }

  // The sum of the values of the threads before this one.
  QCCL_MEMBER u32 sum_before(u32 mine) const {
    u32* lanes = reinterpret_cast<u32*>(integer_lanes());
    lanes[threadIdx.x] = mine;
    sync();
    u32 sum = 0;
    for (u32 i = 0; i < threadIdx.x; ++i) sum += lanes[i];
    sync();
    return sum;
  }

  QCCL_MEMBER float fold_sum(float mine) const {
    return fold(float_lanes(), mine, [](float a, float b) { return a + b; });
  }
  QCCL_MEMBER FloatPair fold_sum(const FloatPair& mine) const { return {fold_sum(mine.first), fold_sum(mine.second)}; }

  // Combines the upper half of the lanes with the lower half until one value is left, which all threads get. The first
  // three steps combine values of different warps, and every warp does them.
  template <class Value, class Combine>
  QCCL_MEMBER Value fold(Value* lanes, Value mine, const Combine& combine) const {
    lanes[threadIdx.x] = mine;
    sync();
    Value each[kWarps];
#pragma unroll
    for (u32 w = 0; w < kWarps; ++w) each[w] = lanes[32 * w + threadIdx.x % 32];
    sync();  // the next fold overwrites the lanes
#pragma unroll
    for (u32 half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
      for (u32 w = 0; w < half; ++w) each[w] = combine(each[w], each[w + half]);
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) each[0] = combine(each[0], __shfl_xor_sync(kAllLanes, each[0], half));
    return each[0];
  }

  u32* scratch_;
};

}  // namespace QCCL_NAMESPACE
