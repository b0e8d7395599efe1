"""The verifier accepts the all-reduces of up to 1,024 ranks: 10 minutes and 6 GB, on request (-m every_size)."""

from __future__ import annotations

import pytest
from schedule_cases import all_ranks

from qccl.analysis.verify import verify
from qccl.codecs import MinMax
from qccl.collectives.allreduce import AllReduceSpec
from qccl.collectives.hierarchical import HierarchicalSpec
from qccl.collectives.topology import for_nodes

pytestmark = [pytest.mark.every_size, pytest.mark.usefixtures("no_collector")]

#: ranks of a node in two levels
NODE = 8


@pytest.mark.parametrize("size", [127, 128, 256, 512, 1000, 1024])
def test_two_levels_with_many_ranks(size: int) -> None:
    """As a call makes them on nodes of eight ranks; of 127 and 1,000 one node is smaller, or parts differ."""
    node_ids = [rank // NODE for rank in range(size)]
    spec = AllReduceSpec.from_arguments(2 * size * 1024 - 3, "float32", MinMax(bits=4), None)
    chosen = for_nodes(spec, node_ids)
    assert isinstance(chosen, HierarchicalSpec)
    verify([chosen.schedule(rank, size, in_place=rank % 2 == 0) for rank in range(size)])


@pytest.mark.parametrize("size", [127, 128, 256, 512, 1024])
@pytest.mark.parametrize("name", ["one_shot", "two_round"])
def test_one_level_with_many_ranks(name: str, size: int) -> None:
    count = 8 * (size if name == "two_round" else 1) - 3
    verify(all_ranks(name, size, count, chunk_elements=8, depth=2))
