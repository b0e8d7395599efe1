"""run_ranks: threads as ranks."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import qccl
from qccl.base.errors import ArgumentError, PeerLost


def test_results_in_rank_order():
    assert qccl.run_ranks(4, lambda comm: (comm.rank, comm.size)) == [(r, 4) for r in range(4)]


def test_the_first_failure_is_raised_with_its_rank_and_the_others_end():
    seen, before = {}, set(threading.enumerate())  # with those that other tests have left

    def run(comm):
        if comm.rank == 2:
            raise ZeroDivisionError("on purpose")
        try:
            comm.quantized_allreduce(np.ones(10, np.float32))
        except PeerLost as error:
            seen[comm.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError, match="on purpose") as info:
        qccl.run_ranks(4, run, timeout=20)
    assert info.value.__notes__ == ["raised on rank 2 of 4"]
    assert sorted(seen) == [0, 1, 3] and all("on purpose" in text for text in seen.values())
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ") and t not in before]


def test_refusals():
    with pytest.raises(ArgumentError, match="at least 1 rank"):
        qccl.run_ranks(0, lambda comm: None)
    with pytest.raises(ArgumentError, match="timeout"):
        qccl.run_ranks(1, lambda comm: None, timeout=0)


@pytest.mark.processes
def test_a_process_ends_while_a_rank_gives_up():
    """As after Ctrl-C. A thread that came back from native code then would end the process by abort()."""
    script = """
import threading, time
import numpy as np, qccl
from qccl.engine.host import shutdown

shutdown._FLUSH_SECONDS = 0.5
failing = threading.Event()

def run(comm):
    if comm.rank == 1:
        comm.quantized_allreduce(np.ones(1000, np.float32), async_op=True)
        failing.set()
        comm.abort("the other rank does not listen any more")
    threading.Event().wait()

threading.Thread(target=qccl.run_ranks, args=(2, run), daemon=True).start()
failing.wait()
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
