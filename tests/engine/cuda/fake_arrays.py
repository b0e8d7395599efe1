"""Arrays of other libraries on a fake GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_cuda


class Interface:
    """An array of which only the array interface is known."""

    def __init__(self, array: fake_cuda.Array, **changed: Any) -> None:
        self._array = array
        self._interface = {
            "shape": array.values.shape, "typestr": "<f4", "data": (array.data.ptr, False), "version": 3,
            "strides": None, **changed,
        }  # fmt: skip

    @property
    def __cuda_array_interface__(self):
        return self._interface


class OnlyDLPack:
    """An array of a library that does not tell its stream."""

    def __init__(self, array: fake_cuda.Array) -> None:
        self._array = array
        self.orders = array.orders

    def __dlpack__(self, **arguments):
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class Tensor(OnlyDLPack):
    """What is asked of a tensor of PyTorch."""

    negated = False

    def is_neg(self):
        return self.negated

    def is_conj(self):
        return False

    def data_ptr(self):
        return self._array.data.ptr

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: 4 * self._array.size)
