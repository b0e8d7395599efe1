"""The start of threads: exceptions from other threads, and systems that give no further thread."""

from __future__ import annotations

import _thread
import ctypes
import re
import threading
from pathlib import Path

import numpy as np
import patience
import pytest
from thread_ranks import on_ranks

import qccl

COUNT = 100_000


class Stop(BaseException):
    """An exception from another thread."""


@pytest.fixture
def starting(monkeypatch):
    """Let a function be called after each start of a thread, by the thread that starts it; it gets the usual result."""
    usual, after = _thread.start_new_thread, []

    def start(*arguments):
        result = usual(*arguments)
        for function in after:
            function()
        return result

    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(threading, "_start_new_thread", start, raising=False)  # CPython 3.11
    return after


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the thread that was hit
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_for_a_caller_whose_progress_thread_starts(starting):
    """CPython 3.11 gives it to the thread that starts. The call ends in either case."""
    armed: list[int] = []
    ended = threading.Event()
    found: list[object] = []

    def interrupt():
        if threading.get_ident() in armed:
            armed.clear()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Stop))

    def call(comm):
        x = np.ones(COUNT, np.float32)
        comm.barrier()
        if comm.rank == 0:
            armed.append(threading.get_ident())
        try:
            return comm.quantized_allreduce(x, codec="none", async_op=True).wait()[0]
        except (Stop, qccl.PeerLost) as error:
            return type(error)

    def run():
        found.extend(qccl.run_ranks(2, call, timeout=20))
        ended.set()

    starting.append(interrupt)
    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(patience.Limit(30).left()), "a call did not end"
    assert found in ([2.0, 2.0], [Stop, qccl.PeerLost]) and not armed


@on_ranks(2)
def test_a_system_that_gives_no_further_thread(comm, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("can't start new thread")

    x = np.ones(COUNT, np.float32)
    comm.barrier()
    if comm.rank == 0:
        text = r"'qccl progress' cannot be started .*see ulimit -u"
        with monkeypatch.context() as patch, pytest.raises(qccl.EngineError, match=text):
            patch.setattr(_thread, "start_new_thread", refuse)
            patch.setattr(threading, "_start_new_thread", refuse, raising=False)
            comm.quantized_allreduce(x, async_op=True)
        with pytest.raises(qccl.EngineError, match="failed earlier"):
            comm.barrier()
        return
    with pytest.raises(qccl.QcclError, match=r"rank 0 gave up: .*the thread"):
        for _ in range(2):  # rank 0 may have sent all of the first one
            comm.quantized_allreduce(x)


def test_every_thread_is_started_so():
    """The command line aside, whose threads are started outside of calls."""
    package = Path(qccl.__file__).parent
    texts = {path.relative_to(package): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    found = [
        f"{path}: {line}"
        for path, text in texts.items()
        for line in re.findall(r".*(?:thread|timer|Thread\(.*\))\.start\(\)", text)
        if path.parts[0] != "bench" and path.name != "threads.py"
    ]
    assert found == []
