"""Ranks as threads of this process, for examples and tests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

from qccl.base.deadline import Deadline
from qccl.base.errors import CollectiveTimeout
from qccl.base.threads import start
from qccl.collectives.arguments import integer, timeout_of
from qccl.communicator.communicator import Communicator
from qccl.transports.loopback import LoopbackGroup

__all__ = ["run_ranks"]

_T = TypeVar("_T")

#: time beyond the timeout for a rank to notice that another rank has failed
_GRACE_SECONDS = 5.0
#: numbers the groups, for records
_numbers = itertools.count()


def run_ranks(n: int, fn: Callable[[Communicator], _T], *, timeout: float = 60.0) -> list[_T]:
    """Call ``fn(comm)`` on ``n`` ranks at once, each a thread. Returns the results in rank order.

    ``timeout`` is the communicators' timeout: the longest that a collective waits for another rank. After a failure the
    other ranks fail in their next collective. When they have ended, the first failure is raised again, with a note that
    names its rank. A rank that computes for ever outside qccl cannot be stopped, and is left behind.
    """
    timeout = timeout_of(timeout)
    n = integer(n, "n")
    group, name = LoopbackGroup(n), f"threads {next(_numbers)}"
    results: dict[int, _T] = {}
    failures: list[BaseException] = []  # in the order of time

    def record(rank: int, error: BaseException) -> None:
        if error not in failures:
            error.add_note(f"raised on rank {rank} of {n}")
            failures.append(error)

    def run(rank: int) -> None:
        transport = group.transport(rank)
        try:
            with Communicator._from_transport(transport, timeout=timeout, name=name) as comm:
                try:
                    results[rank] = fn(comm)
                except BaseException as error:  # recorded before the other ranks fail because of it
                    record(rank, error)
                    raise
        except BaseException as error:
            record(rank, error)
            transport.abort(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(n)]
    for thread in threads:
        start(thread)
    _join(threads, failures, timeout + _GRACE_SECONDS)
    if failures:
        raise failures[0]
    if len(results) < n:
        raise CollectiveTimeout(f"ranks {sorted(set(range(n)) - results.keys())} did not end")
    return [results[r] for r in range(n)]


def _join(threads: list[threading.Thread], failures: list[BaseException], patience: float) -> None:
    """Wait for the threads: without limit while none has failed, from then on for ``patience`` seconds."""
    limit = Deadline(patience, counts=False)
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            if failures and limit.start().is_over:
                return
