// The tile of the codecs of blocks. A warp or a part of one has a bucket, and neighbouring lanes have a block in each row of
// vectors: they find its scale together by shuffles.
#pragma once

#include "../../cuda/coded.h"
#include "codec.h"

namespace QCCL_NAMESPACE {

// op() of the values of `Lanes` neighbouring lanes. All lanes of the warp take part.
template <u32 Lanes, class Op>
QCCL_FN i32 over_lanes(i32 x, const Op& op) {
#pragma unroll
  for (u32 distance = 1; distance < Lanes; distance *= 2) x = op(x, __shfl_xor_sync(kAllLanes, x, (int)distance));
  return x;
}

template <u32 Format, u32 Block, u32 Bucket, bool Stochastic>
struct BlocksTile {
  using Table = typename FormatOf<Format>::Table;
  using Scale = typename FormatOf<Format>::Scale;
  static constexpr int bits = Table::bits;
  // Scales need more registers than four blocks leave beside the values, and with a state more than two leave.
  static constexpr int encode_blocks = 3, decode_blocks = bits > 4 ? 2 : 4, reduce_blocks = 2, state_blocks = 1;
  template <class T>
  static constexpr u32 block_lanes = Block / kPerVector<T>;

  // The part of a received wire that a thread loads, with the scale of each of its vectors.
  template <class T, class S>
  struct Wire {
    Pieces<bits, T, S> pieces;
    float scales[S::vectors], post;
  };

  template <class T>
  QCCL_FN u64 offset_of_meta(u64 count, u64 bucket) {
    return meta_offset(packed_nbytes(count, bits)) + bucket * Blocks::meta_nbytes<T>({Bucket, 0, {Format, Block}}, Bucket);
  }

  // The number of the block of vector j.
  template <class T>
  QCCL_FN u32 block_of(const Unit& unit, u32 j) {
    return (unit.offset + j * kPerRow<T>) / Block;
  }

  template <class T, class S>
  QCCL_FN void load_wire(const u8* wire, u64 count, const Unit& unit, Wire<T, S>& to) {
    const u8* meta = wire + offset_of_meta<T>(count, unit.bucket);
    const BlockFrame frame = block_frame(Scale::number_nbytes ? load_meta<1>(meta).at[0] : 1.0f);
    to.post = frame.post;
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      const i32 code = j < unit.vectors ? meta[Scale::number_nbytes + block_of<T>(unit, j)] : 0;
      to.scales[j] = Scale::scale(code, frame);
    }
    load_codes<bits, T, S>(wire, unit, to.pieces);
  }

  template <class T>
  QCCL_FN void prefetch_wire(const u8* wire, const Unit& unit) {
    prefetch(wire + warp_offset<bits>(unit), (u32)packed_nbytes(unit.warp_size, bits), lane_number());
  }

  template <class T, class S, class Take>
  QCCL_FN void for_each_value(const Wire<T, S>& wire, const Unit&, Take take) {
    constexpr i32 mask = (1 << bits) - 1;
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) {
        take(j, i, Table::value((i32)((u64)wire.pieces[j] >> bits * i) & mask) * wire.scales[j] * wire.post);
      }
    }
  }

  template <class T, class S>
  QCCL_FN bool has_nan(const Wire<T, S>&, const Values<T, S>& x) {
    return any_nan<T, S>(x);
  }

  // The factor of the first scale of vector j's block by least squares.
  template <class T, class S>
  QCCL_FN float fitted(const Values<T, S>& x, const Unit& unit, u32 j, float pre, float factor) {
    constexpr i32 edges = Table::top / 2 + 1;
    i32 sums[edges] = {}, counts[edges] = {};
#pragma unroll
    for (u32 i = 0; i < kPerVector<T>; ++i) {
      if (unit.offset + j * kPerRow<T> + i >= unit.size) continue;
      const float size = absolute(x[j][i]) * pre * factor;
      const i32 term = to_nearest(size);
#pragma unroll
      for (i32 k = 0; k < edges; ++k) {
        const bool above = k == 0 || size > Table::edge(k == 0 ? 1 : k) * kFitUnit;
        sums[k] += above ? term : 0, counts[k] += above;
      }
    }
#pragma unroll
    for (i32 k = 0; k < edges; ++k) {
      const auto add = [](i32 a, i32 b) { return a + b; };
      sums[k] = over_lanes<block_lanes<T>>(sums[k], add), counts[k] = over_lanes<block_lanes<T>>(counts[k], add);
    }
    return fit_ratio<Table>(sums, counts);
  }

  // The byte of vector j's block, whose greatest magnitude is `size`.
  template <class T, class S>
  QCCL_FN i32 choose(const Values<T, S>& x, const Unit& unit, u32 j, i32 size, const BlockFrame& frame) {
    const float most = as_float(size < kInfinite ? size : 0) * frame.pre;
    i32 code;
    if constexpr (Stochastic) {
      code = Scale::code_above(most, frame);
    } else {
      float wanted = most * Table::reach;
      if constexpr (Table::least_squares) {
        wanted *= fitted<T, S>(x, unit, j, frame.pre, 1.0f / greatest(wanted, kLeastFitted) * kFitUnit);
      }
      code = Scale::code(wanted, frame);
    }
    return size >= kInfinite ? Scale::nan : size == 0 ? Scale::zero : code;
  }

  // The same function as in CodedTile; a bucket is one unit.
  template <Pass P, class T, class S>
  QCCL_FN bool encode(const Values<T, S>& x, u8* wire, const Unit& unit, const TileJob& job, const Parameters& parameters,
                      const Memory& memory, Wire<T, S>& made) {
    static_assert(P == Pass::whole && S::lanes <= 32, "a bucket fits a warp");
    u8* meta = wire + offset_of_meta<T>(job.count, unit.bucket);
    const auto more = [](i32 a, i32 b) { return a > b ? a : b; };
    i32 sizes[S::vectors], most = 0;
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      i32 size = 0;
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) {
        if (unit.offset + j * kPerRow<T> + i < unit.size) size = more(size, magnitude(x[j][i]));
      }
      sizes[j] = over_lanes<block_lanes<T>>(size, more);
      most = more(most, sizes[j] < kInfinite ? sizes[j] : 0);
    }
    const float number = Scale::number(over_lanes<S::lanes>(most, more));
    const BlockFrame frame = block_frame(number);
    if (unit.leads) {
      if (Scale::number_nbytes) store_meta(meta, Meta<1>{{number}});
      for (u32 b = (unit.size + Block - 1) / Block; b % 4; ++b) meta[Scale::number_nbytes + b] = 0;
    }
    if (unit.last) clear_padding(wire, job.count, bits);
    made.post = frame.post;
    bool nan = false;
    RandomWords random = {};
    if constexpr (Stochastic) random = random_words(parameters, memory, job, unit.first);
#pragma unroll
    for (u32 j = 0; j < S::vectors; ++j) {
      const i32 code = choose<T, S>(x, unit, j, sizes[j], frame);
      if (j < unit.stored && unit.offset % Block == 0) meta[Scale::number_nbytes + block_of<T>(unit, j)] = (u8)code;
      made.scales[j] = Scale::scale(code, frame);
      const float inverse = made.scales[j] > 0.0f ? 1.0f / made.scales[j] : 0.0f;
      const bool finite = sizes[j] < kInfinite;
      nan |= j < unit.vectors && !finite;
      u64 piece = 0;
#pragma unroll
      for (u32 i = 0; i < kPerVector<T>; ++i) {
        const float position = x[j][i] * frame.pre * inverse;
        if constexpr (Stochastic) {
          const u32 index = random.index + unit.offset + j * kPerRow<T> + i;
          const RandomKey key = index < random.index ? random.next_key : random.key;
          piece |= (u64)(u32)Table::stochastic(position, (float)(i32)(random_word(key, index) >> 8) * 0x1p-24f) << bits * i;
        } else {
          piece |= (u64)(u32)Table::code(position) << bits * i;
        }
      }
      made.pieces[j] = finite ? (typename Piece<bits, T>::Word)piece : 0;
    }
    store_codes<bits, T, S>(wire, unit, made.pieces);
    return nan;
  }
};

}  // namespace QCCL_NAMESPACE
