"""The interface of a codec: what the schedules, the engines and the users need to know of it.

A codec turns ``count`` values into ``encoded_nbytes(count, dtype)`` bytes and back. It is an immutable dataclass of
its parameters, so ``repr()`` is the constructor call, equality is equality of parameters, and a codec can be a key.
Its arithmetic is not here: ``host()`` returns the compiled kernel object that the header in ``kernels/`` defines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from qccl.dtypes import DType

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Codec"]


class Codec(ABC):
    """A codec: parameters, sizes, and the kernels that do its arithmetic."""

    #: name in a specification, e.g. ``"minmax"``
    name: ClassVar[str]

    @property
    @abstractmethod
    def granule(self) -> int:
        """Elements whose multiples every shard and chunk boundary must be (the bucket)."""

    @property
    def splittable(self) -> bool:
        """Whether a shard may be cut into chunks without changing the result."""
        return True

    @abstractmethod
    def encoded_nbytes(self, count: int, dtype: DType | str) -> int:
        """Bytes on the wire for ``count`` elements; depends on nothing else (law 2)."""

    @abstractmethod
    def spec(self) -> str:
        """The canonical specification: ``get(codec.spec()) == codec``."""

    @abstractmethod
    def host(self) -> Any:
        """The kernel object of the host extension (one per parameter set, cached)."""

    @abstractmethod
    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """Largest possible ``|decode(encode(x)) - x|`` per element, float64, shape of ``x`` (float32, finite).

        Derived from the codec's formula, not measured; rounding of the decoded value to a narrower output type is not
        included.
        """
