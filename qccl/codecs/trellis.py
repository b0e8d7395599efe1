"""Trellis-coded quantisation: codes are chosen together for the least squared error; outliers are stored apart.

Source: trellis-coded quantization (Marcellin and Fischer 1990, IEEE Transactions on Communications 38(1)), with four
states.

The arithmetic is ``kernels/codecs/trellis/``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qccl.base.dtypes import DType
from qccl.codecs.base import BucketCodec, Kernel, Tile
from qccl.codecs.checks import check_block, check_bucket, check_integer

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Trellis"]

_MAX_BUCKET = 2048
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
_REACH = {1: 0.4375, 2: 0.6875, 3: 0.84375, 4: 0.9375}
_HUGE = 2.0**125
_TINY = 2.0**-100
_SHARES = 2032 - 255  # subtracted from the upper 13 bits of a share's quotient


@dataclass(frozen=True)
class Trellis(BucketCodec):
    """The smallest error of all codecs for its bytes, also for values with outliers or an offset.

    A bucket has a centre, a scale for each of its blocks, and its outliers: the values farthest from the centre. The
    others are codes of levels that are denser in the middle of a block's range.

    Attributes:
        bits: bits of a code, 1 to 8.
        bucket: elements that share a centre and outliers, a multiple of 8 up to 2048.
        block: elements that share a scale, a power of two from 32 to 2048; a scale is one byte.
        outliers: values of a bucket that are stored apart, 0 to 16, in four bytes each.

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
        check_block(self, _BLOCKS)

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        blocks = -(-count // self.block)
        return -(-count * self.bits // 8), 8 + 4 * self.outliers + -(-blocks // 4) * 4

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/trellis/``, and its arguments.

        Device code of its own decodes; encoding takes the general kernel.
        """
        decoder = f"TrellisTile<{self.bits}, {self.bucket}, {self.block}, {self.outliers}>"
        return Kernel(
            "Trellis",
            bucket=self.bucket,
            options=(self.bits, self.block, self.outliers),
            tile=Tile(None, decoder, by_bucket=True),
        )

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The distance from a value to the farthest level that the encoder may choose, plus roundings.

        This computes centre, outliers and scales in fp32 as the encoder does. Only the four levels in the window
        around a value are candidates, so the search chooses no level farther than the farthest of them (``_gap``). An
        outlier is rounded to 13 significant bits: by ``2**-13`` of its distance from the centre, or by ``2**-138``
        among subnormals. The arithmetic has fewer than twelve roundings of numbers no larger than the distance and the
        error together; the last operation, which adds the centre, rounds the value itself. A block whose values all
        equal the centre is exact.
        """
        import numpy as np

        flat = np.asarray(x, dtype=np.float32).reshape(-1)
        whole = flat.size - flat.size % self.bucket
        parts = [flat[:whole].reshape(-1, self.bucket), flat[whole:].reshape(1, -1)]
        bounds = [self._bound_of_buckets(part).reshape(-1) for part in parts if part.size]
        return np.concatenate([np.zeros(0), *bounds]).reshape(np.shape(x))

    def _bound_of_buckets(self, x: np.ndarray) -> np.ndarray:
        """``error_bound`` of buckets of equal sizes, one in each row."""
        import numpy as np

        count = x.shape[1]
        centre = self._centres(x)[:, None]
        distance = np.abs(x - centre)
        rest, outliers = self._without_outliers(distance)
        unit = np.repeat(self._units(rest), self.block, axis=1)[:, :count]
        inside = unit > 0
        position = np.divide(rest, unit, out=np.zeros(x.shape), where=inside)
        error = np.where(outliers, 2.0**-13 * distance + 2.0**-138, self._gap(position) * unit)
        roundings = 2.0**-24 * (12 * (distance.astype(np.float64) + error) + np.abs(x)) + 2.0**-148
        return np.where(inside | outliers, error + roundings, 0.0)

    def _centres(self, x: np.ndarray) -> np.ndarray:
        """The median of the middles of a row's blocks; 0 if values are huge."""
        import numpy as np

        blocks = self._by_block(x, "edge")
        low, high = blocks.min(axis=2), blocks.max(axis=2)
        with np.errstate(over="ignore", invalid="ignore"):  # middles of huge values overflow, but are not used
            middles = np.sort(low + (high - low) * np.float32(0.5), axis=1)
        return np.where(np.abs(x).max(axis=1) < _HUGE, middles[:, (middles.shape[1] - 1) // 2], np.float32(0))

    def _without_outliers(self, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The distances with 0 for the outliers, and the mask of the outliers."""
        import numpy as np

        rest, rows = distance.copy(), np.arange(len(distance))
        rows = rows[distance.max(axis=1) >= _TINY]
        for _ in range(self.outliers if rows.size else 0):
            farthest = rest.argmax(axis=1)
            rest[rows, farthest[rows]] = 0
        return rest, (rest == 0) & (distance > 0)

    def _units(self, rest: np.ndarray) -> np.ndarray:
        """The unit of each block, half of its highest level, in float64; 0 if all of it equals the centre."""
        import numpy as np

        distances = self._by_block(rest, "constant").max(axis=2)
        scale = distances.max(axis=1, keepdims=True)
        pre = np.where(scale < _TINY, 1 / _TINY, 1).astype(np.float32)
        quotient = np.divide(distances * pre, scale * pre, out=np.zeros_like(distances), where=scale > 0)
        share = np.maximum(((quotient.view(np.uint32) + 0x7FFFF) >> 19).astype(np.int64) - _SHARES, 1)
        part = ((share + _SHARES) << 19).astype(np.uint32).view(np.float32)
        unit = part.astype(np.float64) * scale * (self._reach / 2)
        return np.where(distances > 0, unit, 0.0)

    def _by_block(self, x: np.ndarray, mode: Literal["edge", "constant"]) -> np.ndarray:
        """Rows of elements as rows of blocks; the last block is padded."""
        import numpy as np

        rows, count = x.shape
        return np.pad(x, ((0, 0), (0, -count % self.block)), mode=mode).reshape(rows, -1, self.block)

    @property
    def _top(self) -> int:
        """The number of the highest level."""
        return int(2 ** (self.bits + 1) - 1)

    @property
    def _reach(self) -> float:
        return _REACH.get(self.bits, 1.0)

    @property
    def _off(self) -> float:
        """The most levels between a value and a candidate; the window is accurate to 0.0014 of half of the levels."""
        return 2 + 0.0014 * self._top / 2

    def _level(self, number: np.ndarray | float) -> np.ndarray | float:
        """The value of a level, in units; fractional numbers are allowed."""
        u = (2 * number - self._top) / self._top
        return u * (1 + u * u)

    def _gap(self, position: np.ndarray) -> np.ndarray:
        """The distance from ``position`` (in units, not below 0) to the farthest of its candidates.

        The window is four levels with the position between the middle two, except for its inaccuracy; it stays within
        the levels. ``u`` solves ``u (1 + u**2) = position``.
        """
        import numpy as np

        u = 2 / 3**0.5 * np.sinh(np.arcsinh(1.5 * 3**0.5 * position) / 3)
        number = self._top / 2 * (1 + u)
        lowest = np.clip(number - self._off, 0, self._top - 3)
        highest = np.clip(number + self._off, 3, self._top)
        return np.maximum(position - self._level(lowest), self._level(highest) - position)
