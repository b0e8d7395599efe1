"""One rank's GPU for its engine: the streams that runs use, the memory pool that belongs to them, and spare events."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from qccl.collectives.schedule import Queue
from qccl.engine.cuda.flags import RunFlags
from qccl.engine.cuda.garbage import Garbage
from qccl.engine.cuda.libraries import (
    COMPUTE_PRIORITY,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    NOT_READY,
    TRANSFER_PRIORITY,
    cuda_libraries,
    no_room,
    on_device,
    stream_status,
    translated,
)

__all__ = ["Device", "DeviceState"]

_EVENTS = 32
_NOTHING = contextlib.nullcontext()


class Device:
    """The streams, memory and events of one engine.

    Attributes:
        number: the GPU's number.
        home: the compute stream, on which every run begins and ends.
        queues: the stream of each queue.
        capture_queues: the streams of calls that become part of a CUDA graph.
        flags: how far the runs are.
        garbage: frees what runs have kept.
    """

    def __init__(self, number: int, comm_stream: int) -> None:
        """Make the other streams; ``comm_stream`` is the transport's."""
        self.number = number
        cuda = cuda_libraries().cupy.cuda
        with on_device(number):
            self._home, *self._capture = (
                _stream(priority) for priority in (COMPUTE_PRIORITY, COMPUTE_PRIORITY, TRANSFER_PRIORITY)
            )
            self.flags = RunFlags()
            self._events = [cuda.Event(disable_timing=True) for _ in range(_EVENTS)]
        self._staged: list[Any] = []
        self.garbage = Garbage(number)
        self.garbage.drop_with(self, [self._home, *self._capture], self._staged, self._events)
        self.home = int(self._home.ptr)
        self.queues: dict[Queue, int] = {Queue.COMPUTE: self.home, Queue.COMM: comm_stream}
        self.capture_queues: Mapping[Queue, int] = {
            Queue.COMPUTE: self._capture[0].ptr,
            Queue.COMM: self._capture[1].ptr,
        }
        self._lock = threading.Lock()  # guards the list of events
        self._threads = threading.local()

    def add_staged_queues(self) -> None:
        """Make the two streams of transfers through host memory."""
        self._staged[:] = [_stream(TRANSFER_PRIORITY) for _ in range(2)]
        self.queues |= zip((Queue.OUT, Queue.IN), (stream.ptr for stream in self._staged), strict=True)

    def is_busy(self) -> bool:
        """Whether work is left on any stream."""
        return any(stream_status(queue) == NOT_READY for queue in self.queues.values())

    def is_capturing(self, stream: int) -> bool:
        """Whether calls on ``stream`` become part of a graph."""
        if stream in (0, 1):  # the legacy default stream cannot be captured
            return False
        with translated, self.current():
            return bool(cuda_libraries().runtime.streamIsCapturing(stream))

    def current(self) -> AbstractContextManager[None]:
        """Make the GPU the thread's current one if it is not, as the driver's launches need."""
        runtime = cuda_libraries().runtime
        if runtime.getDevice() != self.number:
            return on_device(self.number)
        if not getattr(self._threads, "ready", False):  # the thread may have no context yet
            runtime.setDevice(self.number)
            self._threads.ready = True
        return _NOTHING

    def allocate(self, nbytes: int, what: str) -> Any:
        """Allocate memory for ``what`` from CuPy's pool for the home stream. Raises EngineError if the GPU has no room.

        The pool gives freed memory only to later work of that stream, and every run begins and ends on it. So no two
        runs use the same memory at once, whichever streams they use.
        """
        gpu = cuda_libraries()
        try:
            with on_device(self.number), self._home:
                return gpu.cupy.cuda.alloc(nbytes)
        except gpu.cupy.cuda.memory.OutOfMemoryError as error:
            raise no_room(self.number, nbytes, what, str(error)) from error

    def write(self, contents: Mapping[int, bytes]) -> list[Any]:
        """Write to allocated memory, after its earlier users. The caller must keep the result until the copies end."""
        copy = cuda_libraries().runtime.memcpyAsync
        sources = [(address, ctypes.create_string_buffer(each, len(each))) for address, each in contents.items()]
        for address, source in sources:
            copy(address, ctypes.addressof(source), len(source), HOST_TO_DEVICE, self._home.ptr)
        return sources

    def take_event(self) -> Any:
        """An unused event."""
        with self._lock:
            if self._events:
                return self._events.pop()
        with on_device(self.number):
            return cuda_libraries().cupy.cuda.Event(disable_timing=True)

    def give_back(self, event: Any) -> None:
        """Reuse an event that nobody waits for any more."""
        with self._lock:
            self._events.append(event)


def _stream(priority: int) -> Any:
    return cuda_libraries().cupy.cuda.Stream(non_blocking=True, priority=priority)


class DeviceState:
    """Memory on the device that keeps its contents from run to run (interface: Persistent)."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._memory = device.allocate(max(nbytes, 1), "a codec's state")
        self._written: list[Any] = []
        self.address: int = self._memory.ptr
        cuda_libraries().runtime.memsetAsync(self.address, 0, nbytes, device.home)

    def write(self, data: bytes) -> None:
        """Put ``data`` at the start, before all later runs."""
        with on_device(self._device.number):
            self._written = self._device.write({self.address: data})

    def read(self, start: int, nbytes: int) -> bytes:
        """Copy ``nbytes`` from ``start``."""
        runtime, copy, home = cuda_libraries().runtime, ctypes.create_string_buffer(nbytes), self._device.home
        with on_device(self._device.number):
            runtime.memcpyAsync(ctypes.addressof(copy), self.address + start, nbytes, DEVICE_TO_HOST, home)
            runtime.streamSynchronize(home)
        return copy.raw
