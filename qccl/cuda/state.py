"""What lasts from run to run on CUDA."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from qccl.cuda.runtime import on_device, require

if TYPE_CHECKING:
    from qccl.cuda.engine import CudaEngine

__all__ = ["DeviceState"]

_DEVICE_TO_HOST = 2


class DeviceState:
    """Memory on the device that lasts from run to run (interface: Persistent)."""

    def __init__(self, engine: CudaEngine, nbytes: int) -> None:
        self._engine = engine
        self._memory = engine.allocate(max(nbytes, 1))
        self._written: list[Any] = []
        self.address: int = self._memory.ptr
        require().runtime.memsetAsync(self.address, 0, nbytes, engine.home)

    def write(self, data: bytes) -> None:
        """Put ``data`` at the start, before the runs to come."""
        with on_device(self._engine.device):
            self._written = self._engine.write({self.address: data})

    def read(self, start: int, nbytes: int) -> bytes:
        """A copy of ``nbytes`` from ``start``."""
        runtime, copy, home = require().runtime, ctypes.create_string_buffer(nbytes), self._engine.home
        with on_device(self._engine.device):
            runtime.memcpyAsync(ctypes.addressof(copy), self.address + start, nbytes, _DEVICE_TO_HOST, home)
            runtime.streamSynchronize(home)
        return copy.raw
