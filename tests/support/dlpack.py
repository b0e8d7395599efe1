"""A DLPack producer made by hand, for what NumPy cannot export: bfloat16, other devices, old and read-only capsules."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from qccl import _host


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# a function of its own: JAX changes the types of the one in ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)

FLOAT, BFLOAT = 2, 4


class Producer:
    """Exports the memory of ``array`` with the given element type, device and flags.

    ``versioned`` False: knows no ``max_version``, as before DLPack 1.0, and cannot say that it is read-only.
    """

    def __init__(
        self, array: np.ndarray, code: int, *, device: tuple[int, int] = (1, 0), versioned: bool = True,
        readonly: bool = False,
    ) -> None:  # fmt: skip
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        tensor = _Tensor(
            array.ctypes.data, *device, array.ndim, code, 8 * array.itemsize, 1, self._shape, self._strides, 0
        )
        self._managed: Any = _Versioned(1, 0, None, None, int(readonly), tensor) if versioned else _Managed(tensor)
        self._array, self._device, self._versioned = array, device, versioned

    def __dlpack__(self, **arguments: Any) -> Any:
        if self._versioned and "max_version" not in arguments:
            raise BufferError("only versioned capsules")
        if not self._versioned and arguments:
            raise TypeError("__dlpack__() takes no arguments")
        name = b"dltensor_versioned" if self._versioned else b"dltensor"
        return _new_capsule(ctypes.addressof(self._managed), name, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class Exchange:
    """The C functions of an array type, as DLPack 1.3 defines them: of them only the one that describes ``tensor``.

    A type has ``capsule`` as its ``__dlpack_c_exchange_api__``.
    """

    def __init__(self, array: np.ndarray, code: int, *, device: tuple[int, int] = (1, 0)) -> None:
        self._producer = Producer(array, code, device=device)
        tensor = self._producer._managed.tensor

        def describe(_: int, found: Any) -> int:
            found[0] = tensor
            return 0

        kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Tensor))
        self._describe = kind(describe)
        address = ctypes.cast(self._describe, ctypes.c_void_p).value
        self._functions = (ctypes.c_uint64 * 6)(1 | 3 << 32, 0, 0, 0, 0, address)  # version 1.3
        self.capsule = _new_capsule(ctypes.addressof(self._functions), b"dlpack_exchange_api", None)


def check_that_a_view_keeps_the_memory(make: Callable[[], Any], *stream: int) -> None:
    x = make()
    alive = weakref.ref(x)
    view = _host.describe(x, *stream)
    del x
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None
