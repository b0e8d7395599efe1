"""Groups over wan whose ranks share memory inside a machine: which messages go which way."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import patience
import pytest
from rank_calls import all_calls
from start_ranks import needs_ucx
from wan_groups import group

import qccl
from qccl.base.errors import EngineError
from qccl.base.trace import TraceEvent
from qccl.meeting import topology
from qccl.meeting.network import Network
from qccl.transports import ucx, wan
from qccl.transports.wan import WanTransport, memory_obstacle

pytestmark = needs_ucx

SECRET = bytes(range(32))


def once(function):
    """Work of a group that each rank does once; then the ranks only call with each other until the test has all."""
    results: dict[int, object] = {}
    lock, done = threading.Lock(), threading.Event()

    def work(comm: qccl.Communicator, chosen: random.Random) -> int:
        if comm.rank not in results:
            found = function(comm)
            with lock:
                results[comm.rank] = found
                if len(results) == comm.size:
                    done.set()
        return 1

    def of(size: int, ranks_each: int, secret: bytes | None = SECRET) -> list:
        with group(size, secret, ranks_each=ranks_each, work=work) as running:
            limit = patience.Limit(60)
            while not done.wait(0.05) and limit.left():
                if failed := [each for each in running.ends if each.done()]:
                    failed[0].result()
        return [results[rank] for rank in range(size)]

    return of


def carrier(comm: qccl.Communicator) -> str:
    x = np.full(100_000, comm.rank + 1, np.float32)
    assert (comm.quantized_allreduce(x, codec="none") == comm.size * (comm.size + 1) / 2).all()
    return comm.transport.carrier


@pytest.mark.parametrize(
    ("size", "ranks_each", "expected"),
    [
        (4, 2, ["wan; ucx with 1", "wan; ucx with 0", "wan; ucx with 3", "wan; ucx with 2"]),
        (3, 2, ["wan; ucx with 1", "wan; ucx with 0", "wan"]),
        (3, 3, ["wan; ucx with 1, 2", "wan; ucx with 0, 2", "wan; ucx with 0, 1"]),
        (2, 1, ["wan", "wan"]),
    ],
)
@pytest.mark.parametrize("secret", [SECRET, None])
def test_ranks_of_a_machine_share_memory(size, ranks_each, expected, secret):
    assert once(carrier)(size, ranks_each, secret) == expected


def test_the_communicator_says_which_ranks_share_memory():
    assert once(repr)(4, 2)[2] == "<Communicator rank 2 of 4, wan; ucx with 3>"


def test_all_calls_have_the_bits_of_threads():
    def work(comm: qccl.Communicator) -> list[bytes]:
        x = np.random.default_rng(comm.rank).standard_normal(50_000, np.float32)
        found = all_calls(comm)
        for layout in ("sharded", "leader"):
            nodes = [rank // 2 for rank in range(comm.size)]
            out = comm.hierarchical_allreduce(x.copy(), codec="minmax8", layout=layout, node_ids=nodes)
            found.append(out.tobytes())
        return found

    assert once(work)(4, 2) == qccl.run_ranks(4, work)


def test_a_group_has_the_nodes_of_its_machines():
    assert once(lambda comm: comm.nodes)(4, 2) == [(0, 0, 1, 1)] * 4


@pytest.mark.parametrize("names", ["tcp", "rc,tcp,self", "^sm"])
def test_settings_of_ucx_without_shared_memory_keep_all_on_wan(names, monkeypatch):
    monkeypatch.setenv("UCX_TLS", names)
    assert memory_obstacle() == f"UCX_TLS={names} names no shared memory"
    assert once(carrier)(2, 2) == ["wan"] * 2


@pytest.mark.parametrize("names", ["all", "tcp,sm", "posix"])
def test_settings_of_ucx_with_shared_memory(names, monkeypatch):
    monkeypatch.setenv("UCX_TLS", names)
    assert not memory_obstacle()


def test_a_system_that_does_not_say_who_shares_memory(monkeypatch):
    monkeypatch.setattr(topology, "memory_id", lambda: "")
    assert once(carrier)(2, 2) == ["wan"] * 2


def test_a_rank_without_ucx_stays_on_wan(monkeypatch):
    """The others of its machine share memory without it."""
    start, calls = wan.memory_wire, itertools.count()

    def fails(membership: object) -> object:
        if not next(calls):
            raise EngineError("there is no UCX")
        return start(membership)

    monkeypatch.setattr(wan, "memory_wire", fails)
    found = once(carrier)(3, 3)
    assert sorted(map(len, found)) == [len("wan")] + [len("wan; ucx with 0")] * 2, found


def test_ucx_starts_only_where_another_rank_may_be_on_the_machine(monkeypatch):
    """A process that joins may be."""
    started = []
    start = wan.memory_wire
    monkeypatch.setattr(wan, "memory_wire", lambda membership: started.append(membership) or start(membership))
    first = WanTransport.meet(lambda note: [note], 10.0, Network(is_local=True, is_alone=True))
    second, _ = first.regroup(0, 10.0, grows=False)
    assert not started
    third, _ = second.regroup(0, 10.0, grows=True)
    assert len(started) == 1
    third.close()


def test_ranks_that_ucx_does_not_reach(monkeypatch):
    """Its workers have no transport between processes."""
    monkeypatch.setattr(ucx, "_IN_MEMORY", "self")
    notes, barrier = [b"", b""], threading.Barrier(2)

    def rank(number: int) -> WanTransport:
        def gather(note: bytes) -> list[bytes]:
            notes[number] = note
            barrier.wait(60)
            return notes

        return WanTransport.meet(gather, 10.0, Network(is_local=True))

    with ThreadPoolExecutor(2) as pool:
        for end in [pool.submit(rank, number) for number in range(2)]:
            with pytest.raises(EngineError, match=r"wan has no network.*\(UCX status -6\); UCX_TLS=tcp keeps ranks"):
                end.result()


@pytest.mark.parametrize(("size", "ranks_each"), [(3, 2), (2, 1)])
def test_sends_ahead_to_other_machines_only(size, ranks_each):
    """All chunks of the first round leave rank 0 for another machine while the ranks there have not called.

    Their headers take long from another site. UCX keeps all that comes early, so a rank of the same machine gets one
    window before it has called.
    """
    traces: list[list[TraceEvent]] = [[] for _ in range(size)]
    began, called = [0.0] * size, threading.Event()

    def work(comm: qccl.Communicator) -> None:
        x = np.full(3 << 18, comm.rank + 1, np.float32)
        comm.barrier()
        if comm.rank:  # rank 0's sends need none of its Python code any more
            assert called.wait(60)
            time.sleep(0.5 * patience.factor())
        began[comm.rank] = time.perf_counter()
        trace = traces[comm.rank]
        call = comm.quantized_allreduce(x, chunk=1 << 12, algorithm="two_round", trace=trace, async_op=True)
        if not comm.rank:
            called.set()
        call.wait()
        assert (x == size * (size + 1) / 2).all()

    once(work)(size, ranks_each)
    for peer in range(1, size):
        sends = [e for e in traces[0] if e.queue == "send" and e.args["round"] == 0 and e.args["peer"] == peer]
        early = [event for event in sends if event.start < min(began[1:])]
        assert len(early) == len(sends) if peer >= ranks_each else 0 < len(early) < len(sends), (peer, len(sends))


def connections(ports: list[int]) -> int:
    """The ends of TCP connections to these ports of this machine."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(each[3] == "01" and int(each[1].rpartition(":")[2], 16) in ports for each in fields)


@pytest.mark.parametrize("ranks_each", [2, 1])
def test_ranks_that_share_memory_keep_no_connection(ranks_each):
    with group(2, SECRET, ranks_each=ranks_each) as running:
        assert bool(connections(running.ports)) == (ranks_each == 1)


def held() -> tuple[int, int]:
    """This process's descriptors, and its mappings of shared memory."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("/dev/shm" in each or "/SYSV" in each for each in mappings)


def test_descriptors_and_memory_end_with_the_group():
    once(carrier)(4, 2)  # UCX is loaded
    gc.collect()
    descriptors, mappings = held()
    for _ in range(3):
        once(carrier)(4, 2)
    gc.collect()
    now = held()
    assert now[0] <= descriptors and now[1] <= mappings, (now, descriptors, mappings)
