"""From any array to its address, layout and element type, without a copy."""

from __future__ import annotations

import array
import ctypes
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from dlpack import BFLOAT, FLOAT, Exchange, Producer, check_that_a_view_keeps_the_memory

from qccl import _host


def frozen(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


MATRIX, BITS, FLOATS = np.zeros((3, 4), np.float32), np.zeros((2, 5), np.uint16), np.zeros(4, np.float32)
CTYPES = ((ctypes.c_float * 3) * 2)()


@pytest.mark.parametrize(
    ("x", "address", "expected"),  # shape, strides, element type, device and its number, whether it is read-only
    [
        (MATRIX, MATRIX.ctypes.data, ((3, 4), (4, 1), "float32", 1, 0, False)),
        (MATRIX[1:, ::2].T, MATRIX[1:].ctypes.data, ((2, 2), (2, 4), "float32", 1, 0, False)),
        (frozen(HALF := np.zeros(3, np.float16)), HALF.ctypes.data, ((3,), (1,), "float16", 1, 0, True)),
        (CTYPES, ctypes.addressof(CTYPES), ((2, 3), (3, 1), "float32", 1, 0, False)),  # no strides of its own
        (Producer(BITS, BFLOAT), BITS.ctypes.data, ((2, 5), (5, 1), "bfloat16", 1, 0, False)),
        (Producer(BITS, BFLOAT, versioned=False), BITS.ctypes.data, ((2, 5), (5, 1), "bfloat16", 1, 0, False)),
        (Producer(FLOATS, FLOAT, readonly=True), FLOATS.ctypes.data, ((4,), (1,), "float32", 1, 0, True)),
        (Producer(FLOATS, FLOAT, device=(2, 3)), FLOATS.ctypes.data, ((4,), (1,), "float32", 2, 3, False)),
    ],
    ids=["matrix", "strided", "read-only", "ctypes", "bfloat16", "unversioned", "read-only DLPack", "device"],
)
def test_arrays(x: Any, address: int, expected: tuple[Any, ...]) -> None:
    """The device is reported, and not touched."""
    view = _host.describe(x)
    found = view.shape, view.strides, view.dtype, view.device_type, view.device_id, view.readonly
    assert (view.address, found) == (address, expected)


@pytest.mark.parametrize("shape", [(), (0, 5)])
def test_scalars_and_empty_arrays(shape: tuple[int, ...]) -> None:
    assert _host.describe(np.zeros(shape, np.float32)).shape == shape


@pytest.mark.parametrize("make", [lambda: np.zeros(4, np.float32), lambda: ((ctypes.c_float * 3) * 2)()])
def test_a_view_keeps_the_memory_alive(make: Callable[[], Any]) -> None:
    check_that_a_view_keeps_the_memory(make)


@pytest.mark.parametrize(
    ("x", "name"),
    [
        (np.zeros(2), "float64"),
        (np.zeros(2, np.int32), "int32"),
        (np.zeros(2, np.uint16), "uint16"),
        (np.zeros(2, bool), "bool"),
        (np.zeros(2, np.complex64), "complex64"),
        (array.array("f", [1, 2]), "float32"),
        (bytearray(4), "uint8"),
        (memoryview(b"abcd"), "uint8"),
    ],
)
def test_other_element_types_have_a_name(x: Any, name: str) -> None:
    assert _host.describe(x).dtype == name


@pytest.mark.parametrize("x", [3, "abc", None, [1.0], np.zeros(2, "M8[s]"), np.zeros(2, [("a", "f4")])], ids=repr)
def test_no_access_is_a_type_error(x: Any) -> None:
    with pytest.raises(TypeError, match=f"a {type(x).__name__} gives no access to its memory"):
        _host.describe(x)


def test_read_only_where_the_c_functions_cannot_tell_it() -> None:
    x = np.zeros(4, np.float32)
    exchange = Exchange(x, FLOAT)
    for base, readonly in ((bytes, True), (bytearray, False), (object, False)):
        kind = type("Array", (base,), {"__dlpack_c_exchange_api__": exchange.capsule})
        view = _host.describe(kind())
        assert (view.address, view.shape, view.dtype, view.readonly) == (x.ctypes.data, (4,), "float32", readonly)


class Exporter(Producer):
    """It keeps the arguments of its exports."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exports: list[dict[str, Any]] = []

    def __dlpack__(self, **arguments: Any) -> Any:
        self.exports.append(arguments)
        return super().__dlpack__(**arguments)


class DeviceType(IntEnum):
    CUDA = 2


@pytest.mark.parametrize(
    ("device", "given"), [((1, 0), {}), ((3, 0), {}), ((2, 3), {"stream": 7}), ((13, 0), {"stream": 7}),
                          ((DeviceType.CUDA, 3), {"stream": 7})],
)  # fmt: skip
def test_a_stream_is_passed_to_the_library_of_a_gpu(device: tuple[int, int], given: dict[str, int]) -> None:
    x = np.zeros((2, 3), np.float32)
    exporter = Exporter(x, FLOAT, device=device)
    view = _host.describe(exporter, 7)
    assert exporter.exports == [{**given, "max_version": (1, 1)}]
    assert (view.address, view.shape, view.strides) == (x.ctypes.data, (2, 3), (3, 1))
    assert (view.dtype, view.device_type, view.device_id, view.readonly) == ("float32", *device, False)
    assert _host.describe(Exporter(x, FLOAT, device=device, readonly=True), 7).readonly


def test_a_stream_for_a_library_older_than_versions() -> None:
    class Old(Exporter):
        def __dlpack__(self, *, stream: int) -> Any:
            self.exports.append({"stream": stream})
            return Producer.__dlpack__(self)

    x = Old(np.zeros(4, np.float32), FLOAT, device=(2, 0), versioned=False)
    view = _host.describe(x, -1)
    assert x.exports == [{"stream": -1}] and view.device_type == 2 and not view.readonly


def test_with_a_stream_the_errors_of_the_library_are_raised() -> None:
    class Refuses(Producer):
        error: Exception

        def __dlpack__(self, **arguments: Any) -> Any:
            raise self.error

    x = Refuses(np.zeros(4, np.float32), FLOAT, device=(2, 0))
    for kind in (BufferError, TypeError, KeyError, KeyboardInterrupt):
        x.error = kind("the reason")
        with pytest.raises(kind, match="the reason"):
            _host.describe(x, 1)
    for wrong in (3, np.zeros(2, "M8[s]"), type("Array", (), {"__dlpack_device__": lambda self: (2, 0)})()):
        with pytest.raises((AttributeError, BufferError)):
            _host.describe(wrong, 1)
    wrong = type("Array", (), {"__dlpack_device__": lambda self: (2, 0), "__dlpack__": lambda self, **how: 3})()
    with pytest.raises(TypeError, match="a Array gives no access to its memory"):
        _host.describe(wrong, 1)


def test_a_view_for_a_stream_keeps_the_array_alive() -> None:
    check_that_a_view_keeps_the_memory(lambda: Exporter(np.zeros(4, np.float32), FLOAT, device=(2, 0)), 1)


def test_the_c_functions_of_a_type_where_no_order_is_wanted() -> None:
    """They order nothing, so they serve only those who give the stream -1; __dlpack__ knows pinned memory."""
    x = np.zeros(4, np.float32)
    for device, by_exchange in (((2, 3), True), ((13, 0), True), ((1, 0), False), ((3, 0), False)):
        exchange = Exchange(x, FLOAT, device=device)
        kind = type("Array", (Exporter,), {"__dlpack_c_exchange_api__": exchange.capsule})
        array = kind(x, FLOAT, device=device)
        view = _host.describe(array, -1)
        assert (view.address, view.device_type, view.device_id, view.readonly) == (x.ctypes.data, *device, False)
        assert bool(array.exports) != by_exchange
        _host.describe(array, 1)
        assert len(array.exports) == 2 - by_exchange
        alive = weakref.ref(array)
        del array
        assert alive() is not None
        del view
        assert alive() is None
