"""Memory on a GPU that keeps its contents from run to run."""

from __future__ import annotations

import ctypes
from typing import Any

from qccl.cuda.device import Device
from qccl.cuda.libraries import DEVICE_TO_HOST, cuda_libraries, on_device

__all__ = ["DeviceState"]


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
        """A copy of ``nbytes`` from ``start``."""
        runtime, copy, home = cuda_libraries().runtime, ctypes.create_string_buffer(nbytes), self._device.home
        with on_device(self._device.number):
            runtime.memcpyAsync(ctypes.addressof(copy), self.address + start, nbytes, DEVICE_TO_HOST, home)
            runtime.streamSynchronize(home)
        return copy.raw
