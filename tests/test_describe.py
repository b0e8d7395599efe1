"""From any array to its address, layout and element type, without a copy."""

from __future__ import annotations

import array
import ctypes
import gc
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from dlpack import BFLOAT, FLOAT, Exchange, Producer

from qccl import _host


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


def test_numpy() -> None:
    x = np.zeros((3, 4), np.float32)
    view = _host.describe(x)
    assert (view.address, view.shape, view.strides) == (x.ctypes.data, (3, 4), (4, 1))
    assert (view.dtype, view.device_type, view.device_id, view.readonly) == ("float32", 1, 0, False)
    part = x[1:, ::2].T
    view = _host.describe(part)
    assert (view.address, view.shape, view.strides) == (part.ctypes.data, (2, 2), (2, 4))


def test_arrays_of_ctypes_have_no_strides_of_their_own() -> None:
    x = ((ctypes.c_float * 3) * 2)()
    view = _host.describe(x)
    assert (view.address, view.shape, view.strides) == (ctypes.addressof(x), (2, 3), (3, 1))
    assert (view.dtype, view.readonly) == ("float32", False)
    check_that_a_view_keeps_the_memory(lambda: ((ctypes.c_float * 3) * 2)())


def test_read_only_numpy() -> None:
    x = np.zeros(3, np.float16)
    x.flags.writeable = False
    view = _host.describe(x)
    assert (view.address, view.dtype, view.readonly) == (x.ctypes.data, "float16", True)


def test_scalar_and_empty() -> None:
    assert _host.describe(np.zeros((), np.float32)).shape == ()
    assert _host.describe(np.zeros((0, 5), np.float32)).shape == (0, 5)


@pytest.mark.parametrize("versioned", [True, False])
def test_bfloat16_through_dlpack(versioned: bool) -> None:
    x = np.zeros((2, 5), np.uint16)
    view = _host.describe(Producer(x, BFLOAT, versioned=versioned))
    assert (view.address, view.shape, view.strides) == (x.ctypes.data, (2, 5), (5, 1))
    assert (view.dtype, view.readonly) == ("bfloat16", False)


def test_read_only_through_dlpack() -> None:
    x = np.zeros(4, np.float32)
    assert _host.describe(Producer(x, FLOAT, readonly=True)).readonly
    assert not _host.describe(Producer(x, FLOAT)).readonly


def test_device_is_reported_not_touched() -> None:
    view = _host.describe(Producer(np.zeros(4, np.float32), FLOAT, device=(2, 3)))
    assert (view.device_type, view.device_id) == (2, 3)


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


def test_view_keeps_the_memory_alive() -> None:
    check_that_a_view_keeps_the_memory(lambda: np.zeros(4, np.float32))


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    view = _host.describe(x)
    assert (view.address, view.shape, view.dtype, view.readonly) == (x.data_ptr(), (3, 4), "bfloat16", False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros(4, dtype)
    view = _host.describe(x)
    assert view.address == x.unsafe_buffer_pointer()
    assert (view.shape, view.dtype, view.device_type, view.readonly) == ((4,), dtype, 1, True)


def test_torch_by_the_c_functions_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is described without a call of __dlpack__."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no C functions for DLPack")

    exports = []
    monkeypatch.setattr(torch.Tensor, "__dlpack__", lambda *arguments, **options: exports.append(arguments))
    x = torch.zeros(3, 4)
    part = x[1:, ::2].T
    view = _host.describe(part)
    assert (view.address, view.shape, view.strides) == (part.data_ptr(), (2, 2), (2, 4))
    assert (view.dtype, view.device_type, view.device_id, view.readonly) == ("float32", 1, 0, False)
    assert _host.describe(torch.zeros(())).shape == ()
    assert not exports
    with pytest.raises(TypeError, match="no access to its memory"):
        _host.describe(x.to_sparse())
    check_that_a_view_keeps_the_memory(lambda: torch.zeros(3, 4)[1:, ::2].T)


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
