"""All-reduce in two levels: which ranks share a node, and how they share the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qccl import codecs
from qccl.arguments import CodecLike, OpLike, integers, one_of, op_of
from qccl.codecs.base import Codec
from qccl.collectives import ALLREDUCE, choose_inter
from qccl.collectives.hierarchical import hierarchical
from qccl.errors import ArgumentError
from qccl.schedule import Schedule
from qccl.signatures.base import Signature, common, reduction

__all__ = ["INTRA", "LAYOUTS", "Hierarchical"]

LAYOUTS = ("leader", "sharded")

#: what may be written for the codec inside nodes: nothing that draws random numbers, or sums it with codes
INTRA = {"none": "none", "float16": "cast:dtype=float16", "bfloat16": "cast:dtype=bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchical(Signature):
    """Parameters of hierarchical_allreduce; ``node_ids`` has a number for each rank's node.

    ``inter`` "host" sends what goes between nodes from host memory, also where the values are on a GPU.
    """

    name = "hierarchical_allreduce"

    op: str
    intra: Codec
    layout: str
    node_ids: tuple[int, ...]
    algorithm: str
    inter: str | None = None

    @classmethod
    def make(
        cls,
        *given: Any,
        op: OpLike = "sum",
        intra: CodecLike = "none",
        layout: str = "leader",
        node_ids: Sequence[int] = (),
        algorithm: str = "auto",
        inter: str | None = None,
    ) -> Hierarchical:
        """Check the arguments."""
        if inter not in (None, "host"):
            raise ArgumentError(
                f"inter={inter!r} cannot be had; between nodes codes go as the communicator's other transfers do "
                f'(None), or from host memory ("host")'
            )
        one_of(layout, LAYOUTS, "layout")
        one_of(algorithm, ("auto", *ALLREDUCE), "algorithm")
        checked = common(*given)
        one_of(intra if isinstance(intra, str) else repr(intra), INTRA, "intra")
        plain = intra == checked["dtype"].name
        return cls(
            **checked,
            op=op_of(op),
            intra=codecs.get("none" if plain else INTRA[str(intra)]),
            layout=layout,
            node_ids=integers(node_ids, "node_ids"),
            algorithm=algorithm,
            inter=inter,
        )

    def _shown(self) -> dict[str, Any]:
        shown = Signature._shown(self) | {"intra": self.intra.spec(), "node_ids": list(self.node_ids)}
        if self.inter is None:
            del shown["inter"]
        return shown

    def counts(self, rank: int, size: int) -> dict[str, int]:
        """See Signature."""
        if len(self.node_ids) != size:
            raise ArgumentError(
                f"node_ids has {len(self.node_ids)} numbers; there must be {size}, one for each rank, equal for ranks "
                f"of one node"
            )
        return Signature.counts(self, rank, size)

    def nodes(self) -> list[list[int]]:
        """The ranks of each node, in the order of the nodes' first ranks."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.node_ids):
            found.setdefault(node, []).append(rank)
        return list(found.values())

    def resolved(self) -> tuple[list[list[int]], int, str]:
        """The nodes, the parts that have owners in each, and the algorithm between them."""
        nodes = self.nodes()
        parts = 1 if self.layout == "leader" else min(map(len, nodes))
        algorithm = self.algorithm
        if algorithm == "auto":
            algorithm = choose_inter(self.count, len(nodes), parts, self.dtype, self.codec)
        return nodes, parts, algorithm

    def schedule(self, rank: int, size: int, *, in_place: bool, default_chunk: int | None = None) -> Schedule:
        """See Signature."""
        combine, scale = reduction(self.op, size)
        nodes, parts, algorithm = self.resolved()
        made = hierarchical(
            *(rank, size, self.count, self.dtype, self.codec, combine),
            intra=self.intra,
            nodes=nodes,
            parts=parts,
            algorithm=algorithm,
            scale=scale,
            in_place=in_place,
            chunk_elements=self._chunk(default_chunk),
        )
        if self.inter is None:
            return made
        return replace(
            made, staged_peers=frozenset(r for r, node in enumerate(self.node_ids) if node != self.node_ids[rank])
        )
