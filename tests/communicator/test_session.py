"""Set-up calls, which a Session runs: barrier(), allgather() and split(). Who gave up, left, or raised."""

from __future__ import annotations

import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import patience
import pytest
from start_ranks import needs_ucx
from thread_ranks import on_ranks
from threads import meeting

import qccl
from qccl.base.errors import MismatchError, PeerLost, own
from qccl.meeting import regroup
from qccl.meeting.network import Network
from qccl.transports.base import renumbered
from qccl.transports.connect import connected_transport

SET_UP = {"barrier": lambda c: c.barrier(), "allgather": lambda c: c.allgather(b"1"), "split": lambda c: c.split(0)}
#: exceptions that a signal's handler may raise
RAISED = [qccl.CollectiveTimeout, qccl.EngineError, KeyboardInterrupt]


@pytest.mark.parametrize("what", SET_UP)
@on_ranks(3)
def test_a_set_up_call_hears_who_gave_up(comm, what):
    if comm.rank == 2:
        time.sleep(0.2)
        comm.abort("out of paper")
        return
    for text in ("out of paper", "failed earlier"):  # not the timeout
        with pytest.raises(PeerLost, match=text):
            SET_UP[what](comm)


@pytest.mark.parametrize("what", SET_UP)
@on_ranks(3, timeout=20)
def test_a_set_up_call_misses_who_left(comm, what):
    if comm.rank == 1:
        comm.close()
        return
    text = rf"rank 1 has closed its communicator, and rank \d called {what}\(\)|gave up"
    with pytest.raises(PeerLost, match=text):
        SET_UP[what](comm)


@pytest.mark.parametrize("what", SET_UP)
@on_ranks(2)
def test_a_set_up_call_has_a_deadline(comm, missed: threading.Event, what):
    if comm.rank:
        assert missed.wait(60)
        return
    comm.timeout = 0.3
    for text in (rf"rank 0 reached the deadline of {what}\(\)", "failed earlier and is unusable"):
        with pytest.raises(qccl.CollectiveTimeout, match=text):
            SET_UP[what](comm)
    missed.set()


def test_set_up_calls_have_their_place_among_the_others():
    def run(comm):
        x = np.ones(100, np.float32)
        comm.barrier() if comm.rank else comm.quantized_allreduce(x)

    with pytest.raises(MismatchError, match=r"rank 1 called barrier\(\)|rank 0 called allreduce"):
        qccl.run_ranks(2, run, timeout=20)


@on_ranks(2, timeout=20)
def test_calls_under_way_progress_in_set_up_calls(comm):
    x = np.ones(300_000, np.float32)
    plan = comm.plan("allreduce", x.size).bind(x)
    comm._session.engine._progress_thread = None  # nobody else drives it
    work = plan.start()
    if comm.rank:
        work.wait()
    comm.barrier()
    assert comm.allgather(bytes([comm.rank])) == [b"\0", b"\1"]
    work.wait()
    assert (x == 2).all()


def test_set_up_calls_change_no_random_numbers():
    def run(comm, more):
        x = (np.arange(5000) % 256 + comm.rank).astype(np.float32)
        found = []
        for _ in range(2):
            found.append(comm.quantized_allreduce(x, np.empty_like(x), codec="minmax2:rounding=stochastic").tobytes())
            if more:
                comm.barrier()
        return found

    found = qccl.run_ranks(2, lambda c: run(c, True))
    assert found == qccl.run_ranks(2, lambda c: run(c, False))
    assert found[0][0] != found[0][1]


@pytest.fixture(params=["ucx", "wan"])
def transport(request, monkeypatch):
    monkeypatch.setenv("QCCL_INSECURE", "1")
    if request.param == "wan":
        monkeypatch.setenv("UCX_TLS", "tcp")  # no shared memory
    return request.param


def run_over(transport, size, function):
    """As qccl.run_ranks(), over a transport that connects processes."""
    gather = meeting(size)

    def run(rank):
        made = connected_transport(transport).meet(gather(rank), 60.0, Network(is_local=True, can_share_memory=True))
        comm = qccl.Communicator.from_transport(made, 60.0)
        try:
            return function(comm)
        finally:
            comm.abort("the end of the test")
            comm.transport.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size), timeout=patience.Limit(100).left()))


def together(comm):
    """The size of the group in which the ranks that are left go on."""
    with comm.shrink(30.0) as new:
        assert new.allgather(bytes([new.rank])) == [b"\0", b"\1"]
        return new.size


@needs_ucx
@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("what", ["allgather", "split"])
@pytest.mark.parametrize("late", [False, True])
def test_an_exception_of_the_program(late, what, kind, transport):
    """The other rank hears of it at once, whatever its type, and both go on together.

    ``late``: it looks at its connections only when they have ended, and the message that says why waits there, too.
    """
    raised, gone = threading.Event(), threading.Event()

    def interrupt():
        raised.set()
        raise kind("my time limit")

    def run(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.transport.progress_hook = interrupt
            with pytest.raises(kind, match="my time limit"):
                SET_UP[what](comm)
            gone.set()
        else:
            usual = comm.transport._exchange
            comm.transport._exchange = lambda *arguments: (gone if late else raised).wait(30) and usual(*arguments)
            text = f"rank 0 gave up: {kind.__name__}: my time limit"
            with pytest.raises(PeerLost, match=text):
                SET_UP[what](comm)
        return together(comm)

    assert run_over(transport, 2, run) == [2, 2]


@needs_ucx
def test_an_exception_before_the_other_rank_connects(transport, monkeypatch):
    """The other rank finds nobody to connect with, and tells why: not that there is no network."""
    gone, usual = threading.Event(), connected_transport(transport)._connect_wire

    def interrupt(made, addresses):
        if made.rank == 0:
            raise qccl.CollectiveTimeout("my time limit")
        gone.wait(30)
        usual(made, addresses)

    def run(comm):
        comm.barrier()
        monkeypatch.setattr(connected_transport(transport), "_connect_wire", interrupt)
        if comm.rank == 0:
            with pytest.raises(qccl.CollectiveTimeout, match="my time limit"):
                comm.split(0)
            gone.set()
        else:
            with pytest.raises(PeerLost, match="rank 0 gave up: CollectiveTimeout: my time limit"):
                comm.split(0)
        monkeypatch.setattr(connected_transport(transport), "_connect_wire", usual)
        return together(comm)

    assert run_over(transport, 2, run) == [2, 2]


@needs_ucx
def test_a_rank_lost_in_a_split_has_its_number_in_the_group_that_is_split(transport, monkeypatch):
    """Ranks 1 and 2 are ranks 0 and 1 of the new group: rank 2 is lost for all ranks of the old one."""
    gone, usual = threading.Event(), connected_transport(transport)._connect_wire

    def lose(made, addresses):
        if made.size == 2 and made.rank == 0:
            raise own(PeerLost("rank 1 was lost: rank 0 has no connection to rank 1 any more", 1))
        if made.size == 2:
            gone.wait(30)
        usual(made, addresses)

    def run(comm):
        comm.barrier()
        monkeypatch.setattr(connected_transport(transport), "_connect_wire", lose)
        text = "in a new group, whose rank 1 is rank 2 here: rank 1 was lost"
        with pytest.raises(PeerLost, match=text) as caught:
            try:
                comm.split(min(comm.rank, 1))
            finally:
                if comm.rank == 1:
                    gone.set()
            comm.barrier()
        assert caught.value.rank == comm._session.end.failure.rank == 2

    run_over(transport, 3, run)


@needs_ucx
def test_errors_of_shrink_number_the_ranks_of_the_group_that_shrinks(transport, monkeypatch):
    """Ranks 1 and 2 are ranks 0 and 1 of the group of the failed attempt, and of the agreement that follows it."""
    ended, failed, alone = threading.Barrier(3), threading.Barrier(2), threading.Barrier(2)
    later, usual = threading.Event(), connected_transport(transport)._connect_wire

    def fail(made, addresses):
        if made.size == 2 and not later.is_set():
            raise PeerLost("rank 0 was lost", 0) if made.rank else MismatchError("of rank 1")
        usual(made, addresses)

    def run(comm):
        comm.barrier()
        ended.wait(60)  # a rank that aborts while another is still in barrier() fails it
        if comm.rank == 0:
            comm.abort("a test")
            comm.transport.close()
        ended.wait(60)
        if comm.rank == 0:
            return None
        kind, numbers = MismatchError, "rank 0 is rank 1 here, rank 1 is rank 2 here: of rank 1"
        if comm.rank == 2:
            kind, numbers = PeerLost, "rank 0 is rank 1 here: rank 0 was lost"
        with pytest.raises(kind, match=f"in a new group, whose {numbers}") as caught:
            comm.shrink(20.0)
        assert comm.rank == 1 or caught.value.rank == 1
        failed.wait(60)
        later.set()
        if comm.rank == 2:
            text = r"rank 0 is rank 1 here, rank 1 is rank 2 here: ranks \[0\] neither answered within 0.3 s"
            with pytest.raises(qccl.CollectiveTimeout, match=text):
                comm.shrink(0.3)
        alone.wait(60)
        return together(comm)

    monkeypatch.setattr(connected_transport(transport), "_connect_wire", fail)
    assert run_over(transport, 3, run) == [None, 2, 2]


def test_errors_of_grow_say_which_ranks_join():
    made = [PeerLost("rank 2 was lost", 2), MismatchError("rank 0 sent 3 bytes to rank 2")]
    texts = ["rank 2 joins: rank 2", "rank 0 is rank 1 here, rank 1 is rank 2 here, rank 2 joins: rank 0"]

    def run(comm):
        for error, text in zip(made, texts, strict=True):
            with (
                pytest.raises(type(error), match=f"in a new group, whose {text}") as caught,
                renumbered(comm.transport, [1, 2, None]),
            ):
                raise error
            assert getattr(caught.value, "rank", None) is None

    qccl.run_ranks(1, run)


@needs_ucx
def test_a_deadline_names_the_ranks_that_were_silent(transport):
    ended = threading.Barrier(3)

    def run(comm):
        comm.barrier()
        if comm.rank == 2:
            comm.transport._exchange = lambda *arguments: [b""] * (1 + ended.wait(60))
            with pytest.raises(struct.error):
                comm.allgather(b"x")
            return
        comm.timeout = 2.0
        text = r"rank 2 did not answer in an all-gather within 2 s|rank \d gave up: .*rank 2 did not"
        with pytest.raises(qccl.QcclError, match=text):
            comm.allgather(b"x")
        ended.wait(60)

    run_over(transport, 3, run)


@needs_ucx
def test_the_deadline_of_join_begins_before_the_library_starts(transport, monkeypatch):
    """A start that takes all of the time leaves none to call the group."""
    kind, now = connected_transport(transport), time.monotonic
    start, late = kind._start, [0.0]

    def slowly(*arguments):
        late[0] = 10.0
        return start(*arguments)

    monkeypatch.setattr(kind, "_start", slowly)
    monkeypatch.setattr(time, "monotonic", lambda: now() + late[0])
    monkeypatch.setattr(regroup, "call", lambda *arguments: pytest.fail("the group was called"))
    with pytest.raises(qccl.CollectiveTimeout, match=r"no group took this process in .* within 8.0 s"):
        qccl.join(f"{transport}://127.0.0.1:9" if transport == "wan" else "127.0.0.1:9", timeout=8.0)
