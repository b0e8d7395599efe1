"""The measured calls: the compressed collective, and its baseline, the all-reduce of a communication library."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from qccl import codecs
from qccl.base import dtypes
from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError, CodecError
from qccl.bench.options import DTYPES, KINDS, SweepOptions, neighbours
from qccl.bench.params import codec_of
from qccl.bench.sweep import data, reference
from qccl.bench.sweep.arrays import Arrays
from qccl.codecs import Codec, NoCodec
from qccl.codecs.base import PLAIN_GRANULE
from qccl.codecs.feedback import momentum_of
from qccl.collectives import (
    CoalescedSpec,
    CollectiveSpec,
    HierarchicalCoalescedSpec,
    HierarchicalSpec,
    PeerExchangeSpec,
    ReduceScatterSpec,
    spec_of_plan,
)
from qccl.collectives.operands import ranks_by_node
from qccl.collectives.schedule import Schedule, buffer_name
from qccl.communicator.plan import Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qccl.communicator.communicator import Communicator

__all__ = [
    "Case",
    "PlainCall",
    "QuantizedCall",
    "Wiring",
    "cases",
    "check_calls",
    "parameters",
    "parameters_of",
    "spec_of_case",
]

#: arrays of a coalesced call
_ARRAYS = 16


@dataclass(frozen=True)
class Case:
    """One case: a collective (see KINDS) of ``count`` elements of ``dtype``, with ``op``."""

    count: int
    dtype: DType
    op: str
    kind: str = "allreduce"
    root: int = -1

    @property
    def nbytes(self) -> int:
        """The bytes of all elements, uncompressed."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Wiring:
    """The node and the link of each rank, by rank; transfers inside a node use no link."""

    nodes: tuple[int, ...]
    links: tuple[int, ...]

    @staticmethod
    def one_link_each(size: int) -> Wiring:
        """Make every rank a node with its own link."""
        return Wiring(tuple(range(size)), tuple(range(size)))

    def crossing(self, schedule: Schedule) -> int:
        """The bytes of a schedule that leave its rank's node."""
        return schedule.moved_nbytes(self.nodes)[0]

    def by_link(self, sent: Sequence[int]) -> list[int]:
        """The bytes that each link carries if rank r sends ``sent[r]``."""
        return [sum(n for n, mine in zip(sent, self.links, strict=True) if mine == link) for link in set(self.links)]


class QuantizedCall:
    """The compressed collective: the communicator's method, or with ``as_plan`` a plan that is bound once.

    A stateful codec keeps its state under a key made of its name, and starts without state.

    Attributes:
        plan: the plan of the call; the timed calls use it only with ``as_plan``.
        codec: the codec without error feedback and momentum.
        codecs: all codecs of the call; the last one's buckets matter most.
        each: the elements of each array of the call.
        granule: in a reduce-scatter or all-gather the random keys of each rank's part begin at a multiple of this.
        shards: number of parts of the vector that have their own buckets and owner.
    """

    def __init__(
        self,
        comm: Communicator,
        case: Case,
        codec: Codec,
        algorithm: str,
        chunk: int | None,
        parameters: Mapping[str, Any] = MappingProxyType({}),
        wiring: Wiring | None = None,
        *,
        as_plan: bool = False,
    ) -> None:
        self.case, self._comm = case, comm
        first, second = codec.plain.rounds
        self.codec = {"reduce": first, "all_gather": second}.get(case.kind, codec.plain)
        self._as_plan, self._peers = as_plan, neighbours(comm.rank, comm.size)
        kind = KINDS[case.kind]
        self.identical = kind.identical
        self._key = f"qccl-bench {codec.spec()}" if codec.state_names else None
        self._mu = np.float32(momentum_of(codec))
        given = parameters_of(case, algorithm, {"node_ids": comm.nodes, **parameters})
        self._given = {"codec": _as_passed(codec), "chunk": chunk, **given}
        if self._key is not None:
            self._given["key"] = self._key
        self.forget()
        self.plan = comm.plan_of(spec_of_case(case, codec, chunk, given, comm.rank, comm.size), self._key)
        schedule = self.plan.schedule(in_place=kind.is_allreduce)
        self.name, self.algorithm = codec.spec(), schedule.name
        self.codecs: tuple[Codec, ...] = (self.codec,)
        self.each: tuple[int, ...] = getattr(self.plan.spec, "each", (case.count,))
        self._scattered = ranks_by_node(spec.node_ids) if isinstance(spec := self.plan.spec, ReduceScatterSpec) else ()
        self.granule = math.lcm(self.codec.granule, PLAIN_GRANULE if self._scattered else 1)
        self.shards = 1 if self.algorithm == "one_shot" else comm.size
        if isinstance(self.plan.spec, HierarchicalSpec):
            levels = self.plan.spec.levels()
            self._nodes, self._between = levels.nodes, levels.algorithm
            self.codecs = (levels.intra, self.codec)
            self.shards = levels.parts * (len(levels.nodes) if levels.algorithm == "two_round" else 1)
        wiring = wiring or Wiring.one_link_each(comm.size)
        sent = comm.allgather(struct.pack("<q", wiring.crossing(schedule)))
        self.sent: list[int] = wiring.by_link([struct.unpack("<q", item)[0] for item in sent])

    @property
    def growth(self) -> int:
        """The factor by which state may enlarge the result of a call whose input is the last call's result.

        Residuals and momenta are then geometric series: at most two and three times the last values.
        """
        return 1 if self._key is None else 4

    def forget(self) -> None:
        """Collective: remove the state of all calls, also of calls with other codecs."""
        if self._key is not None:
            self._comm.reset()

    def contributions(self, values: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """The ranks' contributions to the result of a first call: momentum multiplies a first value by 1 + mu."""
        return [x + self._mu * x for x in values] if self._mu else list(values)

    def counts(self, comm: Communicator) -> tuple[int, int]:
        """Elements of this rank's input and output."""
        kind, part = KINDS[self.case.kind], self.case.count // comm.size
        if kind.adds:
            return self.case.count, self.case.count * (1 + len(self._peers))
        return (self.case.count if kind.whole_input else part), (self.case.count if kind.whole_output else part)

    def bind(self, arrays: Arrays, x: Any, out: Any) -> Callable[[], object]:
        """A function that makes one call from ``x`` to ``out``."""
        if not self._as_plan:
            return self._method_on(x, out)
        return self.plan_on(x, out).run

    def _method_on(self, x: Any, out: Any) -> Callable[[], object]:
        """Make the call like programs: each time the communicator reads the arguments and looks up the plan."""
        case, given = self.case, dict(self._given)
        if case.dtype.name == "bfloat16":
            given["dtype"] = case.dtype  # bfloat16 is held in arrays of uint16
        name = f"quantized_{case.kind}"
        method = getattr(self._comm, name if hasattr(self._comm, name) else case.kind)
        if case.kind == CoalescedSpec.name:
            xs, outs = self._slices(x), None if out is x else self._slices(out)
            return lambda: method(xs, outs, **given)
        if case.kind == PeerExchangeSpec.name:
            applied, *others = self._parts(out)
            replicas = dict(zip(self._peers, others, strict=True))
            return lambda: method(x, send_to=self._peers, replicas=replicas, applied=applied, **given)
        target = None if out is x else out
        return lambda: method(x, target, **given)

    def _slices(self, whole: Any) -> list[Any]:
        """The arrays of a coalesced call, as slices of one array."""
        assert isinstance(self.plan.spec, CoalescedSpec | HierarchicalCoalescedSpec)
        return [whole[start:stop] for start, stop in pairwise(accumulate(self.plan.spec.each, initial=0))]

    def _parts(self, out: Any) -> list[Any]:
        """The arrays that a peer exchange updates, as parts of one array: this rank's, and each peer's replica."""
        return [out[i * self.case.count : (i + 1) * self.case.count] for i in range(1 + len(self._peers))]

    def plan_on(self, x: Any, out: Any) -> Plan:
        """The plan, bound to ``x`` and ``out``, or to their slices if the call has several arrays."""
        case = self.case
        if case.kind == CoalescedSpec.name:
            arrays = {
                buffer_name(name, i): part
                for name, whole in (("input", x), ("output", out))
                for i, part in enumerate(self._slices(whole))
            }
            return self.plan.bind_buffers(arrays, out)
        if case.kind == PeerExchangeSpec.name:
            names = ["applied", *(buffer_name("replica", peer) for peer in self._peers)]
            return self.plan.bind_buffers({"input": x, **dict(zip(names, self._parts(out), strict=True))}, out)
        return self.plan.bind(x, None if out is x else out)

    def expected(self, values: Sequence[NDArray[np.float32]], owner: int, start: int, number: int) -> NDArray[Any]:
        """Compute, by reference.py, a stretch of call ``number``'s result in the shard of ``owner``."""
        case, spec = self.case, self.plan.spec
        if isinstance(spec, HierarchicalSpec):
            given = (self.codec, spec.intra, case.dtype, case.op, self._between, self._nodes)
            return reference.hierarchical(values, *given, self.shards, owner, start, number)
        common = (values, self.codec, case.dtype, case.op)
        if self._scattered:
            return reference.scattered(*common, self._scattered, owner, start, number)
        encoded = self.shards > 1 and case.kind != "reduce_scatter" and owner != case.root
        if self.shards == 1:
            owner = case.root  # the root of a reduce, or -1: every rank encodes
        return reference.reduced(*common, owner, start, number, encoded=encoded)


def _as_passed(codec: Codec) -> str | Codec:
    """The codec in the form that programs pass: its specification, if codecs.get() knows it."""
    text = codec.spec()
    with contextlib.suppress(CodecError):
        return text if codecs.get(text) == codec else codec
    return codec


def parameters_of(case: Case, algorithm: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Select the parameters of the case's collective from ``parameters`` and the case's own."""
    kind = KINDS[case.kind]
    given = {name: parameters[name] for name in kind.parameters if name in parameters}
    if "root" in kind.parameters:
        given["root"] = case.root
    if kind.combines:
        given["op"] = case.op
    if kind.algorithms:
        given["algorithm"] = algorithm
    return given


def spec_of_case(
    case: Case, codec: Codec, chunk: int | None, parameters: Mapping[str, Any], rank: int, size: int
) -> CollectiveSpec:
    """Make the collective's spec from parameters_of(). Raises ArgumentError if the call is impossible."""
    common, given = (case.count, case.dtype, codec, chunk), dict(parameters)
    if case.kind == CoalescedSpec.name:
        return CoalescedSpec.from_arguments(*common, each=_equal_arrays(case.count, codec), **given)
    if case.kind == PeerExchangeSpec.name:
        peers = neighbours(rank, size)
        return PeerExchangeSpec.from_arguments(*common, send_to=peers, receive_from=peers, applied=True)
    return spec_of_plan(case.kind, *common, given)


def _equal_arrays(count: int, codec: Codec) -> tuple[int, ...]:
    """The sizes of a coalesced call's arrays: nearly equal, in whole buckets, like the buckets of one array."""
    granule = math.lcm(codec.granule, PLAIN_GRANULE)
    bounds = [min(-(-count // granule) * i // _ARRAYS * granule, count) for i in range(_ARRAYS + 1)]
    return tuple(stop - start for start, stop in pairwise(bounds))


def cases(options: SweepOptions, size: int) -> Iterator[Case]:
    """Yield all cases in nccl-tests' order: by type, operation and size; sizes are rounded down to whole elements."""
    kind = KINDS[options.collective]
    ops = options.ops if kind.combines else ("none",)
    for name, op, nbytes in itertools.product(options.dtypes, ops, options.sizes()):
        dtype = dtypes.get(DTYPES[name])
        count = nbytes // dtype.itemsize
        if not (kind.whole_input and kind.whole_output) or options.collective == "all_to_all":
            count -= count % size  # equal parts
        root = options.root if "root" in kind.parameters else -1
        yield Case(count, dtype, op, options.collective, root)


def parameters(options: SweepOptions, node_ids: Sequence[int]) -> dict[str, Any]:
    """The parameters besides op, root and algorithm; ``node_ids`` is used without --nodes."""
    o = options
    nodes = node_ids if o.nodes is None else [rank % o.nodes for rank in range(len(node_ids))]
    return {"layout": o.layout, "intra": o.intra, "inter": o.inter, "node_ids": nodes}


def check_calls(options: SweepOptions, size: int) -> None:
    """Raise ArgumentError or CodecError if a call of the run is impossible on ``size`` ranks."""
    every = parameters(options, [0] * size)
    for case, spec in itertools.product(cases(options, size), options.codecs):
        given = parameters_of(case, options.algorithm, every)
        call = spec_of_case(case, codec_of(spec), options.chunk, given, 0, size)
        call.buffers(0, size)


class PlainCall:
    """The baseline: the uncompressed all-reduce of a communication library. Its avg is a sum."""

    identical = False
    codec: Codec = NoCodec()
    codecs = (codec,)
    growth = 1

    def __init__(
        self, comm: Communicator, case: Case, wiring: Wiring | None = None, library: str | None = None
    ) -> None:
        """``library`` is "mpi", "gloo" or "nccl"; None means the transport's library."""
        self.case = Case(case.count, case.dtype, "sum" if case.op == "avg" else case.op)
        self.name, self.algorithm, self.shards = library or comm.transport.name, "", comm.size
        self.each = (case.count,)
        wiring = wiring or Wiring.one_link_each(comm.size)
        nodes = len(set(wiring.nodes))
        each = 2 * (nodes - 1) * case.nbytes // nodes * nodes // len(set(wiring.links))
        self.sent = [each] * len(set(wiring.links))

    def forget(self) -> None:
        """Do nothing: the calls have no state."""

    def contributions(self, values: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Return the inputs themselves."""
        return list(values)

    def counts(self, comm: Communicator) -> tuple[int, int]:
        """Elements of this rank's input and output."""
        return self.case.count, self.case.count

    def is_supported(self, arrays: Arrays) -> bool:
        """Whether the library can reduce this type with this operation (the same on all ranks)."""
        x = arrays.empty(1, self.case.dtype)
        arrays.put(x, data.gaussian(0, 0, 1, self.case.dtype, seed=0))
        try:
            arrays.plain(self.name, x, x, 1, self.case.dtype.name, self.case.op)()
        except ArgumentError:
            return False
        return True

    def bind(self, arrays: Arrays, x: Any, out: Any) -> Callable[[], object]:
        """A function that makes one call from ``x`` to ``out``."""
        return arrays.plain(self.name, x, out, self.case.count, self.case.dtype.name, self.case.op)

    def bound(self, values: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """The largest possible error of a stretch of the result; the library may add in any order."""
        dtype, most = self.case.dtype, np.zeros(values[0].shape)
        if self.case.op in ("min", "max"):
            return most
        for v in values:
            most += np.abs(v)
        unit, additions = 2.0 ** -(dtype.mantissa_bits + 1), len(values)  # n - 1, and 1 for second-order terms
        most *= unit * (1 + additions * unit)
        return additions * (most + unit * 2.0**dtype.min_exponent)
