"""What the calls of each method of Collectives have in common, and how their arguments are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from qccl.arrays import Memory, Values
from qccl.collectives import (
    AllGatherSpec,
    AllReduceSpec,
    AllToAllSpec,
    BroadcastSpec,
    CoalescedSpec,
    CollectiveSpec,
    HierarchicalSpec,
    PeerExchangeSpec,
    ReduceScatterSpec,
    ReduceSpec,
    spec_of,
)
from qccl.dtypes import FLOAT32
from qccl.errors import ArgumentError
from qccl.options import ArrayOptions, CallOptions, ResultArrayOptions, StateArrayOptions

__all__ = ["ALLREDUCE", "ALL_GATHER", "ALL_TO_ALL", "BROADCAST", "COALESCED", "HIERARCHICAL", "PEER_EXCHANGE", "REDUCE"]
__all__ += ["REDUCE_SCATTER", "Caller", "Checked", "Given", "Method", "pair_of", "two_of"]

#: what a call was given: its arrays, or its other arguments
Given = tuple[Any, ...]
#: the spec of a call, and its arrays by the names of the schedule's buffers
Checked = tuple[CollectiveSpec, dict[str, Values]]


class Caller(Protocol):
    """What the checks need of a communicator."""

    rank: int
    size: int
    _memory: Memory


class Method(NamedTuple):
    """What all calls of a method, or of a function on pointers, have in common.

    Attributes:
        name: for messages, and to tell its calls from others.
        options: those that it accepts.
        prepare: checks the arguments of a call: the arrays (or pointers), its own parameters, and all options.
    """

    name: str
    options: type
    prepare: Callable[[Caller, Given, Given, CallOptions], Checked]


def pair_of(comm: Caller, x: Any, out: Any, how: CallOptions) -> tuple[Values, Values]:
    """The memory of both arrays, which is the same if ``out`` is None."""
    if out is not None:
        return two_of(comm, x, out, how)
    source = comm._memory.from_array(x, dtype=how["dtype"], writable=True, what="x")
    return source, source


def two_of(comm: Caller, x: Any, out: Any, how: CallOptions) -> tuple[Values, Values]:
    """The memory of an input and of an output."""
    source = comm._memory.from_array(x, dtype=how["dtype"], writable=False, what="x")
    return source, comm._memory.from_array(out, dtype=source.dtype, writable=True, what="out")


def _allreduce(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    (x, out), (op, algorithm) = arrays, parameters
    source, target = pair_of(comm, x, out, how)
    if target.count != source.count:
        raise ArgumentError(f"x has {source.count} elements and out has {target.count}; they must be equal")
    spec = spec_of(AllReduceSpec.from_arguments, source, how, source.order, op=op, algorithm=algorithm)
    return spec, {"input": source, "output": target}


ALLREDUCE = Method("quantized_allreduce", CallOptions, _allreduce)


def _coalesced(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    is_in_place, op, algorithm = parameters
    xs = arrays if is_in_place else arrays[: len(arrays) // 2]
    outs = arrays[len(xs) :]
    memory, dtype = comm._memory, how["dtype"]
    by_name: dict[str, Values] = {}
    for i, x in enumerate(xs):
        source = memory.from_array(x, dtype=dtype, writable=is_in_place, what=f"xs[{i}]")
        dtype = source.dtype
        by_name[f"input {i}"] = by_name[f"output {i}"] = source
        if not is_in_place:
            by_name[f"output {i}"] = memory.from_array(outs[i], dtype=dtype, writable=True, what=f"outs[{i}]")
    each = [by_name[f"input {i}"].count for i in range(len(xs))]
    shared = sum(each), dtype or FLOAT32, how["codec"], how["chunk"]
    return CoalescedSpec.from_arguments(*shared, each=each, op=op, algorithm=algorithm), by_name


COALESCED = Method("quantized_allreduce_coalesced", CallOptions, _coalesced)


def _reduce_scatter(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    (x, out), (op, counts) = arrays, parameters
    source = comm._memory.from_array(x, dtype=how["dtype"], writable=out is None, what="x")
    spec = spec_of(ReduceScatterSpec.from_arguments, source, how, op=op, counts=counts)
    if out is None:
        target = spec.output_in(source, comm.rank, comm.size)
    else:
        target = comm._memory.from_array(out, dtype=source.dtype, writable=True, what="out")
    return spec, {"input": source, "output": target}


REDUCE_SCATTER = Method("quantized_reduce_scatter", StateArrayOptions, _reduce_scatter)


def _all_gather(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    (x, out), (counts,) = arrays, parameters
    source, target = two_of(comm, x, out, how)
    spec = spec_of(AllGatherSpec.from_arguments, target, how, counts=counts)
    return spec, {"input": source, "output": target}


ALL_GATHER = Method("quantized_all_gather", ResultArrayOptions, _all_gather)


def _all_to_all(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    (x, out), (send_counts, recv_counts) = arrays, parameters
    source, target = two_of(comm, x, out, how)
    spec = spec_of(AllToAllSpec.from_arguments, source, how, send_counts=send_counts, recv_counts=recv_counts)
    return spec, {"input": source, "output": target}


ALL_TO_ALL = Method("quantized_all_to_all", ArrayOptions, _all_to_all)


def _broadcast(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    (x, out), (root, algorithm) = arrays, parameters
    if comm.rank == root or out is None:
        source, target = pair_of(comm, x, out, how)
    else:
        source = target = comm._memory.from_array(out, dtype=how["dtype"], writable=True, what="out")
    spec = spec_of(BroadcastSpec.from_arguments, source, how, source.order, root=root, algorithm=algorithm)
    return spec, {"input": source, "output": target}


BROADCAST = Method("quantized_broadcast", ResultArrayOptions, _broadcast)


def _reduce(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    (x, out), (op, root, algorithm) = arrays, parameters
    if comm.rank == root:
        source, target = pair_of(comm, x, out, how)
        by_name = {"input": source, "output": target}
    else:
        source = comm._memory.from_array(x, dtype=how["dtype"], writable=False, what="x")
        by_name = {"input": source}
    own = {"op": op, "root": root, "algorithm": algorithm}
    return spec_of(ReduceSpec.from_arguments, source, how, source.order, **own), by_name


REDUCE = Method("quantized_reduce", ArrayOptions, _reduce)


def _hierarchical(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    (x, out), (op, intra, layout, node_ids, algorithm, inter, exact) = arrays, parameters
    source, target = pair_of(comm, x, out, how)
    own = {"op": op, "intra": intra, "layout": layout, "node_ids": node_ids, "algorithm": algorithm}
    own |= {"inter": inter, "exact": exact}
    spec = spec_of(HierarchicalSpec.from_arguments, source, how, source.order, **own)
    return spec, {"input": source, "output": target}


HIERARCHICAL = Method("hierarchical_allreduce", CallOptions, _hierarchical)


def _peer_exchange(comm: Caller, arrays: Given, parameters: Given, how: CallOptions) -> Checked:
    (z, applied, *others), (send_to, peers) = arrays, parameters
    memory = comm._memory
    own = memory.from_array(z, dtype=how["dtype"], writable=False, what="z")
    by_name = {"input": own}
    if applied is not None:
        by_name["applied"] = memory.from_array(applied, dtype=own.dtype, writable=True, what="applied")
    for peer, array in zip(peers, others, strict=True):
        what = f"replicas[{peer}]"
        by_name[f"replica {peer}"] = memory.from_array(array, dtype=own.dtype, writable=True, what=what)
    edges = {"send_to": send_to, "receive_from": peers, "applied": applied is not None}
    return spec_of(PeerExchangeSpec.from_arguments, own, how, own.order, **edges), by_name


PEER_EXCHANGE = Method("peer_exchange", StateArrayOptions, _peer_exchange)
