"""The host backend: compiled kernels on host memory, over a host transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qccl.base.arrays import Memory
    from qccl.engine.base import Engine
    from qccl.transports.base import Transport

__all__ = ["HostBackend"]


class HostBackend:
    """The engine and the memory of one communicator on the host; see qccl.engine.base.Backend."""

    name = "host"
    timeout = 60.0

    def __init__(self, transport: Transport) -> None:
        from qccl.engine.host.engine import HostEngine
        from qccl.engine.host.memory import HostMemory

        self.engine: Engine = HostEngine(transport, self.timeout)
        self.memory: Memory = HostMemory()
