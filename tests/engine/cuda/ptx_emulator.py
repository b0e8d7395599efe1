"""Runs the CUDA kernels without a device: NVRTC compiles them to PTX, which ptx_machine/machine.cpp executes.

The machine checks each access to memory: alignment, bounds, races, and bits that were never set.
"""

from __future__ import annotations

import ctypes
import functools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from kernel_cases import Arrays, memory_argument
from nvrtc import Nvrtc, Program
from ptx_program import INSTRUCTION, Module, PtxError
from ptx_program import Program as Kernel

from qccl.engine.cuda import cache
from qccl.engine.cuda import source as cuda_source
from qccl.engine.cuda.source import Launch

__all__ = ["ARCHITECTURES", "HEADERS", "Extent", "Fault", "Kernel", "PtxEmulator", "PtxError", "changed", "nvrtc_13"]

HEADERS = Path(cuda_source.__file__).parents[2] / "kernels"

ARCHITECTURES = (75, 80, 90, 100, 120)
#: instructions of warps in a launch, above those of all tests
MOST_INSTRUCTIONS = 50_000_000
_FOLDER = Path(__file__).with_name("ptx_machine")
_CCACHE = ("ccache",) if shutil.which("ccache") else ()
#: Extent in memory.h
_EXTENT = np.dtype([("begin", "<u8"), ("nbytes", "<u8"), ("writable", "<u4"), ("defined", "<u4")])


#: a piece of memory: address, bytes, whether kernels may write it, whether it has content
Extent = tuple[int, int, bool, bool]


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
        library, compiled_file = folder / "ptx_machine.so", folder / "ptx_machine.o"
        options = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-Wall", "-Wextra", "-Werror")
        for command in (  # in two steps, because ccache keeps only object files
            [*_CCACHE, "g++", *options, "-c", _FOLDER / "machine.cpp", "-o", compiled_file],
            ["g++", "-shared", compiled_file, "-o", library],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
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
            ctypes.c_uint64(MOST_INSTRUCTIONS), ctypes.byref(line),
        )  # fmt: skip
        if message is not None:
            raise Fault(f"{message.decode()}: {kernel.text_of(line.value)}")


@functools.cache
def machine() -> Machine:
    """The interpreter, compiled once for the process."""
    with tempfile.TemporaryDirectory() as folder:
        return Machine(Path(folder))


def nvrtc_13() -> Nvrtc:
    """CUDA 13's NVRTC; a skip where it is not installed."""
    try:
        return Nvrtc(13)
    except FileNotFoundError as error:
        pytest.skip(f"{error} (extra 'nvrtc')")


def extents(rows: Iterable[Extent]) -> np.ndarray:
    """Memory as pieces."""
    return np.array([row for row in rows if row[1]], _EXTENT)


class PtxEmulator:
    """Kernels by their names, compiled when they first run.

    ``headers`` replaces the folder kernels/; ``options`` are further ones of NVRTC; ``code`` replaces the whole source.
    """

    def __init__(
        self, library: Nvrtc, headers: Path | None = None, arch: int = 90, options: Sequence[str] = (), code: str = ""
    ) -> None:
        self._library, self._headers, self._code = library, headers, code
        self._options = (f"--gpu-architecture=compute_{arch}", *options)
        self._machine = machine()
        self._modules: dict[str, tuple[Module, str]] = {}
        self._kernels: dict[str, Kernel] = {}

    def _compile(self, names: Sequence[str]) -> None:
        """Compile those of the kernels together that are new. The PTX of an unchanged source is kept, as by qccl."""
        new = [name for name in names if name not in self._modules]
        if not new:
            return
        code, options = cuda_source.source(new)
        code = self._code or code
        if self._headers:
            options = tuple(f"-I{self._headers}" if option.startswith("-I") else option for option in options)

        def compile() -> tuple[bytes, str]:
            program = Program(self._library, code, new, [*self._options, *options])
            assert not program.failed, program.log[:4000]
            return program.ptx().encode(), json.dumps([program.mangled(name) for name in new])

        key = ["ptx", str(self._library.version), code, *self._options, *options]
        ptx, mangled = compile() if self._headers else cache.load_or_make(key, compile)
        module = Module(ptx.decode())
        self._modules |= {name: (module, entry) for name, entry in zip(new, json.loads(mangled), strict=True)}

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            module, mangled = self._modules[name]
            self._kernels[name] = Kernel(module, mangled, self._machine.operations)
        return self._kernels[name]

    def run(
        self, launch: Launch, arrays: Arrays, call: int, seed: int = 0, lr: float = 1.0, *, failed: bool = False
    ) -> None:
        """As a device would, in the memory of ``arrays``; raises Fault.

        ``failed``: after a failure of the communicator.
        """
        if not launch.kernels:
            return
        number, flag = np.array([call, 0], np.uint64), np.array([failed], np.uint32)
        memory = memory_argument(arrays.addresses, lr, number.ctypes.data, flag.ctypes.data)
        room = np.zeros(launch.scratch_nbytes + 16, np.uint8)
        scratch = room[-room.ctypes.data % 16 :][: launch.scratch_nbytes]
        parameters = launch.parameters.copy()
        parameters["scratch"], parameters["blocks"] = scratch.ctypes.data, launch.blocks.ctypes.data
        arguments = (launch.jobs.ctypes.data, launch.sources.ctypes.data, parameters, memory)
        read = (launch.jobs, launch.sources, launch.blocks, number, flag)
        known = [(each.ctypes.data, each.nbytes, False, True) for each in read]
        known.append((scratch.ctypes.data, scratch.nbytes, True, launch.clears_scratch))
        known += [(begin, nbytes, True, True) for begin, nbytes in arrays.extents]
        self.execute(launch.kernels, arguments, known, blocks=len(launch.blocks), seed=seed)

    def execute(
        self, names: Sequence[str], arguments: Iterable[int | np.ndarray | np.generic], memory: Iterable[Extent], *,
        blocks: int = 1, threads: int = cuda_source.THREADS, seed: int = 0,
    ) -> None:  # fmt: skip
        """Run kernels with the same arguments, one after the other; raises Fault.

        Arguments are addresses, and NumPy's scalars and arrays by value. ``memory`` is what the kernels may access.
        """
        self._compile(names)
        given = b""
        for each in arguments:
            value = np.uint64(each) if isinstance(each, int) else each
            given += bytes(-len(given) % min(value.itemsize, 8)) + value.tobytes()
        kernels = [self._kernel(name) for name in names]
        self._machine.run(kernels, given, blocks, extents(memory), threads=threads, seed=seed)


def changed(folder: Path, header: str | Path, text: str, replacement: str) -> PtxEmulator:
    """The kernels with another text of a header, in a copy in ``folder``."""
    shutil.copytree(HEADERS, folder, ignore=shutil.ignore_patterns("host", "engine"))
    usual = (HEADERS / header).read_text()
    assert text in usual
    (folder / header).write_text(usual.replace(text, replacement))
    return PtxEmulator(nvrtc_13(), folder)


assert INSTRUCTION.itemsize == 80, "machine.cpp has this size"
