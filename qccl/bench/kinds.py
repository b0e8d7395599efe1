"""The collectives that ``qccl-bench`` times: nccl-tests' factors, parameters, and each rank's part of the results.

The size of a call is the size of the whole vector: the output of an all-gather, the input of a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["KINDS", "NCCL_OTHERS", "NCCL_TESTS", "Kind", "Stretch", "neighbours", "stretches"]


@dataclass(frozen=True)
class Kind:
    """A collective.

    Attributes:
        title: text in the command's help.
        factor: busbw over algbw as a function of the number of ranks (as in nccl-tests' PERFORMANCE.md).
        combines: it has an op; otherwise it only moves values.
        algorithms: choices besides "auto".
        parameters: names of its options besides op and algorithm.
        whole_input, whole_output: a rank's input or output is the whole vector, not only a part.
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
        """Whether every rank gets the whole combined vector."""
        return self.combines and self.whole_output and "root" not in self.parameters


class Stretch(NamedTuple):
    """Elements ``start`` to ``stop`` of a result come from elements ``first`` and on of the inputs of ``ranks``."""

    start: int
    stop: int
    ranks: range
    first: int


def stretches(name: str, rank: int, size: int, count: int, root: int) -> list[Stretch]:
    """The stretches of the output of ``rank``, for collectives other than the all-reduces."""
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
            sources = (rank, *neighbours(rank, size))
            return [Stretch(i * count, (i + 1) * count, range(r, r + 1), 0) for i, r in enumerate(sources)]
    raise ValueError(f"the result of {name} has no stretches")


def neighbours(rank: int, size: int) -> list[int]:
    """The previous and the next rank in a ring."""
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

#: nccl-tests' names, whose programs are these with "_perf", and ours
NCCL_TESTS = MappingProxyType(
    {"all_reduce": "allreduce", "alltoall": "all_to_all"}
    | {name: name for name in ("all_gather", "broadcast", "reduce", "reduce_scatter")}
)
#: nccl-tests' other collectives, and what there is here
NCCL_OTHERS = MappingProxyType(
    {
        "sendrecv": "peer_exchange is the nearest; it sends to both neighbours in the ring, and adds what it receives",
        "gather": "all_gather is the nearest; all ranks get the vector",
        "scatter": "broadcast is the nearest; all ranks get the whole vector",
        "alltoallv": "all_to_all is the nearest; its parts are equal",
        "hypercube": "all_gather is the nearest; its ranks send to all others at once",
    }
)
