"""Calls of a codec's kernels on arrays of the host, to check results and to measure the kernels.

Plans prepare the same operations for spans of their buffers (qccl/engine/host/program.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from qccl.base import dtypes
from qccl.base.dtypes import BFLOAT16, DTypeLike
from qccl.base.errors import ArgumentError
from qccl.base.scalars import as_integer

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Operations", "Place", "copy", "instruction_set", "usable_instruction_sets"]

#: (index of the first element, round, rank): the key of random numbers
Place = tuple[int, int, int]
_FIRST = (0, 0, 0)


class _Codec(Protocol):
    """The part of a codecs.Codec that this module uses; codecs/base.py imports this module."""

    def host(self) -> Any: ...


class Operations:
    """Calls of one codec's kernels on values of one element type.

    Each method returns a function that makes the call, as often as it is called. Values are contiguous arrays (of
    uint16 for bfloat16), wires contiguous arrays of uint8 with ``codec.encoded_nbytes()`` bytes; they must exist as
    long as the function is used. ``call`` is the number of the collective, 0 to 2**64 - 1, which keys random numbers;
    ``threads`` may share a call.
    """

    def __init__(self, codec: _Codec, dtype: DTypeLike, *, call: int = 0, threads: int = 1) -> None:
        number = as_integer(call)
        if number is None or not 0 <= number < 1 << 64:
            raise ArgumentError(
                f"call={call!r} is not possible; the number of a collective is an integer, 0 to 2**64 - 1"
            )
        self._codec, self._code = codec.host(), dtypes.get(dtype).code
        self._call, self._threads = number, threads

    def encode(self, values: np.ndarray, wire: np.ndarray, place: Place = _FIRST) -> Callable[[], None]:
        """``wire = encode(values)``."""
        from qccl import _host

        return _host.Encode(*self._arguments(values, wire), (0, 0), (1, 0), values.size, *place)

    def decode(self, wire: np.ndarray, values: np.ndarray, place: Place = _FIRST) -> Callable[[], None]:
        """``values = decode(wire)``; ``place`` is the place of the encode."""
        from qccl import _host

        return _host.Decode(*self._arguments(wire, values), (0, 0), (1, 0), values.size, False, *place)

    def reduce(
        self,
        wires: Sequence[np.ndarray],
        own: np.ndarray,
        wire: np.ndarray,
        out: np.ndarray | None = None,
        *,
        residual: Sequence[np.ndarray] = (),
        momentum: Sequence[np.ndarray] = (),
        mu: float = 0.0,
        beta: float = 1.0,
        place: Place = _FIRST,
    ) -> Callable[[], None]:
        """``wire = encode(own + decode(wires[0]) + ...)``; ``out`` receives the decoded sum.

        ``residual`` and ``momentum`` are the old and the new state (see schedule.Reduce), one value per element:
        float32, or for residuals uint16 that holds bfloat16.
        """
        from qccl import _host

        arrays = [own, wire, *([] if out is None else [out]), *residual, *momentum, *wires]
        at = {id(array): (i, 0) for i, array in enumerate(arrays)}
        return _host.Reduce(
            *self._arguments(*arrays),
            srcs=[at[id(each)] for each in wires],
            own=at[id(own)],
            own_index=0,
            wire=at[id(wire)],
            out=None if out is None else at[id(out)],
            count=own.size,
            op=0,
            scale=1.0,
            index=place[0],
            round=place[1],
            rank=place[2],
            residual=_pair(at, residual),
            momentum=_pair(at, momentum),
            mu=mu,
            beta=beta,
            residual_dtype=BFLOAT16.code if residual and residual[0].dtype.itemsize == BFLOAT16.itemsize else 0,
        )

    def _arguments(self, *arrays: np.ndarray) -> tuple[Any, Any, int]:
        """The first arguments of an operation; the arrays are its buffers 0, 1, ..."""
        from qccl import _host

        memory = _host.Memory(len(arrays))
        memory.call, memory.threads = self._call, self._threads
        for i, array in enumerate(arrays):
            memory[i] = array.ctypes.data
        return memory, self._codec, self._code


def _pair(at: dict[int, tuple[int, int]], state: Sequence[np.ndarray]) -> Any:
    return tuple(at[id(array)] for array in state) or None


def copy(values: np.ndarray, out: np.ndarray) -> None:
    """Copy contiguous arrays of the same size by memcpy, the baseline of the kernels' speed."""
    from qccl import _host

    _host.memcpy(out.ctypes.data, values.ctypes.data, values.nbytes)


def instruction_set() -> str:
    """The instruction set of the host kernels in use. Raises ImportError if the kernels cannot be loaded."""
    from qccl import _host

    return _host.isa


def usable_instruction_sets() -> tuple[str, ...]:
    """The instruction sets of all host kernels that this processor can run, best first. Raises ImportError likewise."""
    from qccl import _host

    return _host.usable_isas
