"""From any array to its address, layout and element type, without a copy."""

from __future__ import annotations

import array
import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from dlpack import BFLOAT, FLOAT, Exchange, Producer

from qccl import _host


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
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


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
    x = np.zeros(4, np.float32)
    alive = weakref.ref(x)
    view = _host.describe(x)
    del x
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


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
    alive = weakref.ref(part)
    del part
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_read_only_where_the_c_functions_cannot_tell_it() -> None:
    x = np.zeros(4, np.float32)
    exchange = Exchange(x, FLOAT)
    for base, readonly in ((bytes, True), (bytearray, False), (object, False)):
        kind = type("Array", (base,), {"__dlpack_c_exchange_api__": exchange.capsule})
        view = _host.describe(kind())
        assert (view.address, view.shape, view.dtype, view.readonly) == (x.ctypes.data, (4,), "float32", readonly)
