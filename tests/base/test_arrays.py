"""The caller's arrays: which are taken, from any library, and which are refused on every rank and left as they were."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl

COUNT = 5000


class OnlyDLPack:
    """An array of which only DLPack is known."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **arguments):
        return self._x.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def ramp(rank, dtype=np.float32):
    return (np.arange(COUNT) % 256 + rank).astype(dtype)


def close_to_sum(y, size, dtype=np.float32):
    exact = sum(ramp(r, np.float64) for r in range(size))
    return np.abs(y.astype(np.float64) - exact).max() < (255 * size) / 255 * 2 + (8 if dtype != np.float32 else 0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        OnlyDLPack,
        memoryview,
        lambda x: x.reshape(50, 100),
        lambda x: x.reshape(50, 100).T,
        lambda x: np.ctypeslib.as_ctypes(x.reshape(50, 100)),
    ],
    ids=["numpy", "dlpack", "buffer", "matrix", "column major", "ctypes"],
)
def test_in_place_changes_the_array_that_was_given(wrap):
    def run(comm):
        x = ramp(comm.rank)
        given = wrap(x)
        assert comm.quantized_allreduce(given) is given
        return x

    results = qccl.run_ranks(3, run)
    assert close_to_sum(results[0], 3)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_bfloat16_as_ml_dtypes_and_as_uint16_are_the_same():
    def run(comm):
        x = ramp(comm.rank, ml_dtypes.bfloat16)
        bits = x.view(np.uint16).copy()
        comm.quantized_allreduce(x)
        comm.quantized_allreduce(bits, dtype="bfloat16")
        np.testing.assert_array_equal(x.view(np.uint16), bits)
        return x

    assert close_to_sum(qccl.run_ranks(2, run)[0], 2, ml_dtypes.bfloat16)


@on_ranks(2)
def test_out_of_place_leaves_the_input_alone(comm):
    x = ramp(comm.rank)
    x.flags.writeable = False
    out = np.empty_like(x)
    assert comm.quantized_allreduce(x, out=out) is out
    np.testing.assert_array_equal(x, ramp(comm.rank))
    y = ramp(comm.rank)
    comm.quantized_allreduce(y)
    np.testing.assert_array_equal(y, out)


@on_ranks(2)
def test_ranks_with_other_orders_in_memory_disagree(comm):
    """Row-major on one rank and column-major on another would add other elements to each other."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = np.asfortranarray(x)
    comm.quantized_allreduce(y, codec="none")
    np.testing.assert_array_equal(y, 2 * x)
    with pytest.raises(qccl.MismatchError, match=r"axes \[1, 0\] of \[3, 4\]"):
        comm.quantized_allreduce(y if comm.rank else x, codec="none")


@on_ranks(2)
def test_axes_of_length_one_and_shapes_do_not_matter(comm):
    x, out = np.ones((4, 1, 5), np.float32), np.empty((1, 20), np.float32)
    comm.quantized_allreduce(x, out=out)
    comm.quantized_allreduce(np.asfortranarray(np.ones((1, 9), np.float32)), out=np.empty(9, np.float32))
    assert (out == 2).all()


def arrays():
    read_only = np.zeros(COUNT, np.float32)
    read_only.flags.writeable = False
    return {
        "float64": (np.zeros(COUNT), "float64; .* convert it"),
        "int32": (np.zeros(COUNT, np.int32), "int32"),
        "uint16": (np.zeros(COUNT, np.uint16), 'dtype="bfloat16"'),
        "strided": (np.zeros(2 * COUNT, np.float32)[::2], "contiguous"),
        "reversed": (np.zeros(COUNT, np.float32)[::-1], "contiguous"),
        "a hole": (np.zeros((30, 100), np.float32)[:, :50], "contiguous"),
        "read only": (read_only, "out="),
        "a list": ([0.0] * COUNT, "list"),
        "None": (None, "NoneType"),
        "a number": (np.float32(1), "x is read-only.* a single number"),
        "text": ("minmax4", "x is the text 'minmax4'; .* codec='minmax4'"),
    }


@pytest.mark.parametrize("which", arrays())
@on_ranks(2)
def test_arrays(comm, which):
    x, message = arrays()[which]
    with pytest.raises(qccl.InvalidBufferError, match=message):
        comm.quantized_allreduce(x)
    if which not in ("read only", "None"):  # as out they are another error, or none at all
        with pytest.raises(qccl.InvalidBufferError):
            comm.quantized_allreduce(np.zeros(COUNT, np.float32), out=x)


@on_ranks(1)
def test_an_unreadable_array_is_told_why_once(comm):
    """With the reason of its library."""

    class Broken:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **given):
            raise BufferError("it is on fire")

    for x, message in (
        ([0.0], "x is of type list, .* (it has neither __dlpack__ nor a buffer); pass"),
        (Broken(), "x is of type Broken, .* (it is on fire); pass"),
        (np.zeros(2, "M8[s]"), "x is of type ndarray, .* (DLPack only supports .*); pass"),
    ):
        pattern = message.replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(qccl.InvalidBufferError, match=pattern) as caught:
            comm.quantized_allreduce(x)
        assert str(caught.value).count("access to its memory") == 1


@on_ranks(1)
def test_masked_arrays_are_refused(comm: qccl.Communicator) -> None:
    """The values under the mask would be summed, too; an array of the type without a mask may get one later."""
    x = np.ma.array(np.ones(4, np.float32), mask=[True, False, False, True])

    for each in (x, np.ma.array(np.ones(4, np.float32))):
        for call in (comm.quantized_allreduce, comm.quantized_reduce_scatter, comm.plan("allreduce", 4)):
            with pytest.raises(qccl.InvalidBufferError, match=r"x is a masked array.* x\.filled\(0\)"):
                call(each)
    assert (comm.quantized_allreduce(x.filled(0), codec="none") == [0, 1, 1, 0]).all()
    assert (comm.quantized_allreduce(x.data, codec="none") == 1).all()
