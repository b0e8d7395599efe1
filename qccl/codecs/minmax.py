"""Codes of 1 to 8 bits, evenly spaced from the least to the greatest value of a bucket (QSGD-TF, ByteGrad, CGX).

Sources: the code guide of QSGD-TF, section 2, "Quantization"; ByteGrad of Bagua, section "Algorithm"; CGX (Markov et
al. 2021, arXiv 2111.08617).

The arithmetic is ``kernels/codecs/minmax/``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qccl.base.dtypes import DType
from qccl.codecs.base import PLAIN_GRANULE, BucketCodec, Kernel, Tile
from qccl.codecs.checks import check_bucket, check_choice, check_integer, check_seed

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MinMax"]

_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class MinMax(BucketCodec):
    """``low + code * (high - low) / (2**bits - 1)``, with ``low`` and ``high`` of each bucket, exact and in fp32.

    Attributes:
        bits: bits of a code, 1 to 8.
        bucket: elements that share a range, a multiple of 8 up to 2**24; or "shard": all elements of a call.
        rounding: "nearest", or "stochastic", which is unbiased and reproducible.
        seed: seed of the stochastic rounding, 0 to 2**64 - 1.

    Raises CodecError for other values.
    """

    bits: int = 8
    bucket: int | str = 1024  # type: ignore[assignment]
    rounding: str = "nearest"
    seed: int = 0

    name: ClassVar[str] = "minmax"
    examples: ClassVar = ("minmax8", "minmax4", "minmax4:rounding=stochastic")

    def __post_init__(self) -> None:
        check_integer(self, "bits", 1, 8)
        check_bucket(self, "bucket", other="shard")
        check_choice(self, "rounding", _ROUNDINGS)
        check_seed(self)

    @property
    def granule(self) -> int:
        """The bucket; with bucket="shard" a fixed number of elements, because the whole shard has one range."""
        return PLAIN_GRANULE if self.bucket == "shard" else int(self.bucket)

    @property
    def splittable(self) -> bool:
        """False with bucket="shard": chunks would have ranges of their own."""
        return self.bucket != "shard"

    def _bucket_of(self, count: int) -> int:
        return count if self.bucket == "shard" else int(self.bucket)

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        return -(-count * self.bits // 8), 8

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/minmax/``, and its arguments. Stochastic rounding draws random numbers."""
        stochastic = self.rounding == "stochastic"
        return Kernel(
            "MinMax",
            bucket=self._bucket_of(0),
            seed=self.seed,
            options=(self.bits, int(stochastic)),
            draws=stochastic,
            tile=Tile(
                encoder=f"MinMaxTile<{self.bits}, {str(stochastic).lower()}>",
                decoder=f"MinMaxTile<{self.bits}, false>",
                by_bucket=True,
            ),
        )

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The distance of two levels (stochastic) or half of it (nearest), plus the roundings of the arithmetic.

        With ``u = 2**-24``, ``w = high - low`` and ``L = 2**bits - 1``: the position ``L (x - low) / w`` is computed in
        four roundings, of which the inverse of the distance counts double where it is subnormal, and so is off by at
        most ``5 u L``, that is ``5 u w`` in value. The value ``end + n * w / L`` has ``n`` at most ``L / 2``, with
        three roundings: ``1.5 u w``. With second-order terms both are below ``7 u w``. The last addition rounds a
        number no larger than the greater end: half a unit in that end's last place. Scaling by powers of two is exact
        except for subnormals, which cost ``2**-148``. A constant bucket is exact.
        """
        import numpy as np

        flat = np.asarray(x, dtype=np.float64).reshape(-1)
        size = self._bucket_of(flat.size)
        if flat.size == 0:
            return np.zeros(np.shape(x))
        starts = np.arange(0, flat.size, size)
        low, high = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
        width = high - low
        distance = width / (2**self.bits - 1) * (0.5 if self.rounding == "nearest" else 1.0)
        greater = np.maximum(abs(low), abs(high)).astype(np.float32)
        slack = 7 * 2.0**-24 * width + np.spacing(greater).astype(np.float64) / 2 + 2.0**-148
        bound = np.where(width > 0, distance + slack, 0.0)
        return np.repeat(bound, size)[: flat.size].reshape(np.shape(x))
