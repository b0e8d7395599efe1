// The loops that serve every codec: one bucket after the other, with its values in scratch as fp32.
#pragma once

#include "../shared/state.h"
#include "blocking.h"
#include "kernel_args.h"
#include "combine.h"
#include "elements.h"
#include "team.h"

namespace QCCL_NAMESPACE {

using qccl::BucketRange;
using qccl::DecodeArgs;
using qccl::EncodeArgs;
using qccl::ReduceArgs;
using qccl::StateArgs;

static inline RngCounter counter_at(const RngCounter& counter, u64 first) {
  return {counter.call, counter.index + first, counter.round, counter.rank};
}

// The thread that encodes the last bucket stores the zeros behind its codes.
template <class Format>
void clear_padding(const Format& format, u8* wire, const BucketRange& buckets) {
  if (buckets.last != format.buckets) return;
  for (u64 i = format.codes_end; i < format.meta_begin; ++i) wire[i] = 0;
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
QCCL_LOOP static inline void add_momentum(const StateArgs& state, u64 first, const float* own, u32 n, float* to) {
  const float *old = state.momentum + first, mu = state.mu;
  float* next = state.new_momentum + first;
  QCCL_INDEPENDENT
  for (u32 i = 0; i < n; ++i) {
    const float x = own[i], m = next_momentum(mu, old[i], x);
    next[i] = finite_or_zero(m);
    to[i] = with_momentum(mu, m, x);
  }
}

// Residuals of type R: adds them to the total, and stores those that the decoded values leave.
template <class R>
struct Residuals {
  QCCL_LOOP static void add(const StateArgs& state, u64 first, u32 n, float* total) {
    const auto* old = element<R>(state.residual, first);
    const float factor = residual_factor(state.beta, state.lr);
    for (u32 i = 0; i < n; ++i) total[i] = with_residual(total[i], R::to_float(old[i]), factor);
  }

  QCCL_LOOP static void keep(const StateArgs& state, u64 first, u32 n, const float* total, const float* decoded) {
    auto* next = element<R>(state.new_residual, first);
    const float lr = state.lr;
    for (u32 i = 0; i < n; ++i) next[i] = R::from_float(next_residual<R>(total[i], decoded[i], lr));
  }
};

static inline void add_residual(const StateArgs& state, u64 first, u32 n, float* total) {
  if (state.residual_dtype == Float32::code) return Residuals<Float32>::add(state, first, n, total);
  Residuals<BFloat16>::add(state, first, n, total);
}

static inline void keep_residual(const StateArgs& state, u64 first, u32 n, const float* total, const float* decoded) {
  if (state.residual_dtype == Float32::code) return Residuals<Float32>::keep(state, first, n, total, decoded);
  Residuals<BFloat16>::keep(state, first, n, total, decoded);
}

// Encodes and decodes one bucket. `T` is the call's element type for typed codecs, and Float32 for the others, so that
// these are compiled once for all types.
template <class Codec, class T>
struct OneBucket {
  using Format = WireFormat<Codec, T>;

  // Decodes bucket b to y; with `add`, adds the elements that a sparse codec has to y.
  QCCL_LOOP static void decode(const Format& format, const u8* wire, u64 b, const RngCounter& counter, bool add, float* y) {
    const u32 n = Format::size_of(format, b);
    const HostTeam team(wire + Format::nbytes(format));
    const u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    if (Codec::sparse && !add) __builtin_memset(y, 0, n * sizeof *y);
    const auto take = [y](i32 i, float value) QCCL_INLINE { y[i] = Codec::sparse ? y[i] + value : value; };
    Codec::template decode<T>(team, format.options, counter, codes, meta, n, take);
  }

  // The same to the caller's output, where every NaN becomes the quiet one; a sparse codec adds the elements that it has.
  QCCL_LOOP static void decode_to_values(const Format& format, const u8* wire, u64 b, const RngCounter& counter, float* y) {
    const HostTeam team(wire + Format::nbytes(format));
    const u8 *codes = wire + Format::codes_of(format, b), *meta = wire + Format::meta_of(format, b);
    const auto take = [y](i32 i, float value) QCCL_INLINE {
      const float x = Codec::sparse ? y[i] + value : value;
      y[i] = is_nan(x) ? float_of(kQuietNan) : x;
    };
    Codec::template decode<T>(team, format.options, counter, codes, meta, Format::size_of(format, b), take);
  }

  QCCL_LOOP static void encode(const Format& format, const float* x, u64 b, const RngCounter& counter, u8* wire, float* scratch) {
    const HostTeam team(nullptr, scratch);
    Codec::template encode<T>(team, format.options, counter, x, Format::size_of(format, b), wire + Format::codes_of(format, b),
                              wire + Format::meta_of(format, b));
  }
};

// From and to the elements of a call. A codec that needs no copy as fp32 specialises it.
template <class Codec, class T>
struct BucketOfElements {
  using Storage = typename T::Storage;
  template <class Bucket, class Format>
  static void encode(const Format& format, const Storage* from, u64 b, const RngCounter& counter, u8* wire, float* values,
                     float* scratch) {
    Bucket::encode(format, as_floats<T>(from, Format::size_of(format, b), values), b, counter, wire, scratch);
  }
  template <class Bucket, class Format>
  static void decode(const Format& format, const u8* wire, u64 b, const RngCounter& counter, [[maybe_unused]] float* scratch,
                     Storage* to) {
    if constexpr (T::code == Float32::code) {
      if (Codec::sparse) __builtin_memset(to, 0, Format::size_of(format, b) * sizeof *to);
      Bucket::decode_to_values(format, wire, b, counter, to);
    } else {
      Bucket::decode(format, wire, b, counter, false, scratch);
      to_elements<T>(scratch, Format::size_of(format, b), to);
    }
  }
};

// Where a sparse codec decodes more floats than caches hold, buckets go around the caches: a store of zeros would
// otherwise first read the line.
constexpr u64 kStreamedFloats = 1 << 20;

template <class Codec, class T>
bool streams(u64 count, const typename T::Storage* to) {
  return Codec::sparse && T::code == Float32::code && count >= kStreamedFloats && reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
}

template <class Codec, class T>
struct BucketLoops {
  using Storage = typename T::Storage;
  using Bucket = OneBucket<Codec, Choose<Codec::typed, T, Float32>>;
  using Format = typename Bucket::Format;
  using Elements = BucketOfElements<Codec, T>;

  // The parts of the scratch, each with space for a bucket.
  static float* part(const Format& format, float* scratch, u32 number) {
    return scratch + number * (smaller(format.bucket, format.count) + 64);
  }

  static void encode(const BucketOptions& options, const EncodeArgs& args) {
    const Format format = Format::make(options, args.count);
    float *values = part(format, args.scratch, 0), *scratch = part(format, args.scratch, 2);
    for (u64 b = args.buckets.first; b < args.buckets.last; ++b) {
      const u64 first = Format::first_of(format, b);
      Elements::template encode<Bucket>(format, element<T>(args.src, first), b, counter_at(args.counter, first), args.wire,
                                        values, scratch);
    }
    clear_padding(format, args.wire, args.buckets);
  }

  static void decode(const BucketOptions& options, const DecodeArgs& args) {
    const Format format = Format::make(options, args.count);
    float *total = part(format, args.scratch, 0), *term = part(format, args.scratch, 1);
    const bool streamed = !args.accumulate && streams<Codec, T>(args.count, element<T>(args.dst, 0));
    if (streamed) __builtin_memset(total, 0, smaller(format.bucket, format.count) * sizeof *total);
    for (u64 b = args.buckets.first; b < args.buckets.last; ++b) {
      const u64 first = Format::first_of(format, b);
      const u32 n = Format::size_of(format, b);
      Storage* dst = element<T>(args.dst, first);
      const RngCounter counter = counter_at(args.counter, first);
      if constexpr (Codec::sparse && T::code == Float32::code) {
        if (streamed || args.accumulate) {
          if (args.accumulate) make_nans_quiet(dst, n);
          Bucket::decode_to_values(format, args.wire, b, counter, streamed ? total : dst);
          if (streamed) move_floats(total, n, dst);
          continue;
        }
      }
      if (!args.accumulate) {
        Elements::template decode<Bucket>(format, args.wire, b, counter, total, dst);
        continue;
      }
      Total sum(total, n, Combine::sum);
      sum.add(as_floats<T>(dst, n, term));
      add_bucket(format, args.wire, b, counter, sum, total, term);
      to_elements<T>(total, n, dst);
    }
    if (streamed) stop_streaming();
  }

  static void add_bucket(const Format& format, const u8* wire, u64 b, const RngCounter& counter, Total& sum, float* total,
                         float* term) {
    if (sum.empty()) {
      Bucket::decode(format, wire, b, counter, false, sum.put());
    } else if (Codec::sparse) {
      Bucket::decode(format, wire, b, counter, true, total);
    } else {
      Bucket::decode(format, wire, b, counter, false, term);
      sum.add(term);
    }
  }

  static void reduce(const BucketOptions& options, const ReduceArgs& args) {
    const Format format = Format::make(options, args.count);
    float *total = part(format, args.scratch, 0), *term = part(format, args.scratch, 1);
    for (u64 b = args.buckets.first; b < args.buckets.last; ++b) {
      const u64 first = Format::first_of(format, b);
      const u32 n = Format::size_of(format, b);
      Total sum(total, n, args.op);
      for (u32 s = 0; s <= args.source_count; ++s) {
        if (args.own && s == args.own_index) {
          const float* own = as_floats<T>(element<T>(args.own, first), n, term);
          if (args.state && args.state->momentum) {
            add_momentum(*args.state, first, own, n, term);
            own = term;
          }
          sum.add(own);
        }
        if (s == args.source_count) break;
        const u32 rank = args.source_ranks ? args.source_ranks[s] : 0;
        const RngCounter counter = counter_at({args.counter.call, args.counter.index, args.source_round, rank}, first);
        add_bucket(format, args.sources[s], b, counter, sum, total, term);
      }
      finish(format, args, b, first, n, total, term);
    }
    if (args.wire) clear_padding(format, args.wire, args.buckets);
  }

  // Scales the total and stores it to the wire and the output.
  static void finish(const Format& format, const ReduceArgs& args, u64 b, u64 first, u32 n, float* total, float* term) {
    if (args.scale != 1.0f) {
      for (u32 i = 0; i < n; ++i) total[i] *= args.scale;
    }
    Storage* out = args.out ? element<T>(args.out, first) : nullptr;
    if (!args.wire) return to_elements<T>(total, n, out);
    const bool residual = args.state && args.state->residual;
    if (residual) add_residual(*args.state, first, n, total);
    const RngCounter counter = counter_at(args.counter, first);
    float* scratch = part(format, args.scratch, 2);
    BucketOfElements<Codec, Float32>::template encode<Bucket>(format, total, b, counter, args.wire, total, scratch);
    if (!out && !residual) return;
    Bucket::decode(format, args.wire, b, counter, false, term);
    if (out) to_elements<T>(term, n, out);
    if (residual) keep_residual(*args.state, first, n, total, out ? as_floats<T>(out, n, term) : term);
  }
};

// The loops of a codec for calls without state. A codec may specialise them (codecs/minmax/host.h). Reductions with state
// always use BucketLoops.
template <class Codec>
struct CallLoops {
  static constexpr bool whole_call = false;

  template <class T>
  static void encode(const BucketOptions& options, const EncodeArgs& args) {
    BucketLoops<Codec, T>::encode(options, args);
  }
  template <class T>
  static void decode(const BucketOptions& options, const DecodeArgs& args) {
    BucketLoops<Codec, T>::decode(options, args);
  }
  template <class T>
  static void reduce(const BucketOptions& options, const ReduceArgs& args) {
    BucketLoops<Codec, T>::reduce(options, args);
  }
};

}  // namespace QCCL_NAMESPACE
