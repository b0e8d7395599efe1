"""The collectives that ``qccl-bench`` times: their place in nccl-tests' terms, and what their results are made of.

The size of a call is that of the whole vector: what a rank has after an all-gather, and before a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["KINDS", "Kind", "Stretch", "neighbours", "stretches"]


@dataclass(frozen=True)
class Kind:
    """A collective.

    Attributes:
        title: for the command's help.
        factor: busbw over algbw, of the number of ranks (as in nccl-tests' PERFORMANCE.md).
        combines: it has an op; otherwise values are only moved.
        algorithms: beside "auto".
        parameters: names of the options that it has, beside op and algorithm.
        whole_input, whole_output: a rank gives, or gets, the whole vector, and not its part alone.
        identical: all ranks get the same bits.
        adds: the result is added to what the output holds.
    """

    title: str
    factor: Callable[[int], float]
    combines: bool = False
    algorithms: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    whole_input: bool = True
    whole_output: bool = True
    identical: bool = True
    adds: bool = False

    @property
    def is_allreduce(self) -> bool:
        """Every rank gets all, combined."""
        return self.combines and self.whole_output and "root" not in self.parameters


class Stretch(NamedTuple):
    """Elements of a result: which ranks' inputs they are made of, and from which element of those on."""

    start: int
    stop: int
    ranks: range
    first: int


def stretches(name: str, rank: int, size: int, count: int, root: int) -> list[Stretch]:
    """What the output of ``rank`` is made of, where it is not an all-reduce of everything."""
    part = count // size
    match name:
        case "reduce_scatter":
            return [Stretch(0, part, range(size), rank * part)]
        case "all_gather":
            return [Stretch(r * part, (r + 1) * part, range(r, r + 1), 0) for r in range(size)]
        case "all_to_all":
            return [Stretch(r * part, (r + 1) * part, range(r, r + 1), rank * part) for r in range(size)]
        case "broadcast":
            return [Stretch(0, count, range(root, root + 1), 0)]
        case "reduce":
            return [Stretch(0, count, range(size), 0)] if rank == root else []
        case "peer_exchange":
            whose = (rank, *neighbours(rank, size))
            return [Stretch(i * count, (i + 1) * count, range(r, r + 1), 0) for i, r in enumerate(whose)]
    raise ValueError(f"{name} is not made of stretches")


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks before and behind one in a ring."""
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


def _half(n: int) -> float:
    return (n - 1) / n


_ROUNDS = ("one_shot", "two_round")

KINDS: MappingProxyType[str, Kind] = MappingProxyType(
    {
        "allreduce": Kind("all-reduce", lambda n: 2 * _half(n), True, _ROUNDS),
        "hierarchical_allreduce": Kind(
            *("all-reduce in two levels", lambda n: 2 * _half(n), True, _ROUNDS),
            parameters=("layout", "intra", "inter", "node_ids"),
        ),
        "allreduce_coalesced": Kind("all-reduce of many arrays", lambda n: 2 * _half(n), True, _ROUNDS, ("arrays",)),
        "reduce_scatter": Kind("reduce-scatter", _half, True, whole_output=False, identical=False),
        "all_gather": Kind("all-gather", _half, whole_input=False),
        "all_to_all": Kind("all-to-all", _half, identical=False),
        "broadcast": Kind("broadcast", lambda n: 1.0, algorithms=("chain", "binomial"), parameters=("root",)),
        "reduce": Kind("reduce", lambda n: 1.0, True, _ROUNDS, ("root",), identical=False),
        "peer_exchange": Kind(
            *("peer exchange with both neighbours in a ring", lambda n: float(min(n - 1, 2))),
            identical=False,
            adds=True,
        ),
    }
)
