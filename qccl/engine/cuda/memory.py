"""The caller's memory on a GPU: addresses checked with the driver, and the streams that order its data.

An array gives its address by ``__dlpack__`` or ``__cuda_array_interface__``; nothing is copied. The stream of a call is
the stream that the caller names, or else the current stream of the library that made the array: torch and CuPy are
asked, and an array interface of version 3 names its stream. Other libraries only order their work before a stream that
they are given; they are given CUDA's legacy default stream.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qccl import _host
from qccl.base import dtypes
from qccl.base.arrays import EXPONENT_BITS, Pointer, Values, check_pointer, check_unmoved, from_view, unreadable
from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError, InvalidBufferError
from qccl.base.tensors import check_values, is_tensor, storage_of
from qccl.codecs.base import Codec
from qccl.engine.cuda.kernels import kernels
from qccl.engine.cuda.libraries import DEVICE_TO_HOST, HOST_TO_DEVICE, cuda_libraries, on_device, translated
from qccl.engine.cuda.source import NONFINITE_KERNEL, THREADS

__all__ = ["CudaMemory"]

#: DLPack's device types
_CUDA, _CUDA_MANAGED = 2, 13
_DEVICES = {1: "host memory", 3: "pinned host memory", 10: "ROCm memory"}
#: the legacy default stream in DLPack, which forbids CUDA's other number for it, 0
_LEGACY = 1
_NO_ORDER = -1
#: NONFINITE_KERNEL's index if all elements are finite, and its most blocks
_NONE, _SCAN_BLOCKS = 2**64 - 1, 1024
#: the most allocations that are remembered as checked
_CHECKED = 1024
_ELEMENTS = {"<f4": "float32", "<f2": "float16", "<u2": "uint16", "|u1": "uint8"}


@dataclass(frozen=True, slots=True)
class _View:
    """The contents of __cuda_array_interface__, with the attributes of _host.View."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    readonly: bool

    @property
    def form(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return self.dtype, self.shape, self.strides


class CudaMemory:
    """Memory of one GPU (interface: Memory)."""

    has_streams = True

    def __init__(self, device: int) -> None:
        self.device = device
        self._checked: dict[int, tuple[int, int]] = {}  # address -> the allocation's end and number

    def call_table(self) -> _host.CallTable:
        """See Memory."""
        return _host.CallTable(Codec, _view, self._is_known)

    def from_array(self, array: Any, *, dtype: DType | str | None = None, writable: bool, what: str) -> Values:
        """Find an array on this rank's GPU, by DLPack or by ``__cuda_array_interface__``.

        The latter does not name the GPU, so the driver is asked.
        """
        wanted = None if dtype is None else dtypes.get(dtype)
        view: Any = None
        refusal = "it has neither __dlpack__ nor __cuda_array_interface__"
        try:
            view = _view(array)
        except Exception as error:
            refusal = str(error)
        if view is None and hasattr(array, "__cuda_array_interface__"):
            view, refusal = _by_interface(array)
        if view is None:
            allowed = (
                f"a CuPy, torch or JAX array on GPU {self.device}, or a raw pointer, or make the communicator with "
                f'qccl.init(backend="host")'
            )
            raise unreadable(array, what, allowed, refusal)
        values = from_view(view, array, wanted, writable=writable, what=what)
        if isinstance(view, _View):  # DLPack names the device, the array interface does not
            self._check_memory(values.address, values.nbytes, what)
        else:
            self._check_device(view, what)
        return values

    def from_pointer(self, pointer: Pointer, count: int, dtype: DType, *, writable: bool, what: str) -> Values:
        """Check by the driver that an address is memory of this rank's GPU."""
        address = check_pointer(pointer, count, dtype, what)
        if count:
            self._check_memory(address, count * dtype.itemsize, what)
        return Values(address, count, dtype, ((count,), (1,)), what, owner=pointer, writable=writable)

    def hold(self, values: Iterable[Values]) -> None:
        """Check that no tensor's memory was replaced; PyTorch cannot forbid to resize tensors of a GPU."""
        for each in values:
            check_unmoved(each)

    def recheck(self, tensors: Iterable[tuple[int, Values]], arrays: Sequence[Any], *, hold: bool) -> list[Any]:
        """See Memory. A tensor of a GPU can still be resized."""
        owners = []
        for number, values in tensors:
            check_values(arrays[number], values.what)
            owners.append(storage_of(arrays[number], values.address, values.nbytes, values.what))
        return owners

    def streams(self, stream: Any, arrays: Iterable[Any]) -> tuple[int, ...]:
        """The call's stream, then the other current streams of the libraries that made the arrays."""
        arrays = [array for array in arrays if array is not None and not isinstance(array, int)]
        own, by_type = [], dict[type, int]()
        for array in arrays:
            found = by_type.get(type(array))
            if found is None:
                found = _current_stream(array, self.device)
                if found is not None and (is_tensor(array) or _is_cupy(array)):
                    by_type[type(array)] = found  # a library has one current stream for all its arrays
            own.append(found)
        known = [s for s in own if s is not None]
        call = _number(stream) if stream is not None else known[0] if known else 0
        for array, s in zip(arrays, own, strict=True):
            if s is None and hasattr(array, "__dlpack__"):
                _export(array, call or _LEGACY)  # its library puts its work so far before ours
        return (call, *(s for s in dict.fromkeys(known) if (s or _LEGACY) != (call or _LEGACY)))

    def is_capturing(self, stream: Any) -> bool:
        """See Memory. CuPy and torch are asked for their current streams."""
        gpu = cuda_libraries()
        found = {_number(stream)} if stream is not None else {int(gpu.cupy.cuda.get_current_stream(self.device).ptr)}
        torch = sys.modules.get("torch")
        if stream is None and torch is not None and torch.cuda.is_initialized():
            found.add(int(torch.cuda.current_stream(self.device).cuda_stream))
        with translated, on_device(self.device):  # the legacy default stream cannot be captured
            return any(gpu.runtime.streamIsCapturing(each) for each in found - {0, _LEGACY})

    def first_nonfinite(self, values: Values) -> int | None:
        """Search on the GPU, by a kernel of qccl's: kernels of CuPy need the headers of CUDA's toolkit."""
        if values.count == 0:
            return None
        gpu, first = cuda_libraries(), ctypes.c_uint64(_NONE)
        blocks = min(-(-values.count // THREADS), _SCAN_BLOCKS)
        with translated, on_device(self.device):
            found = gpu.cupy.cuda.alloc(ctypes.sizeof(first))
            gpu.runtime.memcpy(found.ptr, ctypes.addressof(first), ctypes.sizeof(first), HOST_TO_DEVICE)
            arguments = (
                *(ctypes.c_uint64(values.address), ctypes.c_uint64(values.count)),
                *(ctypes.c_uint32(values.dtype.itemsize), ctypes.c_uint32(EXPONENT_BITS[values.dtype.name])),
                *(ctypes.c_uint64(found.ptr), ctypes.c_uint32(blocks)),
            )
            pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
            kernel, shape = kernels(self.device, [NONFINITE_KERNEL])[NONFINITE_KERNEL], (blocks, 1, 1, THREADS, 1, 1)
            gpu.driver.launchKernel(kernel, *shape, 0, 0, ctypes.addressof(pointers), 0)
            gpu.runtime.streamSynchronize(0)
            gpu.runtime.memcpy(ctypes.addressof(first), found.ptr, ctypes.sizeof(first), DEVICE_TO_HOST)
        return None if first.value == _NONE else first.value

    def _check_device(self, view: Any, what: str) -> None:
        if view.device_type not in (_CUDA, _CUDA_MANAGED):
            where = _DEVICES.get(view.device_type, f"memory of DLPack's device type {view.device_type}")
            raise InvalidBufferError(
                f"{what} is in {where}, but this communicator works on GPU {self.device}; copy it there, or make the "
                f'communicator with qccl.init(backend="host")'
            )
        if view.device_type == _CUDA and view.device_id != self.device:
            raise self._elsewhere(what, view.device_id)

    def _is_known(self, address: int, nbytes: int, writes: bool) -> bool:
        """Whether _check_memory() has allowed an address whose allocation still lives.

        The driver's BUFFER_ID tells: no later allocation gets the same one.
        """
        if (checked := self._checked.get(address)) is None or address + nbytes > checked[0]:
            return False
        driver = cuda_libraries().bindings
        buffer_id = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        status, number = driver.cuPointerGetAttribute(buffer_id, address)
        return not status and number == checked[1]

    def _check_memory(self, address: int, nbytes: int, what: str) -> None:
        """Ask the driver about an address. Raises InvalidBufferError."""
        if nbytes == 0 or self._is_known(address, nbytes, True):
            return
        driver = cuda_libraries().bindings
        attribute = driver.CUpointer_attribute
        wanted = [
            attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
            attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID,
        ]
        with on_device(self.device):  # a thread that has made no call yet has no context
            status, found = driver.cuPointerGetAttributes(len(wanted), wanted, address)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise InvalidBufferError(f"{what} {address:#x} is not memory that CUDA knows ({status.name})")
        kind, device, managed, start, size, number = (int(each) for each in found)
        if kind != int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE) and not managed:
            raise InvalidBufferError(
                f"{what} {address:#x} is host memory, or unknown to CUDA; this communicator works on GPU {self.device}"
            )
        if device != self.device and not managed:
            raise self._elsewhere(what, device)
        if size and not start <= address <= address + nbytes <= start + size:
            raise InvalidBufferError(
                f"{what}: the call uses {nbytes} bytes from {address:#x}, but the allocation has {size} bytes from "
                f"{start:#x}; pass a smaller count or another pointer"
            )
        if size and number:
            if len(self._checked) >= _CHECKED:
                self._checked.clear()
            self._checked[address] = start + size, number

    def _elsewhere(self, what: str, device: int) -> InvalidBufferError:
        return InvalidBufferError(
            f"{what} is on GPU {device}, but this communicator works on GPU {self.device}; copy it there"
        )


def _view(array: Any) -> _host.View | None:
    """The memory of an array, or None without ``__dlpack__``, without an order of streams: each call orders them.

    Libraries that do not know the stream -1, "no order", are told the default stream; JAX would take -1 for a stream.
    """
    if not hasattr(array, "__dlpack__"):
        return None
    return _export(array, _NO_ORDER if is_tensor(array) or _is_cupy(array) else _LEGACY)


def _export(array: Any, stream: int) -> _host.View:
    """The memory of an array. Its library orders its work so far before ``stream``, one of DLPack's numbers."""
    return _host.describe(array, stream)


def _by_interface(array: Any) -> tuple[_View | None, str]:
    try:
        interface = array.__cuda_array_interface__
    except Exception as error:
        return None, str(error)
    if interface.get("mask") is not None:
        return None, "it has a mask"
    shape, typestr = tuple(interface["shape"]), interface["typestr"]
    address, readonly = interface["data"]
    strides = interface.get("strides") if typestr in _ELEMENTS else None  # other types are refused later
    if strides is None:
        elements = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    else:
        itemsize = int(typestr[2:])
        if any(stride % itemsize for stride in strides):  # for example a field of a packed structure
            return None, f"its strides, {strides} bytes, are not multiples of the {itemsize} bytes of an element"
        elements = tuple(stride // itemsize for stride in strides)
    return _View(address, shape, elements, _ELEMENTS.get(typestr, typestr), readonly), ""


def _is_cupy(array: Any) -> bool:
    return isinstance(array, cuda_libraries().cupy.ndarray)


def _current_stream(array: Any, device: int) -> int | None:
    """The current stream of the library that made ``array``, or None if the library does not say."""
    if is_tensor(array):
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if _is_cupy(array):
        return int(cuda_libraries().cupy.cuda.get_current_stream(device).ptr)
    if hasattr(array, "__cuda_array_interface__"):
        try:
            stream = array.__cuda_array_interface__.get("stream")
        except Exception:
            return None
        return None if stream is None else int(stream)
    return None


def _number(stream: Any) -> int:
    """The number of a stream, from a number or an object with __cuda_stream__ (or torch's cuda_stream, CuPy's ptr)."""
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    if hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__
        return int((found() if callable(found) else found)[1])
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise ArgumentError(
        f"stream={stream!r} is not a CUDA stream; pass its address as an integer (0: the legacy default stream), or an "
        f"object with __cuda_stream__"
    )
