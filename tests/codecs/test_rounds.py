"""A codec for each round of an all-reduce: specifications, and residuals on both sides."""

from __future__ import annotations

from typing import Any

import pytest

from qccl import codecs
from qccl.base.dtypes import FLOAT32
from qccl.base.errors import ArgumentError, CodecError
from qccl.codecs import ErrorFeedback, MinMax, TwoRounds
from qccl.collectives.allreduce import AllReduceSpec
from qccl.collectives.feedback import sums_of
from qccl.collectives.hierarchical import intra_of

SPARSE = "topk:k=8,block=128,values=exp4/k=32"
PAIRS = (SPARSE, "trellis2:bucket=256/trellis4:bucket=384", "topk:k=5,block=64/none", "none/minmax4:bucket=64")


@pytest.mark.parametrize("inside", [ErrorFeedback(MinMax(4)), TwoRounds(MinMax(2), MinMax(4)), "minmax8"])
def test_a_round_has_a_plain_codec(inside: Any) -> None:
    for pair in ((inside, MinMax(8)), (MinMax(8), inside)):
        with pytest.raises(CodecError, match="is not possible in one round"):
            TwoRounds(*pair)


def test_where_a_pair_is_refused() -> None:
    with pytest.raises(ArgumentError, match="nodes have one codec; use minmax2"):
        intra_of("minmax2/minmax4", FLOAT32)
    with pytest.raises(ArgumentError, match="op 'max' is not possible with minmax8/topk:k=3"):
        AllReduceSpec.from_arguments(9, "float32", "minmax8/topk:k=3", None, op="max")


def test_decorators_of_the_rounds() -> None:
    """Both rounds have residuals. Momentum is that of a rank's own values."""
    first, second = codecs.get("minmax2/minmax8+ef+nesterov:mu=0.5").rounds
    assert (first.spec(), second.spec()) == ("minmax2+ef+nesterov:mu=0.5", "minmax8+ef")
    single = codecs.get("minmax2+ef+nesterov:mu=0.5")
    assert single.rounds == (single, single)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("decorators", ["+ef", "+ef+nesterov:mu=0.5"])
def test_the_residuals_of_sums_are_those_of_the_own_part(size: int, decorators: str) -> None:
    codecs = ("minmax2:bucket=64", "minmax2:bucket=64/bits=4")
    for count in (1, 64, 65, 1000):
        for rank in range(size):
            found = []
            for codec in codecs:
                spec = AllReduceSpec.from_arguments(count, "float32", codec + decorators, None, algorithm="two_round")
                found.append(sums_of(spec.schedule(rank, size, in_place=count % 2 == 0)))
            assert found[0] == found[1]
