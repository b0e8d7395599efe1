"""The caller's memory in this process; nothing is copied.

It accepts objects that speak DLPack or the buffer protocol, NumPy arrays of ml_dtypes' bfloat16, arrays of uint16 that
hold bfloat16 (``dtype="bfloat16"``), and raw addresses.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from qccl import _host
from qccl.base import dtypes
from qccl.base.arrays import EXPONENT_BITS, Pointer, Values, check_pointer, check_unmoved, from_view, unreadable
from qccl.base.dtypes import BFLOAT16, DType
from qccl.base.errors import ArgumentError, InvalidBufferError
from qccl.base.scalars import as_integer
from qccl.base.tensors import check_values, forbid_resizing, is_tensor, storage_of
from qccl.codecs.base import Codec

__all__ = ["HostMemory"]

_DLPACK_CPU = 1
_DLPACK_DEVICES = {2: "CUDA", 3: "CUDA pinned host", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed"}


class HostMemory:
    """Memory of this process (interface: Memory)."""

    has_streams = False

    def call_table(self) -> _host.CallTable:
        """See Memory."""
        return _host.CallTable(Codec)

    def from_array(self, array: Any, *, dtype: DType | str | None = None, writable: bool, what: str) -> Values:
        """Find an array in host memory, by DLPack or by the buffer protocol; NumPy's bfloat16 by its bits.

        A masked array is refused, because its masked values would be combined.
        """
        wanted = None if dtype is None else dtypes.get(dtype)
        try:
            view = _host.describe(array)
        except (TypeError, BufferError, RuntimeError, ValueError) as error:
            if not _is_bfloat16_of_numpy(array):
                allowed = "a NumPy, torch, JAX or CuPy array, or a raw pointer"
                raise unreadable(array, what, allowed, _refusal(array)) from error
            view, wanted = _host.describe(array.view("uint16")), BFLOAT16
        if view.device_type != _DLPACK_CPU:
            device = _DLPACK_DEVICES.get(view.device_type, f"DLPack device type {view.device_type}")
            raise InvalidBufferError(
                f"{what} is in {device} memory, but this communicator works on host memory; copy it to the host, or "
                f'make the communicator with qccl.init(backend="cuda")'
            )
        if _is_masked(array):
            raise InvalidBufferError(
                f"{what} is a masked array, and the values under its mask would be combined, too; pass "
                f"{what}.filled(0), which is a copy, or {what}.data"
            )
        return from_view(view, array, wanted, writable=writable, what=what)

    def from_pointer(self, pointer: Pointer, count: int, dtype: DType, *, writable: bool, what: str) -> Values:
        """Check an address: it must be aligned and mapped, and writable if ``writable``."""
        address = check_pointer(pointer, count, dtype, what)
        values = Values(address, count, dtype, ((count,), (1,)), what, owner=pointer, writable=writable)
        if not count or _host.may_access(address, values.nbytes, writable):
            return values
        place = f"{what}: the {count} elements of {dtype} at [{address:#x}, {address + values.nbytes:#x}) are"
        if writable and _host.may_access(address, values.nbytes, False):
            raise InvalidBufferError(
                f"{place} read-only, at least in part, and the result would be written there; pass writable memory"
            )
        raise InvalidBufferError(
            f"{place} not all memory of this process; is it a device pointer, or is the count too large?"
        )

    def hold(self, values: Iterable[Values]) -> None:
        """Forbid PyTorch to resize its tensors. Other arrays cannot be resized while their memory is exported."""
        for each in dict.fromkeys(values):  # in place, each is the input and the output
            if is_tensor(each.array):
                check_unmoved(each)
                forbid_resizing(each.array)

    def recheck(self, tensors: Iterable[tuple[int, Values]], arrays: Sequence[Any], *, hold: bool) -> list[Any]:
        """Look at the tensors' negation and storage."""
        owners = []
        for number, values in tensors:
            tensor = arrays[number]
            check_values(tensor, values.what)
            owners.append(storage_of(tensor, values.address, values.nbytes, values.what))
            if hold:
                forbid_resizing(tensor)
        return owners

    def streams(self, stream: Any, arrays: Iterable[Any]) -> tuple[int, ...]:
        """Return an empty tuple: the host has no streams. Raises ArgumentError for any stream but 0."""
        if stream is not None and as_integer(stream) != 0:
            raise ArgumentError(
                f"stream={stream} was given, but the host backend has no streams; pass 0, or leave it out"
            )
        return ()

    def is_capturing(self, stream: Any) -> bool:
        """Return False: the host has no graphs."""
        return False

    def first_nonfinite(self, values: Values) -> int | None:
        """Search block by block, without a copy."""
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


def _is_bfloat16_of_numpy(array: Any) -> bool:
    """Whether an array has ml_dtypes' bfloat16, which neither DLPack nor the buffer protocol of NumPy knows."""
    return getattr(getattr(array, "dtype", None), "name", None) == "bfloat16" and hasattr(array, "__array_interface__")


def _is_masked(array: Any) -> bool:
    """Whether an array is a masked array of numpy.ma."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(array, masked.MaskedArray)


def _refusal(array: Any) -> str:
    """Say why an array gives no access to its memory, in the words of its library."""
    try:
        array.__dlpack__()
    except Exception as error:
        return "it has neither __dlpack__ nor a buffer" if isinstance(error, AttributeError) else str(error)
    return "DLPack has no such element type"
