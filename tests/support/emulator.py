"""Runs the CUDA kernels without a device: g++ compiles the source that NVRTC would get, with shim.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from spans import Arrays

from qccl.cuda import source as cuda_source
from qccl.cuda.source import Launch

CCACHE = ("ccache",) if shutil.which("ccache") else ()
_SHIM = Path(__file__).with_name("shim.h")
_OPTIONS = ("-O0", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror")
#: the compiler's time: functions are compiled once, not in each of their callers, and without tables of unwinding
_OPTIONS += ("-Dalways_inline=", "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables")

_RUN = """
template <class Job>
bool run(void (*kernel)(const Job*, const qccl::BufferRef*, qccl::Parameters, qccl::Memory),
         const void* const* arguments, unsigned blocks, unsigned seed) {
  return emulator::run_grid(blocks, seed, [&] {
    kernel(static_cast<const Job*>(arguments[0]), static_cast<const qccl::BufferRef*>(arguments[1]),
           *static_cast<const qccl::Parameters*>(arguments[2]), *static_cast<const qccl::Memory*>(arguments[3]));
  });
}

extern "C" bool launch(unsigned number, const void* const* arguments, unsigned blocks, unsigned seed) {
  switch (number) {
"""


class Emulator:
    """Kernels by their names in cuda_source, compiled in parallel."""

    def __init__(self, names: Iterable[str], folder: Path, headers: Path | None = None) -> None:
        """Compile into ``folder``; ``headers`` replaces the folder kernels/."""
        pieces = 2
        chosen = list(dict.fromkeys(names))
        self._headers = headers
        parts = [chosen[i::pieces] for i in range(pieces) if chosen[i::pieces]]
        with ThreadPoolExecutor(pieces) as pool:
            libraries = list(pool.map(self._compile, parts, (folder / f"piece{i}" for i in range(len(parts)))))
        self._kernels = {
            name: (library, number)
            for part, library in zip(parts, libraries, strict=True)
            for number, name in enumerate(part)
        }

    def _compile(self, names: Sequence[str], target: Path) -> ctypes.CDLL:
        code, options = cuda_source.source(names)
        if self._headers:
            options = tuple(f"-I{self._headers}" if option.startswith("-I") else option for option in options)
        cases = "".join(f"    case {i}: return run({name}, arguments, blocks, seed);\n" for i, name in enumerate(names))
        target.with_suffix(".cpp").write_text(f"{code}{_RUN}{cases}  }}\n  return false;\n}}\n")
        given = [option for option in options if option.startswith(("-I", "--std"))]
        # in two steps and with relative names, because ccache keeps only object files, by their names
        for command in (
            [
                *CCACHE,
                "g++",
                *given,
                *_OPTIONS,
                "-include",
                _SHIM,
                "-c",
                f"{target.name}.cpp",
                "-o",
                f"{target.name}.o",
            ],
            ["g++", "-shared", f"{target.name}.o", "-o", f"{target.name}.so"],
        ):
            done = subprocess.run(command, cwd=target.parent, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(str(target.with_suffix(".so")))

    def run(
        self, launch: Launch, arrays: Arrays, call: int, seed: int = 0, lr: float = 1.0, *, failed: bool = False
    ) -> None:
        """As a device would, in the memory of ``arrays``; ``failed``: after a failure of the communicator."""
        number, flag = np.array([call, 0], np.uint64), np.array([failed], np.uint32)
        memory = memory_argument(arrays, lr, number, flag)
        scratch = np.zeros(max(launch.scratch_nbytes, 1), np.uint8)
        parameters = launch.parameters.copy()
        parameters["scratch"], parameters["blocks"] = scratch.ctypes.data, launch.blocks.ctypes.data
        pointers = [array.ctypes.data for array in (launch.jobs, launch.sources, parameters, memory)]
        arguments = (ctypes.c_void_p * 4)(*pointers)
        for name in launch.kernels:
            library, kernel = self._kernels[name]
            assert library.launch(kernel, arguments, len(launch.blocks), seed), f"{name}: threads wait for ever"


def memory_argument(arrays: Arrays, lr: float, number: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """Memory of jobs.h: the buffers, the learning rate, and where the call's number and the flag of failures are."""
    memory = np.zeros(cuda_source.MEMORY_WORDS, np.uint64)
    memory[: len(arrays.addresses)] = arrays.addresses
    memory[cuda_source.LR_WORD] = np.array([lr, 0], np.float32).view(np.uint64)[0]
    memory[cuda_source.CALL_WORD], memory[cuda_source.FAILED_WORD] = number.ctypes.data, failed.ctypes.data
    return memory
