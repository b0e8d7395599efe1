"""What the caller holds in the memory of this process; nothing is copied.

Accepted: objects that speak DLPack or the buffer protocol, NumPy arrays of ml_dtypes' bfloat16, arrays of uint16 that
hold bfloat16 (``dtype="bfloat16"``), and raw addresses.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from qccl import dtypes
from qccl.dtypes import BFLOAT16, DType
from qccl.errors import ArgumentError, InvalidBufferError
from qccl.memory.base import EXPONENT_BITS, Values, check_pointer, from_view
from qccl.scalars import as_integer

__all__ = ["HostMemory"]

_DLPACK_CPU = 1
_DLPACK_DEVICES = {2: "CUDA", 3: "CUDA pinned host", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed"}


class HostMemory:
    """Memory of this process (interface: Memory)."""

    def from_array(self, array: Any, *, dtype: DType | str | None = None, writable: bool, what: str) -> Values:
        from qccl import _host

        source = array
        wanted = None if dtype is None else dtypes.get(dtype)
        if getattr(getattr(array, "dtype", None), "name", None) == "bfloat16" and hasattr(array, "__array_interface__"):
            source, wanted = array.view("uint16"), BFLOAT16  # neither DLPack nor the buffer protocol of NumPy knows it
        try:
            view = _host.describe(source)
        except (TypeError, BufferError, RuntimeError, ValueError) as error:
            raise InvalidBufferError(
                f"{what} is a {type(array).__name__}, which gives access to its memory neither through __dlpack__ nor "
                f"through the buffer protocol ({error}); pass a NumPy, torch, JAX or CuPy array, or a raw pointer"
            ) from error
        if view.device_type != _DLPACK_CPU:
            device = _DLPACK_DEVICES.get(view.device_type, f"DLPack device type {view.device_type}")
            raise InvalidBufferError(
                f"{what} is in {device} memory, but this communicator works on host memory; copy it to the host, or "
                f'make the communicator with qccl.init(backend="cuda")'
            )
        return from_view(view, array, wanted, writable=writable, what=what)

    def from_pointer(self, address: int, count: int, dtype: DType, *, what: str) -> Values:
        """As in Memory; null, unaligned and unmapped addresses are refused."""
        address = check_pointer(address, count, dtype, what)
        for byte in (address, address + count * dtype.itemsize - 1) if count else ():
            if not _is_mapped(byte):
                raise InvalidBufferError(
                    f"{what}: {count} elements of {dtype} from {address:#x} reach {byte:#x}, which is not memory of "
                    f"this process (a device pointer, or a count too large?)"
                )
        return Values(address, count, dtype, ((count,), (1,)), what)

    def streams(self, stream: Any, *values: Values) -> tuple[int, ...]:
        if stream is not None and as_integer(stream) != 0:
            raise ArgumentError(
                f"stream={stream} was given, but the host backend has no streams; pass 0, or leave it out"
            )
        return ()

    def first_nonfinite(self, values: Values) -> int | None:
        """As in Memory; works in blocks, without a copy."""
        import numpy as np

        exponent = EXPONENT_BITS[values.dtype.name]
        memory = (ctypes.c_char * values.nbytes).from_address(values.address)
        bits = np.frombuffer(memoryview(memory), np.dtype(f"u{values.dtype.itemsize}"))
        block = 1 << 20
        for start in range(0, values.count, block):
            found = np.flatnonzero((bits[start : start + block] & exponent) == exponent)
            if found.size:
                return start + int(found[0])
        return None


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def _is_mapped(address: int) -> bool:
    """Whether the byte at ``address`` can be read, asked of the kernel rather than of luck (Linux; else assumed)."""
    read = getattr(_libc, "process_vm_readv", None)
    if read is None:
        return True
    local = ctypes.create_string_buffer(1)
    to, source = _IoVec(ctypes.addressof(local), 1), _IoVec(address, 1)
    done: int = read(os.getpid(), ctypes.byref(to), 1, ctypes.byref(source), 1, 0)
    return done == 1 or ctypes.get_errno() not in (14,)  # EFAULT; a sandbox that forbids the call says EPERM
