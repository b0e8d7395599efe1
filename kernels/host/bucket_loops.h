// The loops that serve every codec: one bucket after the other, with its values in scratch as fp32.
#pragma once

#include "../state.h"
#include "blocking.h"
#include "kernel_args.h"
#include "combine.h"
#include "elements.h"
#include "team.h"

namespace QCCL_NAMESPACE {

using qccl::BucketRange;
using qccl::DecodeCall;
using qccl::EncodeCall;
using qccl::ReduceCall;
using qccl::StateCall;

static inline RngCounter counter_at(const RngCounter& counter, u64 first) {
  return {counter.call, counter.index + first, counter.round, counter.rank};
}

// The thread that encodes the last bucket stores the zeros behind its codes.
template <class Wire>
void clear_padding(const Wire& layout, u8* wire, const BucketRange& buckets) {
  if (buckets.last != layout.buckets) return;
  for (u64 i = layout.codes_end; i < layout.meta_begin; ++i) wire[i] = 0;
}

// n elements as fp32: in place if they are fp32, otherwise converted into `scratch`.
template <class T>
const float* as_floats(const typename T::Storage* from, u32 n, [[maybe_unused]] float* scratch) {
  if constexpr (T::code == Float32::code) {
    return from;
  } else {
    for_lanes(n, [&](u32 i, u32 lanes) QCCL_INLINE {
      store_values<Float32>(load_values<T>(from + i, lanes), scratch + i, lanes);
    });
    return scratch;
  }
}

// Converts n floats to elements.
template <class T>
void to_elements(const float* x, u32 n, typename T::Storage* to) {
  for_lanes(n, [&](u32 i, u32 lanes) QCCL_INLINE {
    store_values<T>(quiet_nans(load_values<Float32>(x + i, lanes)), to + i, lanes);
  });
}

// Combines terms in order.
class Total {
 public:
  Total(float* at, u32 n, Combine op) : at_(at), n_(n), op_(op) {}

  bool empty() const { return empty_; }

  // Memory for the first term, which replaces add().
  float* put() {
    empty_ = false;
    return at_;
  }

  void add(const float* x) {
    if (empty_) {
      __builtin_memcpy(put(), x, n_ * sizeof *x);
    } else if (op_ == Combine::sum) {
      add_by<Combine::sum>(x);
    } else if (op_ == Combine::min) {
      add_by<Combine::min>(x);
    } else {
      add_by<Combine::max>(x);
    }
  }

 private:
  template <Combine op>
  QCCL_LOOP void add_by(const float* x) {
    for_lanes(n_, [&](u32 i, u32 lanes) QCCL_INLINE {
      const f32xN both = combine<op>(load_values<Float32>(at_ + i, lanes), load_values<Float32>(x + i, lanes));
      store_values<Float32>(both, at_ + i, lanes);
    });
  }

  float* at_;
  u32 n_;
  Combine op_;
  bool empty_ = true;
};

// Adds momentum to the own values and stores the new momentum; n elements from element `first` of the call.
QCCL_LOOP static inline void add_momentum(const StateCall& state, u64 first, const float* own, u32 n, float* to) {
  const float *old = state.momentum + first, mu = state.mu;
  float* next = state.new_momentum + first;
#pragma GCC ivdep
  for (u32 i = 0; i < n; ++i) {
    const float x = own[i], m = next_momentum(mu, old[i], x);
    next[i] = finite_or_zero(m);
    to[i] = with_momentum(mu, m, x);
  }
}

QCCL_LOOP static inline void add_residual(const StateCall& state, u64 first, u32 n, float* total) {
  const float *old = state.residual + first, inverse_lr = 1.0f / state.lr;
  for (u32 i = 0; i < n; ++i) total[i] = with_residual(total[i], old[i], inverse_lr);
}

QCCL_LOOP static inline void keep_residual(const StateCall& state, u64 first, u32 n, const float* total,
                                           const float* decoded) {
  float *next = state.new_residual + first, lr = state.lr;
  for (u32 i = 0; i < n; ++i) next[i] = next_residual(total[i], decoded[i], lr);
}

// Functions that decode() calls for each value.
struct PutTo {
  float* at;
  QCCL_MEMBER void operator()(i32 i, float value) const { at[i] = value; }
};
struct PutQuiet {
  float* at;
  QCCL_MEMBER void operator()(i32 i, float value) const { at[i] = is_nan(value) ? float_of(kQuietNan) : value; }
};
struct AddTo {
  float* at;
  QCCL_MEMBER void operator()(i32 i, float value) const { at[i] += value; }
};

// Encodes and decodes one bucket. `T` is the call's element type for typed codecs, and Float32 for the others, so that
// these are compiled once for all types.
template <class Codec, class T>
struct OneBucket {
  using Wire = BucketWire<Codec, T>;

  // Decodes bucket b to y; with `add`, adds the elements that a sparse codec has to y.
  QCCL_LOOP static void decode(const Wire& layout, const u8* wire, u64 b, const RngCounter& counter, bool add, float* y) {
    const u32 n = Wire::size_of(layout, b);
    const HostTeam team(wire + Wire::nbytes(layout));
    const u8 *codes = wire + Wire::codes_of(layout, b), *meta = wire + Wire::meta_of(layout, b);
    if (Codec::sparse && !add) __builtin_memset(y, 0, n * sizeof *y);
    if constexpr (Codec::sparse) {
      Codec::template decode<T>(team, layout.options, counter, codes, meta, n, AddTo{y});
    } else {
      Codec::template decode<T>(team, layout.options, counter, codes, meta, n, PutTo{y});
    }
  }

  // The same to the caller's output, where every NaN becomes the quiet one.
  QCCL_LOOP static void decode_to_values(const Wire& layout, const u8* wire, u64 b, const RngCounter& counter, float* y) {
    const HostTeam team(wire + Wire::nbytes(layout));
    const u8 *codes = wire + Wire::codes_of(layout, b), *meta = wire + Wire::meta_of(layout, b);
    Codec::template decode<T>(team, layout.options, counter, codes, meta, Wire::size_of(layout, b), PutQuiet{y});
  }

  QCCL_LOOP static void encode(const Wire& layout, const float* x, u64 b, const RngCounter& counter, u8* wire, float* scratch) {
    const HostTeam team(nullptr, scratch);
    Codec::template encode<T>(team, layout.options, counter, x, Wire::size_of(layout, b), wire + Wire::codes_of(layout, b),
                              wire + Wire::meta_of(layout, b));
  }
};

// From and to the elements of a call. A codec that needs no copy as fp32 specialises it.
template <class Codec, class T>
struct BucketOfElements {
  using Storage = typename T::Storage;
  template <class Bucket, class Wire>
  static void encode(const Wire& layout, const Storage* from, u64 b, const RngCounter& counter, u8* wire, float* values,
                     float* scratch) {
    Bucket::encode(layout, as_floats<T>(from, Wire::size_of(layout, b), values), b, counter, wire, scratch);
  }
  template <class Bucket, class Wire>
  static void decode(const Wire& layout, const u8* wire, u64 b, const RngCounter& counter, [[maybe_unused]] float* scratch,
                     Storage* to) {
    if constexpr (T::code == Float32::code && !Codec::sparse) {
      Bucket::decode_to_values(layout, wire, b, counter, to);
    } else {
      Bucket::decode(layout, wire, b, counter, false, scratch);
      to_elements<T>(scratch, Wire::size_of(layout, b), to);
    }
  }
};

template <bool Typed, class T>
struct TypeOnWire {
  using Type = Float32;
};
template <class T>
struct TypeOnWire<true, T> {
  using Type = T;
};

template <class Codec, class T>
struct BucketLoops {
  using Storage = typename T::Storage;
  using Bucket = OneBucket<Codec, typename TypeOnWire<Codec::typed, T>::Type>;
  using Wire = typename Bucket::Wire;
  using Elements = BucketOfElements<Codec, T>;

  // The parts of the scratch, each with space for a bucket.
  static float* part(const Wire& layout, float* scratch, u32 number) {
    return scratch + number * (smaller(layout.bucket, layout.count) + 64);
  }

  static void encode(const BucketOptions& options, const EncodeCall& call) {
    const Wire layout = Wire::make(options, call.count);
    float *values = part(layout, call.scratch, 0), *scratch = part(layout, call.scratch, 2);
    for (u64 b = call.buckets.first; b < call.buckets.last; ++b) {
      const u64 first = Wire::first_of(layout, b);
      Elements::template encode<Bucket>(layout, element<T>(call.src, first), b, counter_at(call.counter, first), call.wire,
                                        values, scratch);
    }
    clear_padding(layout, call.wire, call.buckets);
  }

  static void decode(const BucketOptions& options, const DecodeCall& call) {
    const Wire layout = Wire::make(options, call.count);
    float *total = part(layout, call.scratch, 0), *term = part(layout, call.scratch, 1);
    for (u64 b = call.buckets.first; b < call.buckets.last; ++b) {
      const u64 first = Wire::first_of(layout, b);
      const u32 n = Wire::size_of(layout, b);
      Storage* dst = element<T>(call.dst, first);
      const RngCounter counter = counter_at(call.counter, first);
      if (!call.accumulate) {
        Elements::template decode<Bucket>(layout, call.wire, b, counter, total, dst);
        continue;
      }
      Total sum(total, n, Combine::sum);
      sum.add(as_floats<T>(dst, n, term));
      add_bucket(layout, call.wire, b, counter, sum, total, term);
      to_elements<T>(total, n, dst);
    }
  }

  static void add_bucket(const Wire& layout, const u8* wire, u64 b, const RngCounter& counter, Total& sum, float* total,
                         float* term) {
    if (sum.empty()) {
      Bucket::decode(layout, wire, b, counter, false, sum.put());
    } else if (Codec::sparse) {
      Bucket::decode(layout, wire, b, counter, true, total);
    } else {
      Bucket::decode(layout, wire, b, counter, false, term);
      sum.add(term);
    }
  }

  static void reduce(const BucketOptions& options, const ReduceCall& call) {
    const Wire layout = Wire::make(options, call.count);
    float *total = part(layout, call.scratch, 0), *term = part(layout, call.scratch, 1);
    for (u64 b = call.buckets.first; b < call.buckets.last; ++b) {
      const u64 first = Wire::first_of(layout, b);
      const u32 n = Wire::size_of(layout, b);
      Total sum(total, n, call.op);
      for (u32 s = 0; s <= call.source_count; ++s) {
        if (call.own && s == call.own_index) {
          const float* own = as_floats<T>(element<T>(call.own, first), n, term);
          if (call.state && call.state->momentum) {
            add_momentum(*call.state, first, own, n, term);
            own = term;
          }
          sum.add(own);
        }
        if (s == call.source_count) break;
        const u32 rank = call.source_ranks ? call.source_ranks[s] : 0;
        const RngCounter counter = counter_at({call.counter.call, call.counter.index, call.source_round, rank}, first);
        add_bucket(layout, call.sources[s], b, counter, sum, total, term);
      }
      finish(layout, call, b, first, n, total, term);
    }
    if (call.wire) clear_padding(layout, call.wire, call.buckets);
  }

  // Scales the total and stores it to the wire and the output.
  static void finish(const Wire& layout, const ReduceCall& call, u64 b, u64 first, u32 n, float* total, float* term) {
    if (call.scale != 1.0f) {
      for (u32 i = 0; i < n; ++i) total[i] *= call.scale;
    }
    Storage* out = call.out ? element<T>(call.out, first) : nullptr;
    if (!call.wire) return to_elements<T>(total, n, out);
    const bool residual = call.state && call.state->residual;
    if (residual) add_residual(*call.state, first, n, total);
    const RngCounter counter = counter_at(call.counter, first);
    float* scratch = part(layout, call.scratch, 2);
    BucketOfElements<Codec, Float32>::template encode<Bucket>(layout, total, b, counter, call.wire, total, scratch);
    if (!out && !residual) return;
    Bucket::decode(layout, call.wire, b, counter, false, term);
    if (out) to_elements<T>(term, n, out);
    if (residual) keep_residual(*call.state, first, n, total, out ? as_floats<T>(out, n, term) : term);
  }
};

// The loops of a codec for calls without state. A codec may specialise them (codecs/minmax/host.h). Reductions with state
// always use BucketLoops.
template <class Codec>
struct CallLoops {
  static constexpr bool whole_call = false;

  template <class T>
  static void encode(const BucketOptions& options, const EncodeCall& call) {
    BucketLoops<Codec, T>::encode(options, call);
  }
  template <class T>
  static void decode(const BucketOptions& options, const DecodeCall& call) {
    BucketLoops<Codec, T>::decode(options, call);
  }
  template <class T>
  static void reduce(const BucketOptions& options, const ReduceCall& call) {
    BucketLoops<Codec, T>::reduce(options, call);
  }
};

}  // namespace QCCL_NAMESPACE
