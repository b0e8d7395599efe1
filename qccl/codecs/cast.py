"""Conversion to a shorter type: two types of 16 bits, and two of 8 bits with a scale for each bucket.

Source of the types of 8 bits: FP8 formats (Micikevicius et al. 2022, arXiv 2209.05433).

The arithmetic is ``kernels/codecs/cast/``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qccl.base.dtypes import DType
from qccl.codecs.base import BucketCodec, Kernel, Tile
from qccl.codecs.checks import check_bucket, check_choice

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Cast"]

_TYPES = ("float16", "bfloat16", "float8_e4m3", "float8_e5m2")  # their numbers are those of the header
#: for each type: bits of the mantissa, exponent of the least normal number, greatest number (before scaling)
_SHAPES = {
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, 3.3895313892515355e38),
    "float8_e4m3": (3, -6, 448.0),
    "float8_e5m2": (2, -14, 57344.0),
}


@dataclass(frozen=True)
class Cast(BucketCodec):
    """Conversion of the element type; sums are computed in fp32.

    Attributes:
        dtype: "float16" (values beyond 65504 become infinite), "bfloat16", or "float8_e4m3" and "float8_e5m2", whose
            buckets are scaled by a power of two so that their greatest number fits.
        bucket: elements that share a scale, a multiple of 8 up to 2**24; shards and chunks are multiples of it, also
            without scales.

    Raises CodecError for other values.
    """

    dtype: str = "float16"
    bucket: int = 1024

    name: ClassVar[str] = "cast"
    examples: ClassVar = ("cast", "cast:dtype=float8_e4m3")

    def __post_init__(self) -> None:
        check_choice(self, "dtype", _TYPES)
        check_bucket(self, "bucket")

    @property
    def _is_scaled(self) -> bool:
        return self.dtype.startswith("float8")

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        return (count, 4) if self._is_scaled else (2 * count, 0)

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/cast/``, and its arguments.

        Types of 16 bits have no scales, so their device code works across buckets.
        """
        number = _TYPES.index(self.dtype)
        tile = Tile(f"CastTile<{number}>", f"CastTile<{number}>", by_bucket=self._is_scaled)
        return Kernel("Cast", bucket=self.bucket, options=(number,), tile=tile)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """Half a unit in the last place; for subnormals, that of the least normal number.

        Scaling is exact, but the scale is at least ``2**-126``. A value that would round beyond the greatest float32 is
        rounded down instead, by one unit in the last place at most. Without scales the bound is infinite if a value
        rounds beyond the greatest number.
        """
        import numpy as np

        mantissa, least, greatest = _SHAPES[self.dtype]
        flat = np.abs(np.asarray(x, dtype=np.float64).reshape(-1))
        unit = np.ones(flat.size)
        if self._is_scaled and flat.size:
            most = np.maximum.reduceat(flat, np.arange(0, flat.size, self.bucket))
            with np.errstate(divide="ignore"):
                exponent = np.maximum(np.ceil(np.log2(most / greatest)), -126)
            unit = np.repeat(2.0**exponent, self.bucket)[: flat.size]
        places = np.maximum(np.frexp(flat / unit)[1] - 1, least) - mantissa
        bound: np.ndarray = 2.0 ** (places - 1) * unit + (2.0**-149 if self._is_scaled else 0.0)
        if self._is_scaled:
            bound *= np.where(flat + bound >= 2.0**128, 2, 1)
        else:
            bound[flat + bound > greatest] = np.inf
        return bound.reshape(np.shape(x))
