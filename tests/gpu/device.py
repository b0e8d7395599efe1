"""Arrays on a GPU, and a transport with simulated peers, for the checks on a single GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from qccl.communicator.communicator import Communicator
from qccl.engine.cuda import CudaBackend
from qccl.engine.cuda.libraries import DEVICE_TO_HOST, HOST_TO_DEVICE, ON_DEVICE, cuda_libraries
from qccl.transports.base import ApiCall, DeviceTransfer, DeviceTransport, Transport

GUARD = 256

SOURCE = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
extern "C" __global__ void copy(const unsigned* from, unsigned* to, unsigned long long words) {
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    to[i] = from[i];
  }
}
extern "C" __global__ void race(unsigned* to) {
  __shared__ volatile unsigned last;  // otherwise the compiler keeps the value in a register, and there is no race
  last = threadIdx.x;
  to[threadIdx.x] = last;
}
"""


class DeviceArray:
    """A copy of ``values`` on the GPU, between guard areas. It shows itself by the array interface."""

    def __init__(self, values: np.ndarray) -> None:
        self._runtime, cuda = cuda_libraries().runtime, cuda_libraries().cupy.cuda
        self.nbytes, self.dtype, self.shape = values.nbytes, values.dtype, values.shape
        self._memory = cuda.alloc(values.nbytes + 2 * GUARD)
        self.ptr = self._memory.ptr + GUARD
        edges = np.full(values.nbytes + 2 * GUARD, 0x5A, np.uint8)
        self._copy(self._memory.ptr, edges.ctypes.data, edges.nbytes, HOST_TO_DEVICE)
        self.put(values)

    def put(self, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        assert values.nbytes == self.nbytes
        self._copy(self.ptr, values.ctypes.data, values.nbytes, HOST_TO_DEVICE)

    def get(self) -> np.ndarray:
        """The values, after all work on the GPU. Asserts that the guard areas are unchanged."""
        self._runtime.deviceSynchronize()
        whole = np.empty(self.nbytes + 2 * GUARD, np.uint8)
        self._copy(whole.ctypes.data, self.ptr - GUARD, whole.nbytes, DEVICE_TO_HOST)
        assert (whole[:GUARD] == 0x5A).all() and (whole[GUARD + self.nbytes :] == 0x5A).all(), "written outside"
        return whole[GUARD : GUARD + self.nbytes].view(self.dtype).reshape(self.shape).copy()

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            self._runtime.memcpy(to, source, nbytes, kind)
            self._runtime.streamSynchronize(0)  # a copy from pageable memory may return before it is complete

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        names = {"float32": "<f4", "float16": "<f2", "uint16": "<u2"}
        interface = {"shape": self.shape, "typestr": names[self.dtype.name], "data": (self.ptr, False), "version": 3}
        return interface | {"strides": None, "stream": None}


class Kernels:
    """Launches the kernels of SOURCE on a stream."""

    def __init__(self) -> None:
        cuda = cuda_libraries().cupy.cuda
        module = cuda.function.Module()
        module.load(cuda.compiler.compile_using_nvrtc(SOURCE, ("-std=c++17",))[0])  # RawModule would need headers
        self._spin, self._copy, self._race = (module.get_function(name) for name in ("spin", "copy", "race"))

    def spin(self, stream: Any, seconds: float) -> None:
        """Keep the stream busy."""
        with stream:
            self._spin((1,), (1,), (np.uint64(seconds * 1e9),))

    def copy(self, stream: Any, source: int, target: int, nbytes: int) -> None:
        with stream:
            self._copy((64,), (256,), (np.uint64(source), np.uint64(target), np.uint64(nbytes // 4)))

    def race(self, stream: Any, target: int) -> None:
        """Write 4 KiB that depend on the order of a block's warps."""
        with stream:
            self._race((1,), (1024,), (np.uint64(target),))


class _Alone(DeviceTransport):
    """What a transport of one GPU has nothing to do for."""

    def __init__(self) -> None:
        gpu = cuda_libraries()
        self.device, self._runtime = gpu.runtime.getDevice(), gpu.runtime
        self._stream = gpu.cupy.cuda.Stream(non_blocking=True)
        self.stream = self._stream.ptr

    def split(self, color: int | None, key: int, timeout: float) -> None:
        raise NotImplementedError

    def check(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


class Mirror(_Alone):
    """Rank 0 of a group whose other ranks hold what this one holds: it gets back what it sends.

    With one_shot that is a true all-reduce of equal arrays. A transfer takes ``seconds_per_byte`` in addition, and
    transfers come one after the other, as over a link.
    """

    name = "mirror"
    rank = local_rank = 0
    host = None

    def __init__(self, size: int = 2, seconds_per_byte: float = 0.0) -> None:
        super().__init__()
        self.size = self.local_size = size
        self.nodes = (0,) * size
        self._kernels = Kernels() if seconds_per_byte else None
        self._rate = seconds_per_byte

    def exchange(
        self, sends: Sequence[DeviceTransfer], receives: Sequence[DeviceTransfer], stream: int
    ) -> list[ApiCall]:
        calls: list[ApiCall] = []
        if self._kernels is not None:
            seconds = self._rate * sum(transfer.nbytes for transfer in sends)
            calls.append((self._kernels.spin, (_known(stream), seconds)))
        by_peer = {transfer.peer: transfer for transfer in sends}
        for transfer in receives:
            nbytes = min(transfer.nbytes, by_peer[transfer.peer].nbytes)
            copy = (transfer.address, by_peer[transfer.peer].address, nbytes, ON_DEVICE, stream)
            calls.append((self._runtime.memcpyAsync, copy))
        return calls

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        return [item] * self.size


class Apart(_Alone):
    """Ranks, each on its own node, that have only a host transport between them."""

    name = "apart"

    def __init__(self, host: Transport) -> None:
        super().__init__()
        self.host: Transport | None = host
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size = 0, 1
        self.nodes = tuple(range(host.size))
        self._host = host

    def exchange(
        self, sends: Sequence[DeviceTransfer], receives: Sequence[DeviceTransfer], stream: int
    ) -> list[ApiCall]:
        raise AssertionError("there is no way between these ranks' devices")

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        return self._host.allgather(item, timeout)

    def abort(self, reason: str) -> None:
        self._host.abort(reason)

    def close(self) -> None:
        self._host.close()


def _known(stream: int) -> Any:
    """A CuPy stream from its address."""

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream

    return cuda_libraries().cupy.cuda.Stream.from_external(Foreign())


@contextmanager
def mirrored(seconds_per_byte: float = 0.0) -> Any:
    """A communicator over a Mirror of two ranks."""
    with Communicator._from_transport(Mirror(2, seconds_per_byte), 60.0, CudaBackend) as comm:
        yield comm
