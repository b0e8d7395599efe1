"""Collectives on raw pointers, with the argument order of NCCL's functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Unpack

from qccl.base.arrays import Pointer
from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError
from qccl.collectives import AllReduceSpec, HierarchicalSpec, PeerExchangeSpec
from qccl.collectives.arguments import CodecLike, OpLike
from qccl.communicator.calls import Collectives
from qccl.communicator.options import Method, PointerOptions, StateOptions

if TYPE_CHECKING:
    from qccl.communicator.communicator import Communicator
    from qccl.communicator.work import Work

__all__ = ["hierarchical_allreduce", "peer_exchange", "quantized_allreduce"]

_MEMORY = "count", "datatype", "stream"
_ALLREDUCE = Method(AllReduceSpec, *_MEMORY, "op", "algorithm")
_HIERARCHICAL = Method(HierarchicalSpec, *_MEMORY, "op", "intra", "layout", "node_ids", "inter", "algorithm")
_PEER_EXCHANGE = Method(PeerExchangeSpec, *_MEMORY, "send_to", "replicas")


@_ALLREDUCE.accepts(PointerOptions)
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
    ``stream`` 0 is CUDA's legacy default stream; on the host 0 is the only value. The memory must stay valid until the
    call has ended. Returns the Work with ``async_op``, otherwise None.
    """
    if not isinstance(comm, Collectives):
        _refuse(comm)
    own = count, datatype, stream, op, algorithm
    work: Work | None = comm._call(_ALLREDUCE, (sendbuf, recvbuf), own, options, None)
    return work


@_HIERARCHICAL.accepts(PointerOptions)
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
    algorithm: str = "auto",
    **options: Unpack[PointerOptions],
) -> Work | None:
    """All-reduce in two levels (Communicator.hierarchical_allreduce) on raw pointers, as in quantized_allreduce."""
    if not isinstance(comm, Collectives):
        _refuse(comm)
    own = count, datatype, stream, op, intra, layout, node_ids, inter, algorithm
    work: Work | None = comm._call(_HIERARCHICAL, (sendbuf, recvbuf), own, options, None)
    return work


@_PEER_EXCHANGE.accepts(StateOptions)
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
    """Communicator.peer_exchange on raw pointers to ``count`` elements each; ``replicas`` has a pointer per peer."""
    if not isinstance(replicas, Mapping):
        raise ArgumentError(f"replicas must be a dict of pointers by rank, not {type(replicas).__name__}")
    if not isinstance(comm, Collectives):
        _refuse(comm)
    pointers, own = (sendbuf, applied, *replicas.values()), (count, datatype, stream, send_to, tuple(replicas))
    work: Work | None = comm._call(_PEER_EXCHANGE, pointers, own, options, None)
    return work


def _refuse(comm: object) -> NoReturn:
    raise ArgumentError(f"comm must be a Communicator, as qccl.init() returns, not {comm!r}")
