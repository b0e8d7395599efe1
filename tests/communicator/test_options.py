"""The keywords of collectives: those that each shows, and those of others, which it refuses."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl
from qccl.communicator.calls import Collectives
from qccl.communicator.options import CallOptions


def test_every_collective_shows_the_shared_keywords_and_refuses_others() -> None:
    methods = [method for name, method in vars(Collectives).items() if not name.startswith("_")]
    pointers = [qccl.quantized_allreduce, qccl.hierarchical_allreduce, qccl.peer_exchange]
    assert len(methods) == 9
    for function in (*methods, *pointers):
        shown = inspect.signature(function).parameters
        assert {"codec", "async_op", "chunk", "timeout"} <= shown.keys() and "options" not in shown
        assert (function in methods) == ("dtype" in shown) == ("trace" in shown)
        assert shown["codec"].default == "minmax8" and shown["codec"].annotation == "CodecLike"


@on_ranks(1)
def test_every_collective_refuses_the_keywords_of_others(comm: qccl.Communicator) -> None:
    """Also where a call before had the same arguments without them."""
    x, y = np.ones(24, np.float32), np.ones(24, np.float32)
    there = x.ctypes.data, y.ctypes.data, 24, "float32", "sum", comm
    edges: dict[str, Any] = {"send_to": [], "replicas": {}}
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (comm.quantized_allreduce, (x, y), {}),
        (comm.quantized_allreduce_coalesced, ([x], [y]), {}),
        (comm.quantized_reduce_scatter, (x, y), {}),
        (comm.quantized_all_gather, (x, y), {}),
        (comm.quantized_all_to_all, (x, y), {}),
        (comm.quantized_broadcast, (x, y), {}),
        (comm.quantized_reduce, (x, y), {}),
        (comm.hierarchical_allreduce, (x, y), {}),
        (comm.peer_exchange, (x,), edges),
        (qccl.quantized_allreduce, there, {}),
        (qccl.hierarchical_allreduce, there, {}),
        (qccl.peer_exchange, (x.ctypes.data, 24, "float32", comm), edges),
    ]
    for function, arguments, own in calls:
        function(*arguments, **own)
        for wrong in {"colour", *CallOptions.__annotations__} - inspect.signature(function).parameters.keys():
            reason = rf"{function.__name__}\(\) got an unexpected keyword argument '{wrong}'"
            for value in (None, 0.5):
                with pytest.raises(TypeError, match=reason):
                    function(*arguments, **own, **{wrong: value})
    assert comm.calls == len(calls)
