"""Failures of hierarchical_allreduce(inter='host') on fake GPUs, and calls that are refused."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import fake_cuda
import numpy as np
import patience
import pytest
from cuda_ranks import captured, values
from staging_ranks import exact, ranks, staged
from start_ranks import start

import qccl
from qccl.collectives import spec_of_plan
from qccl.engine.cuda import libraries
from qccl.transports.loopback import LoopbackGroup

#: of calls that end because of another rank: longer than that one waits for their ends
NEVER = 10_000.0

# -- faults ------------------------------------------------------------------------------------------------------------


def under_way(device: fake_cuda.World, other: Callable[[qccl.Communicator], Any], seconds: float) -> list[Any]:
    """Rank 0 calls, and rank 1 does something else; both results, and afterwards all threads have ended.

    Rank 1 is still there when rank 0 gets its error, and waits a minute for it.
    """
    raised = threading.Event()

    def run(comm: qccl.Communicator) -> Any:
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        staged(comm, x)
        comm.check()
        comm.barrier()
        if comm.rank == 1:
            found = other(comm)
            assert raised.wait(60)
            return found
        work = staged(comm, x, async_op=True, timeout=seconds)
        with pytest.raises(qccl.QcclError) as caught:
            work.synchronize()
        raised.set()
        for call in (lambda: staged(comm, x), comm.check, comm.barrier):
            with pytest.raises(type(caught.value), match="earlier"):
                call()
        return type(caught.value), str(caught.value)

    found = ranks(2, run)
    device.finish(lambda: device.is_idle(0))
    assert not fake_cuda.remaining_threads(device)
    return found


def test_a_peer_that_gives_up(world, cupy):
    [(kind, text), _] = under_way(world, lambda comm: comm.abort("on purpose"), NEVER)
    assert kind is qccl.PeerLost and "on purpose" in text


def test_a_peer_that_stays_away(world, cupy):
    [(kind, text), _] = under_way(world, lambda comm: None, 0.4)
    assert kind is qccl.CollectiveTimeout and "hierarchical_allreduce" in text


def test_a_peer_that_sends_something_else(world, cupy):
    """As much as can be seen: a message of another length."""

    def other(comm: qccl.Communicator) -> Any:
        x = fake_cuda.array(values(comm.rank, 2000), comm.rank)
        how = {"node_ids": [0, 1], "inter": "host"}
        comm._session.engine._consistency._checked.add(
            spec_of_plan("hierarchical_allreduce", 2000, "float32", "minmax8", 256, how).text()
        )
        with pytest.raises(qccl.QcclError):
            staged(comm, x, async_op=True, timeout=NEVER).synchronize()

    [(kind, text), error] = under_way(world, other, NEVER)
    assert kind in (qccl.MismatchError, qccl.PeerLost) and error is None
    assert "bytes to rank" in text


def test_a_transport_that_fails(world, cupy):
    """What the courier's thread meets is the call's error, and of the calls to come."""

    def run(comm: qccl.Communicator) -> Any:
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        staged(comm, x)
        comm.check()

        def poll(*, idle: int) -> Any:
            raise qccl.PeerLost("a node has gone") if comm.rank else ZeroDivisionError("a fault of ours")

        comm.transport.host.poll = poll
        with pytest.raises(qccl.QcclError) as caught:
            staged(comm, x, async_op=True).synchronize()
        with pytest.raises(type(caught.value), match="earlier"):
            staged(comm, x)
        return type(caught.value), str(caught.value)

    first, second = ranks(2, run)
    assert second[0] is qccl.PeerLost and "a node has gone" in second[1]
    assert "ZeroDivisionError" in first[1] or "a node has gone" in first[1]
    world.finish(lambda: world.is_idle(0) and world.is_idle(1))


def test_streams_go_on_after_a_failure_only_when_it_is_known():
    """Or what they do then could be taken for a result."""
    from qccl.base.deadline import Deadline
    from qccl.engine.cuda.proxy import HostProxy, ProxyMessage, TransferBatch

    transport = LoopbackGroup(2).transport(0)
    transport.poll = lambda *, idle: (_ for _ in ()).throw(qccl.PeerLost("a node has gone"))
    words, seen, failed = memoryview(bytearray(8)).cast("I"), list[int](), threading.Event()

    def on_failure(error: qccl.QcclError) -> None:
        time.sleep(0.1)
        seen.append(words[1])
        failed.set()

    proxy = HostProxy(transport, on_failure)
    data = np.zeros(8, np.uint8)
    message = ProxyMessage(1, False, data.ctypes.data, 8, ((0, 0),), 1)
    words[0] = 1
    proxy.begin(
        TransferBatch([message], words, 1, call=0, call_text="a call", deadline=Deadline(10, counts=False), kept=data)
    )
    assert failed.wait(60)
    proxy.close(Deadline(10))
    assert seen == [0] and words[1] == 1, "and then they do go on"


def test_aborting_lets_the_streams_go_on(world, cupy):
    """Nobody answers, and the caller's stream waits for the call: after abort() it ends all the same."""
    left = threading.Barrier(2)

    def run(comm: qccl.Communicator) -> Any:
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        staged(comm, x)
        comm.check()
        comm.barrier()
        left.wait(60)
        if comm.rank == 0:
            staged(comm, x)
            time.sleep(0.1)
            assert not world.is_empty(0)
            comm.abort("enough")
            libraries.cuda_libraries().runtime.deviceSynchronize()
            with pytest.raises(qccl.PeerLost, match="enough"):
                comm.check()
        return "done"

    assert ranks(2, run)[0] == "done"


def test_closing_waits_for_the_last_messages(world, cupy):
    """A rank that has its result may still have to send: the others get theirs although it leaves at once."""

    def run(comm: qccl.Communicator) -> bytes:
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        staged(comm, x, algorithm="two_round")
        if comm.rank:
            time.sleep(0.3)
        comm.check()
        comm.close()
        return x.get().tobytes()

    assert ranks(3, run) == exact(3, algorithm="two_round") * 3
    assert not fake_cuda.remaining_threads(world)


@pytest.mark.mpi
def test_a_process_that_ends_has_sent_what_others_wait_for():
    ended = start(3, "tests/ranks/staged_exit.py", limit=60)
    found = re.findall(r"rank (\d) has ([0-9a-f]{64})", ended.output)
    assert ended.status == 0 and sorted(rank for rank, _ in found) == ["1", "2"], ended.output
    assert found[0][1] == found[1][1] and ended.seconds < 30 * patience.factor()


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_graphs_are_refused(world, cupy):
    one_at_a_time = threading.Lock()

    def run(comm: qccl.Communicator) -> bytes:
        with libraries.on_device(comm.rank):
            x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
            staged(comm, x)
            comm.check()
            comm.barrier()
            with one_at_a_time, pytest.raises(qccl.ArgumentError, match="cannot be put into a graph"):
                captured(cupy, comm, lambda stream: staged(comm, x, stream=stream))
            comm.barrier()
            staged(comm, x)
            comm.check()
            return x.get().tobytes()

    first, second = ranks(2, run)
    assert first == second


def test_a_communicator_without_a_way_between_hosts(world, cupy):
    from cuda_ranks import ranks as over_nccl_alone

    def run(comm: qccl.Communicator) -> bytes:
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        for layout in ("leader", "sharded"):  # on all ranks, also those that would send nothing
            with pytest.raises(qccl.ArgumentError, match=r"make it over MPI.*from_mpi"):
                comm.hierarchical_allreduce(x, node_ids=[0, 0, 1], layout=layout, inter="host")
        comm.hierarchical_allreduce(x, node_ids=[0, 0, 0], inter="host")  # one node: nothing would be staged
        comm.check()
        return x.get().tobytes()

    assert len(set(over_nccl_alone(3, run))) == 1


def test_what_the_libraries_cannot_do(world, cupy):
    def run(comm: qccl.Communicator) -> bytes:
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        comm.transport.host.is_threaded = False
        with pytest.raises(qccl.ArgumentError, match="MPI_THREAD_MULTIPLE"):
            staged(comm, x)
        comm.transport.host.is_threaded = True
        comm.barrier()
        world.no_stream_memory = True
        with pytest.raises(qccl.EngineError, match="801"):
            staged(comm, x)
        comm.barrier()
        world.no_stream_memory = False
        comm.barrier()
        staged(comm, x)
        comm.check()
        return x.get().tobytes()

    assert ranks(2, run) == exact(2) * 2


def test_ranks_that_disagree_on_the_way(world, cupy):
    def run(comm: qccl.Communicator) -> str:
        x = fake_cuda.array(values(comm.rank, 100), comm.rank)
        with pytest.raises(qccl.MismatchError, match="inter=host"):
            staged(comm, x, inter="host" if comm.rank else None)
        return x.get().tobytes() == values(comm.rank, 100).tobytes()

    assert ranks(2, run) == [True, True]
