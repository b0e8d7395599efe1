"""NCCL's functions that CuPy's module lacks, called in the library that the module uses.

CuPy 14 has neither NCCL's own text about an error, nor a function for a bare ncclComm_t.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from qccl.base.errors import ArgumentError, EngineError, PeerLost, QcclError, with_text
from qccl.engine.cuda.libraries import bounded, cuda_libraries

__all__ = ["UINT8", "BareCommunicator", "call", "last_error", "library", "set_up", "with_reason"]

#: ncclUint8, an ncclDataType_t
UINT8 = 1
_T = TypeVar("_T")
#: words in NCCL's errors, with advice
_HINTS = (
    (
        r"/dev/shm|shared memory",
        "/dev/shm is too small: start the container with --shm-size=1g or more, or set NCCL_SHM_DISABLE=1",
    ),
    (
        r"duplicate gpu",
        "two ranks have the same GPU: start no more ranks than there are GPUs, or give each rank its own with device= "
        "or CUDA_VISIBLE_DEVICES",
    ),
    (
        r"socket|interface|connect|bootstrap",
        "the ranks do not reach each other: set NCCL_SOCKET_IFNAME to the interface of the network between the nodes",
    ),
)


def library() -> Any:
    """The NCCL library that CuPy's module uses, even if the process has loaded others (unless with RTLD_GLOBAL).

    Raises EngineError if there is none.
    """
    module = sys.modules[cuda_libraries().nccl.NcclCommunicator.__module__]
    try:
        return ctypes.CDLL(module.__file__)  # finds also the functions of the libraries that the module is linked with
    except OSError as error:
        raise EngineError(f"the NCCL library cannot be found ({error})") from error


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library that returns a ncclResult_t, and raise its failure as CuPy does.

    Raises EngineError if there is no such function in this version.
    """
    found = library()
    if not hasattr(found, name):
        raise EngineError(f"this NCCL has no {name}")
    status = getattr(found, name)(*arguments)
    if status:
        raise cuda_libraries().nccl.NcclError(status)


def last_error() -> str:
    """NCCL's text about its last error in this process, or an empty text; it needs no communicator."""
    try:
        function = library().ncclGetLastError
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p
        return (function(None) or b"").decode(errors="replace").strip()
    except (EngineError, AttributeError):
        return ""


def with_reason(error: QcclError) -> QcclError:
    """Add to an error of NCCL's the library's own text, and advice if the error is a frequent one."""
    last = last_error()
    if not last or last in str(error):
        return error
    hint = next((f"; {hint}" for words, hint in _HINTS if re.search(words, last, re.IGNORECASE)), "")
    return with_text(error, f"{error}: {last}{hint}")


def set_up(device: int, timeout: float, what: str, fn: Callable[[], _T]) -> _T:
    """Run a step of a communicator's set-up by bounded(), and add NCCL's reason to its error."""
    try:
        return bounded(device, timeout, what, fn)
    except (EngineError, PeerLost) as error:
        raise with_reason(error) from error.__cause__


class BareCommunicator:
    """An ncclComm_t as an integer, with the methods of CuPy's NcclCommunicator by which ranks agree on an id."""

    def __init__(self, pointer: int) -> None:
        if pointer <= 0:
            raise ArgumentError(f"{pointer} is not a pointer to an NCCL communicator")
        self._pointer = ctypes.c_void_p(pointer)

    def rank_id(self) -> int:
        """This rank."""
        return self._number("ncclCommUserRank")

    def size(self) -> int:
        """The number of ranks."""
        return self._number("ncclCommCount")

    def device_id(self) -> int:
        """The number of this rank's GPU."""
        return self._number("ncclCommCuDevice")

    def broadcast(self, source: int, target: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Collective: ncclBroadcast."""
        pointers = [ctypes.c_void_p(p) for p in (source, target)]
        types = (ctypes.c_size_t(count), ctypes.c_int(datatype), ctypes.c_int(root))
        call("ncclBroadcast", *pointers, *types, self._pointer, ctypes.c_void_p(stream))

    def _number(self, name: str) -> int:
        found = ctypes.c_int()
        call(name, self._pointer, ctypes.byref(found))
        return found.value
