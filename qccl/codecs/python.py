"""Codecs written in NumPy, for research: they run on the host only, and slowly."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qccl.base.dtypes import DTYPES, FLOAT32
from qccl.base.errors import CodecError
from qccl.codecs.base import Codec, Kernel

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PythonCodec"]

_COMBINE = ("add", "minimum", "maximum")
_FLOAT32 = FLOAT32.code


class PythonCodec(Codec):
    """A codec whose arithmetic is two functions of arrays: ``encode_values`` and ``decode_values``.

    A subclass is a dataclass that also has ``name``, ``granule``, ``_nbytes`` and ``error_bound``
    (``docs/adding-a-codec.md``). If one of the functions raises an error, the call raises it on this rank, and PeerLost
    on the others. The functions hold the GIL.
    """

    slow: ClassVar[bool] = True

    @abstractmethod
    def encode_values(self, x: np.ndarray) -> np.ndarray:
        """The wire of ``x`` (float32, read only): ``encoded_nbytes(x.size)`` of uint8."""

    @abstractmethod
    def decode_values(self, wire: np.ndarray, count: int) -> np.ndarray:
        """The ``count`` values (float32) of ``wire`` (uint8, read only)."""

    def kernel(self) -> Kernel:
        """The name of the class in place of a C++ type, so CUDA refuses the codec."""
        return Kernel(type(self).__name__)

    def host(self) -> Any:
        """An object of the extension that calls encode_values() and decode_values()."""
        from qccl import _host

        calls = _Calls(self)  # not cached: a cycle through an object of the extension would never be freed
        return _host.CallbackCodec(calls.encode, calls.decode, calls.reduce)


class _Calls:
    """The functions that CallbackCodec calls with the addresses of its arrays."""

    def __init__(self, codec: PythonCodec) -> None:
        self.codec = codec

    def encode(self, src: int, wire: int, count: int, dtype: int) -> None:
        self._put_wire(_load(src, count, dtype), wire, dtype)

    def decode(self, wire: int, dst: int, count: int, dtype: int, accumulate: bool) -> None:
        values = self._values(wire, count, dtype)
        _store(_load(dst, count, dtype) + values if accumulate else values, dst, dtype)

    def reduce(
        self,
        sources: list[int],
        own: int,
        own_index: int,
        wire: int,
        out: int,
        count: int,
        dtype: int,
        op: int,
        scale: float,
        given_state: tuple[Any, ...] | None,
    ) -> None:
        import numpy as np

        state = _State(*given_state) if given_state else _State()
        terms = [self._values(source, count, dtype) for source in sources]
        if own:
            terms.insert(own_index, state.with_momentum(_load(own, count, dtype)))
        total = terms[0]
        with np.errstate(all="ignore"):
            for term in terms[1:]:
                total = getattr(np, _COMBINE[op])(total, term)
            if scale != 1:
                total = total * np.float32(scale)
        if not wire:
            _store(total, out, dtype)
            return
        total = state.with_residual(total)
        self._put_wire(total, wire, dtype)
        if out or state.residual:
            decoded = self._values(wire, count, dtype)
            if out:
                _store(decoded, out, dtype)
            state.keep_residual(total, _load(out, count, dtype) if out else decoded)

    def _put_wire(self, x: np.ndarray, wire: int, dtype: int) -> None:
        import numpy as np

        x.flags.writeable = False
        found = np.ascontiguousarray(self.codec.encode_values(x))
        nbytes = self.codec.encoded_nbytes(x.size, DTYPES[dtype])
        if found.dtype != np.uint8 or found.size != nbytes:
            raise CodecError(
                f"{self.codec!r}: encode_values() of {x.size} values gave {found.size} of {found.dtype}; "
                f"encoded_nbytes() says {nbytes} of uint8"
            )
        ctypes.memmove(wire, found.ctypes.data, nbytes)

    def _values(self, wire: int, count: int, dtype: int) -> np.ndarray:
        import numpy as np

        data = np.frombuffer(_bytes(wire, self.codec.encoded_nbytes(count, DTYPES[dtype])), np.uint8)
        found = np.array(self.codec.decode_values(data, count))  # a copy, because the codec may reuse its array
        if found.dtype != np.float32 or found.shape != (count,):
            raise CodecError(
                f"{self.codec!r}: decode_values() of {count} values gave {found.dtype} of shape {found.shape}; "
                f"it must give float32 of shape ({count},)"
            )
        return found


@dataclass(frozen=True)
class _State:
    """Addresses of the arrays kept from call to call (0: none); arithmetic as in ``kernels/shared/state.h``."""

    residual: int = 0
    new_residual: int = 0
    momentum: int = 0
    new_momentum: int = 0
    mu: float = 0.0
    beta: float = 1.0
    lr: float = 1.0
    residual_dtype: int = 0

    def with_momentum(self, x: np.ndarray) -> np.ndarray:
        """This rank's values with Nesterov momentum; stores the new momentum."""
        import numpy as np

        if not self.momentum:
            return x
        with np.errstate(all="ignore"):
            momentum = np.float32(self.mu) * _load(self.momentum, x.size, _FLOAT32) + x
            _store_float32(momentum, self.new_momentum)
            found: np.ndarray = x + np.float32(self.mu) * momentum
        return found

    def with_residual(self, total: np.ndarray) -> np.ndarray:
        """The total plus the residual of earlier calls."""
        import numpy as np

        if not self.residual:
            return total
        with np.errstate(all="ignore"):
            factor = np.float32(self.beta) * (np.float32(1) / np.float32(self.lr))
            return total + _load(self.residual, total.size, self.residual_dtype) * factor

    def keep_residual(self, total: np.ndarray, received: np.ndarray) -> None:
        """Store the new residual, with 0 in place of values that are not finite."""
        import numpy as np

        if not self.residual:
            return
        with np.errstate(all="ignore"):
            left = (total - received) * np.float32(self.lr)
        _store(left, self.new_residual, self.residual_dtype)
        kept = _load(self.new_residual, left.size, self.residual_dtype)
        _store(np.where(np.isfinite(kept), kept, np.float32(0)), self.new_residual, self.residual_dtype)


def _store_float32(x: np.ndarray, address: int) -> None:
    ctypes.memmove(address, x.ctypes.data, x.nbytes)


def _bytes(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def _load(address: int, count: int, dtype: int) -> np.ndarray:
    import numpy as np

    from qccl.codecs.floats import storage, to_float32

    kind = DTYPES[dtype]
    return to_float32(np.frombuffer(_bytes(address, kind.itemsize * count), storage(kind)), kind)


def _store(x: np.ndarray, address: int, dtype: int) -> None:
    import numpy as np

    from qccl.codecs.floats import from_float32

    with np.errstate(all="ignore"):
        data = from_float32(np.where(np.isnan(x), np.float32(np.nan), x), DTYPES[dtype])
    ctypes.memmove(address, data.ctypes.data, data.nbytes)
