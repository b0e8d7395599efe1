"""The device's kernels against the host's, byte for byte: the cases that tests/engine/cuda runs on its PTX machine.

``python codec_kernels.py N,N`` runs cases and says of each, when it has ended, how it went. It exits with 1 where bytes
differ. ``overrun`` and ``race`` make a mistake, which compute-sanitizer must find; so it needs ``unpooled`` memory.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from device import DeviceArray, Kernels
from kernel_cases import CASES, Arrays, memory_argument
from reports import FAILED, report
from sanitizer import on_case
from state_cases import COMMITS, STATE_CASES, AnyCase, prepared

from qccl.engine.cuda.kernels import kernels
from qccl.engine.cuda.libraries import cuda_libraries
from qccl.engine.cuda.source import Launch

#: the first of them are CASES, which have no state
EVERY: tuple[AnyCase, ...] = (*CASES, *STATE_CASES, *COMMITS)
#: what a process says of a case: the operations that were compared, and the difference
_ENDED = re.compile(r"ended (\d+) ?(.*)")
#: so many processes may end early
_DEATHS = 4


class Device:
    """This GPU. Each table and each buffer of arrays has an allocation of its own."""

    def __init__(self) -> None:
        gpu = cuda_libraries()
        self._number, self._launch = gpu.runtime.getDevice(), gpu.driver.launchKernel
        self._stream = gpu.cupy.cuda.Stream(non_blocking=True)

    def compile(self, chosen: Sequence[AnyCase]) -> None:
        """Compile all kernels at once, on all cores, because compiling takes most of the time."""
        launches = (launch for case in chosen for launch in prepared(case).launches.values())
        kernels(self._number, sorted({name for launch in launches for name in launch.kernels}))

    def run(
        self, launch: Launch, arrays: Arrays, call: int, seed: int = 0, lr: float = 1.0, *, failed: bool = False
    ) -> None:
        """Run the kernels of a launch on copies of ``arrays``, and copy them back."""
        if not launch.kernels:
            return
        buffers = [DeviceArray(buffer) for buffer in arrays.buffers]
        number, flag = DeviceArray(np.array([call, 0], np.uint64)), DeviceArray(np.array([failed], np.uint32))
        scratch = DeviceArray(np.full(launch.scratch_nbytes, 0 if launch.clears_scratch else 0xA5, np.uint8))
        jobs, sources, blocks = (DeviceArray(each) for each in (launch.jobs, launch.sources, launch.blocks))
        parameters = launch.parameters.copy()
        parameters["scratch"], parameters["blocks"] = scratch.ptr, blocks.ptr
        memory = memory_argument([buffer.ptr for buffer in buffers], lr, number.ptr, flag.ptr)
        values = np.array(jobs.ptr, np.uint64), np.array(sources.ptr, np.uint64), parameters, memory
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        for function in kernels(self._number, launch.kernels).values():
            self._launch(function, *launch.geometry, self._stream.ptr, ctypes.addressof(pointers), 0)
        for here, there in zip(arrays.buffers, buffers, strict=True):
            here[:] = there.get()


def check(chosen: Sequence[AnyCase]) -> Iterator[tuple[int, str]]:
    """For each case the number of compared operations, and the differences from the host's bytes."""
    device = Device()
    device.compile(chosen)
    for case in chosen:
        operations, differences = prepared(case), list[str]()
        for kind in operations.launches:
            try:
                operations.check(device, [kind])
            except AssertionError as error:
                differences.append(f"{case}: {kind}: {error}")
        yield sum(len(launch.jobs) for launch in operations.launches.values()), "; ".join(differences)


def check_apart(numbers: Sequence[int] = range(len(EVERY))) -> dict[str, Any]:
    """check() of the cases with these numbers, in processes of their own: every codec, type, alignment, kind of state.

    After an error of a kernel CUDA answers nothing any more in its process. So another process goes on behind that
    case. Raises AssertionError with the failures, and with what compute-sanitizer says of the first case that failed.
    """
    left, failed = list(numbers), dict[int, str]()
    compared = deaths = 0
    while left and deaths < _DEATHS:
        command = [sys.executable, __file__, ",".join(map(str, left))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if match := _ENDED.match(line):
                    number = left.pop(0)
                    compared += int(match[1])
                    report("operations", compared)
                    if match[2]:
                        failed[number] = match[2]
                        report("kernels", FAILED + _few(failed))
        if left:  # it has ended early
            deaths, number = deaths + 1, left.pop(0)
            failed[number] = f"{EVERY[number]}: its process ended with status {process.returncode}"
            report("kernels", FAILED + _few(failed))
    figures: dict[str, Any] = {"operations": compared, "cases": len(numbers) - len(left)}
    if failed:
        if words := on_case(min(failed, key=list(numbers).index)):
            figures["compute-sanitizer"] = words
        text = f"{_few(failed)} ({len(failed)} of {figures['cases']} cases; stderr has the errors)"
        raise AssertionError(text, figures)
    return figures


def _few(failed: Mapping[int, str]) -> str:
    """What the first cases said that failed."""
    return "; ".join([*failed.values()][:5])


def plant(mistake: str) -> None:
    """A write past the end of an allocation, or a race in shared memory: the sanitizers must find them."""
    cuda, kernels = cuda_libraries().cupy.cuda, Kernels()
    memory = cuda.alloc(4096)
    if mistake == "race":
        kernels.race(cuda.Stream.null, memory.ptr)
    else:
        kernels.copy(cuda.Stream.null, memory.ptr, memory.ptr, 4096 + 4)
    cuda_libraries().runtime.deviceSynchronize()


def main(what: str, memory: str = "pooled") -> int:
    """What the module's text says."""
    if memory == "unpooled":  # then memory beside an array is unallocated
        cuda_libraries().cupy.cuda.set_allocator(None)
    if what in ("overrun", "race"):
        plant(what)
        return 0
    status = 0
    for operations, found in check([EVERY[int(number)] for number in what.split(",")]):
        print(f"ended {operations} {found}", flush=True)
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
