"""The CUDA backend: kernels compiled at run time on the memory of a GPU, over NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qccl.base.arrays import Memory
    from qccl.engine.base import Engine
    from qccl.transports.base import DeviceTransport

__all__ = ["CudaBackend"]


class CudaBackend:
    """The engine and the memory of one communicator on CUDA; see qccl.engine.base.Backend."""

    name = "cuda"
    timeout = 600.0  # PyTorch's default for NCCL: ranks that compile or write a checkpoint come late

    def __init__(self, transport: DeviceTransport) -> None:
        from qccl.engine.cuda.engine import CudaEngine
        from qccl.engine.cuda.memory import CudaMemory

        self.engine: Engine = CudaEngine(transport, self.timeout)
        self.memory: Memory = CudaMemory(transport.device)
