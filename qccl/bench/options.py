"""The options of a run of ``qccl-bench``, the collectives, and the explanations of its columns.

The size of a call is the size of the whole vector: the output of an all-gather, the input of a reduce-scatter.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from qccl.bench.lab.network import NetworkOptions

__all__ = [
    "COLUMNS",
    "DTYPES",
    "KINDS",
    "NCCL_NAMES",
    "NCCL_OTHERS",
    "NCCL_TESTS",
    "OPS",
    "CollectiveKind",
    "SweepOptions",
    "columns_help",
    "neighbours",
]

#: qccl's names of the element types, by nccl-tests' names
DTYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16"}
NCCL_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
OPS = ("sum", "avg", "min", "max")


@dataclass(frozen=True)
class SweepOptions:
    """The options; the names follow nccl-tests' long flags.

    Attributes:
        minbytes, maxbytes, stepbytes, stepfactor: the sizes; without a factor a size is the last one plus stepbytes.
        iters, warmup_iters: numbers of timed calls, and of calls before them.
        run_cycles: number of times the whole sweep runs; 0: until it is stopped.
        check: number of calls whose results are checked, for each row and mode.
        average: how the ranks' times are combined: 0 rank 0's, 1 mean, 2 minimum, 3 maximum.
        ops, dtypes, codecs: the operations, element types (in nccl-tests' names) and codecs that are measured.
        algorithm, chunk, timeout: as in Communicator.quantized_allreduce.
        backend: as in qccl.init().
        transport: a name in choice.TRANSPORTS, or "loopback"; None: qccl.init()'s choice under a launcher, otherwise
            the first transport that works.
        plain: the baseline of an all-reduce: see plain.baseline().
        cudagraph: launches of a captured call for each timed call; 0: no graph.
        plan: time a bound plan instead of the communicator's method.
        network: the lab's network.
        nodes, link_per_rank: see lab.Lab.
        collective: a name in KINDS.
        root, layout, intra, inter: as in the collectives with these parameters.
        json, trace: files to write, or None.
        args: the command line.
    """

    minbytes: int = 32 << 20
    maxbytes: int = 32 << 20
    stepbytes: int = 1 << 20
    stepfactor: int | None = None
    iters: int = 20
    warmup_iters: int = 1
    run_cycles: int = 1
    check: int = 1
    average: int = 3
    ops: tuple[str, ...] = ("sum",)
    dtypes: tuple[str, ...] = ("float",)
    codecs: tuple[str, ...] = ("minmax8",)
    algorithm: str = "auto"
    chunk: int | None = None
    timeout: float = 60.0
    backend: str = "host"
    transport: str | None = None
    plain: str | None = None
    cudagraph: int = 0
    plan: bool = False
    network: NetworkOptions = field(default_factory=NetworkOptions)
    nodes: int | None = None
    link_per_rank: bool = False
    collective: str = "allreduce"
    root: int = 0
    layout: str = "sharded"
    intra: str = "none"
    inter: str | None = None
    json: str | None = None
    trace: str | None = None
    args: tuple[str, ...] = ()

    @property
    def timed(self) -> str:
        """The kind of timed calls: "method", "plan" (bound once) or "graph" (of a plan)."""
        return "graph" if self.cudagraph else "plan" if self.plan else "method"

    def sizes(self) -> Iterator[int]:
        """The sizes in bytes, ascending."""
        size, before = self.minbytes, -1
        while before < size <= self.maxbytes:
            yield size
            factor, before = self.stepfactor, size
            size = size + self.stepbytes if factor is None else size * factor

    def to_json(self) -> str:
        """Write the options for from_json()."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SweepOptions:
        """Read the options that to_json() wrote."""
        given = json.loads(text)
        network = NetworkOptions(**given.pop("network"))
        values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        return cls(network=network, **values)


@dataclass(frozen=True)
class CollectiveKind:
    """A collective.

    Attributes:
        title: the text in the command's help.
        factor: busbw over algbw as a function of the number of ranks (nccl-tests' PERFORMANCE.md).
        combines: the collective has an op; otherwise it only moves values.
        algorithms: the algorithms besides "auto".
        parameters: the names of the options besides op and algorithm.
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


def neighbours(rank: int, size: int) -> list[int]:
    """The previous and the next rank in a ring."""
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


def _half(n: int) -> float:
    return (n - 1) / n


_ROUNDS = ("one_shot", "two_round")

KINDS: MappingProxyType[str, CollectiveKind] = MappingProxyType(
    {
        "allreduce": CollectiveKind("all-reduce", lambda n: 2 * _half(n), True, _ROUNDS),
        "hierarchical_allreduce": CollectiveKind(
            *("all-reduce in two levels", lambda n: 2 * _half(n), True, _ROUNDS),
            parameters=("layout", "intra", "inter", "node_ids"),
        ),
        "allreduce_coalesced": CollectiveKind("all-reduce of many arrays", lambda n: 2 * _half(n), True, _ROUNDS),
        "reduce_scatter": CollectiveKind("reduce-scatter", _half, True, whole_output=False, identical=False),
        "all_gather": CollectiveKind("all-gather", _half, whole_input=False),
        "all_to_all": CollectiveKind("all-to-all", _half, identical=False),
        "broadcast": CollectiveKind("broadcast", lambda n: 1.0, algorithms=("chain", "binomial"), parameters=("root",)),
        "reduce": CollectiveKind("reduce", lambda n: 1.0, True, _ROUNDS, ("root",), identical=False),
        "peer_exchange": CollectiveKind(
            *("peer exchange with both neighbours in a ring", lambda n: float(min(n - 1, 2))),
            identical=False,
            adds=True,
        ),
    }
)

#: qccl's names of the collectives, by nccl-tests' names, which are the names of its programs without "_perf"
NCCL_TESTS = MappingProxyType(
    {"all_reduce": "allreduce", "alltoall": "all_to_all"}
    | {name: name for name in ("all_gather", "broadcast", "reduce", "reduce_scatter")}
)
#: the nearest commands here to nccl-tests' other collectives
NCCL_OTHERS = MappingProxyType(
    {
        "sendrecv": "peer_exchange is the nearest; it sends to both neighbours in the ring, and adds what it receives",
        "gather": "all_gather is the nearest; all ranks get the vector",
        "scatter": "broadcast is the nearest; all ranks get the whole vector",
        "alltoallv": "all_to_all is the nearest; its parts are equal",
        "hypercube": "all_gather is the nearest; its ranks send to all others at once",
    }
)

#: explanations of the table's columns, in its order
COLUMNS = {
    "size": "bytes of the whole vector, uncompressed",
    "count": "number of elements",
    "type": "element type",
    "redop": "how the ranks' values are combined; none if they are only moved",
    "root": "the rank that has or gets the vector; -1 if there is no root",
    "time": "microseconds of a call: the median of five rounds of back-to-back calls, on the slowest rank (-a)",
    "algbw": "GB/s: the uncompressed size over the time",
    "busbw": "algbw times nccl-tests' factor, 2(n-1)/n for all-reduce: more than the link carries is the gain",
    "#wrong": "elements with other bits than the codec's; in the plain all-reduce, errors beyond rounding",
    "wire": "bytes that the busiest rank sends in a call; for the plain all-reduce: what any algorithm must send",
    "L2 err": "norm of the error over the norm of the exact result, of standard normal values",
    "vs mpi": "time of the plain all-reduce (of MPI, NCCL, gloo; vs none: qccl's) over this, out of place and in place",
    "spread": "the slowest round less the fastest one, in percent of the median, out of place and in place",
    "floor": "with --link: microseconds that the wire bytes take at the link's rate",
    "line": "with --link: floor over time; - where the limiter's burst is more than 2% of the bytes",
    "codec": "the codec; the plain all-reduce has the library's name here, or none",
}


def columns_help() -> str:
    """The columns as a paragraph of help that is not wrapped again."""
    width = max(map(len, COLUMNS)) + 2
    lines = []
    for name, text in COLUMNS.items():
        lines += textwrap.wrap(
            text, 76, initial_indent=name.ljust(width), subsequent_indent=" " * width, break_on_hyphens=False
        )
    return "\n".join(["\b", "Columns (an N/A was not measured):", *(f"  {line}" for line in lines)])
