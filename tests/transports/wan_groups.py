"""Groups over wan whose ranks are threads, for tests: they call and check until they are told to stop."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from patience import wait_until
from threads import meeting

import qccl
from qccl.meeting import topology
from qccl.meeting.network import Network
from qccl.transports.connected import Protection
from qccl.transports.wan import WanTransport

#: values of one call, and how many calls are under way at once
COUNTS = [(0, 1), (1, 1), (64, 20), (1000, 3), (5000, 20), (100_000, 3), (1_000_000, 2)]


def allreduces(comm: qccl.Communicator, chosen: random.Random) -> int:
    """Some calls at once, of any size; all ranks choose the same. Checks every bit, and returns their number."""
    count, calls = chosen.choice(COUNTS)
    places = np.arange(count) % 17
    given = [(places * (call + 1) + comm.rank).astype(np.float32) for call in range(calls)]
    works = [comm.quantized_allreduce(each, codec="none", async_op=True) for each in given]
    others = comm.size * (comm.size - 1) // 2
    for call, work in enumerate(works):
        result: NDArray[np.float32] = work.wait()
        assert (result == places * (call + 1) * comm.size + others).all(), f"rank {comm.rank}: wrong values"
    return calls


def addresses_of(transport: WanTransport) -> list[bytes]:
    """Of the ranks' wires."""
    assert transport.membership is not None
    return [member.worker for member in transport.membership.members]


def ports_of(transport: WanTransport) -> list[int]:
    """By rank, where its wire listens."""
    return [int(address.partition(b"\0")[0].split()[-1]) for address in addresses_of(transport)]


class Group(NamedTuple):
    """Ranks that call.

    Attributes:
        nonce: of the group.
        ports: by rank, where its wire listens.
        calls: by rank, how many it has made.
        ends: by rank, of the thread; its result is None.
        stop: set to end the ranks in order.
    """

    nonce: bytes
    ports: list[int]
    calls: list[int]
    ends: list[Future[None]]
    stop: threading.Event

    def wait_for_calls(self, before: list[int], seconds: float = 60.0) -> None:
        """Until all ranks have made further calls."""

        def go_on() -> bool:
            assert not any(end.done() for end in self.ends), [end.exception() for end in self.ends]
            return all(now > then for now, then in zip(self.calls, before, strict=True))

        wait_until(go_on, seconds=seconds, what="the ranks go on")


@contextmanager
def group(
    size: int = 2,
    secret: bytes | None = None,
    *,
    seed: int = 0,
    timeout: float = 60.0,
    ranks_each: int = 0,
    work: Callable[[qccl.Communicator, random.Random], int] = allreduces,
) -> Iterator[Group]:
    """At the end the ranks stop; what one of them has raised is raised here, unless the test has asked for it.

    With ``ranks_each`` so many ranks share a machine and its memory; otherwise none do.
    """
    gather = meeting(size)
    made, calls, stop = threading.Barrier(size + 1), [0] * size, threading.Event()
    addresses: list[bytes] = []
    ports: list[int] = []

    def run(rank: int) -> None:
        machine.number = 1 + rank // ranks_each if ranks_each else 0
        transport = WanTransport.meet(gather(rank), 120.0, Network(is_local=True), Protection(secret))
        if not rank:
            ports.extend(ports_of(transport))
            addresses.extend(addresses_of(transport))
        with qccl.Communicator.from_transport(transport, timeout=timeout) as comm:
            made.wait(120)
            chosen = random.Random(seed)
            while comm.allgather(b"" if stop.is_set() else b"go")[0]:
                calls[rank] += work(comm, chosen)

    machine = threading.local()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as pool:
        patch.setattr(topology, "_network", lambda: machine.number)
        ends = [pool.submit(run, rank) for rank in range(size)]
        try:
            made.wait(120)
            yield Group(addresses[0].split()[0], ports, calls, ends, stop)
        finally:
            stop.set()
    for end in ends:
        end.result()
