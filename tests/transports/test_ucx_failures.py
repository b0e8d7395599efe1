"""Ranks over UCX that close, end, are killed or stop: the others name them, and go on without them."""

from __future__ import annotations

import os
import signal
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
    """It is not lost for those that are still closing; nor is a process, at last, that ends without close()."""
    for closes in (True, True, False):
        comm = connect(*where)
        assert (comm.quantized_allreduce(np.ones(1000, np.float32)) == comm.size).all()
        time.sleep(0.1 * comm.rank)
        if closes:
            comm.close()


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


@pytest.mark.parametrize("network", [pytest.param("shared memory", marks=pytest.mark.quick), *list(NETWORKS)[1:]])
def test_a_rank_that_is_killed_is_named_and_the_others_go_on(network):
    found = run(3, dies, **NETWORKS[network])
    check(found, but=1)
    assert found[1].status == -signal.SIGKILL
    seconds = max(each.at for each in found) - found[1].at
    assert seconds < 8 * patience.factor(), "the survivors have a keepalive of a second"


def test_a_rank_that_is_killed_and_not_reaped_is_named():
    """UCX's keepalive takes it to be alive, and the others would wait for their deadline of 30 s."""
    found = run(3, dies, unreaped=1)
    check(found, but=1)
    assert found[1].status == -signal.SIGKILL


@on_processes(3, over=NETWORKS)
def test_a_rank_that_stops_for_good_gets_no_group(*where) -> None:
    """The others meet their deadline, and go on without a rank that stops.

    When it continues, it gets no group, and cannot disturb theirs.
    """
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
    assert isinstance(error, qccl.CollectiveTimeout | qccl.PeerLost) and "rank 1" in str(error), error
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
