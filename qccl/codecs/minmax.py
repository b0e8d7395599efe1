"""Codes on the line from the least to the greatest value of a bucket, 1 to 8 bits each (QSGD-TF, ByteGrad, CGX).

The arithmetic is ``kernels/minmax.h``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from qccl.codecs.base import PLAIN_GRANULE, Codec, Form, Kernel
from qccl.codecs.checks import check_bucket, check_choice, check_integer, check_seed
from qccl.dtypes import DType

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MinMax"]

_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class MinMax(Codec):
    """``low + code * (high - low) / (2**bits - 1)`` per bucket; the ends are exact, the range is kept in fp32.

    Attributes:
        bits: of a code, 1 to 8.
        bucket: elements that share a range, a multiple of 8 up to 2**24; or "shard": all elements of a call.
        rounding: "nearest", or "stochastic", which is unbiased and reproducible.
        seed: of the stochastic rounding, 0 to 2**64 - 1.

    Raises CodecError for other values.
    """

    bits: int = 8
    bucket: int | str = 1024
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
        return PLAIN_GRANULE if self.bucket == "shard" else int(self.bucket)

    @property
    def splittable(self) -> bool:
        return self.bucket != "shard"

    def _nbytes(self, count: int, dtype: DType) -> int:
        if count == 0:
            return 0
        buckets = 1 if self.bucket == "shard" else -(-count // int(self.bucket))
        codes = (count * self.bits + 7) // 8
        return (codes + 3) // 4 * 4 + 8 * buckets

    def spec(self) -> str:
        given = [(key, getattr(self, key)) for key in ("bucket", "rounding", "seed")]
        options = [f"{key}={value}" for key, value in given if value != getattr(MinMax, key)]
        return f"{self.name}{self.bits}" + (":" + ",".join(options) if options else "")

    def kernel(self) -> Kernel:
        draws = self.rounding == "stochastic"
        return Kernel(
            type=f"MinMaxCodec<{self.bits}, {str(draws).lower()}>",
            form=Form.TILES,
            decoder=f"MinMaxCodec<{self.bits}, false>",
            bucket=0 if self.bucket == "shard" else int(self.bucket),
            seed=self.seed,
            draws=draws,
        )

    def bucket_kernel(self) -> Kernel:
        bucket = 0 if self.bucket == "shard" else int(self.bucket)
        stochastic = self.rounding == "stochastic"
        return Kernel(
            "MinMaxBuckets", bucket=bucket, seed=self.seed, options=(self.bits, int(stochastic)), draws=stochastic
        )

    def host(self) -> Any:
        return _host_kernel(self)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """Half a step (nearest) or one step (stochastic), plus what the roundings of the arithmetic can add.

        With ``u = 2**-24``, ``w = high - low`` and ``L = 2**bits - 1``: the position ``L (x - low) / w`` is computed in
        four roundings, of which the inverse of the step counts double where it is subnormal, and so is off by at most
        ``5 u L``, that is ``5 u w`` in value. The value ``end + steps * w / L`` has at most half of the steps, with
        three roundings: ``1.5 u w``. With second-order terms both are below ``7 u w``. The last addition rounds a
        number no larger than the greater end: half of that one's last place. Scaling by powers of two is exact but for
        subnormals, which cost ``2**-148``. A constant bucket is exact.
        """
        import numpy as np

        flat = np.asarray(x, dtype=np.float64).reshape(-1)
        size = flat.size if self.bucket == "shard" else int(self.bucket)
        if flat.size == 0:
            return np.zeros(np.shape(x))
        starts = np.arange(0, flat.size, size)
        low, high = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
        width = high - low
        step = width / (2**self.bits - 1) * (0.5 if self.rounding == "nearest" else 1.0)
        greater = np.maximum(abs(low), abs(high)).astype(np.float32)
        slack = 7 * 2.0**-24 * width + np.spacing(greater).astype(np.float64) / 2 + 2.0**-148
        bound = np.where(width > 0, step + slack, 0.0)
        return np.repeat(bound, size)[: flat.size].reshape(np.shape(x))


@cache
def _host_kernel(codec: MinMax) -> Any:
    from qccl import _host

    bucket = 0 if codec.bucket == "shard" else int(codec.bucket)
    return _host.MinMax(codec.bits, bucket, codec.rounding == "stochastic", codec.seed)
