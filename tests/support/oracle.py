"""An oracle of the codecs in NumPy: slow, obvious, and written from the formulas, not from the kernels.

Values are arrays of float32, float16, or uint16 that holds bfloat16; ``dtype`` is the name of the element type. Wires
are uint8 arrays. All arithmetic is float32, one operation at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

f32 = np.float32
NAN = np.uint32(0x7FC00000).view(f32)


@dataclass(frozen=True)
class MinMax:
    """Parameters of the codec under test, with ``bucket`` in elements or "shard"."""

    bits: int
    bucket: int | str = 1024
    stochastic: bool = False
    seed: int = 0

    @property
    def levels(self) -> int:
        return 2**self.bits - 1

    def size(self, count: int) -> int:
        return max(count, 1) if self.bucket == "shard" else int(self.bucket)

    def buckets(self, count: int) -> list[slice]:
        size = self.size(count)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True)
class RngCounter:
    """The counter of the random numbers (kernels/shared/parameters.h); ``index`` is the first element's."""

    call: int = 0
    round: int = 0
    rank: int = 0
    index: int = 0


# Element types


def storage(dtype: str) -> type[np.generic]:
    return {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]


def to_float(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(f32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(f32)


def from_float(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to nearest even; overflow to infinity; one NaN."""
    x = np.where(np.isnan(x), NAN, x).astype(f32)
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    bits = x.view(np.uint32).astype(np.uint64)
    kept, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (kept % 2 == 1))
    return np.where(np.isnan(x), 0x7FC0, kept + up).astype(np.uint16)


# Random words

_MASK = (1 << 64) - 1


def mix(state: int, word: int) -> int:
    z = ((state ^ word) + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def random_words(count: int, seed: int, counter: RngCounter) -> np.ndarray:
    """``count`` random words (uint32), for the elements from ``counter.index`` on."""
    words = np.empty(count, np.uint32)
    index = np.arange(count, dtype=np.uint64) + np.uint64(counter.index)
    upper = index >> np.uint64(32)
    for high in np.unique(upper):
        key = mix(mix(mix(mix(0, seed), counter.call), (counter.round << 32) | counter.rank), int(high))
        chosen = upper == high
        x = index[chosen].astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
        x *= np.uint32(0xED5AD4BB)
        x ^= (x >> 14) ^ np.uint32(key >> 32)
        x *= np.uint32(0xAC4C1B51)
        x ^= x >> 14
        x *= np.uint32(0x31848BAB)
        words[chosen] = x
    return words


# Packing: the codes' bits, least significant first, one after the other


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    digits = (codes[:, None] >> np.arange(bits)) & 1
    return np.packbits(digits.astype(np.uint8).reshape(-1), bitorder="little")


def unpack(data: np.ndarray, count: int, bits: int) -> np.ndarray:
    digits = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    return (digits.astype(np.int64) << np.arange(bits)).sum(axis=1)


# The min-max codec


@dataclass(frozen=True)
class Quantizer:
    """The ranges of buckets (columns), and the conversion between values and codes."""

    low: np.ndarray
    high: np.ndarray
    levels: int

    @property
    def finite(self) -> np.ndarray:
        return np.isfinite(self.low) & np.isfinite(self.high)

    @property
    def pre(self) -> np.ndarray:
        unscaled = self.high - self.low
        small = (unscaled > 0) & (unscaled < f32(2.0**-100))
        return np.where(np.isfinite(unscaled), np.where(small, f32(2.0**100), f32(1)), f32(0.25))

    @property
    def width(self) -> np.ndarray:
        return self.high * self.pre - self.low * self.pre

    def position(self, x: np.ndarray) -> np.ndarray:
        inverse = np.where(self.width > 0, f32(self.levels) / self.width, f32(0))
        return (x * self.pre - self.low * self.pre) * inverse

    def value(self, codes: np.ndarray) -> np.ndarray:
        unit = self.width / f32(self.levels)
        from_low = self.low * self.pre + codes.astype(f32) * unit
        from_high = self.high * self.pre + (codes - self.levels).astype(f32) * unit
        values = np.where(codes <= self.levels // 2, from_low, from_high) * (f32(1) / self.pre)
        return np.where(self.finite, values, NAN)


def quantizer_of(x: np.ndarray, levels: int) -> Quantizer:
    """The ranges of buckets; a row of ``x`` is a bucket."""
    finite = np.isfinite(x).all(axis=1, keepdims=True)
    # -0 is less than +0, which NumPy's min does not guarantee
    ordered = np.take_along_axis(x, np.lexsort((~np.signbit(x), x)), axis=1)
    return Quantizer(np.where(finite, ordered[:, :1], NAN), np.where(finite, ordered[:, -1:], NAN), levels)


def codes_of(codec: MinMax, x: np.ndarray, quantizer: Quantizer, words: np.ndarray) -> np.ndarray:
    t = np.where(quantizer.finite, quantizer.position(x), f32(0))
    if codec.stochastic:
        below = np.floor(t)
        u = (words >> 8).astype(f32) * f32(2.0**-24)
        t = below + (u < t - below)
    return np.where(quantizer.finite, np.clip(np.rint(t), 0, codec.levels), 0).astype(np.int64)


def equal_buckets(codec: MinMax, count: int) -> list[slice]:
    """``count`` elements as slices whose buckets have one size: the full buckets, then the last if it is shorter."""
    full = count - count % codec.size(count)
    return [part for part in (slice(0, full), slice(full, count)) if part.start < part.stop]


def rows(codec: MinMax, values: np.ndarray) -> np.ndarray:
    """Values of buckets of one size, each in a row."""
    return values.reshape(-1, min(codec.size(values.size), values.size))


@np.errstate(all="ignore")
def encode_floats(codec: MinMax, x: np.ndarray, counter: RngCounter) -> np.ndarray:
    words = random_words(x.size, codec.seed, counter) if codec.stochastic else np.zeros(x.size, np.uint32)
    codes, ranges = [np.empty(0, np.int64)], [np.empty(0, f32)]
    for part in equal_buckets(codec, x.size):
        buckets = rows(codec, x[part])
        quantizer = quantizer_of(buckets, codec.levels)
        codes.append(codes_of(codec, buckets, quantizer, rows(codec, words[part])).reshape(-1))
        ranges.append(np.hstack([quantizer.low, quantizer.high]).reshape(-1))
    data = pack(np.concatenate(codes), codec.bits)  # a bucket but the last has a multiple of eight elements
    return np.concatenate([data, np.zeros(-data.size % 4, np.uint8), np.concatenate(ranges).view(np.uint8)])


@np.errstate(all="ignore")
def decode_floats(codec: MinMax, wire: np.ndarray, count: int) -> np.ndarray:
    x = np.empty(count, f32)
    codes = unpack(wire[: (count * codec.bits + 7) // 8], count, codec.bits)
    ranges = wire[wire.size - 8 * len(codec.buckets(count)) :].copy().view("<f4").reshape(-1, 2)
    for part in equal_buckets(codec, count):
        buckets = rows(codec, codes[part])
        of_part = ranges[part.start // codec.size(count) :][: len(buckets)]
        x[part] = Quantizer(of_part[:, :1], of_part[:, 1:], codec.levels).value(buckets).reshape(-1)
    return x


# The three operations, for MinMax, None (the codec none) and the codecs of oracle_buckets.py


@dataclass(frozen=True)
class Sparse:
    """Values of some elements; the others are zero."""

    indices: np.ndarray
    values: np.ndarray


class Other(Protocol):
    """A codec of another file; ``spec`` is the specification of qccl's codec."""

    @property
    def spec(self) -> str: ...
    def encode(self, x: np.ndarray, dtype: str, counter: RngCounter) -> np.ndarray: ...
    def decode(self, wire: np.ndarray, count: int, dtype: str, counter: RngCounter) -> np.ndarray | Sparse: ...


Codec = MinMax | Other | None


def encode(codec: Codec, values: np.ndarray, dtype: str, counter: RngCounter = RngCounter()) -> np.ndarray:
    if codec is None:
        return values.view(np.uint8).copy()
    return encode_any(codec, to_float(values, dtype), dtype, counter)


def encode_any(codec: MinMax | Other, x: np.ndarray, dtype: str, counter: RngCounter) -> np.ndarray:
    return encode_floats(codec, x, counter) if isinstance(codec, MinMax) else codec.encode(x, dtype, counter)


def decode(
    codec: Codec,
    wire: np.ndarray,
    count: int,
    dtype: str,
    add_to: np.ndarray | None = None,
    counter: RngCounter = RngCounter(),
) -> np.ndarray:
    if codec is None and add_to is None:
        return wire.copy().view(storage(dtype))
    term = wire_floats(codec, wire, count, dtype, counter)
    return from_float(combine("sum", None if add_to is None else to_float(add_to, dtype), term, count), dtype)


def wire_floats(codec: Codec, wire: np.ndarray, count: int, dtype: str, counter: RngCounter) -> np.ndarray | Sparse:
    if codec is None:
        return to_float(wire.copy().view(storage(dtype)), dtype)
    return decode_floats(codec, wire, count) if isinstance(codec, MinMax) else codec.decode(wire, count, dtype, counter)


def combine(op: str, a: np.ndarray | None, b: np.ndarray | Sparse, count: int) -> np.ndarray:
    """``a (op) b``; NaN if either is, and of equal values (+0 and -0) the first.

    Without ``a`` it is ``b``. Sparse values are added to ``a`` or, without ``a``, to zeros.
    """
    if isinstance(b, Sparse):
        total = np.zeros(count, f32) if a is None else a.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            total[b.indices] = total[b.indices] + b.values
        return total
    if a is None:
        return b
    with np.errstate(over="ignore", invalid="ignore"):
        if op == "sum":
            return a + b
        better = b < a if op == "min" else b > a
        return np.where(better | np.isnan(b), b, a)


def reduce(
    codec: Codec,
    wires: Sequence[np.ndarray],
    own: np.ndarray | None,
    own_index: int,
    count: int,
    dtype: str,
    *,
    op: str = "sum",
    scale: float = 1.0,
    encoded: bool,
    counter: RngCounter = RngCounter(),
    makers: Sequence[RngCounter] | None = None,
) -> tuple[np.ndarray | None, np.ndarray]:
    """(wire, out). ``encoded``: there is a wire, and ``out`` is its decoded values."""
    makers = makers or [RngCounter(call=counter.call, index=counter.index)] * len(wires)
    terms = [wire_floats(codec, wire, count, dtype, maker) for wire, maker in zip(wires, makers, strict=True)]
    if own is not None:
        if not wires and scale == 1 and not encoded:
            return None, own.copy()
        terms.insert(own_index, to_float(own, dtype))
    total: np.ndarray | None = None
    for term in terms:
        total = combine(op, total, term, count)
    assert total is not None
    if scale != 1:
        with np.errstate(over="ignore", invalid="ignore"):
            total = total * f32(scale)
    if not encoded:
        return None, from_float(total, dtype)
    if codec is None:
        out = from_float(total, dtype)
        return out.view(np.uint8).copy(), out
    wire = encode_any(codec, total, dtype, counter)
    return wire, decode(codec, wire, count, dtype, counter=counter)
