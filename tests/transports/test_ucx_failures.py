"""Ranks over UCX that close, end, are killed or stop: the others name them, and go on without them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import patience
import pytest
from rank_calls import error_of
from rank_forks import check, on_processes, run
from start_ranks import NETWORKS, needs_ucx
from ucx_ranks import call_until_it_fails, check_sum, connect, next_group, processes_of, wait_for_the_end

import qccl

pytestmark = [pytest.mark.starts_first, pytest.mark.processes, needs_ucx]


# -- close() ---------------------------------------------------------------------------------------------------------


@on_processes(3, over=NETWORKS)
def test_a_rank_that_closes_early(*where) -> None:
    """A rank that closes early is not lost for those that are still closing, and calls are over."""
    for _ in range(3):
        comm = connect(*where)
        comm.quantized_allreduce(np.ones(10, np.float32))
        time.sleep(0.1 * comm.rank)
        comm.close()


@on_processes(3, over=NETWORKS)
def test_a_process_that_ends_without_close(*where) -> None:
    """The process ends without close(), with a call behind it."""
    comm = connect(*where)
    assert (comm.quantized_allreduce(np.ones(1000, np.float32)) == comm.size).all()


@on_processes(3, over=NETWORKS)
def test_a_call_after_another_ranks_close(*where) -> None:
    """A call after another rank's close() names that rank, and does not say that it was lost."""
    comm = connect(*where)
    processes = processes_of(comm)
    if comm.rank == 1:
        comm.timeout = 0.5  # close() waits so long for the others
        comm.close()
        wait_for_the_end(processes[0], processes[2])
        return
    time.sleep(1)
    error = call_until_it_fails(comm)
    assert isinstance(error, qccl.PeerLost) and "rank 1 has closed its communicator" in str(error), error
    assert "lost" not in str(error), error


@on_processes(3, over=NETWORKS)
def test_the_reason_of_a_rank_that_gives_up(*where) -> None:
    """The reason of a rank that gives up reaches the others, in whatever call they are."""
    for call in ("quantized_allreduce", "barrier", "allgather"):
        comm = connect(*where)
        given = {"quantized_allreduce": [np.ones(10, np.float32)], "barrier": [], "allgather": [b""]}[call]

        def work(comm: qccl.Communicator = comm, call: str = call, given: list = given) -> None:
            with comm:
                if comm.rank == 0:
                    raise ZeroDivisionError("a reason of its own")
                getattr(comm, call)(*given)

        text = error_of(work, qccl.PeerLost if comm.rank else ZeroDivisionError)
        assert "a reason of its own" in text, text


@on_processes(3)
def test_a_rank_that_stays_longer_than_the_others_wait(*where) -> None:
    """They leave, and so does it: that is no failure."""
    comm = connect(*where)
    comm.quantized_allreduce(np.ones(10, np.float32))
    comm.barrier()
    comm.timeout = 0.5  # close() waits so long
    if comm.rank == 1:
        time.sleep(2)
    comm.close()


@on_processes(2)
def test_an_all_gather_has_a_deadline(*where) -> None:
    """An all-gather has a deadline, too; a communicator that timed out is of no further use."""
    comm = connect(*where)
    processes = processes_of(comm)
    if comm.rank == 0:
        comm.timeout = 0.3
        for expected in (
            "rank 0 reached the deadline of allgather()",
            "this communicator failed earlier and is unusable",
        ):
            text = error_of(lambda: comm.allgather(b"x"), qccl.CollectiveTimeout)
            assert text.startswith(expected), text
    else:
        wait_for_the_end(processes[0])


@on_processes(3)
def test_a_process_that_ends_while_the_others_call(*where) -> None:
    """They hear of it at once, and why."""
    comm = connect(*where)
    comm.quantized_allreduce(np.ones(1000, np.float32))
    if comm.rank != 1:
        error = call_until_it_fails(comm)
        assert isinstance(error, qccl.PeerLost) and "rank 1 ended its process" in str(error), error


@on_processes(3)
def test_a_child_that_ends_while_a_call_is_under_way(*where) -> None:
    """It cannot use the call, and does not disturb it."""
    x = np.ones(1 << 20, np.float32)
    with connect(*where) as comm:
        work = comm.quantized_allreduce(x, async_op=True)
        if not (child := os.fork()):
            try:
                work.wait()
            except qccl.EngineError:
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        work.wait()
        assert (x == 3).all()
        comm.barrier()


# -- losses ----------------------------------------------------------------------------------------------------------


def dies(*where) -> None:
    """Rank 1 is killed in the middle; the others name it, and are the next group."""
    comm = connect(*where)
    comm.quantized_allreduce(np.ones(10, np.float32))
    if comm.rank == 1:
        comm.quantized_allreduce(np.ones(200_000, np.float32), op="avg")  # the others have ended the first call then
        os.kill(os.getpid(), signal.SIGKILL)
    error = call_until_it_fails(comm)
    assert isinstance(error, qccl.PeerLost) and "rank 1 was lost" in str(error), error
    with comm.shrink() as rest:
        assert (rest.rank, rest.size) == (comm.rank // 2, 2)
        check_sum(rest)


def dies_in_a_transfer(*where) -> None:
    """Rank 1 is killed while the ranks move 16 MiB; the others name it before their deadline."""
    comm = connect(*where)
    x = np.ones(4 << 20, np.float32)
    for _ in range(2):
        begin = time.monotonic()
        comm.quantized_allreduce(x, op="avg")
        seconds = time.monotonic() - begin
    if comm.rank == 1:
        threading.Timer(seconds / 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    error = call_until_it_fails(comm, x.size)
    assert isinstance(error, qccl.PeerLost) and "rank 1 was lost" in str(error), error


@pytest.mark.parametrize("network", [pytest.param("shared memory", marks=pytest.mark.quick), *list(NETWORKS)[1:]])
def test_a_rank_that_is_killed_is_named_and_the_others_go_on(network):
    found = run(3, dies, **NETWORKS[network])
    check(found, but=1)
    assert found[1].status == -signal.SIGKILL
    assert max(each.at for each in found) - found[1].at < 8, "the survivors have a keepalive of a second"


@pytest.mark.parametrize("body", [dies, dies_in_a_transfer])
def test_a_rank_that_is_killed_and_not_reaped_is_named(body):
    """UCX's keepalive takes it to be alive, and the others would wait for their deadline of 30 s."""
    found = run(3, body, unreaped=1)
    check(found, but=1)
    assert found[1].status == -signal.SIGKILL


@on_processes(3, over=NETWORKS, lost=1)
def test_a_rank_that_stops_meets_the_deadline(*where) -> None:
    """Rank 1 stops; the others meet their deadline, and end."""
    comm = connect(*where)
    comm.quantized_allreduce(np.ones(10, np.float32))
    comm.timeout = 1.0 * patience.factor()
    if comm.rank == 1:
        comm.quantized_allreduce(np.ones(200_000, np.float32), op="avg")
        os.kill(os.getpid(), signal.SIGSTOP)
    error = call_until_it_fails(comm)
    assert isinstance(error, qccl.CollectiveTimeout | qccl.PeerLost) and "rank 1" in str(error), error


@on_processes(3, over=NETWORKS)
def test_a_rank_that_stops_for_good_gets_no_group(*where) -> None:
    """The others go on without a rank that stops. When it continues, it gets no group, and cannot disturb theirs."""
    comm = connect(*where)
    rank, processes = comm.rank, processes_of(comm)
    comm.timeout = 1.0 * patience.factor()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        error = call_until_it_fails(comm)
        refused = error_of(lambda: comm.shrink(timeout=2 * patience.factor()), (qccl.PeerLost, qccl.CollectiveTimeout))
        assert "rank" in refused, (error, refused)
        return
    error = call_until_it_fails(comm)
    assert isinstance(error, qccl.CollectiveTimeout | qccl.PeerLost), error
    first = comm.shrink(timeout=1 * patience.factor())
    first.timeout = 20.0 * patience.factor()
    assert (first.rank, first.size) == (rank // 2, 2)
    check_sum(first)
    if rank == 0:
        os.kill(processes[1], signal.SIGCONT)
    for _ in range(30):
        check_sum(first)
        time.sleep(0.1)
    second = next_group(first)
    assert (second.rank, second.size) == (rank // 2, 2)
    check_sum(second)
    second.close()
