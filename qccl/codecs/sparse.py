"""Sparse codecs: the greatest values of each block, or random ones; the others decode to zero (BytePS).

Source: sparsified SGD with memory (Stich et al. 2018, arXiv 1809.07599), which needs error feedback (``+ef``), too.

The arithmetic is ``kernels/codecs/topk/`` and ``kernels/codecs/randomk/``; the bytes are ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qccl.base.dtypes import DType
from qccl.base.errors import CodecError
from qccl.base.scalars import as_real
from qccl.codecs.base import BucketCodec, Kernel
from qccl.codecs.checks import check_bucket, check_choice, check_flag, check_seed, keep

if TYPE_CHECKING:
    import numpy as np

__all__ = ["RandomK", "TopK", "index_nbytes"]

_GREATEST = 3.4028e38
_SUBNORMAL = 2.0**-149
#: forms of TopK's values, in the order of their numbers in kernels/codecs/topk/codec.h
_FORMS = ("exact", "float16", "exp4")


def index_nbytes(kept: int, count: int) -> int:
    """Bytes of ``kept`` indices below ``count`` (``kernels/codecs/elias_fano.h``)."""
    low_bits = (count // kept).bit_length() - 1
    return -(-kept * low_bits // 8) + -(-(kept + (count - 1 >> low_bits)) // 8)


class _Sparse(BucketCodec):
    """A codec that keeps ``k`` elements of each ``block``."""

    k: float
    block: int

    sparse: ClassVar[bool] = True

    def _check(self) -> None:
        check_bucket(self, "block")
        k = as_real(self.k)
        if k is None or not (0 < k <= 1 if isinstance(k, float) else 1 <= k <= self.block):
            raise CodecError(
                f"{self.name}: k={self.k!r} is not possible; allowed are a fraction, written with a decimal point, "
                f"above 0 up to 1.0 (all), or the number of elements to keep of each block, 1 to {self.block}"
            )
        # 1.0 equals 1 in Python, but keeps all elements instead of one
        keep(self, "k", self.block if isinstance(k, float) and k == 1 else k)

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
    """The values of greatest magnitude, with their indices; of equal magnitudes the values of lower index.

    An index takes about ``2 + log2(block / k)`` bits (Elias-Fano coding).

    Attributes:
        k: elements to keep of each block: a count if it is an integer, a fraction if it is a float. 1 is one element;
            1.0 is all of them, and becomes the count ``block``.
        block: elements, a multiple of 8 up to 2**24.
        values: "exact": in the call's element type. "float16": 16-bit floats, scaled by a power of two for each block,
            so that no value overflows. "exp4": 4 bits, the sign and the nearest of the block's greatest magnitude times
            1, 1/2, ..., 1/64; values below 3/4 of the last become 0.

    Raises CodecError for other values.

    Source: quasi-succinct indices (Vigna 2013, arXiv 1206.4300).
    """

    k: float
    block: int = 16384
    values: str = "exact"

    name: ClassVar[str] = "topk"
    examples: ClassVar = ("topk:k=0.01", "topk:k=64,block=4096,values=exp4")

    def __post_init__(self) -> None:
        self._check()
        check_choice(self, "values", _FORMS)

    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        kept = self.kept(count)
        values = {"float16": 4 + 2 * kept, "exp4": 4 + -(-kept // 2)}
        return index_nbytes(kept, count) + values.get(self.values, kept * dtype.itemsize), 0

    def kernel(self) -> Kernel:
        """The C++ type in ``kernels/codecs/topk/``, and its arguments."""
        options = (*self._options, _FORMS.index(self.values))
        return Kernel("TopK", bucket=self.block, options=options, scratch=self._most)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The value itself for elements that are not kept; for the others the error of their form.

        "exact" has none (in the call's type). "float16" rounds to 11 significant bits, or among its subnormals to
        ``2**-24`` of the scaled values, which are multiplied by ``2**14`` over the power of two of the greatest
        magnitude. With "exp4" no power of two is nearer than the one chosen, but for a rounding of the ratio by which
        it is chosen, and values below 3/4 of the least one become 0.
        """
        import numpy as np

        flat = np.abs(np.asarray(x, dtype=np.float64).reshape(-1))
        bound = flat.copy()
        for start in range(0, flat.size, self.block):
            part = flat[start : start + self.block]
            kept = np.argsort(-part, kind="stable")[: self.kept(part.size)]
            bound[start + kept] = _form_error(self.values, part[kept])
        return bound.reshape(np.shape(x))


def _form_error(form: str, size: np.ndarray) -> np.ndarray:
    """The error bound of the kept magnitudes of a block in one of ``_FORMS``."""
    import numpy as np

    greatest = float(size.max())
    bound = np.zeros(size.shape)
    if greatest == 0 or form == "exact":
        return bound
    if form == "float16":
        scale = 2.0 ** min(14 - (int(np.frexp(greatest)[1]) - 1), 127)
        np.maximum(size * 2.0**-11, 2.0**-25 / scale, out=bound)
    else:
        levels = greatest * 2.0 ** -np.arange(7)
        nearest = np.abs(size[:, None] - levels).min(axis=1) + greatest * 2.0**-20
        bound = np.where(size < 0.75 * levels[-1] * (1 + 2.0**-20), size, nearest)
    return bound + _SUBNORMAL


@dataclass(frozen=True)
class RandomK(_Sparse):
    """Values drawn at random without replacement; the seed determines their indices, which are not sent.

    Attributes:
        k: elements to keep of each block: a count if it is an integer, a fraction if it is a float. 1 is one element;
            1.0 is all of them, and becomes the count ``block``.
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
