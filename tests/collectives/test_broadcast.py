"""The tree that broadcast chooses: a chain once the vector is long enough for its hops."""

from __future__ import annotations

import pytest

from qccl.base.dtypes import FLOAT32
from qccl.codecs import get
from qccl.collectives import BroadcastSpec

#: ranks, and the elements of codec ``none`` from which on a chain passes no more bytes than a binomial tree; in bytes:
#: nbytes + (n - 2) chunk + (n - 1) hop <= depth (nbytes + hop), chunk = 96 KiB and hop = 24 KiB
CROSSOVERS = {4: 55_296, 5: 39_936, 8: 86_016, 9: 65_536, 64: 374_784}


def trees(counts: list[int], sizes: list[int], codec: str = "none") -> list[str]:
    specs = (BroadcastSpec.from_arguments(count, "float32", codec, None) for count in counts)
    return [spec.algorithm_for(size) for spec in specs for size in sizes]


@pytest.mark.parametrize(("size", "count"), CROSSOVERS.items())
def test_a_chain_from_where_both_pass_the_same_bytes_on(size: int, count: int) -> None:
    nbytes, depth, chunk, hop = 4 * count, (size - 1).bit_length(), 96 << 10, 24 << 10
    assert nbytes + (size - 2) * chunk + (size - 1) * hop == depth * (nbytes + hop)
    for elements, tree in ((count - 1, "binomial"), (count, "chain"), (10 * count, "chain")):
        spec = BroadcastSpec.from_arguments(elements, "float32", "none", None)
        assert spec.algorithm_for(size) == tree
        assert spec.schedule(size - 1, size, in_place=True).name == tree


@pytest.mark.parametrize("count", [0, 1, 1 << 20])
def test_two_and_three_ranks_are_a_chain(count: int) -> None:
    """Of two ranks both trees are one; of three a chain has no further hop."""
    assert trees([count], [2, 3]) == ["chain"] * 2


def test_a_short_vector_takes_the_tree_with_fewer_hops() -> None:
    assert trees([0], [4, 5, 8, 64]) == ["binomial"] * 4


def test_the_bytes_are_those_of_the_codes() -> None:
    """Of four bits from 221,184 bytes of codes and ranges on."""
    codec = get("minmax4")
    assert codec.encoded_nbytes(436_224, FLOAT32) >= 221_184 > codec.encoded_nbytes(435_200, FLOAT32)
    assert trees([435_200, 436_224], [4], "minmax4") == ["binomial", "chain"]
