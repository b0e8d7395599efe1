"""Measures the host's time for a call on CUDA, without a GPU: all functions of CuPy and cuda-python do nothing.

Rank 0 of two repeats its calls on one thread, with tests/support/fake_cuda.py in place of CuPy. For each kind of call
the table has its time, the number of qccl's Python functions that it runs, and the number of calls into CuPy and
cuda-python. The time is that of qccl's own code; on a GPU the functions of CUDA and NCCL add theirs.

    python bench/dispatch.py
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import qccl
from qccl.engine.cuda.source import BEGIN_KERNEL, END_KERNEL

_TREE = Path(__file__).resolve().parent.parent
_COUNT = (1 << 20) // 4
_ROUNDS, _CALLS = 200, 20
_QCCL = str(_TREE / "qccl")


class Counts(NamedTuple):
    """Functions that a call runs: the number of qccl's Python functions, and CuPy's and cuda-python's by name."""

    python: int
    cuda: Counter[str]


def counts(call: Callable[[], object]) -> Counts:
    """Count the functions that ``call()`` runs on this thread."""
    python, cuda = 0, Counter[str]()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal python
        if event != "call" or frame.f_back is None:
            return
        if frame.f_code.co_filename.startswith(_QCCL):
            python += 1
        elif frame.f_code.co_filename == __file__ and frame.f_back.f_code.co_filename.startswith(_QCCL):
            cuda[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Counts(python, cuda)


def microseconds(call: Callable[[], object], comm: qccl.Communicator) -> float:
    """The mean time of ``call()`` in the fastest round of calls; other programs only make a round longer.

    A round begins when no call is under way.
    """
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - begin) / _CALLS)
        comm.check()
    return 1e6 * min(times)


@contextlib.contextmanager
def silent() -> Iterator[qccl.Communicator]:
    """Yield the communicator of rank 0 of two, on a GPU that does nothing."""
    fake_cuda = _fake_cuda()
    world = fake_cuda.World()
    with fake_cuda.installed(world, lambda *_: None) as cupy:
        _silence(world, cupy)
        from qccl.engine.cuda import CudaBackend

        with qccl.Communicator._from_transport(_transport(), 60.0, CudaBackend) as comm:
            yield comm


def _fake_cuda() -> ModuleType:
    if str(_TREE / "tests" / "support") not in sys.path:
        sys.path.append(str(_TREE / "tests" / "support"))
    return importlib.import_module("fake_cuda")


def _silence(world: Any, cupy: Any) -> None:
    """Replace the functions that a call uses. Only the kernels that tell the host how far a run is do their work."""

    def launchKernel(function: int, *rest: Any) -> None:
        word = {BEGIN_KERNEL: 1, END_KERNEL: 2}.get(world.kernels[function])
        if word is not None:
            pointers = (ctypes.c_void_p * 5).from_address(rest[8])
            words = (ctypes.c_uint32 * 3).from_address(ctypes.c_uint64.from_address(pointers[3]).value)
            words[word] = ctypes.c_uint32.from_address(pointers[4]).value

    cupy.cuda.driver.launchKernel = launchKernel
    bindings = sys.modules["cuda.bindings.driver"]
    _replace(cupy.cuda.runtime, None, "eventRecord", "streamWaitEvent", "memsetAsync", "setDevice")
    _replace(cupy.cuda.runtime, 0, "getDevice", "streamIsCapturing")
    _replace(cupy.cuda.nccl, None, "groupStart", "groupEnd")
    _replace(bindings, (0,), "cuEventQuery")
    _replace(bindings, (0, 0), "cuThreadExchangeStreamCaptureMode")


def _replace(module: Any, answer: object, *names: str) -> None:
    for name in names:
        setattr(module, name, _function(name, answer))


def _function(name: str, answer: object) -> Callable[..., Any]:
    """A function of this name that does nothing."""

    def function(*arguments: Any) -> Any:
        return answer

    function.__code__ = function.__code__.replace(co_name=name)
    return function


def _transport() -> Any:
    """An NCCL transport that does nothing, of rank 0 of two."""
    from qccl.engine.cuda.nccl import NcclTransport

    class Silent(NcclTransport):
        def __init__(self) -> None:
            self.rank = self.local_rank = self.device = self.stream = 0
            self.size = self.local_size = 2
            self.nodes, self.host = (0, 0), None
            self.comm = SimpleNamespace(send=_function("send", None), recv=_function("recv", None))

        def allgather(self, item: bytes, timeout: float) -> list[bytes]:
            return [item] * self.size

        def check(self) -> None:
            pass

        def abort(self, reason: str) -> None:
            pass

        def close(self) -> None:
            pass

    return Silent()


def calls(comm: qccl.Communicator) -> dict[str, Callable[[], object]]:
    """The calls to measure, by their text; each has been made once."""
    fake_cuda = _fake_cuda()
    x, *others = (fake_cuda.array(np.zeros(_COUNT, np.float32)) for _ in range(9))
    plan = comm.plan("allreduce", _COUNT, algorithm="two_round").bind(x)
    made: dict[str, Callable[[], object]] = {
        "quantized_allreduce(x)": lambda: comm.quantized_allreduce(x),
        'quantized_allreduce(x, algorithm="one_shot")': lambda: comm.quantized_allreduce(x, algorithm="one_shot"),
        "quantized_allreduce(x, async_op=True).wait()": lambda: comm.quantized_allreduce(x, async_op=True).wait(),
        "quantized_allreduce_coalesced(8 arrays)": lambda: comm.quantized_allreduce_coalesced(others),
        "plan.start().wait()": lambda: plan.start().wait(),
    }
    for call in made.values():
        call()
    comm.check()
    return made


def main() -> None:
    """Print the table."""
    print("| call, 1 MiB of fp32 on 2 ranks | us | functions of qccl | calls into CUDA and NCCL |")
    print("| --- | --- | --- | --- |")
    with silent() as comm:
        for name, call in calls(comm).items():
            found = counts(call)
            print(f"| `{name}` | {microseconds(call, comm):.0f} | {found.python} | {found.cuda.total()} |")


if __name__ == "__main__":
    main()
