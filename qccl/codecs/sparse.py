"""Sparse codecs: the greatest values of each block, or random ones; the others decode to zero (BytePS).

Source: sparsified SGD with memory (Stich et al. 2018, arXiv 1809.07599), which needs error feedback (``+ef``), too.

The arithmetic is ``kernels/codecs/topk/`` and ``kernels/codecs/randomk/``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qccl.codecs.base import BucketCodec, Kernel
from qccl.codecs.checks import check_bucket, check_flag, check_seed, keep
from qccl.dtypes import DType
from qccl.errors import CodecError
from qccl.scalars import as_real

if TYPE_CHECKING:
    import numpy as np

__all__ = ["RandomK", "TopK"]

_GREATEST = 3.4028e38


class _Sparse(BucketCodec):
    """``k`` elements of each ``block``."""

    k: float
    block: int

    sparse: ClassVar[bool] = True

    def _check(self) -> None:
        check_bucket(self, "block")
        k = as_real(self.k)
        if k is None or not (0 < k < 1 or (1 <= k <= self.block and k == int(k))):
            raise CodecError(
                f"{self.name}: k={self.k!r} is not possible; allowed are a fraction between 0 and 1, or the number of "
                f"elements to keep of each block, 1 to {self.block}"
            )
        keep(self, "k", k if k < 1 else int(k))  # 1.0 becomes 1, so that all ranks have the same specification

    @property
    def bucket(self) -> int:  # type: ignore[override]
        """The block: its elements are chosen together."""
        return self.block

    @property
    def _most(self) -> int:
        """Elements kept of a whole block."""
        return max(1, round(self.k * self.block)) if self.k < 1 else int(self.k)

    def kept(self, count: int) -> int:
        """Elements kept of a block of ``count``; a fraction of the last block is rounded up."""
        return -(-self._most * count // self.block) if self.k < 1 else min(self._most, count)

    @property
    def _options(self) -> tuple[int, int]:
        return self._most, int(self.k < 1)


@dataclass(frozen=True)
class TopK(_Sparse):
    """The values of greatest magnitude, with their indices; of equal ones those of lower index.

    Attributes:
        k: elements to keep of each block: a fraction if less than 1, otherwise a count.
        block: elements, a multiple of 8 up to 2**24. Indices take 1 byte up to 256, 2 up to 65536, otherwise 4.

    Raises CodecError for other values.
    """

    k: float
    block: int = 16384

    name: ClassVar[str] = "topk"
    examples: ClassVar = ("topk:k=0.01",)

    def __post_init__(self) -> None:
        self._check()

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        index_nbytes = 1 if self.block <= 1 << 8 else 2 if self.block <= 1 << 16 else 4
        return self.kept(count) * dtype.itemsize, self.kept(count) * index_nbytes

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/topk/``, and its arguments."""
        return Kernel("TopK", bucket=self.block, options=self._options)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """0 for elements that are kept (in their own type), the value itself for the others."""
        import numpy as np

        flat = np.abs(np.asarray(x, dtype=np.float64).reshape(-1))
        bound = flat.copy()
        for start in range(0, flat.size, self.block):
            part = flat[start : start + self.block]
            order = np.argsort(-part, kind="stable")
            bound[start + order[: self.kept(part.size)]] = 0.0
        return bound.reshape(np.shape(x))


@dataclass(frozen=True)
class RandomK(_Sparse):
    """Values drawn at random without replacement; the seed determines their indices, which are not sent.

    Attributes:
        k: elements to keep of each block: a fraction if less than 1, otherwise a count.
        block: elements, a multiple of 8 up to 2**24.
        seed: seed of the random numbers, 0 to 2**64 - 1.
        scale: whether to divide values by the fraction that is kept, so that the result is unbiased.

    Raises CodecError for other values.
    """

    k: float
    block: int = 16384
    seed: int = 0
    scale: bool = False

    name: ClassVar[str] = "randomk"
    examples: ClassVar = ("randomk:k=0.01",)
    aliases: ClassVar = {"scaling": ("scale", None)}
    decoder_draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check()
        check_seed(self)
        check_flag(self, "scale")

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        return self.kept(count) * dtype.itemsize, 0

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/randomk/``, and its arguments.

        Encoder and decoder draw the same random numbers.
        """
        options = (*self._options, int(self.scale))
        return Kernel("RandomK", bucket=self.block, seed=self.seed, options=options, draws=True)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The value itself, if it is not drawn; with ``scale``, if it is drawn, the value times the factor less one."""
        import numpy as np

        flat = np.abs(np.asarray(x, dtype=np.float64).reshape(-1))
        bound = flat.copy()
        for start in range(0, flat.size if self.scale else 0, self.block):
            part = flat[start : start + self.block]
            factor = np.float64(part.size) / self.kept(part.size)
            most = np.where(part * factor < _GREATEST, part * max(1.0, factor - 1) * (1 + 2.0**-22) + 2.0**-149, np.inf)
            bound[start : start + part.size] = most
        return bound.reshape(np.shape(x))
