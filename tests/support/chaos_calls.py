"""The calls of chaos.py's ranks, and their right results, which ranks of one process have computed over memory."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import qccl

__all__ = ["LARGE", "SMALL", "Call", "Results", "other_call", "results"]

Array = NDArray[np.float32]


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
        if len(outs) == 1:
            self._begin(comm, given, outs[0], async_op=False)
            return
        works = [self._begin(comm, given, out, async_op=True) for out in outs]
        time.sleep(rest)
        for work in works:
            work.wait()

    def _begin(self, comm: qccl.Communicator, given: Array, out: Array, *, async_op: bool) -> Any:
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

#: by call and size: of each rank
Results = dict[tuple[Call, int], list[Array]]


def given(rank: int) -> Array:
    """A rank's array, of which each call takes a part: values of all signs and magnitudes, and some that are none."""
    chosen = np.random.default_rng(rank)
    array = chosen.standard_normal(max(call.count for call in LARGE), np.float32)
    array[::97] *= np.float32(1e6)
    array[5::1009] = 0
    return array


def results(sizes: tuple[int, ...], arrays: list[Array]) -> Results:
    """What every rank must get, bit for bit, in groups of these sizes."""
    calls = (*SMALL, *LARGE)

    def run(comm: qccl.Communicator) -> list[Array]:
        given = arrays[comm.rank]
        outs = [call.out(comm.size, given) for call in calls]
        for call, out in zip(calls, outs, strict=True):
            call.make(comm, given, [out])
        return outs

    found: Results = {}
    for size in sizes:
        by_rank = qccl.run_ranks(size, run)
        for call, of_ranks in zip(calls, zip(*by_rank, strict=True), strict=True):
            is_shared = call.collective != "reduce_scatter"
            assert not is_shared or all(each.tobytes() == of_ranks[0].tobytes() for each in of_ranks)
            found[call, size] = [of_ranks[0]] * size if is_shared else list(of_ranks)
    return found


def other_call(call: Call, way: str) -> Call:
    """A call that does not fit the others'."""
    if way == "codec":
        return call._replace(codec="minmax8" if call.codec != "minmax8" else "minmax4")
    if way == "count":
        return call._replace(count=call.count + 12 if call.count < 24 else call.count - 12)
    return call._replace(collective="all_gather" if call.collective != "all_gather" else "reduce_scatter")
