"""Ctrl-C, and any other exception from outside, at each point of a call: interruptions.py says what must hold then.

The usual tests take a sample. ``scripts/test -m every_interruption`` takes every function entry of a call of each kind,
over threads and over UCX, every few instructions, and random times for ten minutes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from interruption_kinds import KINDS
from interruptions import AfterTime, Expected, Tally, every_entry, inject
from plain_ranks import free_ports
from start_ranks import needs_ucx

import qccl
from qccl.session import Session

ROOT = Path(__file__).resolve().parent.parent
#: kinds whose calls compile a plan, which runs many functions before anything is sent
LONG = tuple(name for name, kind in KINDS.items() if kind.warm == 0 or name == "trace")
SHORT = tuple(name for name in KINDS if name not in LONG)


def entries(names, **options) -> Tally:
    return qccl.run_ranks(2, lambda parent: every_entry(parent, names, **options))[0]


def check(tally: Tally, *stories: str) -> None:
    assert tally.wrong == []
    assert set(stories) <= set(tally.stories), tally.stories


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where a generator was closed
class TestAtFunctionEntries:
    @pytest.mark.parametrize("part", range(4))
    def test_sample(self, part):
        check(entries(SHORT[part::4], stride=13, first=part), "not made", "failed")

    def test_sample_of_first_calls(self):
        check(entries(LONG, stride=149, first=20), "not made", "failed")

    def test_sample_of_instructions(self):
        check(entries(("repeated", "async", "plan.start"), opcodes=True, stride=149), "not made", "failed")

    @pytest.mark.parametrize("again", [0, 3, 9])
    def test_sample_of_two_exceptions(self, again):
        """The second one ends what the first one has begun; the next use of the communicator goes on with it."""
        check(entries(("repeated", "async", "plan.run"), stride=23, first=20, again=again), "failed")

    @pytest.mark.every_interruption
    @pytest.mark.parametrize("name", KINDS)
    def test_every_one(self, name):
        check(entries((name,)), "not made", "failed")

    @pytest.mark.every_interruption
    @pytest.mark.parametrize("name", SHORT)
    def test_many_instructions(self, name):
        check(entries((name,), opcodes=True, stride=7), "not made", "failed")

    @pytest.mark.every_interruption
    @pytest.mark.parametrize("again", range(12))
    def test_two_exceptions(self, again):
        check(entries(SHORT[::3], stride=2, again=again), "failed")


def test_at_random_times_from_another_thread():
    """As PyThreadState_SetAsyncExc() raises them."""

    def run(parent):
        tally, spare, chosen = Tally(Counter(), []), [], random.Random(5)
        for name in ("repeated", "async", "plan.run", "state"):
            expected = Expected.of(parent, KINDS[name], spare)
            for _ in range(8):
                after = AfterTime(5e-6 * 400 ** chosen.random())
                tally.add(name, inject(parent, KINDS[name], after, spare=spare), expected)
        return tally

    assert qccl.run_ranks(2, run)[0].wrong == []


def over_ucx(limit: float, *arguments: str) -> None:
    where = f"127.0.0.1:{free_ports(1)[0]}"
    program = str(ROOT / "tests" / "interruption_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), where, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=limit)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(texts)


@needs_ucx
def test_sample_over_ucx():
    over_ucx(100, "entries", "31", "repeated", "async", "plan.start", "state")


@needs_ucx
def test_at_random_times_over_ucx():
    over_ucx(100, "times", "2", "1", "repeated", "async", "plan.run")


@needs_ucx
@pytest.mark.every_interruption
def test_every_entry_over_ucx():
    over_ucx(3600, "entries", "1", *SHORT)


@needs_ucx
@pytest.mark.every_interruption
def test_ten_minutes_over_ucx():
    over_ucx(1200, "times", "600", "2")


def test_a_call_that_nobody_could_settle(monkeypatch):
    """Where exceptions ended the guard's own work, too, the next use of the communicator ends the group."""
    warmed, interrupted = threading.Barrier(2), threading.Barrier(2)

    def run(comm):
        x, other = np.ones(300, np.float32), np.ones(100, np.float32)
        for _ in range(3):
            comm.quantized_allreduce(x, codec="none")
        warmed.wait(20)
        if comm.rank:
            interrupted.wait(20)
            with pytest.raises(qccl.PeerLost, match="rank 0 gave up: exceptions have ended an earlier call"):
                for _ in range(2):  # rank 0 may have sent all of the first one
                    comm.quantized_allreduce(x, codec="none")
            return
        usual = comm._session.engine.rerun

        def rerun(*arguments):
            usual(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(comm._session.engine, "rerun", rerun)
            patch.setattr(Session, "interrupted", lambda *arguments: None)
            threading.Timer(0.2, interrupted.wait).start()
            with pytest.raises(KeyboardInterrupt):
                comm.quantized_allreduce(x, codec="none")
        for use in (comm.barrier, comm.check, lambda: comm.quantized_allreduce(other)):
            with pytest.raises(qccl.PeerLost, match="exceptions have ended an earlier call"):
                use()
        assert comm.calls == 3

    qccl.run_ranks(2, run)


def test_an_exception_that_a_handler_of_a_signal_catches(monkeypatch):
    """A call in a handler that fails takes no lock from the call in whose middle it was made."""
    warmed = threading.Barrier(2)

    def run(comm):
        x = np.ones(300, np.float32)
        for _ in range(3):
            comm.quantized_allreduce(x, codec="none")
        warmed.wait(20)
        usual, refused = comm.transport.poll, []

        def poll(idle=0):
            if not refused:
                with pytest.raises(qccl.ArgumentError, match="codec"):
                    comm.quantized_allreduce(x, codec=7)
                refused.append(True)
            return usual(idle=idle)

        monkeypatch.setattr(comm.transport, "poll", poll)
        comm.quantized_allreduce(x, codec="none")
        comm.quantized_allreduce(x, codec="none")
        return x[0], refused

    assert qccl.run_ranks(2, run) == [(2.0**5, [True])] * 2
