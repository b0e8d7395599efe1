"""The calls of chaos.py's ranks, and their right results, which ranks of one process have computed over memory."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import patience
from numpy.typing import NDArray

import qccl

Array = NDArray[np.float32]
SIZES = (2, 3, 4, 5)


class Call(NamedTuple):
    """A collective; ``count`` is that of its array, of which a shard is one of 2, 3 or 4 equal parts."""

    collective: str
    count: int
    codec: str

    def out(self, size: int, given: Array) -> Array:
        """The array for the result of one of ``size`` ranks, which may be that of its values, too."""
        if self.collective == "allreduce":
            return given[: self.count].copy()
        return np.zeros(self.count // size if self.collective == "reduce_scatter" else self.count, np.float32)

    def make(self, comm: qccl.Communicator, given: Array, outs: list[Array], rest: float = 0) -> None:
        """Make it with this rank's array, once for each of ``outs``: several are under way for ``rest`` seconds."""
        works = [self.begin(comm, given, out, async_op=len(outs) > 1) for out in outs]
        time.sleep(rest)
        for work in works if len(outs) > 1 else ():
            work.wait()

    def begin(self, comm: qccl.Communicator, given: Array, out: Array, *, async_op: bool) -> Any:
        options = {"codec": self.codec, "async_op": async_op}
        if self.collective == "allreduce":
            return comm.quantized_allreduce(out, algorithm="two_round", **options)
        if self.collective == "reduce_scatter":
            return comm.quantized_reduce_scatter(given[: self.count], out, **options)
        return comm.quantized_all_gather(given[: self.count // comm.size], out, **options)


SMALL = (
    *(Call("allreduce", 1, "none"), Call("allreduce", 12, "minmax8"), Call("allreduce", 10_007, "minmax4")),
    *(Call("reduce_scatter", 12_000, "minmax8"), Call("all_gather", 1_200, "none"), Call("allreduce", 999, "onebit")),
)
LARGE = (
    *(Call("allreduce", 1_800_000, "minmax8"), Call("allreduce", 1_200_003, "none")),
    *(Call("reduce_scatter", 1_800_000, "minmax8"), Call("all_gather", 1_800_000, "none")),
)


class Known(NamedTuple):
    """By rank the array of which each call takes a part, and by call and size the results of the ranks."""

    arrays: list[Array]
    results: dict[tuple[Call, int], list[Array]]

    def fault(self, call: Call, size: int, rank: int, result: Array) -> str:
        """What is wrong with a result: every bit must be right."""
        differ = result.view(np.uint32) != self.results[call, size][rank].view(np.uint32)
        return f"{call}: {differ.sum()} values differ, from number {differ.argmax()} on" if differ.any() else ""


def given(rank: int) -> Array:
    """Values of all signs and magnitudes, and some that are 0."""
    chosen = np.random.default_rng(rank)
    array = chosen.standard_normal(max(call.count for call in LARGE), np.float32)
    array[::97] *= np.float32(1e6)
    array[5::1009] = 0
    return array


def known() -> Known:
    """What every rank must get, bit for bit."""
    found = Known([given(rank) for rank in range(max(SIZES))], {})
    for size in SIZES:
        calls = SMALL if size == max(SIZES) else (*SMALL, *LARGE)

        def run(comm: qccl.Communicator, calls: tuple[Call, ...] = calls) -> list[Array]:
            array = found.arrays[comm.rank]
            outs = [call.out(comm.size, array) for call in calls]
            for call, out in zip(calls, outs, strict=True):
                call.make(comm, array, [out])
            return outs

        results = qccl.run_ranks(size, run, timeout=60.0 * patience.factor())
        for call, of_ranks in zip(calls, zip(*results, strict=True), strict=True):
            is_shared = call.collective != "reduce_scatter"
            assert not is_shared or all(each.tobytes() == of_ranks[0].tobytes() for each in of_ranks)
            found.results[call, size] = [of_ranks[0]] * size if is_shared else list(of_ranks)
    return found


def other_call(call: Call, way: str) -> Call:
    """A call that does not fit the others'."""
    if way == "codec":
        return call._replace(codec="minmax8" if call.codec != "minmax8" else "minmax4")
    if way == "count":
        return call._replace(count=call.count + 12 if call.count < 24 else call.count - 12)
    return call._replace(collective="all_gather" if call.collective != "all_gather" else "reduce_scatter")
