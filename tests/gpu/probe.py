"""What CUDA and NCCL cost by themselves on one GPU: the numbers that decide how long chunks should be."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from device import DeviceArray, Kernels
from reports import each_of

from qccl.base.errors import EngineError
from qccl.engine.cuda import nccl_library
from qccl.engine.cuda.libraries import COMPUTE_PRIORITY, TRANSFER_PRIORITY, cuda_libraries, stream_status

#: transfers of a group, as among 2, 4 and 8 ranks, and the bytes of each
TRANSFERS, NBYTES = (1, 3, 7), (1 << 10, 1 << 20)
_REPEATS = 50
#: a kernel that takes so long holds the GPU back until the host has put all of a measurement on its streams
_HOLD_SECONDS = 0.03
_MIB = 1 << 20


def measure() -> dict[str, Any]:
    """The section "probe"."""
    # memory() comes first: it begins before the first use of CUDA
    checks = {"memory": memory, "groups": groups, "groups of registered memory": registered_groups}
    return each_of(checks | {"edges": edges, "flag": flag})


def memory() -> dict[str, Any]:
    """MiB of the GPU that this process takes by its context, then by a communicator of NCCL."""
    gpu, before = cuda_libraries(), _used()
    gpu.runtime.setDevice(0)
    gpu.runtime.deviceSynchronize()
    context = _used()
    free = gpu.runtime.memGetInfo()[0]
    comm = gpu.nccl.NcclCommunicator(1, gpu.nccl.get_unique_id(), 0)
    taken = (free - gpu.runtime.memGetInfo()[0]) // _MIB
    comm.destroy()
    return {"context_mib": None if before is None or context is None else context - before, "nccl_mib": taken}


def _used() -> int | None:
    """MiB of the GPU that are used, or None without nvidia-smi."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return None
    return int(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)


def plain(comm: Any, nbytes: int) -> Any:
    """Memory of CuPy's pool."""
    return cuda_libraries().cupy.cuda.alloc(nbytes)


def registered(comm: Any, nbytes: int) -> Any:
    """Memory that NCCL has allocated and registered, from which its transfers need not copy; the process keeps it."""
    pointer, handle = ctypes.c_void_p(), ctypes.c_void_p()
    nccl_library.call("ncclMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    given = ctypes.c_void_p(comm.comm), pointer, ctypes.c_size_t(nbytes), ctypes.byref(handle)
    nccl_library.call("ncclCommRegister", *given)
    if not handle.value:
        raise EngineError("NCCL calls it a success, and has registered nothing")
    return SimpleNamespace(ptr=pointer.value)


def registered_groups() -> dict[str, Any] | str:
    """groups() with registered memory, or why there is none."""
    try:
        return groups(registered)
    except (EngineError, cuda_libraries().nccl.NcclError) as error:
        return str(error)


def groups(memory_for: Callable[[Any, int], Any] = plain) -> dict[str, Any]:
    """The host's and the GPU's time of an NCCL group in which a rank sends to itself: a lower bound for several."""
    gpu = cuda_libraries()
    stream, kernels = gpu.cupy.cuda.Stream(non_blocking=True, priority=TRANSFER_PRIORITY), Kernels()
    comm = gpu.nccl.NcclCommunicator(1, gpu.nccl.get_unique_id(), 0)
    half = max(TRANSFERS) * max(NBYTES)
    memory, figures = memory_for(comm, 2 * half), dict[str, Any]()
    for transfers in TRANSFERS:
        for nbytes in NBYTES:
            hosts = list[float]()

            def group(transfers: int = transfers, nbytes: int = nbytes, hosts: list[float] = hosts) -> None:
                begin = time.perf_counter()
                gpu.nccl.groupStart()
                for i in range(transfers):
                    comm.recv(memory.ptr + half + i * nbytes, nbytes, nccl_library.UINT8, 0, stream.ptr)
                    comm.send(memory.ptr + i * nbytes, nbytes, nccl_library.UINT8, 0, stream.ptr)
                gpu.nccl.groupEnd()
                hosts.append(1e6 * (time.perf_counter() - begin))

            group()  # connects
            found = _seconds(kernels, stream, lambda group=group: [group() for _ in range(_REPEATS)]) / _REPEATS
            name = f"{transfers} x {nbytes >> 10} KiB"
            figures[name] = {"host_us": statistics.median(hosts[1:]), "gpu_us": 1e6 * found}
    return figures


def _seconds(kernels: Kernels, stream: Any, put: Callable[[], object]) -> float:
    """The GPU's time for what ``put`` puts on a stream, without the host's."""
    cuda = cuda_libraries().cupy.cuda
    begin, end = cuda.Event(), cuda.Event()
    kernels.spin(stream, _HOLD_SECONDS)
    begin.record(stream)
    put()
    end.record(stream)
    stream.synchronize()
    return float(cuda.get_elapsed_time(begin, end)) / 1e3


def edges(launches: int = 200) -> dict[str, float]:
    """The time of a kernel on one stream, and on two in turns, each behind an event of the other."""
    gpu, kernels = cuda_libraries(), Kernels()
    one, two = (gpu.cupy.cuda.Stream(non_blocking=True, priority=p) for p in (COMPUTE_PRIORITY, TRANSFER_PRIORITY))
    events = [gpu.cupy.cuda.Event(disable_timing=True) for _ in range(launches)]
    word = DeviceArray(np.zeros(2, np.uint32))

    def alone() -> None:
        for _ in events:
            kernels.copy(one, word.ptr, word.ptr + 4, 4)

    def in_turns() -> None:
        for number, event in enumerate(events):
            mine, other = (one, two) if number % 2 == 0 else (two, one)
            kernels.copy(mine, word.ptr, word.ptr + 4, 4)
            event.record(mine)
            gpu.runtime.streamWaitEvent(other.ptr, event.ptr)

    figures = dict[str, float]()
    for name, put in (("one_stream_us", alone), ("two_streams_us", in_turns)):
        put()
        one.synchronize()
        figures[name] = 1e6 * _seconds(kernels, one, put) / launches
    return figures


def flag(repeats: int = 200) -> dict[str, float]:
    """The time from the launch of a kernel that writes a word of pinned memory until the host sees it."""
    gpu, kernels = cuda_libraries(), Kernels()
    stream, pinned = gpu.cupy.cuda.Stream(non_blocking=True), gpu.cupy.cuda.alloc_pinned_memory(64)
    values, word, found = DeviceArray(np.arange(repeats, dtype=np.uint32)), ctypes.c_uint32.from_address(pinned.ptr), []
    for number in range(repeats):
        word.value = repeats
        begin = time.perf_counter()
        kernels.copy(stream, values.ptr + 4 * number, pinned.ptr, 4)
        while word.value != number:
            if time.perf_counter() > begin + 5.0:
                raise AssertionError(f"the host does not see what a kernel has written; {stream_status(stream.ptr)}")
        found.append(1e6 * (time.perf_counter() - begin))
        stream.synchronize()
    return {"launch_to_host_us": statistics.median(found)}
