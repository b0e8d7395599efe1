"""Flags in pinned memory by which the device and the host tell each other how far the runs of an engine are.

The first and the last kernel of every run store its number (kernels/cuda/run.h), so the host learns that runs begin and
end without a call into CUDA. Calls into CUDA can block while another thread waits in a launch for room in a full queue,
and calls of CuPy that keep the interpreter can block until that thread goes on. A blocked watchdog checks no deadlines.

After a failure the host sets the first word, and then every run that ends fills its results with NaN.
"""

from __future__ import annotations

import ctypes
from typing import Any

from qccl.engine.cuda.libraries import cuda_libraries
from qccl.engine.cuda.proxy import reached

__all__ = ["RunFlags"]

_FAILED, _BEGUN, _ENDED = range(3)
_NBYTES = 12


class RunFlags:
    """The flags of one engine. Runs have consecutive numbers from 1 on, which wrap around after 32 bits.

    Attributes:
        address: the flags' address, the same on the host and on the device.
    """

    def __init__(self) -> None:
        self._memory: Any = cuda_libraries().cupy.cuda.alloc_pinned_memory(_NBYTES)
        self.address = int(self._memory.ptr)
        self._words = (ctypes.c_uint32 * 3).from_address(self.address)
        ctypes.memset(self.address, 0, _NBYTES)

    def has_begun(self, run: int) -> bool:
        """Whether the first kernel of a run has run."""
        return reached(self._read(_BEGUN), run)

    def has_ended(self, run: int) -> bool:
        """Whether the last kernel of a run has run."""
        return reached(self._read(_ENDED), run)

    def set_failed(self) -> None:
        """Poison the results of all runs that have not ended. Call this before anything ends their transfers."""
        self._words[_FAILED] = 1

    def _read(self, word: int) -> int:
        return self._words[word]
