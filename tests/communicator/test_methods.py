"""Methods on arrays: lists of arrays, and sizes and places of the two arrays of a call."""

from __future__ import annotations

import collections
import re

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl

COUNT = 5000


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.ones(COUNT, np.float32), r"a single array (ndarray); pass [xs]"),
        (np.ones((3, 8), np.float32), r"a single array (ndarray); pass [xs]"),
        ({"w": np.ones(8, np.float32)}, "dict; pass [xs[name] for name in sorted(xs)]"),
        ({0: np.ones(8, np.float32)}, "dict; pass [xs[name] for name in sorted(xs)]"),
        ((np.ones(8, np.float32) for _ in range(2)), "generator; pass a list, such as list(model.parameters())"),
        ({1, 2}, "set; pass a list"),
        *(("abc", "str; pass a list"), (b"abc", "bytes; pass a list"), (bytearray(8), "bytearray; pass a list")),
        *((None, "NoneType; pass a list"), (5, "int; pass a list")),
    ],
    ids=lambda each: type(each).__name__,
)
@on_ranks(1)
def test_what_is_no_list_of_arrays(comm, wrong, text):
    """Keys, letters and rows would be taken for arrays, and the order of a set is another one on each rank."""

    def refused(what, other=""):
        start = f"{what} must be {other}a list of arrays, in the same order on all ranks, not "
        return pytest.raises(qccl.ArgumentError, match=re.escape(start + text.replace("xs", what)))

    with refused("xs"):
        comm.quantized_allreduce_coalesced(wrong)
    if wrong is not None:
        with refused("outs"):
            comm.quantized_allreduce_coalesced([np.ones(8, np.float32)], wrong)
    if not isinstance(wrong, np.ndarray | dict):  # which DiLoCo takes
        with refused("params", "an array, a dict of arrays, or "):
            qccl.DiLoCo(comm, wrong)


@on_ranks(2)
def test_lists_of_other_types_are_taken(comm):
    named = {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)}
    for xs in (tuple(named.values()), named.values(), collections.deque(named.values())):
        comm.quantized_allreduce_coalesced(xs)
    assert [float(x[0]) for x in named.values()] == [8.0, 8.0]


@on_ranks(2)
def test_out_does_not_fit(comm):
    x = np.ones(COUNT, np.float32)
    with pytest.raises(qccl.ArgumentError, match=r"5000 .* 4999"):
        comm.quantized_allreduce(x, out=np.zeros(COUNT - 1, np.float32))
    with pytest.raises(qccl.InvalidBufferError, match="float16"):
        comm.quantized_allreduce(x, out=np.zeros(COUNT, np.float16))
    with pytest.raises(qccl.ArgumentError, match="lie differently"):
        comm.quantized_allreduce(np.ones((30, 100), np.float32), out=np.ones((30, 100), np.float32, order="F"))
