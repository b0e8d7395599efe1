"""An oracle of the codecs but ``none``, ``minmax`` and ``trellis``, written from their formulas (see ``oracle.py``)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from oracle import NAN, RngCounter, Sparse, f32, from_float, mix, pack, random_words, storage, to_float, unpack

NO_BYTES = np.zeros(0, np.uint8)
Numbers = int | np.ndarray
Values = np.ndarray | Sparse


@np.errstate(over="ignore", invalid="ignore")
def sum_of(x: np.ndarray) -> np.float32:
    """A sum in the order of docs/wire-format.md: 256 lanes, tiles of 2048, then halves of the lanes."""
    lanes = np.zeros(256, f32)
    for start in range(0, x.size, 2048):
        tile = np.zeros(256, f32)
        for row in range(start, min(start + 2048, x.size), 256):
            part = x[row : min(row + 256, x.size)]
            tile[: part.size] += part
        lanes = lanes + tile
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def mean_of(x: np.ndarray, chosen: np.ndarray) -> np.float32:
    """The mean of the chosen values, whose sum is scaled by a power of two; 0 if there are none."""
    if not chosen.any():
        return f32(0)
    most = abs(x).max()
    pre = f32(2.0**-64) if most >= f32(2.0**64) else f32(2.0**64) if most < f32(2.0**-64) else f32(1)
    found = sum_of(np.where(chosen, x, f32(0)) * pre) / f32(chosen.sum())
    return np.clip(found, -most * pre, most * pre) * (f32(1) / pre)


def numbers(*x: float) -> np.ndarray:
    return np.array(x, "<f4").view(np.uint8)


class Bucketed:
    """The wire of a codec: the codes section of all buckets, padding, the meta section."""

    name: ClassVar[str]
    bucket: int

    @property
    def spec(self) -> str:
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return f"{self.name}:" + ",".join(f"{key}={value}" for key, value in fields.items())

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        """Sizes of the codes section and the meta section of a bucket of ``count`` elements."""
        raise NotImplementedError

    def encode_bucket(self, x: np.ndarray, dtype: str, counter: RngCounter) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def decode_bucket(self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, counter: RngCounter) -> Values:
        raise NotImplementedError

    def encode(self, x: np.ndarray, dtype: str, counter: RngCounter) -> np.ndarray:
        codes, metas = [NO_BYTES], [NO_BYTES]
        for start in range(0, x.size, self.bucket):
            where = dataclasses.replace(counter, index=counter.index + start)
            code, meta = self.encode_bucket(x[start : start + self.bucket], dtype, where)
            assert (code.size, meta.size) == self.sizes(min(self.bucket, x.size - start), dtype)
            codes.append(code)
            metas.append(meta)
        first, second = np.concatenate(codes), np.concatenate(metas)
        padding = np.zeros(-first.size % 4 if second.size else 0, np.uint8)
        return np.concatenate([first, padding, second])

    def decode(self, wire: np.ndarray, count: int, dtype: str, counter: RngCounter) -> np.ndarray | Sparse:
        starts = range(0, count, self.bucket)
        sizes = [self.sizes(min(self.bucket, count - start), dtype) for start in starts]
        code, meta = 0, wire.size - sum(size for _, size in sizes)
        parts = []
        for start, (code_size, meta_size) in zip(starts, sizes, strict=True):
            n = min(self.bucket, count - start)
            where = dataclasses.replace(counter, index=counter.index + start)
            found = self.decode_bucket(
                wire[code : code + code_size].copy(), wire[meta : meta + meta_size].copy(), n, dtype, where
            )
            parts.append(found)
            code, meta = code + code_size, meta + meta_size
        if any(isinstance(part, Sparse) for part in parts):
            indices = [part.indices + start for part, start in zip(parts, starts, strict=True)]
            return Sparse(np.concatenate(indices), np.concatenate([part.values for part in parts]))
        return np.concatenate([np.zeros(0, f32), *parts])


@dataclass(frozen=True)
class OneBit(Bucketed):
    bucket: int = 1024
    reconstruct: str = "sign"
    name: ClassVar[str] = "onebit"

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        return (count + 7) // 8, 8 if self.reconstruct in ("mean", "midpoint") else 4

    def encode_bucket(self, x: np.ndarray, dtype: str, counter: RngCounter) -> tuple[np.ndarray, np.ndarray]:
        if not np.isfinite(x).all():
            return np.zeros((x.size + 7) // 8, np.uint8), numbers(*[NAN] * (self.sizes(1, dtype)[1] // 4))
        return pack((x < 0).astype(np.int64), 1), numbers(*self.sides(x))

    def sides(self, x: np.ndarray) -> list[np.float32]:
        if self.reconstruct == "sign":
            return [f32(1)]
        if self.reconstruct == "scale":
            return [mean_of(abs(x), np.full(x.size, True))]
        if self.reconstruct == "mean":
            return [mean_of(x, x < 0), mean_of(x, ~(x < 0))]
        ordered = x[np.lexsort((~np.signbit(x), x))]
        least, greatest = ordered[0], ordered[-1]
        return [f32(0.75) * least + f32(0.25) * greatest, f32(0.25) * least + f32(0.75) * greatest]

    def decode_bucket(self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, counter: RngCounter) -> Values:
        sides = meta.view("<f4")
        lower = sides[0] if sides.size == 2 else -sides[0]
        return np.where(unpack(codes, count, 1) == 1, lower, sides[-1]).astype(f32)


def every_number(mantissa: int, bias: int, specials: int) -> np.ndarray:
    """The 8-bit floats without sign in the order of their codes, except the last ``specials`` ones."""
    codes = np.arange(128 - specials)
    exponent, fraction = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / 2.0**mantissa
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


#: mantissa, bias, and the values of the last codes
FLOAT8 = {"float8_e4m3": (3, 7, [np.nan]), "float8_e5m2": (2, 15, [np.inf, np.nan, np.nan, np.nan])}


@dataclass(frozen=True)
class Cast(Bucketed):
    dtype: str = "float16"
    bucket: int = 1024
    name: ClassVar[str] = "cast"

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        return (count, 4) if self.dtype in FLOAT8 else (2 * count, 0)

    def encode_bucket(self, x: np.ndarray, dtype: str, counter: RngCounter) -> tuple[np.ndarray, np.ndarray]:
        if self.dtype not in FLOAT8:
            return from_float(x, self.dtype).view(np.uint8), NO_BYTES
        if not np.isfinite(x).all():
            return np.zeros(x.size, np.uint8), numbers(NAN)
        mantissa, bias, specials = FLOAT8[self.dtype]
        table = every_number(mantissa, bias, len(specials))
        unit = 2.0**-126
        while abs(x).max() > table[-1] * unit:
            unit *= 2
        scaled = abs(x.astype(np.float64)) / unit
        upper = np.searchsorted(table, scaled)
        lower = np.maximum(upper - 1, 0)
        to_lower, to_upper = scaled - table[lower], table[upper] - scaled
        down = (to_lower < to_upper) | ((to_lower == to_upper) & (lower % 2 == 0))
        codes = np.where(down, lower, upper)
        codes = np.where(table[codes] * unit >= 2.0**128, codes - 1, codes) | np.where(np.signbit(x), 128, 0)
        return codes.astype(np.uint8), numbers(unit)

    def decode_bucket(self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, counter: RngCounter) -> Values:
        if self.dtype not in FLOAT8:
            return to_float(codes.view(storage(self.dtype)), self.dtype)
        mantissa, bias, specials = FLOAT8[self.dtype]
        table = np.array([*every_number(mantissa, bias, len(specials)), *specials], f32)
        table = np.concatenate([table, -table])
        with np.errstate(all="ignore"):
            return table[codes] * meta.view("<f4")[0]


@dataclass(frozen=True)
class Dithering(Bucketed):
    k: int
    partition: str = "linear"
    norm: str = "max"
    bucket: int = 1024
    seed: int = 0
    name: ClassVar[str] = "dithering"

    @property
    def bits(self) -> int:
        return 1 + len(f"{self.k:b}")

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        return (count * self.bits + 7) // 8, 4

    def measure(self, x: np.ndarray) -> np.float32:
        most = abs(x).max()
        if self.norm == "max":
            return most
        exponent = int(np.clip(np.frexp(most)[1] - 1, -126, 126)) if most > 0 else -126
        pre, post = f32(2.0**-exponent), f32(2.0**exponent)
        with np.errstate(over="ignore", under="ignore"):
            norm = np.sqrt(sum_of((x * pre) * (x * pre))) * post
        return min(norm, np.finfo(f32).max)

    def scale(self, norm: np.float32) -> tuple[np.float32, np.float32, np.float32]:
        """(power of two, factor of a value, value of the unit); the last two after multiplying by the power."""
        pre = f32(2.0**-100) if norm > f32(2.0**100) else f32(2.0**100) if norm < f32(2.0**-100) else f32(1)
        parts = f32(self.k if self.partition == "linear" else 1)
        with np.errstate(invalid="ignore"):
            scaled = norm * pre
            return pre, parts / scaled if scaled > 0 else f32(0), scaled / parts

    def encode_bucket(self, x: np.ndarray, dtype: str, counter: RngCounter) -> tuple[np.ndarray, np.ndarray]:
        if not np.isfinite(x).all():
            return np.zeros((x.size * self.bits + 7) // 8, np.uint8), numbers(NAN)
        norm = self.measure(x)
        pre, inverse, _ = self.scale(norm)
        with np.errstate(under="ignore"):
            y = abs(x) * pre * inverse
        chance = (random_words(x.size, self.seed, counter) >> 8).astype(f32) * f32(2.0**-24)
        if self.partition == "linear":
            below = np.floor(y)
            level = below + (chance < y - below)
        else:
            levels = np.array([0, *(2.0 ** (j - self.k) for j in range(1, self.k + 1))], f32)
            number = np.searchsorted(levels, y, "right") - 1
            gap = np.diff(levels, append=f32(2))[number]
            with np.errstate(under="ignore"):
                level = number + (chance * gap < y - levels[number])
        codes = np.minimum(level, self.k).astype(np.int64) | (x < 0).astype(np.int64) << (self.bits - 1)
        return pack(codes, self.bits), numbers(norm)

    def decode_bucket(self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, counter: RngCounter) -> Values:
        found = unpack(codes, count, self.bits)
        level, negative = found % 2 ** (self.bits - 1), found >= 2 ** (self.bits - 1)
        weight = level if self.partition == "linear" else np.where(level > 0, 2.0 ** (level - self.k), 0)
        with np.errstate(all="ignore"):
            pre, _, unit = self.scale(meta.view("<f4")[0])
            value = np.minimum(weight.astype(f32) * unit, meta.view("<f4")[0] * pre) * (f32(1) / pre)
        return np.where(negative, -value, value)


class BlockSparse(Bucketed):
    """``k`` values of a block, in the type of the call."""

    k: float
    block: int

    @property
    def bucket(self) -> int:  # type: ignore[override]
        return self.block

    def kept(self, count: int) -> int:
        if self.k < 1:
            return -(-max(1, round(self.k * self.block)) * count // self.block)
        return min(int(self.k), count)


def low_bits_of(kept: int, count: int) -> int:
    """Bits of the lower part of ``kept`` indices below ``count`` in Elias-Fano form."""
    return int(np.floor(np.log2(count // kept)))


def elias_fano(indices: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices below ``count``: their lower bits, then a bitmap of their upper bits."""
    low_bits = low_bits_of(indices.size, count)
    bitmap = np.zeros(indices.size + (count - 1 >> low_bits), np.uint8)
    bitmap[(indices >> low_bits) + np.arange(indices.size)] = 1
    return np.concatenate([pack(indices % 2**low_bits, low_bits), np.packbits(bitmap, bitorder="little")])


def index_nbytes(kept: int, count: int) -> int:
    """Bytes of ``kept`` indices below ``count`` in Elias-Fano form."""
    low_bits = low_bits_of(kept, count)
    return (kept * low_bits + 7) // 8 + (kept + (count - 1) // 2**low_bits + 7) // 8


def from_elias_fano(data: np.ndarray, kept: int, count: int) -> np.ndarray | None:
    """The indices; None if the bytes are not ``kept`` ascending indices below ``count``."""
    low_bits = low_bits_of(kept, count)
    lows, bitmap = np.split(data, [(kept * low_bits + 7) // 8])
    upper = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
    if upper.size != kept:
        return None
    indices = ((upper - np.arange(kept)) << low_bits) + unpack(lows, kept, low_bits)
    return indices if (np.diff(indices) > 0).all() and indices[-1] < count else None


@dataclass(frozen=True)
class TopK(BlockSparse):
    k: float
    block: int = 16384
    values: str = "exact"
    name: ClassVar[str] = "topk"

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        kept = self.kept(count)
        exact = kept * np.dtype(storage(dtype)).itemsize
        values = {"exact": exact, "float16": 4 + 2 * kept, "exp4": 4 + (kept + 1) // 2}
        return index_nbytes(kept, count) + values[self.values], 0

    def encode_bucket(self, x: np.ndarray, dtype: str, counter: RngCounter) -> tuple[np.ndarray, np.ndarray]:
        if not np.isfinite(x).all():
            return np.zeros(self.sizes(x.size, dtype)[0], np.uint8), NO_BYTES
        chosen = np.sort(np.argsort(-abs(x), kind="stable")[: self.kept(x.size)])
        return np.concatenate([elias_fano(chosen, x.size), self.form(x[chosen], dtype)]), NO_BYTES

    def form(self, values: np.ndarray, dtype: str) -> np.ndarray:
        if self.values == "exact":
            return from_float(values, dtype).view(np.uint8)
        greatest = abs(values).max()
        if self.values == "float16":
            with np.errstate(under="ignore"):
                codes = (values * self.scale(greatest)).astype("<f2").view(np.uint8)
        else:
            shares = abs(values) / greatest if greatest > 0 else values * f32(0)
            exponents = np.frexp(shares * f32(4 / 3))[1]
            codes = np.where(shares == 0, 7, np.clip(1 - exponents, 0, 7)) + np.where(values < 0, 8, 0)
            codes = pack(codes, 4)
        return np.concatenate([numbers(greatest), codes])

    def scale(self, greatest: np.float32) -> np.float32:
        exponent = max(int(np.frexp(greatest)[1]) - 1, -126) if greatest > 0 else -126
        return f32(2.0 ** min(14 - exponent, 127))

    def decode_bucket(self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, counter: RngCounter) -> Values:
        data, rest = np.split(codes, [index_nbytes(self.kept(count), count)])
        indices = from_elias_fano(data, self.kept(count), count)
        spoiled = Sparse(np.arange(count), np.full(count, NAN))
        if indices is None:
            return spoiled
        if self.values == "exact":
            return Sparse(indices, to_float(rest.copy().view(storage(dtype)), dtype))
        greatest = rest[:4].copy().view("<f4")[0]
        if not (np.isfinite(greatest) and greatest >= 0):
            return spoiled
        with np.errstate(all="ignore"):
            if self.values == "float16":
                values = to_float(rest[4:].copy().view("<f2"), "float16") * (f32(1) / self.scale(greatest))
                return Sparse(indices, values)
            numbers_of = unpack(rest[4:], indices.size, 4)
            sizes = greatest * np.array([*(2.0**-e for e in range(7)), 0], f32)
            return Sparse(indices, np.concatenate([sizes, -sizes])[numbers_of])


@dataclass(frozen=True)
class RandomK(BlockSparse):
    k: float
    block: int = 16384
    seed: int = 0
    scale: bool = False
    name: ClassVar[str] = "randomk"

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        return self.kept(count) * np.dtype(storage(dtype)).itemsize, 0

    def indices(self, count: int, counter: RngCounter) -> np.ndarray:
        key = mix(mix(mix(mix(0, self.seed), counter.call), (counter.round << 32) | counter.rank), counter.index)
        bits = (count - 1).bit_length()
        high_bits, low_bits = bits // 2, bits - bits // 2

        def word(turn: int, half: Numbers) -> Numbers:
            x = ((half | turn << 24) ^ (key & 0xFFFFFFFF)) * 0xED5AD4BB & 0xFFFFFFFF
            x = (x ^ x >> 14 ^ key >> 32) * 0xAC4C1B51 & 0xFFFFFFFF
            return ((x ^ x >> 14) * 0x31848BAB & 0xFFFFFFFF) >> 8

        def permuted(number: Numbers) -> Numbers:
            low, high = number % (1 << low_bits), number >> low_bits
            for turn in range(6):
                if turn % 2 == 0:
                    low = low ^ word(turn, high) % (1 << low_bits)
                else:
                    high = high ^ word(turn, low) % (1 << high_bits)
            return high << low_bits | low

        if self.kept(count) > 16:  # all at once
            numbers = permuted(np.arange(self.kept(count), dtype=np.uint64))
            while (beyond := numbers >= count).any():
                numbers[beyond] = permuted(numbers[beyond])
            return ((numbers + key % count) % count).astype(np.int64)
        found = []
        for number in map(permuted, range(self.kept(count))):
            while number >= count:
                number = permuted(number)
            found.append((number + key % count) % count)
        return np.array(found, np.int64)

    def encode_bucket(self, x: np.ndarray, dtype: str, counter: RngCounter) -> tuple[np.ndarray, np.ndarray]:
        values = x[self.indices(x.size, counter)] if np.isfinite(x).all() else np.full(self.kept(x.size), NAN)
        return from_float(values, dtype).view(np.uint8), NO_BYTES

    def decode_bucket(self, codes: np.ndarray, meta: np.ndarray, count: int, dtype: str, counter: RngCounter) -> Values:
        values = codes.view(storage(dtype))
        factor = f32(count) / f32(self.kept(count)) if self.scale else f32(1)
        with np.errstate(all="ignore"):
            found = Sparse(self.indices(count, counter), to_float(values, dtype) * factor)
        spoiled = np.isnan(to_float(values[:1], dtype))[0]
        return Sparse(np.arange(count), np.full(count, NAN)) if spoiled else found
