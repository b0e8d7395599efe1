"""Runs the CUDA kernels without a device: NVRTC compiles them to PTX, which ptx_machine/machine.cpp executes.

Unlike emulator.py, which compiles the source for the host, it sees what NVRTC makes of the code for a device, and each
access to memory: alignment, bounds, races, and bits that were never set.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import numpy as np
from emulator import memory_argument
from nvrtc import Nvrtc, Program
from ptx_program import INSTRUCTION, Module, PtxError
from ptx_program import Program as Kernel
from spans import Arrays

from qccl.cuda import source as cuda_source
from qccl.cuda.source import Launch

__all__ = ["Fault", "Kernel", "Machine", "PtxEmulator", "PtxError"]

ARCHITECTURE = 90
PER_PROGRAM = 8  # kernels that are compiled together
#: instructions of warps in a launch, above those of all tests
MOST_INSTRUCTIONS = 50_000_000
_FOLDER = Path(__file__).with_name("ptx_machine")
#: Extent in memory.h
_EXTENT = np.dtype([("begin", "<u8"), ("nbytes", "<u8"), ("writable", "<u4"), ("defined", "<u4")])


class Fault(Exception):
    """What a kernel does wrong, with the line of its PTX."""


class _Kernel(ctypes.Structure):
    """Kernel in machine.cpp."""

    _fields_ = [
        *(("code", ctypes.c_void_p), ("constants", ctypes.c_void_p)),
        *(("registers", ctypes.c_uint32), ("constant_count", ctypes.c_uint32)),
        *(("shared_nbytes", ctypes.c_uint32), ("parameter_nbytes", ctypes.c_uint32)),
    ]


class Machine:
    """The compiled interpreter. ``operations`` are its instructions with their numbers."""

    def __init__(self, folder: Path) -> None:
        library = folder / "ptx_machine.so"
        options = (
            "-std=c++20",
            "-O2",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fPIC",
            "-shared",
            "-Wall",
            "-Wextra",
            "-Werror",
        )
        done = subprocess.run(
            ["g++", *options, _FOLDER / "machine.cpp", "-o", library], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[:4000]
        self._library = ctypes.CDLL(str(library))
        self._library.ptx_names.restype = self._library.ptx_run.restype = ctypes.c_char_p
        self._library.ptx_memory.restype = ctypes.c_void_p
        names = self._library.ptx_names().decode().split()
        self.operations = {name: number for number, name in enumerate(names)}

    def run(
        self,
        kernels: Sequence[Kernel],
        parameters: bytes,
        blocks: int,
        extents: np.ndarray,
        *,
        threads: int,
        seed: int = 0,
    ) -> None:
        """Run kernels with the same parameters, one after the other; raises Fault.

        ``extents`` is the memory that they may access besides the tables of their modules.
        """
        tables = [table for kernel in kernels for table in kernel.tables.values()]
        known = np.array([(table.ctypes.data, table.nbytes, 0, 1) for table in tables], _EXTENT)
        everything = np.concatenate([extents, known])
        memory = ctypes.c_void_p(
            self._library.ptx_memory(ctypes.c_void_p(everything.ctypes.data), ctypes.c_uint(len(everything)))
        )
        try:
            for kernel in kernels:
                self._run(kernel, memory, parameters, blocks, threads, seed)
        finally:
            self._library.ptx_forget(memory)

    def _run(
        self, kernel: Kernel, memory: ctypes.c_void_p, parameters: bytes, blocks: int, threads: int, seed: int
    ) -> None:
        assert len(parameters) >= kernel.parameter_nbytes, "the kernel has more parameters"
        given = _Kernel(
            kernel.code.ctypes.data, kernel.constants.ctypes.data, kernel.registers, len(kernel.constants),
            kernel.shared_nbytes, kernel.parameter_nbytes,
        )  # fmt: skip
        line = ctypes.c_uint(0)
        message = self._library.ptx_run(
            memory, ctypes.byref(given), parameters, ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.c_uint64(seed),  # noqa: E501
            ctypes.c_uint64(MOST_INSTRUCTIONS), ctypes.c_void_p(kernel.executed.ctypes.data), ctypes.byref(line),
        )  # fmt: skip
        if message is not None:
            raise Fault(f"{message.decode()}: {kernel.text_of(line.value)}")


@functools.cache
def machine() -> Machine:
    """The interpreter, compiled once for the process."""
    with tempfile.TemporaryDirectory() as folder:
        return Machine(Path(folder))


def extents(rows: Iterable[tuple[int, int, bool, bool]]) -> np.ndarray:
    """Memory as pieces: address, bytes, whether kernels may write it, whether it has content."""
    return np.array([row for row in rows if row[1]], _EXTENT)


def compiled(library: Nvrtc, names: Sequence[str], headers: Path | None, arch: int) -> Program:
    """Kernels compiled to PTX; ``headers`` replaces the folder kernels/."""
    code, options = cuda_source.source(names)
    if headers:
        options = tuple(f"-I{headers}" if option.startswith("-I") else option for option in options)
    program = Program(library, code, names, [f"--gpu-architecture=compute_{arch}", *options])
    assert not program.failed, program.log[:4000]
    return program


class PtxEmulator:
    """Kernels by their names in cuda_source, compiled in parallel; ``headers`` replaces the folder kernels/."""

    def __init__(
        self, library: Nvrtc, names: Iterable[str], headers: Path | None = None, arch: int = ARCHITECTURE
    ) -> None:
        chosen = list(dict.fromkeys(names))
        groups = [chosen[i : i + PER_PROGRAM] for i in range(0, len(chosen), PER_PROGRAM)]
        self._machine = machine()
        self._modules: dict[str, tuple[Module, str]] = {}
        with ThreadPoolExecutor(2) as pool:
            for program in pool.map(lambda group: compiled(library, group, headers, arch), groups):
                module = Module(program.ptx())
                self._modules |= {name: (module, program.mangled(name)) for name in program.names}
        self._kernels: dict[str, Kernel] = {}

    def text(self, name: str) -> str:
        """A kernel's PTX: what is between its braces."""
        module, mangled = self._modules[name]
        return module.entries[mangled].body

    def executed_lines(self, name: str) -> list[int]:
        """The numbers of the lines of a kernel's text() that a run without ``edited`` has executed."""
        kernel = self._kernel(name, {})
        return (np.flatnonzero(kernel.executed) - kernel.first_line).tolist()

    def _kernel(self, name: str, edited: Mapping[str, str]) -> Kernel:
        module, mangled = self._modules[name]
        if name in edited:
            return Kernel(module, mangled, self._machine.operations, edited[name])
        if name not in self._kernels:
            self._kernels[name] = Kernel(module, mangled, self._machine.operations)
        return self._kernels[name]

    def run(
        self, launch: Launch, arrays: Arrays, call: int, seed: int = 0, lr: float = 1.0, *,
        failed: bool = False, edited: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """As a device would, in the memory of ``arrays``; raises Fault.

        ``failed``: after a failure of the communicator. ``edited`` replaces the text() of kernels.
        """
        if not launch.kernels:
            return
        number, flag = np.array([call, 0], np.uint64), np.array([failed], np.uint32)
        memory = memory_argument(arrays, lr, number, flag)
        room = np.zeros(launch.scratch_nbytes + 16, np.uint8)
        scratch = room[-room.ctypes.data % 16 :][: launch.scratch_nbytes]
        parameters = launch.parameters.copy()
        parameters["scratch"], parameters["blocks"] = scratch.ctypes.data, launch.blocks.ctypes.data
        tables = np.array([launch.jobs.ctypes.data, launch.sources.ctypes.data], np.uint64)
        known = extents(
            [
                *(
                    (each.ctypes.data, each.nbytes, False, True)
                    for each in (launch.jobs, launch.sources, launch.blocks)
                ),
                *((each.ctypes.data, each.nbytes, False, True) for each in (number, flag)),
                (scratch.ctypes.data, scratch.nbytes, True, launch.clears_scratch),
                *((begin, nbytes, True, True) for begin, nbytes in arrays.extents),
            ]
        )
        self._machine.run(
            [self._kernel(name, edited) for name in launch.kernels], tables.tobytes() + parameters.tobytes() + memory.tobytes(),  # noqa: E501
            len(launch.blocks), known, threads=cuda_source.THREADS, seed=seed,
        )  # fmt: skip


assert INSTRUCTION.itemsize == 80, "machine.cpp has this size"
