// The arithmetic of low-rank compression (see qccl/torch/factors.py), compiled once per instruction set. A sum has the same
// order in each of them: registers hold independent sums, and how many of these a loop computes at once changes no bit.
#include "factor_loops.h"

#include <type_traits>

#include "blocking.h"
#include "elements.h"

namespace QCCL_NAMESPACE {

namespace {

using f64xN = Lanes<double>;
constexpr u32 kDoubles = 8;  // lanes of f64xN, and partial sums of a scalar product

// Rows of the basis that a loop takes at once, so that it loads `row` once for them, and does not wait for its additions.
constexpr u32 kTogether = 4;

// A row depends on earlier rows if their projections leave at most this share of its norm, about float32's rounding.
constexpr double kDependent = 1e-6;

// Lane l has the sum of the elements l, l + 8, ... The lanes are added by halves.
QCCL_FN double sum_of_lanes(const f64xN& sums) {
  alignas(64) double at[kDoubles];
  store_lanes(sums, at);
  for (u32 half = kDoubles / 2; half; half /= 2) {
    for (u32 l = 0; l < half; ++l) at[l] += at[l + half];
  }
  return at[0];
}

// The scalar products of `row` and each of some rows. All have zeros up to a multiple of kDoubles.
template <u32 Rows>
QCCL_LOOP void multiply(const double* row, const double* basis, u64 stride, u64 columns, double* products) {
  f64xN sums[Rows] = {};
  for (u64 at = 0; at < columns; at += kDoubles) {
    const f64xN x = load_lanes<double>(row + at);
    for (u32 r = 0; r < Rows; ++r) sums[r] = sums[r] + x * load_lanes<double>(basis + r * stride + at);
  }
  for (u32 r = 0; r < Rows; ++r) products[r] = sum_of_lanes(sums[r]);
}

// Subtracts from `row` the multiples of some rows, one after the other.
template <u32 Rows>
QCCL_LOOP void subtract(double* row, const double* basis, u64 stride, u64 columns, const double* factors) {
  f64xN by[Rows];
  for (u32 r = 0; r < Rows; ++r) by[r] = all_lanes(factors[r]);
  for (u64 at = 0; at < columns; at += kDoubles) {
    f64xN x = load_lanes<double>(row + at);
    for (u32 r = 0; r < Rows; ++r) x = x - by[r] * load_lanes<double>(basis + r * stride + at);
    store_lanes(x, row + at);
  }
}

// Rows of doubles, each of which is filled with zeros up to the next one.
class Basis {
 public:
  Basis(double* rows, u64 columns, double* factors)
      : rows_(rows), columns_(columns), stride_(qccl::row_stride(columns)), factors_(factors) {}

  double* row(u64 i) const { return rows_ + i * stride_; }

  void load(u64 i, const float* from) const {
    for (u64 c = 0; c < columns_; ++c) row(i)[c] = (double)from[c];
    fill(i);
  }

  // Numbers from -1 to 1, by SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom generators").
  void load_random(u64 i, u64 seed) const {
    for (u64 c = 0; c < columns_; ++c) {
      u64 x = (seed * columns_ + c) * 0x9e3779b97f4a7c15u;
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      x ^= x >> 31;
      row(i)[c] = (double)(x >> 11) * 0x1p-52 - 1.0;
    }
    fill(i);
  }

  // Makes row i orthogonal to the rows before it, of norm 1. False if it depends on them or is not finite.
  bool orthonormalise(u64 i) const {
    const double before = norm(i);
    project(i);
    const double rest = norm(i);
    if (!(rest > kDependent * before)) return false;
    for (u64 c = 0; c < columns_; ++c) row(i)[c] /= rest;
    return true;
  }

  void store(u64 i, float* to) const {
    for (u64 c = 0; c < columns_; ++c) to[c] = (float)row(i)[c];
  }

 private:
  double norm(u64 i) const {
    double square;
    multiply<1>(row(i), row(i), stride_, columns_, &square);
    return __builtin_sqrt(square);
  }

  // Subtracts from row i its projections on the rows before it, whose factors are all computed first; twice.
  void project(u64 i) const {
    for (u32 pass = 0; pass < 2; ++pass) {
      u64 j = 0;
      for (; j + kTogether <= i; j += kTogether) {
        multiply<kTogether>(row(i), row(j), stride_, columns_, factors_ + j);
      }
      for (; j < i; ++j) multiply<1>(row(i), row(j), stride_, columns_, factors_ + j);
      for (j = 0; j + kTogether <= i; j += kTogether) {
        subtract<kTogether>(row(i), row(j), stride_, columns_, factors_ + j);
      }
      for (; j < i; ++j) subtract<1>(row(i), row(j), stride_, columns_, factors_ + j);
    }
  }

  void fill(u64 i) const {
    for (u64 c = columns_; c < stride_; ++c) row(i)[c] = 0.0;
  }

  double* rows_;
  u64 columns_, stride_;
  double* factors_;
};

// Rows of the result that a loop computes at once: eight registers hold their sums.
constexpr u32 kRows = kRegisterBytes / 8;

// Sixteen columns of some rows. `p` has the rows' `rank` factors one after the other, `q` sixteen columns of each row of q.
template <u32 Rows>
QCCL_FN void add_products(const float* p, const float* q, u64 rank, float* out, u64 columns, u32 width) {
  f32xN sums[Rows];
  const f32xN first = load_lanes<float>(q);
  for (u32 r = 0; r < Rows; ++r) sums[r] = first * p[r * rank];
  for (u64 j = 1; j < rank; ++j) {
    const f32xN x = load_lanes<float>(q + j * kLanes);
    for (u32 r = 0; r < Rows; ++r) sums[r] = sums[r] + x * p[r * rank + j];
  }
  for (u32 r = 0; r < Rows; ++r) store_values<Float32>(quiet_nans(sums[r]), out + r * columns, width);
}

void orthonormal_rows(const float* given, float* out, std::uint64_t rows, std::uint64_t columns, std::uint64_t seed,
                      double* scratch) {
  const Basis basis(scratch + rows, columns, scratch);
  for (u64 i = 0; i < rows; ++i) {
    basis.load(i, given + i * columns);
    for (u64 attempt = 0; !basis.orthonormalise(i); ++attempt) {
      basis.load_random(i, (seed << 16) + (i << 8) + attempt);
    }
    basis.store(i, out + i * columns);
  }
}

void outer_sum(const qccl::OuterSumArgs& args, const qccl::BucketRange& rows, float* scratch) {
  const u64 rank = args.rank, columns = args.columns;
  const auto width = [&](u64 first) { return (u32)smaller(kLanes, columns - first); };
  for (u64 first = 0; first < columns; first += kLanes) {
    for (u64 j = 0; j < rank; ++j) {
      store_lanes(load_values<Float32>(args.q + j * columns + first, width(first)), scratch + first * rank + j * kLanes);
    }
  }
  const auto add = [&](u64 i, auto some) {
    for (u64 first = 0; first < columns; first += kLanes) {
      add_products<decltype(some)::value>(args.p + i * rank, scratch + first * rank, rank, args.out + i * columns + first,
                                          columns, width(first));
    }
  };
  u64 i = rows.first;
  for (; i + kRows <= rows.last; i += kRows) add(i, std::integral_constant<u32, kRows>{});
  for (; i < rows.last; ++i) add(i, std::integral_constant<u32, 1>{});
}

}  // namespace

const qccl::FactorLoops& factor_loops() {
  static constexpr qccl::FactorLoops all = {orthonormal_rows, outer_sum};
  return all;
}

}  // namespace QCCL_NAMESPACE
