"""NVRTC, CUDA's run-time compiler, by its C interface: it needs no GPU, and several versions fit into one process.

The wheels of CUDA 12 and of CUDA 13 can be installed together. cuda-bindings cannot: only one version fits, and the
version that PyTorch needs loads the NVRTC of one CUDA only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Nvrtc", "Program", "find"]

#: by CUDA version: the library's folder in its wheel, and the name of the wheel
WHEELS = {
    12: ("nvidia/cuda_nvrtc/lib", "nvidia-cuda-nvrtc-cu12"),
    13: ("nvidia/cu13/lib", "nvidia-cuda-nvrtc"),
}


class Nvrtc:
    """The library of a CUDA version, 12 or 13: from its wheel, or else from CUDA's toolkit.

    Raises FileNotFoundError, which says what to install.
    """

    def __init__(self, cuda: int) -> None:
        folder, wheel = WHEELS[cuda]
        name = f"libnvrtc.so.{cuda}"
        places = [Path(path, folder, name) for path in sys.path]
        places.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "lib64", name))
        found = next((path for path in places if path.is_file()), None)
        try:
            # NVRTC 13.0 finds the library of its built-in headers only in the system's folders, or if it is loaded.
            for builtins in found.parent.glob(f"libnvrtc-builtins.so.{cuda}.*") if found else ():
                ctypes.CDLL(str(builtins))
            self.library = ctypes.CDLL(str(found or name))
        except OSError as error:
            raise FileNotFoundError(
                f"{name} cannot be loaded ({error}): pip install {wheel}, or set CUDA_HOME"
            ) from error
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> tuple[int, int]:
        """The library's major and minor version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self) -> list[int]:
        """The GPU architectures that it compiles for, e.g. 90."""
        count = ctypes.c_int()
        self.call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self.call("nvrtcGetSupportedArchs", found)
        return list(found)

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the library; RuntimeError if it fails."""
        status = getattr(self.library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function}: {self.library.nvrtcGetErrorString(status).decode()}")


@functools.cache
def find(*versions: int) -> Nvrtc:
    """The first NVRTC of these CUDA versions (default: 12, then 13) that this machine has."""
    reasons = []
    for cuda in versions or WHEELS:
        try:
            return Nvrtc(cuda)
        except FileNotFoundError as error:
            reasons.append(str(error))
    raise FileNotFoundError("; ".join(reasons))


class Program:
    """Source compiled with ``options``; ``names`` are the expressions of its kernels.

    Attributes:
        names: the kernels' expressions.
        failed: whether it does not compile.
        log: the compiler's messages.
    """

    def __init__(self, nvrtc: Nvrtc, code: str, names: Sequence[str], options: Sequence[str]) -> None:
        self._nvrtc, self._handle, self.names = nvrtc, ctypes.c_void_p(), names
        nvrtc.call("nvrtcCreateProgram", ctypes.byref(self._handle), code.encode(), b"kernels.cu", 0, None, None)
        for name in names:
            nvrtc.call("nvrtcAddNameExpression", self._handle, name.encode())
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self.failed = bool(nvrtc.library.nvrtcCompileProgram(self._handle, len(options), given))
        self.log = self._content("nvrtcGetProgramLog").decode(errors="replace").rstrip("\0 ")

    def mangled(self, name: str) -> str:
        """The name of a kernel in the compiled code."""
        found = ctypes.c_char_p()
        self._nvrtc.call("nvrtcGetLoweredName", self._handle, name.encode(), ctypes.byref(found))
        return (found.value or b"").decode()

    def ptx(self) -> str:
        """The compiled program as PTX, the text of NVIDIA's virtual instruction set."""
        return self._content("nvrtcGetPTX").decode().rstrip("\0 ")

    def _content(self, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._nvrtc.call(f"{function}Size", self._handle, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._nvrtc.call(function, self._handle, content)
        return content.raw

    def __del__(self) -> None:
        self._nvrtc.library.nvrtcDestroyProgram(ctypes.byref(self._handle))
