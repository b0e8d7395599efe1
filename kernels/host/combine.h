// How a reduction combines terms.
#pragma once

#include "kernel_args.h"
#include "lanes.h"

namespace QCCL_NAMESPACE {

using qccl::Combine;

// acc (op) x. The result is NaN if either is; of equal values acc stays.
template <Combine op>
QCCL_FN f32xN combine(const f32xN& acc, const f32xN& x) {
  if constexpr (op == Combine::sum) return acc + x;
  const Mask beyond = op == Combine::min ? is_less(x, acc) : is_less(acc, x);
  return select(either(beyond, is_nan(x)), x, acc);
}

// The terms of a reduction in order: an earlier total if `resumed`, then the sources, with the own values before source
// number `own`.
struct Terms {
  u32 sources;
  u32 own;  // kNoOwn: no own values
  bool resumed;
};
constexpr u32 kNoOwn = 0xffffffffu;

// Combines in order; the functions return the terms.
template <Combine op, class LoadSource, class LoadOwn, class LoadTotal>
QCCL_FN f32xN combine_terms(const Terms& terms, const LoadSource& source, const LoadOwn& own, const LoadTotal& total) {
  f32xN acc;
  u32 i = 0, own_at = terms.own;
  if (terms.resumed) {
    acc = total();
  } else if (own_at == 0) {
    acc = own();
    own_at = kNoOwn;
  } else {
    acc = source(i++);
  }
  for (; i < terms.sources; ++i) {
    if (i == own_at) acc = combine<op>(acc, own());
    acc = combine<op>(acc, source(i));
  }
  return own_at == terms.sources ? combine<op>(acc, own()) : acc;
}

// The same for one to three sources and no earlier total: the only runtime decision is the position of the own values.
template <Combine op, u32 Few, class LoadSource, class LoadOwn>
QCCL_FN f32xN combine_few_terms(u32 own_at, const LoadSource& source, const LoadOwn& own) {
  f32xN acc = source(0);
  if (own_at == 0) acc = combine<op>(own(), acc);
  if (own_at == 1) acc = combine<op>(acc, own());
  if constexpr (Few >= 2) {
    acc = combine<op>(acc, source(1));
    if (own_at == 2) acc = combine<op>(acc, own());
  }
  if constexpr (Few >= 3) {
    acc = combine<op>(acc, source(2));
    if (own_at == 3) acc = combine<op>(acc, own());
  }
  return acc;
}

}  // namespace QCCL_NAMESPACE
