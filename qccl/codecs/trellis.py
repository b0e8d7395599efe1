"""Codes that are chosen together for the least squared error: trellis-coded quantisation, with outliers apart.

The arithmetic is ``kernels/trellis.h``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qccl.codecs.base import BucketCodec, Kernel
from qccl.codecs.checks import check_bucket, check_integer, keep
from qccl.dtypes import DType
from qccl.errors import CodecError
from qccl.scalars import as_integer

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Trellis"]

_MAX_BUCKET = 2048
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
_REACH = {1: 0.4375, 2: 0.6875, 3: 0.84375, 4: 0.9375}
_HUGE = 2.0**125


@dataclass(frozen=True)
class Trellis(BucketCodec):
    """The smallest error for its bytes on values of any distribution, also with outliers or an offset.

    A bucket has a centre, a scale for each of its blocks, and the values that lie furthest from the centre apart. The
    others are codes on levels that are denser in the middle of a block's range.

    Attributes:
        bits: of a code, 1 to 8.
        bucket: elements that share a centre and outliers, a multiple of 8 up to 2048.
        block: elements that share a scale, a power of two from 32 to 2048; a scale is one byte.
        outliers: values of a bucket that go apart, 0 to 16, in four bytes each.

    Raises CodecError for other values.
    """

    bits: int = 8
    bucket: int = 2048
    block: int = 128
    outliers: int = 4

    name: ClassVar[str] = "trellis"

    def __post_init__(self) -> None:
        check_integer(self, "bits", 1, 8)
        check_bucket(self, "bucket", _MAX_BUCKET)
        check_integer(self, "outliers", 0, 16)
        block = as_integer(self.block)
        if block not in _BLOCKS:
            raise CodecError(f"{self.name}: block={self.block!r} is not possible; allowed are {_listed(_BLOCKS)}")
        keep(self, "block", block)

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        blocks = -(-count // self.block)
        return -(-count * self.bits // 8), 8 + 4 * self.outliers + -(-blocks // 4) * 4

    def kernel(self) -> Kernel:
        return Kernel("Trellis", bucket=self.bucket, options=(self.bits, self.block, self.outliers))

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """Three and a bit of the widest steps between levels, what lies beyond the levels' reach, and roundings.

        With ``D`` the greatest distance from the centre, which is within the range of the bucket (0 where that reaches
        ``2**125``): a block's scale is at most ``17/16 D``. Its levels end at ``reach`` times that, and the window that
        is searched is off by less than 0.4 of a step of ``u``, so a value is at most ``3.4`` widest steps from the
        level it gets, plus what it lies beyond the last. An outlier is rounded by ``2**-13 D``, or by ``2**-138``
        among subnormals. The arithmetic has ten roundings of numbers up to ``2.2 D``, of which the last adds the
        centre.
        """
        import numpy as np

        flat = np.asarray(x, dtype=np.float64).reshape(-1)
        if flat.size == 0:
            return np.zeros(np.shape(x))
        starts = np.arange(0, flat.size, self.bucket)
        low, high = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
        greatest = np.maximum(abs(low), abs(high))
        distance = np.where(greatest < _HUGE, high - low, greatest)
        step = 2 / (2 ** (self.bits + 1) - 1)
        reach = _REACH.get(self.bits, 1.0)
        widest = reach / 2 * (2 - (1 - step) * (1 + (1 - step) ** 2))
        relative = 17 / 16 * (3.4 * widest + 1 - reach) + 2.0**-13 + 22 * 2.0**-24
        bound = np.where(distance > 0, relative * distance + 2.0**-24 * greatest + 2.0**-137, 0.0)
        return np.repeat(bound, self.bucket)[: flat.size].reshape(np.shape(x))


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
