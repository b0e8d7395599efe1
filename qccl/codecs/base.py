"""The interface of a codec for schedules, engines and users.

A codec turns ``count`` values into ``encoded_nbytes(count, dtype)`` bytes and back. It is an immutable dataclass of
its parameters, so ``repr()`` is the constructor call, equality is equality of parameters, and a codec can be a key.
The arithmetic is C++ in ``kernels/codecs/``; ``kernel()`` names its type there.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from qccl.base import dtypes
from qccl.base.dtypes import DType, DTypeLike
from qccl.base.errors import ArgumentError, CodecError
from qccl.base.scalars import as_integer
from qccl.codecs.operations import Operations

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MAX_BUCKET", "PLAIN_GRANULE", "WARP_VALUES", "BucketCodec", "Codec", "Kernel", "Tile"]

#: granule of codecs without buckets: the usual bucket, so that most codecs divide a vector alike
PLAIN_GRANULE = 1024
#: the most elements of a bucket that one warp of a GPU holds in registers
WARP_VALUES = 1024
#: the most elements of a bucket
MAX_BUCKET = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tile:
    """A codec's own device code, which replaces a block of threads per bucket (``kernels/cuda/kernels.h``).

    Attributes:
        encoder: the C++ type that encodes and reduces; None: a block of threads per bucket does.
        decoder: the C++ type that decodes.
        by_bucket: a code depends on its bucket, so a unit of work is a bucket or a part of one; an encoder gathers the
            range of a bucket of several units in a first pass. Otherwise elements are independent, and the bucket does
            not matter.
    """

    encoder: str | None
    decoder: str
    by_bucket: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A codec's C++ type and the arguments of its functions.

    Attributes:
        type: the C++ type, a name in ``kernels/codecs/all.h``.
        bucket: elements of a bucket; 0: all elements of a call.
        seed, options: as in ``BucketOptions``.
        draws: encoding takes random numbers, so it depends on the call's number.
        tile: the codec's own device code, for buckets of any size unless it is None.
        scratch: words of memory that an encoder's team needs for a bucket on a GPU.
        copies: the wire is the values, so a copy encodes and decodes them.
    """

    type: str
    bucket: int = 0
    seed: int = 0
    options: tuple[int, ...] = ()
    draws: bool = False
    tile: Tile | None = None
    scratch: int = 0
    copies: bool = False


class Codec(ABC):
    """A codec: parameters, sizes, error bound, and the kernels that do its arithmetic."""

    #: name in a specification, e.g. ``"minmax"``
    name: ClassVar[str]
    #: example specifications for the benchmark's default list and for tests; empty: the name alone
    examples: ClassVar[tuple[str, ...]] = ()
    #: keys of other libraries: the field for each key, and a map from its values to the field's (None: the same)
    aliases: ClassVar[Mapping[str, tuple[str, Mapping[Any, Any] | None]]] = {}
    #: whether a wire has some elements only, and the others are zero; such wires can be summed, but have no min or max
    sparse: ClassVar[bool] = False
    #: whether decoding needs the encoder's random numbers, and so its call, round, rank and first element
    decoder_draws: ClassVar[bool] = False
    #: whether Python functions do the arithmetic, which run on the host only
    slow: ClassVar[bool] = False

    @property
    @abstractmethod
    def granule(self) -> int:
        """Shard and chunk boundaries must be multiples of this many elements (the bucket)."""

    @property
    def splittable(self) -> bool:
        """Whether a shard may be split into chunks without changing the result."""
        return True

    @property
    def plain(self) -> Codec:
        """The codec without decorators."""
        return self

    @property
    def rounds(self) -> tuple[Codec, Codec]:
        """The codec of the ranks' own values, and the codec of their sums in the second round of a collective."""
        return self, self

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state that lasts from call to call under the caller's key: "residual", "momentum", or none."""
        return ()

    def encoded_nbytes(self, count: int, dtype: DTypeLike) -> int:
        """Bytes on the wire for ``count`` elements, whatever their values.

        Raises ArgumentError if ``count`` is not an integer of 0 or more, or codecs do not support the element type.
        """
        number = as_integer(count)
        if number is None or number < 0:
            raise ArgumentError(f"{self!r}: count is {count!r}; it must be an integer, 0 or more")
        return self._nbytes(number, dtypes.get(dtype))

    @abstractmethod
    def _nbytes(self, count: int, dtype: DType) -> int:
        """The size formula; ``count`` is not negative."""

    def spec(self) -> str:
        """The canonical specification: ``get(codec.spec()) == codec``. Bits follow the name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # of a codec that is a dataclass
        given = {field.name: getattr(self, field.name) for field in fields}
        bits = given.pop("bits", "")
        changed = [field.name for field in fields if field.name in given and given[field.name] != field.default]
        options = [f"{name}={_spelled(given[name])}" for name in changed]
        return f"{self.name}{bits}" + (":" + ",".join(options) if options else "")

    @abstractmethod
    def kernel(self) -> Kernel:
        """The C++ type of this codec and its arguments."""

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
        """The wire of ``x`` as a uint8 array, encoded as by rank 0 in the first round of collective number ``call``.

        ``dtype="bfloat16"`` takes uint16 as bfloat16. Raises ArgumentError if codecs do not support the element type.
        """
        import numpy as np

        values = np.ascontiguousarray(x)
        given = dtypes.get(values.dtype.name if dtype is None else dtype)
        allowed = (given.name, "uint16" if given is dtypes.BFLOAT16 else given.name)
        if values.dtype.name not in allowed or not values.dtype.isnative:  # the name leaves out the byte order
            raise ArgumentError(f"an array of {values.dtype} cannot be read as {given}; convert it first")
        wire = np.empty(self.encoded_nbytes(values.size, given), np.uint8)
        Operations(self, given, call=call).encode(values, wire)()
        return wire

    def decode(self, wire: np.ndarray, count: int, dtype: DTypeLike, call: int = 0) -> np.ndarray:
        """The ``count`` values of ``wire`` (uint8), one axis; bfloat16 comes as uint16, since NumPy has no such type.

        ``call`` is the call of ``encode()``; ``randomk`` needs it, because its wire lacks the indices. Raises
        CodecError if the wire does not have the size of ``count`` elements; its content may be anything.
        """
        import numpy as np

        data = np.ascontiguousarray(wire)
        given = dtypes.get(dtype)
        expected = self.encoded_nbytes(count, given)
        if data.dtype != np.uint8 or data.size != expected:
            raise CodecError(
                f"{self!r}: the wire of {count} {given} is {expected} bytes of uint8, not {data.size} of {data.dtype}"
            )
        values = np.empty(count, np.uint16 if given is dtypes.BFLOAT16 else given.name)
        Operations(self, given, call=call).decode(data, values)()
        return values


class BucketCodec(Codec):
    """A codec of ``kernels/codecs/all.h``, which encodes each bucket independently."""

    bucket: int

    @property
    def granule(self) -> int:
        """The bucket: buckets are encoded independently, so a vector may be divided between any two."""
        return self.bucket

    @abstractmethod
    def _sections(self, count: int, dtype: DType) -> tuple[int, int]:
        """Sizes of a bucket's codes section and meta section, for ``count`` elements (``kernels/shared/bucket.h``)."""

    def _bucket_of(self, count: int) -> int:
        """Elements of a bucket in a call of ``count``, 1 or more."""
        return self.bucket

    def _nbytes(self, count: int, dtype: DType) -> int:
        if not count:
            return 0
        bucket = self._bucket_of(count)
        whole, rest = divmod(count, bucket)
        codes, meta = self._sections(bucket, dtype)
        codes, meta = whole * codes, whole * meta
        if rest:
            more = self._sections(rest, dtype)
            codes, meta = codes + more[0], meta + more[1]
        return -(-codes // 4) * 4 + meta if meta else codes

    @cache  # noqa: B019 - a program has few codecs, and equal ones share their loops
    def host(self) -> Any:
        """The compiled loops for these parameters; objects with equal parameters share one."""
        from qccl import _host

        kernel = self.kernel()
        return _host.CompiledCodec(kernel.type, kernel.bucket, kernel.seed, list(kernel.options))


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
