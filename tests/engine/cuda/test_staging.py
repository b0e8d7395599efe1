"""hierarchical_allreduce(inter="host") on fake GPUs: codes between nodes through pinned memory and a host transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import fake_cuda
import numpy as np
import pytest
from cuda_ranks import values
from staging_ranks import exact, options, ranks, staged

import qccl
from qccl.base.deadline import Deadline
from qccl.base.dtypes import FLOAT32
from qccl.codecs import get
from qccl.transports.loopback import LoopbackGroup, LoopbackTransport

NODES = [([0, 1], 2), ([0, 0, 1, 1], 1), ([0, 1, 1], 1), ([0, 0, 1, 2, 2], 1), ([0, 1, 0, 1, 2], 1)]
NODES += [pytest.param([0, 0, 1, 1], 4, marks=pytest.mark.slow), pytest.param([0, 1, 1], 3, marks=pytest.mark.slow)]
CODEC = "minmax3:bucket=64,rounding=stochastic"


def every_call(
    comm: qccl.Communicator, node_ids: Sequence[int], array: Callable[[np.ndarray], Any], read: Callable[[Any], bytes]
) -> list[bytes]:
    """Both layouts and algorithms, one call behind the other with none waited for; what they left."""
    found = []
    for seed, (layout, algorithm, count, more) in enumerate(
        [
            ("leader", "one_shot", 5000, {"op": "avg", "chunk": 256}),
            ("sharded", "two_round", 7001, {"chunk": 320}),
            ("leader", "two_round", 3000, {"intra": "bfloat16"}),
            ("sharded", "one_shot", 4097, {"codec": "minmax8", "chunk": 128, "intra": "minmax4:bucket=64"}),
            ("sharded", "auto", 0, {}),
            ("sharded", "auto", 3, {"op": "max", "codec": "none"}),
        ]
    ):
        how = {"codec": CODEC, "layout": layout, "algorithm": algorithm, "node_ids": node_ids, "inter": "host"}
        x, out = array(values(comm.rank, count, seed)), array(np.full(count, np.nan, np.float32))
        comm.hierarchical_allreduce(x, out, **how | more)
        comm.hierarchical_allreduce(x, **how | more)
        found += [x, out]
    comm.check()
    return [read(each) for each in found]


def on_gpu(comm: qccl.Communicator, node_ids: Sequence[int]) -> list[bytes]:
    return every_call(comm, node_ids, lambda x: fake_cuda.array(x, comm.rank), lambda x: x.get().tobytes())


def on_host(node_ids: Sequence[int]) -> list[list[bytes]]:
    found = qccl.run_ranks(len(node_ids), lambda comm: every_call(comm, node_ids, lambda x: x, lambda x: x.tobytes()))
    assert all(each[::2] == found[0][::2] for each in found)  # the same bits on all ranks
    return found


@pytest.mark.parametrize(("node_ids", "seeds"), NODES, ids=str)
def test_the_hosts_bytes_whatever_the_order(node_ids, seeds, world, cupy):
    expected = on_host(node_ids)
    for seed in range(seeds):
        world.random.seed(seed)
        assert ranks(len(node_ids), lambda comm: on_gpu(comm, node_ids)) == expected


@pytest.mark.parametrize("node_ids", [[0, 1, 2], [0, 0, 1, 1]], ids=str)
def test_streams_may_share_a_queue_of_the_hardware(node_ids, world, cupy):
    """However few queues a GPU has: nothing is put behind a wait that this waits for, on any rank."""
    world.is_serial = True
    assert ranks(len(node_ids), lambda comm: on_gpu(comm, node_ids)) == on_host(node_ids)


@pytest.mark.parametrize("without", ["a message that has come", "a message that has left", "a place that is free"])
def test_each_thing_that_is_waited_for_matters(without, world, cupy, monkeypatch):
    """Rank 0's host sends late, or its device fetches late: the bytes are right, but not without the word for that."""
    from qccl.engine.cuda.proxy import HostProxy, TransferBatch
    from qccl.engine.cuda.staging import Staging

    wait, may_start, finish = Staging._wait, TransferBatch.may_start, HostProxy._finish
    received, active, is_put = list[int](), threading.Event(), threading.Event()

    def run(comm: qccl.Communicator) -> bytes:
        x = fake_cuda.array(values(comm.rank, 20_000), comm.rank)
        comm.plan("hierarchical_allreduce", 20_000, **options(comm), algorithm="one_shot").bind(x)
        comm.barrier()
        received.clear()
        is_put.clear()
        comm.barrier()
        active.set()
        work = staged(comm, x, algorithm="one_shot", async_op=True)
        if comm.rank == 0:
            is_put.set()
        work.wait()
        comm.check()
        active.clear()
        return x.get().tobytes()

    def skips(staging: Staging, stream: int, word: int, back: int) -> None:
        sends = [message.done for message in staging._messages if message.is_send]
        if (word in sends) != (without == "a message that has left"):
            wait(staging, stream, word, back)

    def ahead(batch: TransferBatch, message: Any) -> bool:
        if message.is_send and message.peer == 1:
            if len(received) < 2 or not is_put.is_set():  # the proxy begins before the streams have all that follows
                return False
            world.run(1000)  # all that the device can do before the message leaves
        return may_start(batch, message)

    def finishes(proxy: HostProxy, batch: TransferBatch, message: Any) -> None:
        if proxy.transport.rank == 0 and not message.is_send:
            received.append(message.done)
        finish(proxy, batch, message)

    def holds(node: fake_cuda.Node) -> bool:
        """Rank 0's device does not fetch the first message before the fourth, which has its place, has come."""
        return active.is_set() and node.what == "copy 1" and node.device == 0 and len(received) < 4

    [expected] = exact(2, count=20_000, algorithm="one_shot")
    monkeypatch.setattr(HostProxy, "_finish", finishes)
    monkeypatch.setattr(TransferBatch, "may_start", ahead)
    assert ranks(2, run) == [expected] * 2
    if without == "a place that is free":
        world.holds = holds
        monkeypatch.setattr(TransferBatch, "may_start", lambda batch, m: not m.is_send or may_start(batch, m))
    else:
        monkeypatch.setattr(Staging, "_wait", skips)
    assert ranks(2, run) != [expected] * 2


def test_bytes_between_nodes_go_over_the_host_and_no_others(world, cupy):
    codec, count = get("minmax4"), 1024 * 48
    whole, encoded = 4 * count, codec.encoded_nbytes(count, FLOAT32)

    def run(comm: qccl.Communicator) -> list[tuple[int, int]]:
        sent = {"host": 0, "nccl": 0}
        host, nccl = comm.transport.host, world.communicators[comm.transport.comm.comm]

        def over_host(peer: int, tag: int, address: int, n: int, token: object, send: Any = host.send) -> None:
            sent["host"] += n
            send(peer, tag, address, n, token)

        def over_nccl(address: int, n: int, datatype: int, peer: int, stream: int, send: Any = nccl.send) -> None:
            assert peer // 2 == comm.rank // 2
            sent["nccl"] += n
            send(address, n, datatype, peer, stream)

        host.send, nccl.send = over_host, over_nccl
        found = []
        for layout in ("leader", "sharded"):
            for algorithm in ("one_shot", "two_round"):
                x = fake_cuda.array(np.ones(count, np.float32), comm.rank)
                how = {"layout": layout, "algorithm": algorithm, "node_ids": [0, 0, 1, 1, 2, 2], "codec": codec}
                sent |= {"host": 0, "nccl": 0}
                comm.hierarchical_allreduce(x, inter="host", **how)
                comm.check()
                comm._session.engine._proxy.close(Deadline(60.0))
                found.append((sent["host"], sent["nccl"]))
                comm._session.engine._proxy = None  # the next call makes another
        return found

    leader = [(2 * encoded, whole), (2 * 2 * encoded // 3, whole)]
    sharded = [(2 * encoded // 2, whole), (2 * 2 * encoded // 3 // 2, whole)]
    idle = [(0, whole), (0, whole)]
    assert ranks(6, run) == [[*leader, *sharded], [*idle, *sharded]] * 3


def test_the_host_does_not_wait_and_calls_follow_each_other(world, cupy):
    """Four calls of one plan and four of others are put on their streams before anything runs."""
    begun = threading.Barrier(2)

    def run(comm: qccl.Communicator) -> list[bytes]:
        plan = comm.plan("hierarchical_allreduce", 3000, codec="minmax8", node_ids=[0, 1], inter="host", chunk=256)
        xs = [fake_cuda.array(values(comm.rank, 3000, seed), comm.rank) for seed in range(8)]
        plan.bind(xs[7])
        staged(comm, fake_cuda.array(values(comm.rank, 3000), comm.rank))  # and now the ranks have agreed
        comm.check()
        comm.barrier()
        begun.wait(60)
        world.frozen = True
        works = [plan.bind(x).start() for x in xs[:4]]
        works += [staged(comm, x, async_op=True) for x in xs[4:]]
        assert not any(work.is_completed() for work in works)
        begun.wait(60)
        world.frozen = False
        for work in reversed(works):
            work.synchronize()
        return [x.get().tobytes() for x in xs]

    expected = exact(2, seeds=range(8))
    assert ranks(2, run) == [expected, expected]


def test_numbers_of_runs_go_round(world, cupy):
    from qccl.engine.cuda.proxy import reached

    assert reached(5, 5) and reached(6, 5) and not reached(4, 5)
    assert reached(0, (1 << 32) - 1) and reached(3, (1 << 32) - 3) and not reached((1 << 32) - 1, 0)

    def run(comm: qccl.Communicator) -> list[bytes]:
        plan = comm.plan("hierarchical_allreduce", 3000, codec="minmax8", node_ids=[0, 1], inter="host", chunk=256)
        xs = [fake_cuda.array(values(comm.rank, 3000, seed), comm.rank) for seed in range(5)]
        plan.bind(xs[0])
        [compiled] = plan._programs
        staging = compiled.programs[0]._staging
        staging._number = (1 << 32) - 2
        for word in range(len(staging._flags)):
            staging._flags[word] = (1 << 32) - 2
        for x in xs:
            plan.bind(x).start()
        comm.check()
        return [x.get().tobytes() for x in xs]

    expected = exact(2, seeds=range(5))
    assert ranks(2, run) == [expected, expected]


def test_pinned_memory_does_not_grow_with_the_message(world, cupy):
    def run(comm: qccl.Communicator) -> list[int]:
        found = []
        for count in (20_000, 200_000):
            plan = comm.plan(
                "hierarchical_allreduce", count, codec="minmax8", node_ids=[0, 1], inter="host", chunk=1024
            )
            plan.bind(fake_cuda.array(values(comm.rank, count), comm.rank))
            [compiled] = plan._programs
            staging = compiled.programs[0]._staging
            found.append(staging.nbytes - 4 * staging._count)
        return found

    for small, large in ranks(2, run):
        assert large < small + 512


# -- other ways in -----------------------------------------------------------------------------------------------------


def test_pointers_plans_and_groups(world, cupy):
    def run(comm: qccl.Communicator) -> list[bytes]:
        group = comm.split(0, key=-comm.rank)
        assert group.transport.host.rank == group.rank == comm.size - 1 - comm.rank
        options = {"node_ids": [0, 1, 2], "codec": "minmax8", "inter": "host", "chunk": 256}
        xs = [fake_cuda.array(values(group.rank, 3000), comm.rank) for _ in range(3)]
        qccl.hierarchical_allreduce(xs[0].data.ptr, xs[0].data.ptr, 3000, "float32", "sum", group, **options)
        group.plan("hierarchical_allreduce", 3000, **options)(xs[1])
        staged(group, xs[2], stream=0, async_op=True).wait()
        group.check()
        group.close()
        return [x.get().tobytes() for x in xs]

    assert ranks(3, run) == [exact(3) * 3] * 3


def test_the_group_that_brings_ranks_together_stays_as_long_as_they(world, cupy, monkeypatch):

    closed = []
    monkeypatch.setattr(LoopbackTransport, "close", lambda self: closed.append(self))
    group = LoopbackGroup(1).transport(0)
    with qccl.Communicator._over(group, 0, 60.0) as comm:
        assert comm.transport.host is group and not closed
    assert closed == [group]
    with pytest.raises(qccl.EngineError, match="device=99"):
        qccl.Communicator._over(group, 99, 5.0)
    assert closed == [group] * 2


def test_a_trace_has_the_queues(world, cupy):
    def run(comm: qccl.Communicator) -> list[tuple[str, str]]:
        events: list[qccl.base.trace.TraceEvent] = []
        x = fake_cuda.array(values(comm.rank, 3000), comm.rank)
        staged(comm, x, chunk=None, async_op=True, trace=events).synchronize()
        return [(event.queue, event.name.split()[0]) for event in events]

    expected = [("compute", "encode"), ("out", "exchange"), ("in", "exchange"), ("compute", "reduce")]
    assert ranks(2, run) == [expected, expected]
