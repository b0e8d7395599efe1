"""Collectives on raw pointers, with the argument order of NCCL's functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from qccl import dtypes
from qccl.arguments import CodecLike, OpLike, count_of
from qccl.arrays import Pointer, Values
from qccl.calls import Collectives
from qccl.collectives import AllReduceSpec, HierarchicalSpec, PeerExchangeSpec, spec_of
from qccl.dtypes import DType
from qccl.errors import ArgumentError
from qccl.methods import Caller, Checked, Given, Method
from qccl.options import CallOptions, PointerOptions, StateOptions, accepts

if TYPE_CHECKING:
    from qccl.communicator import Communicator
    from qccl.work import Work

__all__ = ["hierarchical_allreduce", "peer_exchange", "quantized_allreduce"]


@accepts(PointerOptions)
def quantized_allreduce(
    sendbuf: Pointer,
    recvbuf: Pointer,
    count: int,
    datatype: str | int | DType,
    op: OpLike,
    comm: Communicator,
    stream: int = 0,
    *,
    algorithm: str = "auto",
    **options: Unpack[PointerOptions],
) -> Work | None:
    """All-reduce on raw pointers, in the argument order of ncclAllReduce; equal pointers mean in place.

    A pointer is an int, a ctypes.c_void_p, or a ctypes array. ``datatype`` and ``op`` are names or NCCL's enum values;
    ``stream`` 0 is CUDA's legacy default stream, and the only one on the host. The memory must stay valid until the
    call has ended. Returns the Work with ``async_op``, otherwise None.
    """
    if not isinstance(comm, Collectives):
        _refuse(comm)
    options["stream"] = stream  # type: ignore[typeddict-unknown-key]
    work: Work | None = comm._call(_ALLREDUCE, (sendbuf, recvbuf), (count, datatype, op, algorithm), options, None)
    return work


@accepts(PointerOptions)
def hierarchical_allreduce(
    sendbuf: Pointer,
    recvbuf: Pointer,
    count: int,
    datatype: str | int | DType,
    op: OpLike,
    comm: Communicator,
    stream: int = 0,
    *,
    intra: CodecLike = "none",
    layout: str = "sharded",
    node_ids: Sequence[int] | None = None,
    inter: str | None = None,
    exact: bool = True,
    algorithm: str = "auto",
    **options: Unpack[PointerOptions],
) -> Work | None:
    """All-reduce in two levels (Communicator.hierarchical_allreduce) on raw pointers; see quantized_allreduce here."""
    if not isinstance(comm, Collectives):
        _refuse(comm)
    node_ids = comm.nodes if node_ids is None else node_ids
    parameters = count, datatype, op, intra, layout, node_ids, inter, exact, algorithm
    options["stream"] = stream  # type: ignore[typeddict-unknown-key]
    work: Work | None = comm._call(_HIERARCHICAL, (sendbuf, recvbuf), parameters, options, None)
    return work


@accepts(StateOptions)
def peer_exchange(
    sendbuf: Pointer,
    count: int,
    datatype: str | int | DType,
    comm: Communicator,
    stream: int = 0,
    *,
    send_to: Collection[int],
    replicas: Mapping[int, Pointer],
    applied: Pointer | None = None,
    **options: Unpack[StateOptions],
) -> Work | None:
    """Communicator.peer_exchange on raw pointers, each to ``count`` elements; ``replicas`` has one for each peer."""
    if not isinstance(replicas, Mapping):
        raise ArgumentError(f"replicas must be a dict of pointers by rank, not {type(replicas).__name__}")
    if not isinstance(comm, Collectives):
        _refuse(comm)
    pointers, parameters = (sendbuf, applied, *replicas.values()), (count, datatype, send_to, tuple(replicas))
    options["stream"] = stream  # type: ignore[typeddict-unknown-key]
    work: Work | None = comm._call(_PEER_EXCHANGE, pointers, parameters, options, None)
    return work


def _refuse(comm: object) -> NoReturn:
    raise ArgumentError(f"comm must be a Communicator, such as qccl.init() returns, not {comm!r}")


def _two(comm: Caller, pointers: Given, count: int, datatype: str | int | DType) -> tuple[Values, Values]:
    """The memory at both pointers."""
    memory, count, dtype = comm._memory, count_of(count), dtypes.get(datatype)
    source = memory.from_pointer(pointers[0], count, dtype, writable=False, what="sendbuf")
    return source, memory.from_pointer(pointers[1], count, dtype, writable=True, what="recvbuf")


def _allreduce(comm: Caller, pointers: Given, parameters: Given, how: CallOptions) -> Checked:
    count, datatype, op, algorithm = parameters
    source, target = _two(comm, pointers, count, datatype)
    spec = spec_of(AllReduceSpec.from_arguments, source, how, op=op, algorithm=algorithm)
    return spec, {"input": source, "output": target}


_ALLREDUCE = Method("pointers.quantized_allreduce", PointerOptions, _allreduce)


def _hierarchical(comm: Caller, pointers: Given, parameters: Given, how: CallOptions) -> Checked:
    count, datatype, op, intra, layout, node_ids, inter, exact, algorithm = parameters
    source, target = _two(comm, pointers, count, datatype)
    own: dict[str, Any] = {"op": op, "intra": intra, "layout": layout, "algorithm": algorithm}
    own |= {"inter": inter, "exact": exact, "node_ids": node_ids}
    spec = spec_of(HierarchicalSpec.from_arguments, source, how, **own)
    return spec, {"input": source, "output": target}


_HIERARCHICAL = Method("pointers.hierarchical_allreduce", PointerOptions, _hierarchical)


def _peer_exchange(comm: Caller, pointers: Given, parameters: Given, how: CallOptions) -> Checked:
    (sendbuf, applied, *others), (count, datatype, send_to, peers) = pointers, parameters
    memory, elements, dtype = comm._memory, count_of(count), dtypes.get(datatype)
    given = [("input", sendbuf, "sendbuf")] + ([] if applied is None else [("applied", applied, "applied")])
    given += [(f"replica {peer}", each, f"replicas[{peer}]") for peer, each in zip(peers, others, strict=True)]
    arrays = {
        name: memory.from_pointer(pointer, elements, dtype, writable=name != "input", what=what)
        for name, pointer, what in given
    }
    edges: dict[str, Any] = {"send_to": send_to, "receive_from": peers, "applied": applied is not None}
    return spec_of(PeerExchangeSpec.from_arguments, arrays["input"], how, **edges), arrays


_PEER_EXCHANGE = Method("pointers.peer_exchange", StateOptions, _peer_exchange)
