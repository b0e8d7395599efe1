"""Memory of this process for measured calls, and the host's clock (interface: engine.base.Rig)."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

__all__ = ["HostRig"]

#: bytes of an input and a result of 2^21 elements of float32; unused pages take no memory
_NBYTES = 16 << 20
#: bytes; the longest vectors of a processor
_ALIGNMENT = 64


class HostRig:
    """Memory and clock for measured calls on the host, where a call has ended when it returns."""

    nbytes: int = _NBYTES
    work_nbytes: int | None = None
    streams: tuple[int, ...] = ()

    def __init__(self) -> None:
        whole = np.empty(_NBYTES + _ALIGNMENT, np.uint8)
        first = -whole.ctypes.data % _ALIGNMENT
        self._memory = whole[first : first + _NBYTES]
        self.address: int = self._memory.ctypes.data

    def fill(self, values: bytes, start: int, stop: int) -> None:
        """See Rig."""
        self._memory[start:stop] = np.resize(np.frombuffer(values, np.uint8), stop - start)

    def read(self, start: int, nbytes: int) -> bytes:
        """See Rig."""
        return self._memory[start : start + nbytes].tobytes()

    def seconds(self, call: Callable[[], object], times: int) -> float:
        """See Rig."""
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times
