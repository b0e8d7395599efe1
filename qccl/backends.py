"""What a communicator is made of on the host and on CUDA: an engine, and the memory it works on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from qccl.engines.base import Engine
from qccl.memory.base import Memory
from qccl.memory.host import HostMemory

if TYPE_CHECKING:
    from qccl.transports.base import DeviceTransport, Transport

__all__ = ["Backend", "CudaBackend", "HostBackend"]


class Backend(Protocol):
    """Made of a transport, for one communicator.

    Attributes:
        name: "host" or "cuda".
    """

    name: str
    engine: Engine
    memory: Memory


class HostBackend:
    """Compiled kernels on host memory, over a host transport."""

    name = "host"

    def __init__(self, transport: Transport) -> None:
        from qccl.engines.host import HostEngine

        self.engine: Engine = HostEngine(transport)
        self.memory: Memory = HostMemory()


class CudaBackend:
    """Kernels compiled at run time on the memory of a GPU, over a device transport."""

    name = "cuda"

    def __init__(self, transport: DeviceTransport) -> None:
        from qccl.engines.cuda import CudaEngine
        from qccl.memory.cuda import CudaMemory

        self.engine: Engine = CudaEngine(transport)
        self.memory: Memory = CudaMemory(transport.device)
