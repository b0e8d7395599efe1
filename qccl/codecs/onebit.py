"""One bit for the sign of each value, and the values that a bucket's two signs decode to (CNTK, BytePS).

Sources: 1-bit SGD (Seide et al. 2014, Interspeech) for "mean"; "Notes on 1bit SGD", section 2, for "midpoint"; BytePS
and signSGD (Bernstein et al. 2018, arXiv 1802.04434) for "sign" and "scale".

The arithmetic is ``kernels/codecs/onebit/``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qccl.base.dtypes import DType
from qccl.codecs.base import WARP_VALUES, BucketCodec, Kernel, Tile
from qccl.codecs.checks import check_bucket, check_choice

if TYPE_CHECKING:
    import numpy as np

__all__ = ["OneBit"]

_RECONSTRUCTIONS = ("sign", "scale", "mean", "midpoint")  # their numbers are those of the header


@dataclass(frozen=True)
class OneBit(BucketCodec):
    """One bit per element. The codec is biased, so use it with error feedback.

    Attributes:
        bucket: elements that share the decoded values, a multiple of 8 up to 2**24; for a matrix with contiguous
            columns, a column's length.
        reconstruct: the values of the two sides. "sign": -1 and 1. "scale": minus and plus the mean magnitude. "mean":
            the mean of each side. "midpoint": a quarter and three quarters of the way from the least to the greatest.

    Raises CodecError for other values.
    """

    bucket: int = 1024
    reconstruct: str = "sign"

    name: ClassVar[str] = "onebit"
    examples: ClassVar = ("onebit", "onebit:reconstruct=mean")
    aliases: ClassVar = {"scaling": ("reconstruct", {True: "scale", False: "sign"})}

    def __post_init__(self) -> None:
        check_bucket(self, "bucket")
        check_choice(self, "reconstruct", _RECONSTRUCTIONS)

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        return -(-count // 8), 8 if self.reconstruct in ("mean", "midpoint") else 4

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/onebit/``, and its arguments.

        The device code for sums keeps a bucket in the registers of a warp; larger buckets take the general kernel.
        """
        number = _RECONSTRUCTIONS.index(self.reconstruct)
        sums = self.reconstruct in ("scale", "mean")
        tile = Tile(f"OneBitTile<{number}>", f"OneBitTile<{number}>", by_bucket=True)
        has_tile = not sums or self.bucket <= WARP_VALUES
        return Kernel("OneBit", bucket=self.bucket, options=(number,), tile=tile if has_tile else None)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The distance to the decoded value of the element's sign, plus the roundings of that value.

        A mean is a sum of ``n`` terms, at most ``s = min(n, 8) + n / 2048 + 10`` dependent additions, each of which
        rounds by ``2**-24`` of a sum of magnitudes, and one division: ``(s + 2) 2**-24`` of the greatest magnitude. A
        midpoint has three roundings, of numbers no greater. Subnormal results cost ``2**-149``.
        """
        import numpy as np

        flat = np.asarray(x, dtype=np.float64).reshape(-1)
        bound = np.empty(flat.size)
        for start in range(0, flat.size, self.bucket):
            part = flat[start : start + self.bucket]
            below = part < 0
            lower, upper = self._sides(part, below)
            additions = min(part.size, 8) + part.size / 2048 + 12
            slack = 0.0 if self.reconstruct == "sign" else additions * 2.0**-24 * np.abs(part).max() + 2.0**-148
            bound[start : start + part.size] = np.abs(part - np.where(below, lower, upper)) + slack
        return bound.reshape(np.shape(x))

    def _sides(self, x: np.ndarray, below: np.ndarray) -> tuple[float, float]:
        """The decoded values of the two signs, before rounding."""
        if self.reconstruct == "sign":
            return -1.0, 1.0
        if self.reconstruct == "scale":
            return -float(abs(x).mean()), float(abs(x).mean())
        if self.reconstruct == "mean":
            return (float(x[below].mean()) if below.any() else 0.0, 0.0 if below.all() else float(x[~below].mean()))
        return float(0.75 * x.min() + 0.25 * x.max()), float(0.25 * x.min() + 0.75 * x.max())
