"""Threads as ranks, below the communicator: what each rank returned or raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import patience
from schedule_cases import one_rank

from qccl.base.dtypes import FLOAT32
from qccl.codecs import get
from qccl.collectives import AllReduceSpec
from qccl.collectives.allreduce import two_round
from qccl.engine.base import Bound, Progress, Request
from qccl.engine.control import ControlKind, Header
from qccl.engine.host.engine import HostEngine
from qccl.engine.host.execution import HostExecution
from qccl.engine.host.program import HostProgram
from qccl.transports.loopback import LoopbackGroup, LoopbackTransport

CODEC = get("minmax8:bucket=64")


def outcomes(n: int, fn: Callable[[LoopbackTransport], Any]) -> list[Any]:
    """What ``fn(transport)`` returned on each of ``n`` ranks, or the exception it raised."""
    group = LoopbackGroup(n)
    return outcomes_of_ranks(n, lambda rank: fn(group.transport(rank)), 30)


def outcomes_of_ranks(n: int, fn: Callable[[int], Any], seconds: float) -> list[Any]:
    """The same of ``fn(rank)`` in threads that have so many seconds."""
    found: list[Any] = [TimeoutError("still running")] * n

    def run(rank: int) -> None:
        try:
            found[rank] = fn(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(n)]
    for thread in threads:
        thread.start()
    limit = patience.Limit(seconds)
    for thread in threads:
        thread.join(limit.left())
    return found


def meeting(size: int) -> Callable[[int], Callable[[bytes], list[bytes]]]:
    """By rank, the gather of threads that meet: it returns the notes of all."""
    barrier, notes = threading.Barrier(size), [b""] * size

    def gather(rank: int) -> Callable[[bytes], list[bytes]]:
        def meet(note: bytes) -> list[bytes]:
            notes[rank] = note
            barrier.wait(120)
            found = list(notes)
            barrier.wait(120)
            return found

        return meet

    return gather


def hear(engine: HostEngine, headers: int) -> None:
    """Step until that many headers have come, of calls that this rank has not made."""
    patience.wait_until(lambda: engine._loop.early >= headers, engine.step, what=f"{headers} headers come")


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


class Caller:
    """Calls two_round all-reduces on an engine, as a communicator would."""

    def __init__(self, transport, timeout: float = 30.0) -> None:
        self.transport, self.timeout = transport, timeout
        self.engine = HostEngine(transport, timeout)

    def program(self, count: int, **arguments: Any) -> HostProgram:
        t = self.transport
        self.schedule = one_rank(two_round, t.rank, t.size, count, FLOAT32, CODEC, **arguments)
        return self.engine.compile(self.schedule)

    def text(self, count: int, **changed: Any) -> str:
        """What the ranks compare."""
        fields = {
            "count": count,
            "dtype": FLOAT32,
            "op": "sum",
            "codec": CODEC,
            "algorithm": "two_round",
            "chunk": None,
        }
        return AllReduceSpec(**(fields | changed)).text()

    def header(self, count: int, sequence: int = 0) -> Header:
        return Header(ControlKind.CALL, sequence, self.text(count))

    def start(
        self, program: HostProgram, x: np.ndarray, y: np.ndarray, *, trace=None, progress=None, **changed: Any
    ) -> HostExecution:
        """Start a run. Without ``progress`` only threads that wait for runs advance it."""
        if trace is not None:
            program.label(self.schedule)
        return self.run_on(
            program,
            {"input": address(x), "output": address(y)},
            self.text(len(x), **changed),
            (x, y),
            trace=trace,
            progress=progress,
        )

    def run_on(
        self,
        program: HostProgram,
        addresses: dict[str, int],
        text: str,
        kept: object = None,
        *,
        progress=None,
        timeout: float | None = None,
        **request: Any,
    ) -> HostExecution:
        thread = self.engine._progress_thread
        if progress is None:
            self.engine._progress_thread = None
        try:
            return self.engine.start(
                program,
                Bound(addresses, text),
                Request(progress or Progress.SOON, self.timeout if timeout is None else timeout, **request),
                kept,
            )
        finally:
            self.engine._progress_thread = thread

    def begin(self, count: int, **arguments: Any) -> HostExecution:
        """Start an all-reduce of ramp(rank, count) into another array."""
        x = ramp(self.transport.rank, count)
        return self.start(self.program(count, **arguments), x, np.empty_like(x))

    def allreduce(self, x: np.ndarray, **changed: Any) -> np.ndarray:
        y = np.full_like(x, -1)
        self.start(self.program(len(x)), x, y, **changed).run()
        return y

    def close(self) -> None:
        self.engine.close(self.timeout)
        self.transport.close()


class Wrapped:
    """Passes on what it does not define to ``wrapped``: a transport, for example."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self.wrapped, name)


class Counting(Wrapped):
    """A transport that counts what it sends, by tag."""

    def __init__(self, transport):
        super().__init__(transport)
        self.sent = []

    def send(self, peer, tag, address, nbytes, token):
        self.sent.append((peer, tag, nbytes))
        self.wrapped.send(peer, tag, address, nbytes, token)


def ramp(rank: int, count: int) -> np.ndarray:
    """Whole numbers in [0, 256)."""
    return ((np.arange(count) * 7 + rank) % 256).astype(np.float32)


def near_sum(y: np.ndarray, n: int) -> bool:
    """Within one unit of each rank's code and one of the sum's: units are at most 1 and n."""
    exact = sum(ramp(r, len(y)).astype(np.float64) for r in range(n))
    return bool(np.abs(y - exact).max(initial=0) <= 2 * n)
