"""The interface of a codec: what the schedules, the engines and the users need to know of it.

A codec turns ``count`` values into ``encoded_nbytes(count, dtype)`` bytes and back. It is an immutable dataclass of
its parameters, so ``repr()`` is the constructor call, equality is equality of parameters, and a codec can be a key.
Its arithmetic is not here: ``host()`` returns the compiled kernel object that the header in ``kernels/`` defines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from qccl import dtypes
from qccl.dtypes import DType
from qccl.errors import ArgumentError, CodecError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PLAIN_GRANULE", "Codec"]

#: granule of codecs without buckets: as large as the usual bucket, so that all cut a vector alike
PLAIN_GRANULE = 1024


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

    def encoded_nbytes(self, count: int, dtype: DType | str | int) -> int:
        """Bytes on the wire for ``count`` elements; depends on nothing else.

        Raises ArgumentError for a negative count, or an element type without a code.
        """
        if count < 0:
            raise ArgumentError(f"{self!r}: count is {count}; it must be 0 or more")
        return self._nbytes(count, dtypes.get(dtype))

    @abstractmethod
    def _nbytes(self, count: int, dtype: DType) -> int:
        """The size formula, for a count that is not negative."""

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

    def encode(self, x: np.ndarray, call: int = 0, *, dtype: DType | str | None = None) -> np.ndarray:
        """The wire of ``x`` as a uint8 array: what rank 0 sends first in collective number ``call``.

        ``dtype="bfloat16"`` takes uint16 as bfloat16. Raises ArgumentError for an element type without a code.
        """
        import numpy as np

        from qccl import _host

        values = np.ascontiguousarray(x)
        given = dtypes.get(values.dtype.name if dtype is None else dtype)
        allowed = (given.name, "uint16" if given is dtypes.BFLOAT16 else given.name)
        if values.dtype.name not in allowed or not values.dtype.isnative:  # names say nothing of the order of bytes
            raise ArgumentError(f"an array of {values.dtype} cannot be taken as {given}; convert it first")
        wire = np.empty(self.encoded_nbytes(values.size, given), np.uint8)
        memory = _memory(call, values, wire)
        _host.Encode(memory, self.host(), given.code, (0, 0), (1, 0), values.size, 0, 0, 0)()
        return wire

    def decode(self, wire: np.ndarray, count: int, dtype: DType | str) -> np.ndarray:
        """The ``count`` values of ``wire`` (uint8), one axis; bfloat16 comes as uint16, since NumPy has no such type.

        Raises CodecError where the wire has not the size of ``count`` elements; its content may be anything.
        """
        import numpy as np

        from qccl import _host

        data = np.ascontiguousarray(wire)
        given = dtypes.get(dtype)
        expected = self.encoded_nbytes(count, given)
        if data.dtype != np.uint8 or data.size != expected:
            raise CodecError(
                f"{self!r}: the wire of {count} {given} is {expected} bytes of uint8, not {data.size} of {data.dtype}"
            )
        values = np.empty(count, np.uint16 if given is dtypes.BFLOAT16 else given.name)
        memory = _memory(0, data, values)
        _host.Decode(memory, self.host(), given.code, (0, 0), (1, 0), count, False)()
        return values


def _memory(call: int, *arrays: np.ndarray) -> Any:
    from qccl import _host

    memory = _host.Memory(len(arrays))
    memory.call = call
    for i, array in enumerate(arrays):
        memory[i] = array.ctypes.data
    return memory
