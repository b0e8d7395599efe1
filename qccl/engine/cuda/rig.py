"""Memory of a GPU for measured calls, and CUDA's events as a clock (interface: engine.base.Rig).

The memory comes from the driver, not from CuPy's pool, which would keep it after the measurement. The calls have a
stream of their own, with an event before the first and after the last call to take the time. So the host's work for a
call counts only if the GPU waits for it, as in a program that does not wait for each call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from qccl.engine.cuda.device import Device
from qccl.engine.cuda.libraries import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    ON_DEVICE,
    cuda_libraries,
    no_room,
    on_device,
    translated,
)
from qccl.engine.cuda.workspace import RESERVED_NBYTES

__all__ = ["CudaRig"]

#: sizes in bytes; the first that the GPU has room for is taken, as other libraries may hold nearly all of its memory
_NBYTES = (64 << 20, 16 << 20, 4 << 20)
#: fraction of the workspace for the work buffers of measured calls; the kernels' scratch needs the rest
_OF_WORKSPACE = 0.75
#: cudaErrorMemoryAllocation
_NO_ROOM = 2
_TO_MILLISECONDS = 1e3


class CudaRig:
    """Memory and clock for measured calls on a GPU; the host raises a call's failure when it waits for it."""

    work_nbytes: int | None = int(_OF_WORKSPACE * RESERVED_NBYTES)

    def __init__(self, device: Device, wait: Callable[[int], None]) -> None:
        """``wait`` waits until the work of a stream has ended, within a deadline, and raises failures.

        Raises EngineError if the GPU has no room.
        """
        self._device, self._wait = device, wait
        cuda = cuda_libraries().cupy.cuda
        with translated, on_device(device.number):
            self._memory, self.nbytes = _allocate(device.number)
            self._stream = cuda.Stream(non_blocking=True)
            self._before, self._after = cuda.Event(), cuda.Event()
        self.address: int = self._memory.ptr
        self.streams: tuple[int, ...] = (int(self._stream.ptr),)

    def fill(self, values: bytes, start: int, stop: int) -> None:
        """See Rig. Each copy on the GPU doubles the part that is filled."""
        copy, stream, at = cuda_libraries().runtime.memcpyAsync, self.streams[0], self.address + start
        source = ctypes.create_string_buffer(values, len(values))
        nbytes = stop - start
        done = min(len(values), nbytes)
        with translated, self._device.current():
            copy(at, ctypes.addressof(source), done, HOST_TO_DEVICE, stream)
            while done < nbytes:
                more = min(done, nbytes - done)
                copy(at + done, at, more, ON_DEVICE, stream)
                done += more

    def read(self, start: int, nbytes: int) -> bytes:
        """See Rig."""
        found = ctypes.create_string_buffer(nbytes)
        stream = self.streams[0]
        self._wait(stream)  # with a deadline: a copy to memory that is not pinned has none
        with translated, self._device.current():
            copy = cuda_libraries().runtime.memcpyAsync
            copy(ctypes.addressof(found), self.address + start, nbytes, DEVICE_TO_HOST, stream)
        self._wait(stream)
        return found.raw

    def seconds(self, call: Callable[[], object], times: int) -> float:
        """See Rig. The calls follow each other on the stream."""
        stream, runtime = self.streams[0], cuda_libraries().runtime
        with translated, self._device.current():
            runtime.eventRecord(self._before.ptr, stream)
            for _ in range(times):
                call()
            runtime.eventRecord(self._after.ptr, stream)
        self._wait(stream)
        with translated:
            elapsed = float(runtime.eventElapsedTime(self._before.ptr, self._after.ptr))
        return elapsed / _TO_MILLISECONDS / times


def _allocate(device: int) -> tuple[Any, int]:
    gpu = cuda_libraries()
    reason: Exception | None = None
    for nbytes in _NBYTES:
        try:
            return gpu.cupy.cuda.memory.Memory(nbytes), nbytes
        except gpu.runtime.CUDARuntimeError as error:
            if error.status != _NO_ROOM:
                raise
            reason = error
    raise no_room(device, _NBYTES[-1], "the arrays of measured calls", str(reason), "") from reason
