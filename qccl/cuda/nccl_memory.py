"""Memory that NCCL's transfers use directly: allocated by NCCL and registered with its communicators.

Without registration NCCL copies what it sends into buffers of its own, and what it receives out of them. NCCL demands
that in one operation either all ranks use registered memory or none; a mix is undefined (its user guide, "User Buffer
Registration"). So the ranks decide together, once, whether they register (NcclTransport), and from then on memory that
cannot be registered is an error.

ncclCommWindowRegister is not used. For sends and receives it does what ncclCommRegister does. Its symmetric windows
serve NCCL's own collectives only, and need equal offsets on all ranks, which ranks with different plans do not have.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any

from qccl.cuda.garbage import Garbage
from qccl.cuda.libraries import cuda_libraries, no_room, on_device, relaxed
from qccl.cuda.nccl_library import call, check_one_library, last_error, library
from qccl.errors import EngineError

__all__ = ["NcclMemory", "check_registration"]

#: the oldest version with which memory is registered: 2.23 has the registration for sends and receives, and 2.24
#: refuses memory that ncclMemAlloc had to take from cudaMalloc, which could hang a transfer or break an abort
_OLDEST = 22400


def check_registration() -> None:
    """Raise EngineError, with the reason, if this NCCL cannot register memory for sends and receives."""
    version, found = cuda_libraries().nccl.get_version(), ctypes.c_int()
    if version < _OLDEST:
        raise EngineError(f"NCCL {version} registers no memory for sends and receives; 2.24 or newer does")
    call("ncclGetVersion", ctypes.byref(found))
    if found.value != version:  # a communicator of one library means nothing to another
        raise EngineError(f"CuPy uses NCCL {version}, and the process has loaded NCCL {found.value}, too")
    check_one_library(library())
    lacking = [name for name in ("ncclMemAlloc", "ncclCommRegister") if not hasattr(library(), name)]
    if lacking:
        raise EngineError(f"this NCCL has no {' and no '.join(lacking)}")


class NcclMemory:
    """Memory of one GPU, allocated by NCCL. It is deregistered and freed when nothing refers to it any more.

    Attributes:
        ptr, nbytes: its address and size.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        """Raises EngineError if there is no room."""
        self.ptr, self.nbytes = _allocate(device, nbytes), nbytes
        self._registered: list[tuple[Any, ctypes.c_void_p]] = []  # communicators, and NCCL's handles
        self._device = device
        self._free = weakref.finalize(self, Garbage(device).later, _free, self.ptr, self._registered)
        self._free.atexit = False  # the end of the process frees it, and CUDA may be gone before

    def register(self, comm: Any) -> None:
        """Register it with a communicator of CuPy's, for all ranks of which this must succeed."""
        handle = ctypes.c_void_p()
        arguments = ctypes.c_void_p(self.ptr), ctypes.c_size_t(self.nbytes), ctypes.byref(handle)
        call("ncclCommRegister", ctypes.c_void_p(comm.comm), *arguments)
        if not handle.value:  # NCCL calls it a success
            raise EngineError("NCCL registers no memory here, as NCCL_LOCAL_REGISTER=0 tells it")
        self._registered.append((comm, handle))

    def deregister(self) -> None:
        """Deregister it everywhere, when no transfer uses it and the communicators still live."""
        _deregister(self._registered)

    def free(self) -> None:
        """Deregister and free it now, because no transfer has used it."""
        if self._free.detach() is not None:
            with on_device(self._device), relaxed():
                _free(self.ptr, self._registered)

    def keep(self) -> None:
        """Never free it, because the GPU or a peer may still use it. Aborted communicators forget it themselves."""
        self._free.detach()


def _deregister(registered: list[tuple[Any, ctypes.c_void_p]]) -> None:
    while registered:
        comm, handle = registered.pop()
        call("ncclCommDeregister", ctypes.c_void_p(comm.comm), handle)


def _allocate(device: int, nbytes: int) -> int:
    gpu, pointer, arguments = cuda_libraries(), ctypes.c_void_p(), (ctypes.c_size_t(nbytes),)
    with on_device(device):
        try:
            call("ncclMemAlloc", ctypes.byref(pointer), *arguments)
        except gpu.nccl.NcclError:
            gpu.cupy.get_default_memory_pool().free_all_blocks()  # as CuPy does where it finds no room itself
            try:
                call("ncclMemAlloc", ctypes.byref(pointer), *arguments)
            except gpu.nccl.NcclError as error:
                text = f"{error}: {reason}" if (reason := last_error()) else str(error)
                raise no_room(device, nbytes, "the workspace", text) from error
    return int(pointer.value or 0)


def _free(pointer: int, registered: list[tuple[Any, ctypes.c_void_p]]) -> None:
    with contextlib.suppress(Exception):
        _deregister(registered)
        call("ncclMemFree", ctypes.c_void_p(pointer))
