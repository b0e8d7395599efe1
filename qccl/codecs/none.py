"""The codec "none": the wire is the values themselves. Sums are computed in fp32.

The arithmetic is ``kernels/codecs/none/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qccl.base.dtypes import DType
from qccl.codecs.base import PLAIN_GRANULE, BucketCodec, Kernel, Tile

if TYPE_CHECKING:
    import numpy as np

__all__ = ["NoCodec"]


@dataclass(frozen=True)
class NoCodec(BucketCodec):
    """No compression: the wire is the bytes of the values."""

    name: ClassVar[str] = "none"

    @property
    def bucket(self) -> int:  # type: ignore[override]
        """A fixed number of elements, at whose multiples vectors are divided. Elements of a bucket share nothing."""
        return PLAIN_GRANULE

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        return count * dtype.itemsize, 0

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/none/``, and its arguments. A copy encodes and decodes."""
        tile = Tile("NoCodecTile", "NoCodecTile", by_bucket=False)
        return Kernel("NoCodec", bucket=self.bucket, tile=tile, copies=True)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """Zeros: nothing is lost."""
        import numpy as np

        return np.zeros(np.shape(x))
