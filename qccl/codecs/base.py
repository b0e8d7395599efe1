"""The interface of a codec: what the schedules, the engines and the users need to know of it.

A codec turns ``count`` values into ``encoded_nbytes(count, dtype)`` bytes and back. It is an immutable dataclass of
its parameters, so ``repr()`` is the constructor call, equality is equality of parameters, and a codec can be a key.
Its arithmetic is not here: ``kernel()`` says by which C++ type the headers in ``kernels/`` have it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from qccl import dtypes
from qccl.dtypes import DType, DTypeLike
from qccl.errors import ArgumentError, CodecError
from qccl.scalars import as_integer

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MAX_BUCKET", "PLAIN_GRANULE", "BucketCodec", "Codec", "Kernel", "Tile"]

#: granule of codecs without buckets: as large as the usual bucket, so that all cut a vector alike
PLAIN_GRANULE = 1024
#: elements of a bucket at most
MAX_BUCKET = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tile:
    """Device code of a codec's own, which replaces a block of threads per bucket (``kernels/cuda/kernels.h``).

    Attributes:
        encoder: the C++ type that encodes.
        decoder: the C++ type that decodes.
        needs_range: a code depends on the range of its bucket, which a first pass finds in a bucket of several units;
            otherwise elements are independent, and the bucket does not matter.
    """

    encoder: str
    decoder: str
    needs_range: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the compiled code knows of a codec.

    Attributes:
        type: its C++ type, a row of ``kernels/codecs.h``.
        bucket: elements; 0: all of a call.
        seed, options: what else its functions are given (``BucketOptions``).
        draws: encoding takes random numbers, and so the number of the call.
        tile: device code of its own for operations without state; mostly none.
        copies: the wire is the values, so a copy encodes and decodes them.
    """

    type: str
    bucket: int = 0
    seed: int = 0
    options: tuple[int, ...] = ()
    draws: bool = False
    tile: Tile | None = None
    copies: bool = False


class Codec(ABC):
    """A codec: parameters, sizes, and the kernels that do its arithmetic."""

    #: name in a specification, e.g. ``"minmax"``
    name: ClassVar[str]
    #: specifications that show what it can do: the benchmark's default list, and tests; empty: its name alone
    examples: ClassVar[tuple[str, ...]] = ()
    #: keys of other libraries in a specification: the field, and which value of it a value there means (None: the same)
    aliases: ClassVar[Mapping[str, tuple[str, Mapping[Any, Any] | None]]] = {}
    #: whether a wire has some elements only, and the others are zero; such codes can be summed, but have no min or max
    sparse: ClassVar[bool] = False
    #: whether decoding must be told who made the wire (call, round, rank, first element), which is not in it
    placed: ClassVar[bool] = False
    #: whether its arithmetic is Python functions, for trying things out: on the host alone
    slow: ClassVar[bool] = False

    @property
    @abstractmethod
    def granule(self) -> int:
        """Elements whose multiples every shard and chunk boundary must be (the bucket)."""

    @property
    def splittable(self) -> bool:
        """Whether a shard may be cut into chunks without changing the result."""
        return True

    @property
    def plain(self) -> Codec:
        """The codec by itself, without what is around it."""
        return self

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of what is kept from call to call under the caller's key ("residual", "momentum"); mostly none."""
        return ()

    def encoded_nbytes(self, count: int, dtype: DTypeLike) -> int:
        """Bytes on the wire for ``count`` elements; depends on nothing else.

        Raises ArgumentError for what is no number of elements, or an element type without a code.
        """
        number = as_integer(count)
        if number is None or number < 0:
            raise ArgumentError(f"{self!r}: count is {count!r}; it must be an integer, 0 or more")
        return self._nbytes(number, dtypes.get(dtype))

    @abstractmethod
    def _nbytes(self, count: int, dtype: DType) -> int:
        """The size formula, for a count that is not negative."""

    def spec(self) -> str:
        """The canonical specification: ``get(codec.spec()) == codec``. Bits go with the name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # of a codec that is a dataclass
        given = {field.name: getattr(self, field.name) for field in fields}
        bits = given.pop("bits", "")
        changed = [field.name for field in fields if field.name in given and given[field.name] != field.default]
        options = [f"{name}={_spelled(given[name])}" for name in changed]
        return f"{self.name}{bits}" + (":" + ",".join(options) if options else "")

    @abstractmethod
    def kernel(self) -> Kernel:
        """What the compiled code knows of this codec."""

    @abstractmethod
    def host(self) -> Any:
        """The kernel object of the host extension (one per parameter set, cached)."""

    @abstractmethod
    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """Largest possible ``|decode(encode(x)) - x|`` per element, float64, shape of ``x`` (float32, finite).

        Derived from the codec's formula, not measured; rounding of the decoded value to a narrower output type is not
        included.
        """

    def encode(self, x: np.ndarray, call: int = 0, *, dtype: DTypeLike | None = None) -> np.ndarray:
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

    def decode(self, wire: np.ndarray, count: int, dtype: DTypeLike, call: int = 0) -> np.ndarray:
        """The ``count`` values of ``wire`` (uint8), one axis; bfloat16 comes as uint16, since NumPy has no such type.

        ``call`` is that of ``encode()``; it matters where the wire does not say which elements it has (``randomk``).
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
        memory = _memory(call, data, values)
        _host.Decode(memory, self.host(), given.code, (0, 0), (1, 0), count, False)()
        return values


class BucketCodec(Codec):
    """A codec of ``kernels/codecs.h``, whose buckets are encoded independently.

    It has a field or property ``bucket``, and its ``kernel()`` names the C++ type.
    """

    bucket: int

    @property
    def granule(self) -> int:
        return self.bucket

    @abstractmethod
    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        """Bytes of one bucket of ``count`` elements in the two parts of the wire (``kernels/bucket.h``)."""

    def _bucket_of(self, count: int) -> int:
        """Elements of a bucket in a call of ``count``, 1 or more."""
        return self.bucket

    def _nbytes(self, count: int, dtype: DType) -> int:
        if not count:
            return 0
        bucket = self._bucket_of(count)
        whole, rest = divmod(count, bucket)
        codes, meta = (whole * nbytes for nbytes in self._sections(bucket, dtype))
        if rest:
            more = self._sections(rest, dtype)
            codes, meta = codes + more[0], meta + more[1]
        return -(-codes // 4) * 4 + meta if meta else codes

    def host(self) -> Any:
        return _compiled(self)


@cache
def _compiled(codec: BucketCodec) -> Any:
    from qccl import _host

    kernel = codec.kernel()
    return _host.CompiledCodec(kernel.type, kernel.bucket, kernel.seed, list(kernel.options))


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _memory(call: int, *arrays: np.ndarray) -> Any:
    from qccl import _host

    number = as_integer(call)
    if number is None or not 0 <= number < 1 << 64:
        raise ArgumentError(f"call={call!r} is not the number of a collective; that is an integer, 0 to 2**64 - 1")
    memory = _host.Memory(len(arrays))
    memory.call = number
    for i, array in enumerate(arrays):
        memory[i] = array.ctypes.data
    return memory
