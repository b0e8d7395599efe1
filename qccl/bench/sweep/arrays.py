"""Arrays for the measured calls, and the timing of calls on them: on the host, or on a GPU by CUDA events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from qccl.base.dtypes import DType
from qccl.bench.sweep import data
from qccl.bench.sweep.plain import plain_allreduce, plain_nccl_allreduce
from qccl.codecs.operations import instruction_set
from qccl.engine.cuda.libraries import cuda_libraries, on_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.communicator.communicator import Communicator
    from qccl.transports.base import DeviceTransport

__all__ = ["Arrays", "CudaArrays", "GuardedArray", "HostArrays", "arrays_of"]

#: elements of a comparison in one step
_STRETCH = 1 << 17
#: guard bytes on each side of an array: a whole page, which keeps the array's alignment
_GUARD_NBYTES = 4096


class HostArrays:
    """NumPy arrays of one rank, and the timing of calls on them. Calls block; the host's clock times them.

    Attributes:
        calls_per_run: calls that run() makes for each of its ``times`` calls.
    """

    calls_per_run = 1

    def __init__(self, comm: Communicator) -> None:
        self._transport = comm.transport

    def empty(self, count: int, dtype: DType) -> Any:
        """Make a NumPy array of ``count`` elements; bfloat16 is held in uint16."""
        return data.empty(count, dtype)

    def put(self, array: Any, values: NDArray[Any]) -> None:
        """Copy ``values``, which have the array's shape and type."""
        array[:] = values

    def poison(self, array: Any) -> None:
        """Set all bits of every element, NaN in all three types, so that unwritten elements are noticed."""
        array.view(np.uint8).fill(0xFF)

    def get(self, array: Any) -> NDArray[Any]:
        """Return the array itself: calls on the host have ended when they return."""
        return cast("NDArray[Any]", array)

    def run(self, call: Callable[[], object], times: int) -> float:
        """Time ``times`` calls back to back by the host's clock, in seconds."""
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return time.perf_counter() - begin

    def plain(self, library: str, x: Any, out: Any, count: int, dtype: str, op: str) -> Callable[[], object]:
        """Bind the all-reduce of ``library`` to the arrays' addresses (see plain_allreduce())."""
        source, target = x.ctypes.data, out.ctypes.data
        allreduce = plain_allreduce(self._transport, library)
        return lambda: allreduce(source, target, count, dtype, op)

    def device(self) -> tuple[str, int, str]:
        """The instruction set of the loops, and -1 and "" in place of a GPU's number and PCI address."""
        return f"host {instruction_set()}", -1, ""


class CudaArrays:
    """CuPy arrays of one rank (see HostArrays). Calls go to a separate stream; CUDA events on it time them.

    With ``graph_launches`` (nccl-tests' -G), run() captures a call once and launches the graph that often per call.
    """

    def __init__(self, comm: Communicator, graph_launches: int = 0) -> None:
        self._comm = comm
        self._transport = cast("DeviceTransport", comm.transport)
        self.calls_per_run = max(graph_launches, 1)
        self._uses_graph = graph_launches > 0
        self._cupy = cuda_libraries().cupy
        with on_device(self._transport.device):
            self._stream = self._cupy.cuda.Stream(non_blocking=True)

    def empty(self, count: int, dtype: DType) -> Any:
        """Make a CuPy array of ``count`` elements on this rank's GPU; bfloat16 is held in uint16."""
        with on_device(self._transport.device), self._stream:
            return self._cupy.empty(count, data.empty(0, dtype).dtype)

    def put(self, array: Any, values: NDArray[Any]) -> None:
        """Copy ``values`` to the GPU, and wait until they have arrived."""
        with on_device(self._transport.device):
            array.set(values, stream=self._stream)
            self._stream.synchronize()

    def poison(self, array: Any) -> None:
        """Set all bits of every element, NaN in all three types, and wait until that is done."""
        with on_device(self._transport.device), self._stream:
            array.view(np.uint8).fill(0xFF)
            self._stream.synchronize()

    def get(self, array: Any) -> NDArray[Any]:
        """Copy to the host. Waits for all calls on the stream, and raises their first failure."""
        with on_device(self._transport.device), self._stream:
            self._comm.check(self._stream.ptr)
            return cast("NDArray[Any]", array.get())

    def run(self, call: Callable[[], object], times: int) -> float:
        """Time calls, or with graph launches a captured call's replays, by CUDA events on the stream, in seconds."""
        if times == 0:
            return 0.0
        cuda = self._cupy.cuda
        with on_device(self._transport.device), self._stream:
            if self._uses_graph:
                call = self._captured(call)
            begin, end = cuda.Event(), cuda.Event()
            begin.record(self._stream)
            for _ in range(times * self.calls_per_run):
                call()
            end.record(self._stream)
            self._comm.check(self._stream.ptr)
            return float(cuda.get_elapsed_time(begin, end)) / 1e3 / self.calls_per_run

    def plain(self, library: str, x: Any, out: Any, count: int, dtype: str, op: str) -> Callable[[], object]:
        """Bind NCCL's all-reduce on the stream; there is no other ``library`` on GPUs."""
        source, target = x.data.ptr, out.data.ptr
        allreduce = plain_nccl_allreduce(self._transport, self._stream.ptr)
        return lambda: allreduce(source, target, count, dtype, op)

    def device(self) -> tuple[str, int, str]:
        """The GPU's name, number and PCI address."""
        runtime, number = self._cupy.cuda.runtime, self._transport.device
        name = runtime.getDeviceProperties(number)["name"].decode()
        return f"cuda {name}", number, runtime.deviceGetPCIBusId(number)

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        self._comm.check(self._stream.ptr)
        self._stream.begin_capture()
        try:
            call()
        finally:
            graph = self._stream.end_capture()
        return lambda: graph.launch(self._stream)


Arrays = HostArrays | CudaArrays


def arrays_of(comm: Communicator, graph_launches: int = 0) -> Arrays:
    """Make arrays for the backend of ``comm``; ``graph_launches``: see CudaArrays."""
    return HostArrays(comm) if comm.backend == "host" else CudaArrays(comm, graph_launches)


class GuardedArray:
    """An array of ``count`` elements between guard elements, which no call may write."""

    def __init__(self, arrays: Arrays, count: int, dtype: DType) -> None:
        self._arrays, self._dtype = arrays, dtype
        guard = _GUARD_NBYTES // dtype.itemsize
        self._inside = slice(guard, guard + count)
        self._whole = arrays.empty(count + 2 * guard, dtype)
        self.array = self._whole[self._inside]
        self.poison()

    def fill(self, rank: int, seed: int) -> None:
        """Set the elements to a rank's input."""
        self._arrays.put(self.array, data.gaussian(rank, 0, self.array.size, self._dtype, seed))

    def poison(self) -> None:
        """Set every element and every guard to NaN."""
        self._arrays.poison(self._whole)

    def get(self) -> tuple[NDArray[Any], int]:
        """The elements on the host, after all calls on them, and the number of overwritten guard elements."""
        whole = self._arrays.get(self._whole)
        bits = whole.view(f"u{whole.itemsize}")
        guards = (bits[: self._inside.start], bits[self._inside.stop :])
        untouched = (1 << 8 * whole.itemsize) - 1
        return whole[self._inside], sum(int(np.count_nonzero(guard != untouched)) for guard in guards)

    def changed(self, rank: int, seed: int) -> int:
        """The number of elements that differ from fill()'s, plus the overwritten guard elements."""
        x, changed = self.get()
        bits = f"u{x.itemsize}"
        for start in range(0, x.size, _STRETCH):
            stop = min(start + _STRETCH, x.size)
            expected = data.gaussian(rank, start, stop, self._dtype, seed)
            changed += int(np.count_nonzero(x[start:stop].view(bits) != expected.view(bits)))
        return changed
