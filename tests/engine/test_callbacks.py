"""The functions of a run that is over: each is called once, in order, whoever ends the run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from qccl.base.errors import EngineError
from qccl.engine.callbacks import WithCallbacks


@pytest.mark.parametrize(
    "ends", [lambda run: setattr(run, "done", True), lambda run: setattr(run, "failure", EngineError(""))]
)
def test_functions_are_called_when_a_run_is_over(ends):
    run, called = WithCallbacks(), []
    for i in range(3):
        run.add_done_callback(lambda i=i: called.append(i))
    assert not called
    ends(run)
    run.call_back()
    run.call_back()
    assert called == [0, 1, 2]
    run.add_done_callback(lambda: called.append(3))
    assert called == [0, 1, 2, 3] and not run.callbacks


def test_threads_that_end_a_run_and_add_functions_at_once():
    threads, count = 4, 200
    for _ in range(20):
        run, called, begin = WithCallbacks(), [], threading.Barrier(threads)

        def work(number, run=run, called=called, begin=begin):
            begin.wait(60)
            for i in range(count):
                run.add_done_callback(lambda i=i: called.append((number, i)))
                if i == count // 2:
                    run.done = True
                    run.call_back()

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        assert sorted(called) == [(number, i) for number in range(threads) for i in range(count)]
