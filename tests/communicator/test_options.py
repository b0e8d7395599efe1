"""The keywords of collectives: their defaults, those of others, and what help() shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

import qccl
from qccl.collectives import AllGatherSpec
from qccl.communicator.options import ArrayOptions, CommonOptions, Method, StateArrayOptions


def declare(options: type) -> tuple[Method, Callable[..., object]]:
    method = Method(AllGatherSpec)

    @method.accepts(options)
    def call(x, root=0, **options):
        return x

    return method, call


def test_defaults_are_replaced_by_what_a_call_gives():
    method, _ = declare(StateArrayOptions)
    found, own = method.complete({"codec": "none", "lr": 0.5, "root": 3})
    assert (found["codec"], found["lr"], found["key"], found["nonfinite"]) == ("none", 0.5, None, "propagate")
    assert own == {"root": 3}
    assert method.complete({})[0]["codec"] == "minmax8", "defaults stay"


def test_keywords_of_other_collectives():
    with pytest.raises(TypeError, match=r"call\(\) got an unexpected keyword argument 'lr'$"):
        declare(ArrayOptions)[0].complete({"lr": 0.5})

    def run(comm: qccl.Communicator) -> None:
        with pytest.raises(TypeError, match=r"quantized_broadcast\(\) got an unexpected keyword argument 'lr'"):
            comm.quantized_broadcast(None, lr=1)

    qccl.run_ranks(1, run)


def test_signatures_show_the_keywords():
    shown = inspect.signature(declare(CommonOptions)[1]).parameters
    assert list(shown) == ["x", "root", "codec", "async_op", "chunk", "timeout"]
    assert shown["codec"].default == "minmax8" and shown["timeout"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "lr" in inspect.signature(qccl.Communicator.quantized_allreduce).parameters
