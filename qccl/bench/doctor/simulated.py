"""Simulated calls: machines and codecs as the simulator's costs, and the schedules of a call.

``qccl-bench simulate`` shows them, and the doctor predicts steps by them. The constants are for qccl over UCX's TCP,
fitted to the steps of docs/results (2 and 4 ranks on 2 cores). A call is simulated with the schedules of the first
node's ranks if all nodes do the same, and otherwise with the schedules of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qccl._host import HEADER_NBYTES
from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError
from qccl.bench.options import KINDS
from qccl.bench.params import Link
from qccl.bench.sweep.calls import Case, Wiring, parameters_of, spec_of_case
from qccl.codecs import Codec, NoCodec
from qccl.collectives import CollectiveSpec, HierarchicalSpec
from qccl.collectives.analysis.simulate import Costs, Timeline, simulate
from qccl.collectives.schedule import Schedule
from qccl.collectives.topology import for_nodes
from qccl.transports.ucx import UcxTransport

__all__ = ["ADD", "Constants", "Machines", "Processor", "Simulated", "simulated"]

#: seconds that a processor takes to add or copy an element
ADD = 0.17e-9

#: up to this number all ranks are simulated, even if only their parts differ, by a bucket
_ALL_RANKS = 16
#: the most ranks that are simulated one by one
_MOST_RANKS = 1024


@dataclass(frozen=True)
class Machines:
    """The machines of a simulated job.

    Attributes:
        ranks: the number of ranks.
        inter: the link of each node.
        intra: bytes per second that a rank sends to, and receives from, its own node.
        delay: seconds of a packet to another node, beyond the seconds in one room.
        node_size: ranks of a node.
        processors: processors of each rank, at most 1; less if ranks share one.
    """

    ranks: int
    inter: Link
    intra: float
    delay: float = 0.0
    node_size: int = 1
    processors: float = 1.0

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's node."""
        return tuple(rank // self.node_size for rank in range(self.ranks))


@dataclass(frozen=True)
class Constants:
    """The costs of a call beyond its bytes and its codec; all times are seconds.

    Attributes:
        latency: the time until a rank notices a message.
        message, byte: a processor's time for each message and for each of its bytes, on either side.
        operation: a processor's time to start an operation.
        headers: the time on the link divided by the time of the payload.
    """

    latency: float = 0.2e-3
    message: float = 11e-6
    byte: float = 0.3e-9
    operation: float = Costs().overhead
    headers: float = 1.012


@dataclass(frozen=True)
class Processor:
    """The cost of calls on a machine: constants, and seconds to encode and to decode a float32 element, by codec."""

    constants: Constants = field(default_factory=Constants)
    speeds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def rates(self, codec: Codec, dtype: DType) -> tuple[float, float]:
        """Bytes of values that are encoded, and decoded, per second; the codec "none" copies.

        An element of 16 bits takes as long as a float32 element, because codecs compute in float32.
        """
        encode, decode = (ADD, ADD) if codec == NoCodec() else self.speeds[codec.spec()]
        return dtype.itemsize / encode, dtype.itemsize / decode


@dataclass(frozen=True)
class Simulated:
    """A simulated call.

    Attributes:
        algorithm: the schedule's name.
        wire_nbytes: bytes that the busiest link sends.
        timeline: the timeline of all ranks, or of the first node's ranks.
    """

    algorithm: str
    wire_nbytes: int
    timeline: Timeline


def simulated(
    case: Case, codec: Codec, algorithm: str, chunk: int | None, machines: Machines, processor: Processor
) -> Simulated:
    """Simulate one call over UCX's TCP. Raises ArgumentError for calls that are impossible or too large to simulate."""
    given = {"layout": "sharded", "intra": "none", "node_ids": machines.nodes}
    parameters, ranks = parameters_of(case, algorithm, given), machines.ranks
    is_uniform = ranks % machines.node_size == 0 and "root" not in KINDS[case.kind].parameters

    def spec_of(rank: int) -> CollectiveSpec:
        return for_nodes(spec_of_case(case, codec, chunk, parameters, rank, ranks), machines.nodes)

    period, count = ranks, case.count
    if is_uniform and ranks > _ALL_RANKS:
        period, count = _repeated(spec_of(0), machines)
    if period > _MOST_RANKS:
        why = "in so short a vector most have nothing to reduce" if is_uniform else "they do different things"
        raise ArgumentError(
            f"{ranks} ranks with {case.count} elements would be simulated one by one, because {why}; that is possible "
            f"up to {_MOST_RANKS}: give fewer --ranks{', or more elements' if is_uniform else ''}"
        )
    specs = (replace(spec_of(rank), count=count) for rank in range(period))
    schedules = [spec.schedule(rank, ranks, in_place=False) for rank, spec in enumerate(specs)]
    timeline = simulate(schedules, _costs(machines, processor, codec, case.dtype), rules="eager")
    return Simulated(schedules[0].name, _wire_nbytes(schedules, machines), timeline)


def _repeated(spec: CollectiveSpec, machines: Machines) -> tuple[int, int]:
    """The number of ranks after which a uniform job's schedules repeat, for elements that are rounded up a little.

    In two rounds each rank reduces a shard. The elements are rounded up so that all shards have equally many buckets,
    or, with fewer buckets than ranks, every n-th rank has one bucket: the time depends on the largest shard.
    """
    ranks, size, granule = machines.ranks, machines.node_size, spec.codec.granule
    if isinstance(spec, HierarchicalSpec):
        in_rounds, granule = spec.levels().algorithm == "two_round", math.lcm(granule, NoCodec().granule)
    else:
        in_rounds = spec.schedule(0, ranks, in_place=False).name == "two_round"
    if not in_rounds:
        return size, spec.count
    buckets = -(-spec.count // granule)
    if buckets >= ranks:
        return size, -(-buckets // ranks) * ranks * granule
    owners = next(n for n in range(buckets, ranks + 1) if ranks % n == 0)
    period = ranks // owners * size
    repeats = ranks % period == 0 and owners <= 2 * buckets
    return (period, owners * granule) if repeats else (ranks, spec.count)


def _costs(machines: Machines, processor: Processor, codec: Codec, dtype: DType) -> Costs:
    constants = processor.constants
    encode, decode = processor.rates(codec, dtype)
    return Costs(
        link_rate=machines.inter.rate / constants.headers,
        burst=machines.inter.burst,
        latency=constants.latency + machines.delay,
        encode_rate=encode,
        decode_rate=decode,
        rates={NoCodec(): processor.rates(NoCodec(), dtype)},
        overhead=constants.operation,
        message=constants.message,
        byte=constants.byte,
        header=HEADER_NBYTES,
        eager=UcxTransport.eager_nbytes,
        node_size=machines.node_size,
        intra_rate=machines.intra,
        intra_latency=constants.latency,
        processors=machines.processors,
    )


def _wire_nbytes(schedules: list[Schedule], machines: Machines) -> int:
    """The bytes that the busiest link sends, without headers."""
    wiring, sent = Wiring(machines.nodes, machines.nodes), dict.fromkeys(machines.nodes, 0)
    for schedule in schedules:
        sent[wiring.links[schedule.rank]] += wiring.crossing(schedule)
    return max(sent.values())
