"""The collectives, one file each: the arguments and their checks, the choice of algorithm, the schedule.

``partitions`` and ``rounds`` have the parts that several algorithms are built from.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from qccl.base.dtypes import DTypeLike
from qccl.base.errors import ArgumentError
from qccl.collectives.all_gather import AllGatherSpec
from qccl.collectives.all_to_all import AllToAllSpec
from qccl.collectives.allreduce import AllReduceSpec
from qccl.collectives.arguments import CodecLike
from qccl.collectives.broadcast import BroadcastSpec
from qccl.collectives.coalesced import CoalescedSpec, HierarchicalCoalescedSpec
from qccl.collectives.encoded import EncodedAllGatherSpec, EncodedAllToAllSpec
from qccl.collectives.hierarchical import HierarchicalSpec
from qccl.collectives.peer_exchange import PeerExchangeSpec
from qccl.collectives.reduce import ReduceSpec
from qccl.collectives.reduce_scatter import ReduceScatterSpec
from qccl.collectives.spec import Binding, Call, CollectiveSpec, input_and_output
from qccl.collectives.topology import for_nodes, ways

__all__ = [
    "COLLECTIVES",
    "AllGatherSpec",
    "AllReduceSpec",
    "AllToAllSpec",
    "Binding",
    "BroadcastSpec",
    "Call",
    "CoalescedSpec",
    "CollectiveSpec",
    "EncodedAllGatherSpec",
    "EncodedAllToAllSpec",
    "HierarchicalCoalescedSpec",
    "HierarchicalSpec",
    "PeerExchangeSpec",
    "ReduceScatterSpec",
    "ReduceSpec",
    "for_nodes",
    "input_and_output",
    "spec_of_plan",
    "ways",
]

_PLANNED = (
    *(AllReduceSpec, ReduceScatterSpec, AllGatherSpec, AllToAllSpec, BroadcastSpec, ReduceSpec),
    HierarchicalSpec,
)

#: the collectives that Communicator.plan() accepts, by name
COLLECTIVES: Mapping[str, Any] = MappingProxyType({spec.name: spec for spec in _PLANNED})


def spec_of_plan(
    collective: str, count: int, dtype: DTypeLike, codec: CodecLike, chunk: int | None, parameters: Mapping[str, Any]
) -> CollectiveSpec:
    """The spec of a collective that is given by name. Raises ArgumentError for an unknown name or parameter."""
    if not isinstance(collective, str) or collective not in COLLECTIVES:
        known = ", ".join(f'"{name}"' for name in COLLECTIVES)
        raise ArgumentError(f"there is no plan for {collective!r}; the collectives are {known}")
    from_arguments = COLLECTIVES[collective].from_arguments
    parameters_known = inspect.signature(from_arguments).parameters.values()
    own = [parameter.name for parameter in parameters_known if parameter.kind is parameter.KEYWORD_ONLY]
    own = own or [field.name for field in fields(COLLECTIVES[collective])][len(fields(CollectiveSpec)) :]
    for name in parameters:
        if name not in own:
            raise ArgumentError(f"{collective} has no parameter {name!r}; its plans have {', '.join(own)}")
    spec: CollectiveSpec = from_arguments(count, dtype, codec, chunk, **parameters)
    return spec
