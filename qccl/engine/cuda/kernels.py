"""The kernels of this process: compiled when they are first asked for, and never unloaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import TIMEOUT_MAX
from typing import Any

from qccl.engine.cuda.cache import load_or_make
from qccl.engine.cuda.libraries import bounded, cuda_libraries
from qccl.engine.cuda.source import source

__all__ = ["kernels"]

_COMPILERS = 16

#: the functions, by device, name and further options
_kernels: dict[tuple[int, str, tuple[str, ...]], Any] = {}


def kernels(device: int, names: Iterable[str], *more: str) -> dict[str, int]:
    """Kernels by their names in source.py: functions for a GPU, which must be the thread's current one.

    ``more`` are further options of NVRTC. CuPy's RawModule is not used: it adds -ftz=true, which gives other bytes than
    the host's.
    """
    names = tuple(dict.fromkeys(names))
    new = [name for name in names if (device, name, more) not in _kernels]
    if len(new) > 1:  # in parallel: the compiler releases the interpreter
        threads, setting = min(len(new), _COMPILERS, os.cpu_count() or 1), cuda_libraries().runtime.setDevice

        def compile_all() -> list[tuple[bytes, str]]:
            with ThreadPoolExecutor(threads, initializer=setting, initargs=(device,)) as pool:
                return list(pool.map(lambda name: _compiled(name, more), new))

        found = bounded(device, TIMEOUT_MAX, "compiler", compile_all)  # the pool's threads start safely there
    else:
        found = [_compiled(name, more) for name in new]
    for name, (binary, mangled) in zip(new, found, strict=True):
        module = cuda_libraries().cupy.cuda.function.Module()
        module.load(binary)
        _kernels[device, name, more] = module.get_function(mangled)
    return {name: _kernels[device, name, more].ptr for name in names}


def _compiled(name: str, more: tuple[str, ...]) -> tuple[bytes, str]:
    """Compile a kernel for the current GPU. Returns its binary and its name there."""
    cupy = cuda_libraries().cupy
    code, options = source([name])
    options += more

    def compile_it() -> tuple[bytes, str]:
        binary, mapping = cupy.cuda.compiler.compile_using_nvrtc(code, options, name_expressions=(name,))
        return binary, mapping.get(name, name)

    version, capability = cupy.cuda.nvrtc.getVersion(), cupy.cuda.Device().compute_capability
    how = os.environ.get("CUPY_COMPILE_WITH_PTX", "")
    return load_or_make([code, *options, cupy.__version__, str(version), capability, how], compile_it)
