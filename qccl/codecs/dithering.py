"""Unbiased random rounding to one of the two levels around each value (QSGD, BytePS).

Sources: QSGD (Alistarh et al. 2017, arXiv 1610.02132), section 3, for "linear"; natural dithering (Horvath et al. 2019,
arXiv 1905.10988) for "natural".

The arithmetic is ``kernels/codecs/dithering/``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qccl.base.dtypes import DType
from qccl.codecs.base import BucketCodec, Kernel
from qccl.codecs.checks import check_bucket, check_choice, check_integer, check_seed

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Dithering"]

_PARTITIONS = ("linear", "natural")
_NORMS = ("max", "l2")
_GREATEST = 3.4028234663852886e38
_MOST_LEVELS = {"linear": 127, "natural": 31}


@dataclass(frozen=True)
class Dithering(BucketCodec):
    """Sign and level of ``abs(x) / norm``, unbiased; a bucket of zeros is exact.

    Attributes:
        k: levels above zero, 1 to 127 (linear) or 31 (natural). A code has one bit more than k; 1, 3, 7, 15, ... use
            all codes.
        partition: "linear", k equal parts of the norm, or "natural", the norm times 2**(1 - k), ..., 1/2, 1.
        norm: the norm of a bucket, "max" or "l2".
        bucket: elements that share a norm, a multiple of 8 up to 2**24.
        seed: seed of the random numbers, 0 to 2**64 - 1.

    Raises CodecError for other values.
    """

    k: int
    partition: str = "linear"
    norm: str = "max"
    bucket: int = 1024
    seed: int = 0

    name: ClassVar[str] = "dithering"
    examples: ClassVar = ("dithering:k=7", "dithering:k=7,partition=natural")
    aliases: ClassVar = {
        "normalize": ("norm", {"max": "max", "l2": "l2", 0: "max", 1: "l2"}),
        "partition": ("partition", {"linear": "linear", "natural": "natural", 0: "linear", 1: "natural"}),
    }

    def __post_init__(self) -> None:
        check_choice(self, "partition", _PARTITIONS)
        check_choice(self, "norm", _NORMS)
        check_integer(self, "k", 1, _MOST_LEVELS[self.partition])
        check_bucket(self, "bucket")
        check_seed(self)

    @property
    def bits(self) -> int:
        """Bits of a code: a sign and a level from 0 to k."""
        return 1 + self.k.bit_length()

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        return -(-count * self.bits // 8), 4

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/dithering/``, and its arguments. Every element draws a random number."""
        options = (self.k, _PARTITIONS.index(self.partition), _NORMS.index(self.norm))
        return Kernel("Dithering", bucket=self.bucket, seed=self.seed, options=options, draws=True)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The distance of the levels around the value: ``norm / k`` (linear), or the power of two below (natural).

        The roundings of a level's position and value add up to ``8 * 2**-24`` of the value; the value may then lie
        between the next two levels, whose distance counts. The norm has the roundings of its sum (see ``onebit``).
        """
        import numpy as np

        flat = np.abs(np.asarray(x, dtype=np.float64).reshape(-1))
        if not flat.size:
            return np.zeros(np.shape(x))
        starts = np.arange(0, flat.size, self.bucket)
        norm = np.maximum.reduceat(flat, starts)
        if self.norm == "l2":
            with np.errstate(invalid="ignore"):
                scaled = flat / np.repeat(np.where(norm > 0, norm, 1.0), self.bucket)[: flat.size]
            norm = np.minimum(norm * np.sqrt(np.add.reduceat(scaled**2, starts)), _GREATEST)
        norms = np.repeat(norm, self.bucket)[: flat.size]
        slack = (24 + self.bucket / 2048) * 2.0**-24
        if self.partition == "linear":
            gap = norms / self.k
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                exponent = np.floor(np.log2(np.where(norms > 0, flat * (1 + slack) / norms, 0.0)))
            gap = norms * 2.0 ** np.clip(exponent, 1 - self.k, 0)
        bound = gap * (1 + slack) + flat * slack + 2.0**-148
        return np.where(norms > 0, bound, 0.0).reshape(np.shape(x))
