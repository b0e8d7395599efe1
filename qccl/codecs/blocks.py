"""Codes whose scale is one byte for each small block: levels of 2 to 4 bits, and the formats MXFP8, MXFP4 and NVFP4.

Sources: OCP Microscaling Formats (MX) Specification 1.0; "Pretraining Large Language Models with NVFP4" (NVIDIA 2025,
arXiv 2509.25149). ``bench/fit_levels.py`` finds the levels.

The arithmetic is ``kernels/codecs/blocks/``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qccl.base.dtypes import DType
from qccl.codecs.base import PLAIN_GRANULE, WARP_VALUES, BucketCodec, Kernel, Tile
from qccl.codecs.checks import check_block, check_bucket, check_choice, check_integer, check_seed

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MXFP4", "MXFP8", "NVFP4", "Levels", "NVFP4Codes"]

#: an array; the type checker cannot follow NumPy's arithmetic
_Values = Any
_BLOCKS = (16, 32, 64, 128)
_SLOPE = {2: 0.82, 3: 0.73, 4: 0.61}
_REACH = {2: 0.6, 3: 0.92, 4: 0.984}


class _Blocks(BucketCodec):
    """A codec of ``kernels/codecs/blocks/``."""

    block: int
    #: bytes of the number that the scales of a bucket are relative to
    number_nbytes: ClassVar[int] = 4

    @property
    @abstractmethod
    def code_bits(self) -> int:
        """The bits of a code."""

    @property
    @abstractmethod
    def _format(self) -> int:
        """The format's number in ``kernels/codecs/blocks/codec.h``."""

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        blocks = -(-count // self.block)
        return -(-count * self.code_bits // 8), self.number_nbytes + -(-blocks // 4) * 4

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/blocks/``, and its arguments. Stochastic rounding draws random numbers."""
        stochastic = getattr(self, "rounding", "nearest") == "stochastic"
        arguments = f"{self._format}, {self.block}, {self.bucket}"
        return Kernel(
            "Blocks",
            bucket=self.bucket,
            seed=getattr(self, "seed", 0),
            options=(self._format, self.block, int(stochastic)),
            draws=stochastic,
            tile=Tile(
                encoder=f"BlocksTile<{arguments}, {str(stochastic).lower()}>",
                decoder=f"BlocksTile<{arguments}, false>",
                by_bucket=True,
            ),
        )

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The distance from a value to the farthest number that the encoder may choose, plus roundings.

        ``_scales`` computes the scales as the encoder does, and ``_gap`` is the distance in units of the scale. The
        arithmetic has fewer than eight roundings of numbers no larger than the value and the error together; those
        among subnormals cost ``2**-148``. A block of zeros is exact, and values become 0 where the scale is 0.
        """
        import numpy as np

        flat = np.abs(np.asarray(x, dtype=np.float32).reshape(-1))
        shape = (-1, self.bucket // self.block, self.block)
        padded = np.pad(flat, (0, -flat.size % self.bucket)).reshape(shape)
        scale = self._scales(padded, (np.arange(padded.size) < flat.size).reshape(shape)).astype(np.float64)[..., None]
        value = padded.astype(np.float64)
        error = np.where(scale > 0, self._gap(value / np.where(scale > 0, scale, 1)) * scale, value)
        bound: np.ndarray = error + 2.0**-21 * (error + value) + 2.0**-148
        bound = np.where(padded.max(axis=2, keepdims=True) > 0, bound, 0.0)
        return bound.reshape(-1)[: flat.size].reshape(np.shape(x))

    @abstractmethod
    def _scales(self, size: _Values, exists: _Values) -> _Values:
        """The scale of each block from the magnitudes, by bucket and block; padding does not exist."""

    @abstractmethod
    def _gap(self, position: _Values) -> _Values:
        """The largest error of a value that is ``position``, 0 or more, in units of the scale."""


@dataclass(frozen=True)
class Levels(_Blocks):
    """The nearest of fixed levels, denser around 0, times the scale of a small block: little error at a high speed.

    Attributes:
        bits: bits of a code, 2 to 4.
        block: elements that share a scale of one byte: 16, 32, 64 or 128.
        bucket: elements that share the number that scales are relative to, a multiple of ``block`` up to 1024.
        rounding: "nearest", or "stochastic", which is unbiased and reproducible.
        seed: seed of the stochastic rounding, 0 to 2**64 - 1.

    Raises CodecError for other values.
    """

    bits: int = 4
    block: int = 32
    bucket: int = 1024
    rounding: str = "nearest"
    seed: int = 0

    name: ClassVar[str] = "levels"
    examples: ClassVar = ("levels4", "levels2:block=64", "levels3:rounding=stochastic")

    def __post_init__(self) -> None:
        check_integer(self, "bits", 2, 4)
        check_block(self, _BLOCKS)
        check_bucket(self, "bucket", WARP_VALUES, step=self.block)
        check_choice(self, "rounding", ("nearest", "stochastic"))
        check_seed(self)

    @property
    def code_bits(self) -> int:
        """The bits of a code: ``bits``."""
        return self.bits

    @property
    def _format(self) -> int:
        return self.bits

    def _positive_levels(self) -> _Values:
        import numpy as np

        top, slope = np.float32(2**self.bits - 1), np.float32(_SLOPE[self.bits])
        u = np.arange(1, 2**self.bits, 2).astype(np.float32) / top
        return u * (u * u * (1 - slope) + slope)

    def _scales(self, size: _Values, exists: _Values) -> _Values:
        import numpy as np

        most = size.max(axis=2)
        number = most.max(axis=1, keepdims=True)
        pre = np.where(number >= 2.0**64, 2.0**-64, np.where(number < 2.0**-64, 2.0**64, 1.0))
        pre = pre.astype(np.float32)
        wanted, unit = most * pre, number * pre
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if self.rounding == "stochastic":
                step = self._steps(wanted, unit).astype(np.int64)
                step -= _octaves(step, unit) < wanted
            else:
                wanted *= np.float32(_REACH[self.bits])
                if self.bits < 4:
                    wanted *= self._ratio(size * pre[..., None], exists, wanted)
                step = np.rint(self._steps(wanted, unit)).astype(np.int64)
        return np.where(most > 0, _octaves(step, unit) / pre.astype(np.float64), 0.0)

    def _steps(self, wanted: _Values, unit: _Values) -> _Values:
        """16 times the binary logarithm of ``unit / wanted``, as the encoder computes it."""
        import numpy as np

        bits = (wanted / unit).view(np.int32)
        x = ((bits & 0x7FFFFF) + 0x3F800000).astype(np.int32).view(np.float32) - 1
        log = (bits - 0x3F800000).astype(np.float32) * np.float32(2.0**-23)
        log = log + x * (1 - x) * (x * np.float32(-0.15639) + np.float32(0.42086))
        return np.clip(np.nan_to_num(log * -16), 0, 253)

    def _ratio(self, size: _Values, exists: _Values, first: _Values) -> _Values:
        """The scale of least squares over the first scale, as the encoder computes it."""
        import numpy as np

        unit = np.float32(2.0**20)
        size = size * (1 / np.maximum(first, np.float32(2.0**-105)))[..., None] * unit
        level = self._positive_levels()
        edges = np.float32(0.5) * (level[1:] + level[:-1]) * unit
        above = [exists, *(size > edge for edge in edges)]
        steps, squares = (np.diff(values, prepend=np.float32(0)) for values in (level, level * level))
        product = square = np.float32(0)
        for k, which in enumerate(above):
            product = (
                product + np.where(which, np.rint(size), 0).sum(axis=2, dtype=np.int64).astype(np.float32) * steps[k]
            )
            square = square + which.sum(axis=2).astype(np.float32) * squares[k]
        return product / unit / square

    def _gap(self, position: _Values) -> _Values:
        """The distance to the nearest level, or to the farther of the two levels around a position."""
        import numpy as np

        positive = self._positive_levels().astype(np.float64)
        levels = np.concatenate([-positive[::-1], positive])
        if self.rounding == "nearest":
            at = np.clip(np.searchsorted(levels, position), 1, levels.size - 1)
            return np.minimum(np.abs(position - levels[at - 1]), np.abs(position - levels[at]))
        below = np.searchsorted(levels, position * (1 - 2.0**-21), "left") - 1
        above = np.searchsorted(levels, position * (1 + 2.0**-21), "right").clip(0, levels.size - 1)
        return np.maximum(position - levels[below], np.abs(levels[above] - position))


def _octaves(step: _Values, unit: _Values) -> _Values:
    """The scale ``step`` sixteenths of an octave below ``unit``."""
    import numpy as np

    t = (step % 16).astype(np.float32) * np.float32(1 / 16)
    part = ((t * np.float32(-0.04007) + np.float32(0.23174)) * t - np.float32(0.69174)) * t + 1
    return part * np.ldexp(np.float32(1), -(step // 16)) * unit


def _half_place(position: _Values, mantissa: int, least: int, most: float) -> _Values:
    """Half a unit in the last place of a float with ``mantissa`` bits and the exponent ``least`` or more.

    Positions beyond ``most`` are clamped.
    """
    import numpy as np

    exponent = np.maximum(np.frexp(position)[1] - 1, least)
    return np.maximum(np.ldexp(0.5, exponent - mantissa), position - most)


class _Shared(_Blocks):
    """A format of OCP MX: a block of 32 shares a power of two."""

    bucket = PLAIN_GRANULE
    block = 32
    number_nbytes: ClassVar[int] = 0

    @property
    @abstractmethod
    def _shape(self) -> tuple[int, int, float]:
        """Bits of the mantissa, exponent of the least normal number, and greatest number of the elements."""

    def _scales(self, size: _Values, exists: _Values) -> _Values:
        import numpy as np

        exponent = np.frexp(size.max(axis=2))[1] - np.frexp(self._shape[2])[1]
        return np.ldexp(1.0, np.maximum(exponent, -127))

    def _gap(self, position: _Values) -> _Values:
        return _half_place(position, *self._shape)


@dataclass(frozen=True)
class MXFP8(_Shared):
    """MXFP8 of OCP MX 1.0: floats of 8 bits, and a power of two for each 32 of them.

    Attributes:
        type: "e4m3", or "e5m2" with a larger range and larger errors.

    Raises CodecError for other values.
    """

    type: str = "e4m3"

    name: ClassVar[str] = "mxfp8"
    examples: ClassVar = ("mxfp8", "mxfp8:type=e5m2")
    code_bits = 8

    def __post_init__(self) -> None:
        check_choice(self, "type", ("e4m3", "e5m2"))

    @property
    def _format(self) -> int:
        return int(self.type == "e5m2")

    @property
    def _shape(self) -> tuple[int, int, float]:
        return (2, -14, 57344.0) if self.type == "e5m2" else (3, -6, 448.0)


@dataclass(frozen=True)
class MXFP4(_Shared):
    """MXFP4 of OCP MX 1.0: floats of 4 bits (E2M1), and a power of two for each 32 of them."""

    name: ClassVar[str] = "mxfp4"
    code_bits = 4
    _format = 5
    _shape = (1, 0, 6.0)


@dataclass(frozen=True)
class NVFP4(_Blocks):
    """NVFP4: floats of 4 bits (E2M1), a scale in E4M3 for each 16 of them, and a float for each bucket.

    Attributes:
        bucket: elements that share the float, a multiple of 16 up to 1024.

    Raises CodecError for other values.
    """

    bucket: int = 1024

    name: ClassVar[str] = "nvfp4"
    block = 16
    code_bits = 4
    _format = 6

    def __post_init__(self) -> None:
        check_bucket(self, "bucket", WARP_VALUES, step=self.block)

    def _scales(self, size: _Values, exists: _Values) -> _Values:
        import numpy as np

        most = size.max(axis=2)
        number = (most.max(axis=1, keepdims=True) / np.float32(448 * 6)).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = np.nan_to_num(most / (number * 6).astype(np.float64), nan=0.0, posinf=448.0)
        place = np.ldexp(1.0, np.maximum(np.frexp(quotient)[1] - 1, -6) - 3)
        return np.minimum(np.rint(quotient / place) * place, 448.0) * number

    def _gap(self, position: _Values) -> _Values:
        return _half_place(position, 1, 0, 6.0)


class NVFP4Codes(NVFP4):
    """The codes and scales of NVFP4 alone: the wire of an Encoded, whose tensor scale is not on the wire."""

    number_nbytes: ClassVar[int] = 0
    _format = 7
