"""The options of a run of ``qccl-bench``: made from the command line, and passed to the ranks as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from qccl.bench.network_options import NetworkOptions
from qccl.bench.sizes import sweep

__all__ = ["DTYPES", "NCCL_NAMES", "OPS", "PLAIN", "STDOUT", "TRANSPORTS", "Options"]

#: the value of --json that means standard output
STDOUT = "-"

#: nccl-tests' names of the element types, and ours
DTYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16"}
NCCL_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
OPS = ("sum", "avg", "min", "max")

TRANSPORTS = ("mpi", "ucx", "gloo", "wan", "loopback")
#: MPI's and gloo's all-reduce, and qccl's without compression
PLAIN = ("mpi", "gloo", "none")


@dataclass(frozen=True)
class Options:
    """The options; the names follow nccl-tests' long flags.

    Attributes:
        minbytes, maxbytes, stepbytes, stepfactor: the sizes; without a factor each is stepbytes larger than the last.
        iters, warmup_iters: numbers of timed calls, and of calls before them.
        run_cycles: number of times the whole sweep runs; 0: until it is stopped.
        check: number of calls whose results are checked, for each row and mode.
        average: how the ranks' times are combined: 0 rank 0's, 1 mean, 2 minimum, 3 maximum.
        ops, dtypes, codecs: the operations, element types (in nccl-tests' names) and codecs that are measured.
        algorithm, chunk, timeout: as in Communicator.quantized_allreduce.
        backend: as in qccl.init().
        transport: in TRANSPORTS, or None: as qccl.init() chooses under a launcher, or the first that can be used.
        plain: what an all-reduce is compared with: in PLAIN, or None: see plain.baseline().
        cudagraph: launches of a captured call for each timed call; 0: no graph.
        plan: time a bound plan instead of the communicator's method.
        network: the lab's.
        nodes, link_per_rank: see lab.Lab.
        collective: a name in kinds.KINDS.
        root, layout, intra, inter: as in the collectives that have them.
        arrays: number of arrays in a coalesced call.
        json, plot, trace: files to write, or None; json may be STDOUT.
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
    arrays: int = 16
    json: str | None = None
    plot: str | None = None
    trace: str | None = None
    args: tuple[str, ...] = ()

    @property
    def timed(self) -> str:
        """What is timed: "method", "plan" (bound once) or "graph" (of a plan)."""
        return "graph" if self.cudagraph else "plan" if self.plan else "method"

    def sizes(self) -> Iterator[int]:
        """The sizes in bytes, ascending."""
        return sweep(self.minbytes, self.maxbytes, self.stepbytes, self.stepfactor)

    def to_json(self) -> str:
        """For from_json()."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The options that to_json() wrote."""
        given = json.loads(text)
        network = NetworkOptions(**given.pop("network"))
        values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        return cls(network=network, **values)
