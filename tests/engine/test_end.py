"""A communicator's end and its call numbers: one object keeps each, whoever fails, closes or forks."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl
from qccl.base.errors import ArgumentError, EngineError, PeerLost
from qccl.engine.base import Numbers
from qccl.engine.end import End

SOURCES = sorted((Path(__file__).parents[2] / "qccl").rglob("*.py"))
#: besides end.py: errors of one run, of one step of a training, and the reason that ranks in one process pass on
OTHER_FAILURES = {"engine/callbacks.py", "torch/compression.py", "transports/loopback.py"}


def test_the_first_failure_counts():
    end, first = End(0), PeerLost("first")
    assert not end.is_over and end.check() is None
    assert end.fail(first) is first and end.fail(EngineError("second")) is first
    assert end.is_over and end.failure is first and not end.closed
    with pytest.raises(PeerLost, match="first"):
        end.check()


def test_later_calls_raise_an_error_like_the_failure():
    end, first = End(0), EngineError("out of paper", 7)
    end.check_usable()
    end.fail(first)
    with pytest.raises(EngineError, match=r"failed earlier.*out of paper") as caught:
        end.check_usable()
    assert caught.value.code == 7 and caught.value.__cause__ is first


def test_threads_that_fail_at_once_agree():
    for _ in range(50):
        end, begin = End(0), threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda n, e=end, b=begin: (b.wait(60), e.fail(PeerLost(str(n))))[1], range(4)))
        assert {*map(id, found)} == {id(end.failure)}


def test_what_is_closed_does_not_fail():
    end = End(0)
    end.close()
    end.fail(PeerLost("late"))
    assert end.is_over and end.failure is None
    with pytest.raises(ArgumentError, match="closed"):
        end.check()


@pytest.mark.parametrize("failure", [None, PeerLost("before")])
def test_a_child_of_fork_has_an_end_of_its_own(failure):
    end = End(3)
    if failure is not None:
        end.fail(failure)
    if (pid := os.fork()) == 0:
        found = end.is_forked and end.has_left and end.fail(PeerLost("later"))
        os._exit(0 if "forked by rank 3" in str(found) and found is end.failure else 1)
    assert os.waitpid(pid, 0)[1] == 0 and end.failure is failure


def test_numbers_of_calls():
    numbers = Numbers()
    assert [numbers.take(), numbers.take()] == [(0, 0), (1, 1)]
    numbers.go_back(1)  # a barrier
    numbers.go_back(5)
    assert numbers.take() == (2, 1)
    numbers.go_on(10)
    assert numbers.offset == 8 and numbers.take() == (3, 10)


@on_ranks(2, timeout=60)
def test_a_wait_that_ends_fails_every_call_with_the_same_error(comm, missed: threading.Event):
    """Those under way, and the next ones."""
    if comm.rank:
        assert missed.wait(60)
        return
    works = [comm.quantized_allreduce(np.ones(10, np.float32), async_op=True) for _ in range(2)]
    with pytest.raises(qccl.CollectiveTimeout, match="wait") as caught:
        works[0].wait(0.1)
    assert [work.exception() for work in works] == [caught.value] * 2
    with pytest.raises(qccl.CollectiveTimeout, match="failed earlier"):
        comm.barrier()
    missed.set()


def sources_with(pattern: str) -> set[str]:
    """The files below qccl/ in which it is found."""
    return {str(path.relative_to(SOURCES[0].parent)) for path in SOURCES if re.search(pattern, path.read_text())}


def test_nobody_else_keeps_a_failure_or_numbers_calls():
    assert sources_with(r"\bself\._?failure\b[^=\n]* = ") == OTHER_FAILURES | {"engine/end.py"}
    assert not sources_with(r"\bnumbers\.\w+ [+-]?= ")
