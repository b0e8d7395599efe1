"""scripts/gpu-check on fake GPUs: the program of each section's process, with less of everything.

The environment may name a section that fails (QCCL_FAKE_FAILS), and one that hangs (QCCL_FAKE_HANGS). With
QCCL_FAKE_WRONG each array that comes from the GPU has a wrong bit.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import fake_kernels
import numpy as np
import patience
from fake_device import Block

_blocks: list[Block] = []


def main() -> int:
    with fake_cuda.installed(world := fake_cuda.World(), fake_kernels.work):
        import check

        check.PROGRAM, patient = Path(__file__), patience.factor()
        check.SECTIONS = {name: (act, limit * patient) for name, (act, limit) in check.SECTIONS.items()}
        check.CALL_SECONDS = {run: seconds * patient for run, seconds in check.CALL_SECONDS.items()}
        if "--inside" in sys.argv:
            make_small(world)
        return check.program()


def make_small(world: fake_cuda.World) -> None:
    """Give the sections little to do, and the fake GPU what a test of one process lacks."""
    import bandwidth
    import calls
    import check
    import codec_kernels
    import device
    import probe
    import queues
    import ranks
    import reports
    import staged

    probe.NBYTES, probe.time, probe.nccl_library.call = (16,), Polling(world), nccl_call
    codec_kernels.check_apart = in_this_process
    calls.dispatch.__defaults__ = (2, 1)
    queues.all_checks = partial(reports.each_of, {"order": partial(calls.stream_order, 60.0)})
    bandwidth.measure.__defaults__ = bandwidth.first_figures.__defaults__ = (1, 2, 1)
    bandwidth._SPECS = {"minmax8": bandwidth._KINDS}
    ranks.CALLS = tuple((arguments, dtype, min(count, 5000)) for arguments, dtype, count in ranks.CALLS)
    ranks.TIMEOUT, ranks.AWAY = 0.3, 1.0
    ranks._start = on_threads
    staged.CALLS = tuple((c, a, min(n, 5000), k and 1024) for c, a, n, k in staged.CALLS)
    staged.all_checks = lambda: staged.check(2, 60.0)
    for variable, act in (("QCCL_FAKE_FAILS", fail), ("QCCL_FAKE_HANGS", hang)):
        if (name := os.environ.get(variable)) is not None:
            check.SECTIONS[name] = act, check.SECTIONS[name][1]
    if "QCCL_FAKE_WRONG" in os.environ:
        device.DeviceArray.get = lambda array, get=device.DeviceArray.get: spoilt(get(array))
    for name in ("torch", "jax"):
        check.SECTIONS[name] = lambda: {}, check.SECTIONS[name][1]


def spoilt(found: np.ndarray) -> np.ndarray:
    found.reshape(-1).view(np.uint8)[:1] ^= 1
    return found


def fail() -> dict[str, Any]:
    raise AssertionError("it was told to")


def hang() -> dict[str, Any]:
    import reports

    reports.report("first part", 1.5)
    time.sleep(1000)
    return {}


class Polling:
    """The module time. The fake GPU works while a program that polls looks at the clock."""

    def __init__(self, world: fake_cuda.World) -> None:
        self._world = world

    def perf_counter(self) -> float:
        self._world.run()
        return time.perf_counter()


def nccl_call(name: str, *arguments: Any) -> None:
    """The functions of NCCL's library by which memory is registered."""
    if name == "ncclMemAlloc":
        _blocks.append(Block(arguments[1].value))
        arguments[0]._obj.value = _blocks[-1].ptr
    else:
        assert name == "ncclCommRegister" and arguments[1].value == _blocks[-1].ptr
        arguments[3]._obj.value = 1


def in_this_process(numbers: Any = range(0, 550, 55)) -> dict[str, Any]:
    """codec_kernels.check_apart() of few cases."""
    import codec_kernels
    import reports

    compared = 0
    for operations, found in codec_kernels.check([codec_kernels.EVERY[number] for number in numbers]):
        assert not found, found
        compared += reports.report("operations", operations)
    return {"operations": compared}


def on_threads(size: int, what: str) -> tuple[list[dict[str, Any]], list[int]]:
    """ranks._start(), whose ranks are threads of this process, each with a fake GPU."""
    import calls
    import ranks

    import qccl
    from qccl.engine.cuda import libraries

    unique_id, local, captured = qccl.get_unique_id(), threading.local(), calls._captured
    begin, end, one_at_a_time = threading.Barrier(size), threading.Barrier(size), threading.Lock()

    def alone(stream: Any, comm: qccl.Communicator, call: Any) -> Any:
        """Capture while no other thread does what a capture of any thread forbids."""
        call()
        comm.check()
        comm.barrier()
        begin.wait(60)  # a rank may still poll for the barrier, which allocates
        with one_at_a_time:
            graph = captured(stream, SimpleNamespace(check=lambda: None), call)
        end.wait(60)
        comm.barrier()
        return graph

    def rank(number: int) -> dict[str, Any]:
        local.rank = number
        with libraries.on_device(number):
            return {"calls": ranks._calls, "faults": ranks._faults}[what]()

    qccl.init = lambda **_: qccl.Communicator(unique_id, local.rank, size, device=local.rank, timeout=60.0)
    calls._captured = alone
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(rank, range(size))), [0] * size
    finally:
        calls._captured = captured


if __name__ == "__main__":
    sys.exit(main())
