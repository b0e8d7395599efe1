"""What ranks over UCX and over gloo do alike: calls, to compare their bytes with those of loopback, splits, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import qccl
from qccl.collectives import CollectiveSpec
from qccl.communicator.session import Session

#: with algorithms: by default ranks that share nodes use two levels, and loopback's ranks are on one node
CALLS = [
    ("minmax8", 0, {}),
    ("minmax8", 1, {"algorithm": "one_shot"}),
    ("none", 1000, {"algorithm": "one_shot", "op": "max"}),
    ("minmax4:rounding=stochastic,seed=3", 5000, {"algorithm": "one_shot"}),
    ("minmax8", 100_003, {"algorithm": "two_round", "chunk": 4096, "op": "avg"}),
    ("minmax3:bucket=shard", 3001, {"algorithm": "two_round"}),
    ("none", 700_001, {"algorithm": "two_round"}),
]


def all_calls(comm: qccl.Communicator) -> list[bytes]:
    """All under way at once."""
    arrays = [np.random.default_rng([comm.rank, i]).standard_normal(n, np.float32) for i, (_, n, _) in enumerate(CALLS)]
    works = [
        comm.quantized_allreduce(x, codec=codec, async_op=True, **arguments)
        for x, (codec, _, arguments) in zip(arrays, CALLS, strict=True)
    ]
    return [work.wait().tobytes() for work in works]


def check_texts_and_a_split(comm: qccl.Communicator) -> None:
    """Texts of unequal lengths, and a group of all ranks but 0, in the other order."""
    assert comm.allgather(bytes([comm.rank]) * comm.rank) == [bytes([r]) * r for r in range(comm.size)]
    sub = comm.split(0 if comm.rank else None, key=-comm.rank)
    assert (sub is None) == (comm.rank == 0)
    if sub is not None:
        assert (sub.rank, sub.size) == (comm.size - 1 - comm.rank, comm.size - 1)
        y = np.ones(100, np.float32)
        assert (sub.quantized_allreduce(y) == sub.size).all()
        sub.close()


@contextmanager
def bound() -> Iterator[list[tuple[CollectiveSpec, dict[str, Any]]]]:
    """The collectives of the calls that are prepared meanwhile, each with its arrays by name."""
    found: list[tuple[CollectiveSpec, dict[str, Any]]] = []
    bind = Session.bind

    def spy(session: Session, spec: CollectiveSpec, arrays: dict[str, Any], *rest: Any) -> Any:
        found.append((spec, arrays))
        return bind(session, spec, arrays, *rest)

    Session.bind = spy  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Session.bind = bind  # type: ignore[method-assign]


def error_of(act: Callable[[], Any], kind: type[BaseException] | tuple[type[BaseException], ...] = Exception) -> str:
    """The text of the error of this kind that ``act()`` raises. (Importing pytest takes longer than most ranks run.)"""
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind}")
