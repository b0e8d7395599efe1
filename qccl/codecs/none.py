"""The codec "none": the wire is the values themselves ("raw" in the kernels). Sums are still made in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from qccl.codecs.base import PLAIN_GRANULE, Codec, Form, Kernel
from qccl.dtypes import DType

if TYPE_CHECKING:
    import numpy as np

__all__ = ["NoCodec"]


@dataclass(frozen=True)
class NoCodec(Codec):
    """No compression; wire = the bytes of the values."""

    name: ClassVar[str] = "none"

    @property
    def granule(self) -> int:
        return PLAIN_GRANULE

    def _nbytes(self, count: int, dtype: DType) -> int:
        return count * dtype.itemsize

    def kernel(self) -> Kernel:
        return Kernel("RawCodec", Form.RAW)

    def bucket_kernel(self) -> Kernel:
        return Kernel("RawBuckets", bucket=2048)

    def host(self) -> Any:
        return _host_kernel()

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        import numpy as np

        return np.zeros(np.shape(x))


@cache
def _host_kernel() -> Any:
    from qccl import _host

    return _host.Raw()
