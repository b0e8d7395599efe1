#include "factors.h"

#include <cstdint>
#include <memory>

#include "choose_isa.h"
#include "factor_loops.h"
#include "float_environment.h"
#include "operations.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qccl {

namespace {

void orthonormal_rows(std::uintptr_t given, std::uintptr_t out, std::uint64_t rows, std::uint64_t columns,
                      std::uint64_t seed) {
  const std::unique_ptr<double[]> scratch(new double[rows * (1 + row_stride(columns))]);
  const FloatEnvironment defaults;
  loops().factors->orthonormal_rows(reinterpret_cast<const float*>(given), reinterpret_cast<float*>(out), rows, columns,
                                    seed, scratch.get());
}

void outer_sum(std::uintptr_t p, std::uintptr_t q, std::uintptr_t out, std::uint64_t rank, std::uint64_t rows,
               std::uint64_t columns, std::uint32_t threads) {
  const OuterSumArgs args = {reinterpret_cast<const float*>(p), reinterpret_cast<const float*>(q),
                             reinterpret_cast<float*>(out), rank, rows, columns};
  share(rows * columns, columns, threads, [&](const BucketRange& some) {
    const std::unique_ptr<float[]> scratch(new float[rank * (columns + 15)]);
    const FloatEnvironment defaults;
    loops().factors->outer_sum(args, some, scratch.get());
  });
}

}  // namespace

void bind_factors(nb::module_& m) {
  m.def("orthonormal_rows", &orthonormal_rows, "given"_a, "out"_a, "rows"_a, "columns"_a, "seed"_a,
        nb::call_guard<nb::gil_scoped_release>(), "Orthonormal rows that span the given ones, at addresses of float32.");
  m.def("outer_sum", &outer_sum, "p"_a, "q"_a, "out"_a, "rank"_a, "rows"_a, "columns"_a, "threads"_a,
        nb::call_guard<nb::gil_scoped_release>(), "``out`` = p q, at addresses of float32; p is rows x rank.");
}

}  // namespace qccl
