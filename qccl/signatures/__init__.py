"""What is called: for each collective its parameters, the arrays it takes, and the schedule that follows from them.

A Signature is all that makes two calls the same: the key of a plan, and the text that the ranks compare. A new
collective is a schedule (in collectives/), a Signature here, and a method of Communicator that makes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qccl.arguments import CodecLike
from qccl.dtypes import DTypeLike
from qccl.errors import ArgumentError
from qccl.signatures.base import Signature, check_counts
from qccl.signatures.elementwise import AllReduce, Broadcast, Coalesced, Reduce
from qccl.signatures.hierarchical import INTRA, LAYOUTS, Hierarchical
from qccl.signatures.parts import AllGather, AllToAll, ReduceScatter
from qccl.signatures.peers import PeerExchange

__all__ = [
    "INTRA",
    "LAYOUTS",
    "SIGNATURES",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Coalesced",
    "Hierarchical",
    "PeerExchange",
    "Reduce",
    "ReduceScatter",
    "Signature",
    "check_counts",
    "of_plan",
]

#: every collective that there can be a plan of, by name
SIGNATURES: Mapping[str, Any] = MappingProxyType(
    {kind.name: kind for kind in (AllReduce, ReduceScatter, AllGather, AllToAll, Broadcast, Reduce, Hierarchical)}
)


def of_plan(
    collective: str,
    count: int,
    dtype: DTypeLike,
    codec: CodecLike,
    chunk: int | None,
    parameters: Mapping[str, Any],
) -> Signature:
    """The signature of a collective that is given by name."""
    if not isinstance(collective, str) or collective not in SIGNATURES:
        known = ", ".join(f'"{name}"' for name in SIGNATURES)
        raise ArgumentError(f"there is no plan for {collective!r}; the collectives are {known}")
    make = SIGNATURES[collective].make
    own = [name for name, each in inspect.signature(make).parameters.items() if each.kind is each.KEYWORD_ONLY]
    for name in parameters:
        if name not in own:
            raise ArgumentError(f"{collective} has no parameter {name!r}; those of its plans are {', '.join(own)}")
    signature: Signature = make(count, dtype, codec, chunk, **parameters)
    return signature
