"""The codecs of blocks in NumPy, written from docs/wire-format.md, OCP MX 1.0 and NVIDIA's text (see ``oracle.py``).

The 8-bit and 4-bit floats are those of ml_dtypes, which other projects use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from oracle import NAN, RngCounter, f32, pack, random_words, unpack
from oracle_buckets import Bucketed, numbers

#: an array; the type checker cannot follow NumPy's arithmetic
Array = Any
#: constants of the levels and of a block's first scale, by the number of bits
SLOPE = {2: f32(0.82), 3: f32(0.73), 4: f32(0.61)}
REACH = {2: f32(0.6), 3: f32(0.92), 4: f32(0.984)}


@dataclass(frozen=True)
class Frame:
    """A bucket's number times a power of two."""

    number: np.float32

    @property
    def pre(self) -> np.float32:
        size = abs(self.number)
        return f32(2.0**-64) if size >= f32(2.0**64) else f32(2.0**64) if size < f32(2.0**-64) else f32(1)

    @property
    def unit(self) -> np.float32:
        return self.number * self.pre


class Blocked(Bucketed):
    """Codes of blocks, and the meta section: the bucket's number (if it has one) and a byte for each block."""

    block: int
    has_number: ClassVar[bool] = True
    zero: ClassVar[int]
    nan: ClassVar[int]

    @property
    def code_bits(self) -> int:
        raise NotImplementedError

    def number(self, most: np.float32) -> np.float32:
        return most

    def scales(self, bytes_: Array, frame: Frame) -> Array:
        """The scales of blocks, times ``frame.pre``."""
        raise NotImplementedError

    def choose(self, x: Array, count: int, frame: Frame) -> Array:
        """The bytes of finite blocks, one in each row; the elements from ``count`` on are padding."""
        raise NotImplementedError

    def codes(self, position: Array, words: Array) -> Array:
        raise NotImplementedError

    def values(self, codes: Array) -> Array:
        raise NotImplementedError

    def sizes(self, count: int, dtype: str) -> tuple[int, int]:
        blocks = -(-count // self.block)
        return (count * self.code_bits + 7) // 8, 4 * self.has_number + -(-blocks // 4) * 4

    def rows(self, x: Array) -> Array:
        return np.pad(x, (0, -x.size % self.block)).reshape(-1, self.block)

    @np.errstate(all="ignore")
    def encode_bucket(self, x: Array, dtype: str, counter: RngCounter) -> tuple[Array, Array]:
        rows = self.rows(x)
        size = abs(rows).max(axis=1)
        finite = np.isfinite(rows).all(axis=1)
        number = self.number(np.where(finite, size, f32(0)).max())
        frame = Frame(number if self.has_number else f32(1))
        chosen = self.choose(np.where(finite[:, None], rows, f32(0)), x.size, frame)
        bytes_ = np.where(size == 0, self.zero, chosen)
        bytes_ = np.where(finite, bytes_, self.nan)
        scale = self.scales(bytes_, frame)
        inverse = np.where(scale > 0, f32(1) / scale, f32(0))[:, None]
        seed = getattr(self, "seed", 0)
        words = self.rows(random_words(x.size, seed, counter))
        codes = np.where(finite[:, None], self.codes(rows * frame.pre * inverse, words), 0).reshape(-1)[: x.size]
        padding = np.zeros(-bytes_.size % 4, np.uint8)
        head = numbers(float(number)) if self.has_number else np.zeros(0, np.uint8)
        return pack(codes, self.code_bits), np.concatenate([head, bytes_.astype(np.uint8), padding])

    @np.errstate(all="ignore")
    def decode_bucket(self, codes: Array, meta: Array, count: int, dtype: str, counter: RngCounter) -> Array:
        frame = Frame(meta[:4].copy().view("<f4")[0] if self.has_number else f32(1))
        bytes_ = meta[4 * self.has_number :][: -(-count // self.block)]
        scale = np.repeat(self.scales(bytes_.astype(int), frame), self.block)[:count]
        return self.values(unpack(codes, count, self.code_bits)) * scale * (f32(1) / frame.pre)


@dataclass(frozen=True)
class Levels(Blocked):
    bits: int = 4
    block: int = 32
    bucket: int = 1024
    rounding: str = "nearest"
    seed: int = 0
    name: ClassVar[str] = "levels"
    zero: ClassVar[int] = 254
    nan: ClassVar[int] = 255

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def top(self) -> int:
        return int(2**self.bits - 1)

    def values(self, codes: Array) -> Array:
        u = (2 * codes - self.top).astype(f32) * (f32(1) / f32(self.top))
        return u * (u * u * (f32(1) - SLOPE[self.bits]) + SLOPE[self.bits])

    @property
    def positive(self) -> Array:
        """The positive levels."""
        u = np.arange(1, 2**self.bits, 2).astype(f32) / f32(self.top)
        return u * (u * u * (f32(1) - SLOPE[self.bits]) + SLOPE[self.bits])

    @property
    def edges(self) -> Array:
        """The positions between two positive levels."""
        return f32(0.5) * (self.positive[:-1] + self.positive[1:])

    def nearest(self, position: Array) -> Array:
        above = np.searchsorted(self.edges, abs(position), "right")
        return np.where(position < 0, self.top // 2 - above, self.top // 2 + 1 + above)

    def codes(self, position: Array, words: Array) -> Array:
        code = self.nearest(position)
        if self.rounding == "nearest":
            return code
        x = np.clip(position, f32(-1), f32(1))
        below = np.minimum(np.where(x < self.values(code), code - 1, code), self.top - 1)
        low, high = self.values(below), self.values(below + 1)
        uniform = (words >> 8).astype(f32) * f32(2.0**-24)
        return below + (uniform * (high - low) < x - low)

    def scales(self, bytes_: Array, frame: Frame) -> Array:
        t = (bytes_ % 16).astype(f32) * f32(1 / 16)
        part = ((t * f32(-0.04007) + f32(0.23174)) * t - f32(0.69174)) * t + f32(1)
        scale = part * np.ldexp(f32(1), -(bytes_ // 16)).astype(f32) * frame.unit
        return np.where(bytes_ == self.zero, f32(0), np.where(bytes_ == self.nan, NAN, scale))

    def steps(self, wanted: Array, frame: Frame) -> Array:
        bits = (wanted / frame.unit).astype(f32).view(np.int32)
        x = ((bits & 0x7FFFFF) + 0x3F800000).astype(np.int32).view(f32) - f32(1)
        log = (bits - 0x3F800000).astype(f32) * f32(2.0**-23)
        log = log + x * (f32(1) - x) * (x * f32(-0.15639) + f32(0.42086))
        return np.clip(np.nan_to_num(log * f32(-16)), f32(0), f32(253))

    def ratio(self, x: Array, count: int, frame: Frame, first: Array) -> Array:
        """The least squares' scale over the first one."""
        unit = f32(2.0**20)
        inverse = f32(1) / np.maximum(first, f32(2.0**-105)) * unit
        size = abs(x) * frame.pre * inverse[:, None]
        level = self.positive
        counted = np.arange(x.size).reshape(x.shape) < count
        above = [counted, *(size > edge * unit for edge in self.edges)]
        steps, squares = np.diff(level, prepend=f32(0)), np.diff(level * level, prepend=f32(0))
        product, square = f32(0), f32(0)
        for k, which in enumerate(above):
            product = product + np.where(which, np.rint(size).astype(int), 0).sum(axis=1).astype(f32) * steps[k]
            square = square + which.sum(axis=1).astype(f32) * squares[k]
        return product * (f32(1) / unit) / square

    def choose(self, x: Array, count: int, frame: Frame) -> Array:
        size = abs(x).max(axis=1) * frame.pre
        if self.rounding == "stochastic":
            code = self.steps(size, frame).astype(int)
            return np.where(self.scales(code, frame) < size, code - 1, code)
        wanted = size * REACH[self.bits]
        if self.bits < 4:
            wanted = wanted * self.ratio(x, count, frame, wanted)
        return np.rint(self.steps(wanted, frame)).astype(int)


class Micro(Blocked):
    """Floats of 4 or 8 bits."""

    element: Any

    @property
    def code_bits(self) -> int:
        return 4 if self.element is ml_dtypes.float4_e2m1fn else 8

    @property
    def most(self) -> Any:
        return f32(ml_dtypes.finfo(self.element).max)

    def codes(self, position: Array, words: Array) -> Array:
        clamped = np.clip(np.nan_to_num(position), -self.most, self.most)
        return clamped.astype(self.element).view(np.uint8).astype(int)

    def values(self, codes: Array) -> Array:
        return codes.astype(np.uint8).view(self.element).astype(f32)


class Shared(Micro):
    """OCP MX: the scale is a power of two; the greatest number's exponent less that of the element type."""

    block = 32
    bucket = 1024
    has_number: ClassVar[bool] = False
    zero: ClassVar[int] = 0
    nan: ClassVar[int] = 255

    def choose(self, x: Array, count: int, frame: Frame) -> Array:
        exponent = np.frexp(abs(x).max(axis=1))[1] - np.frexp(self.most)[1]
        return np.maximum(exponent + 127, 0)

    def scales(self, bytes_: Array, frame: Frame) -> Array:
        return bytes_.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(f32)


@dataclass(frozen=True)
class MXFP8(Shared):
    type: str = "e4m3"
    name: ClassVar[str] = "mxfp8"

    @property
    def element(self) -> Any:
        return {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[self.type]


@dataclass(frozen=True)
class MXFP4(Shared):
    name: ClassVar[str] = "mxfp4"
    element = ml_dtypes.float4_e2m1fn

    @property
    def spec(self) -> str:
        return self.name


@dataclass(frozen=True)
class NVFP4(Micro):
    bucket: int = 1024
    name: ClassVar[str] = "nvfp4"
    element = ml_dtypes.float4_e2m1fn
    block = 16
    zero: ClassVar[int] = 0
    nan: ClassVar[int] = 0x7F

    def number(self, most: np.float32) -> np.float32:
        return most / f32(6 * 448)

    def choose(self, x: Array, count: int, frame: Frame) -> Array:
        wanted = abs(x).max(axis=1) * frame.pre / (frame.unit * f32(6))
        return np.nan_to_num(wanted, nan=448).clip(0, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(int)

    def scales(self, bytes_: Array, frame: Frame) -> Array:
        return bytes_.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(f32) * frame.unit
