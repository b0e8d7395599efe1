"""The schedules of all-reduce: workspace, and the choice of one.

Their results are checked by test_verify.py; what may run at the same time by test_simulate.py.
"""

from __future__ import annotations

import pytest
from schedule_cases import one_rank

from qccl.base.dtypes import BFLOAT16, FLOAT32
from qccl.base.errors import ArgumentError
from qccl.codecs import MinMax, NoCodec
from qccl.codecs.base import Codec
from qccl.collectives.allreduce import ALLREDUCE, choose_allreduce
from qccl.collectives.schedule import Reduce, Role, Schedule

CODEC = MinMax(bits=4, bucket=8)
ALGORITHMS = sorted(ALLREDUCE)


def all_ranks(name: str, size: int, count: int, codec: Codec = CODEC, **options: object) -> list[Schedule]:
    return [one_rank(ALLREDUCE[name], rank, size, count, FLOAT32, codec, **options) for rank in range(size)]


def workspace(schedule: Schedule) -> int:
    return sum(b.nbytes for b in schedule.buffers.values() if b.role is Role.WORK)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_workspace_does_not_grow_with_the_vector(size: int) -> None:
    for name in ALGORITHMS:
        found = [
            workspace(one_rank(ALLREDUCE[name], 0, size, count, FLOAT32, MinMax()))
            for count in (1 << 22, 1 << 25, 1 << 28)
        ]
        assert max(found) <= 3.2 * (1 << 20) * (1 if name == "two_round" else size)
        assert min(found) > 0.9 * max(found)  # chunks are equal parts of a shard


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("in_place", [False, True])
def test_nothing_to_do(name: str, in_place: bool) -> None:
    for size, count in ((1, 0), (4, 0), (1, 9)):
        for schedule in all_ranks(name, size, count, in_place=in_place):
            assert set(schedule.buffers) == ({"output"} if in_place else {"input", "output"})
            copies = [op for op in schedule.ops if isinstance(op, Reduce) and not op.srcs]
            assert len(schedule.ops) == len(copies) == (0 if in_place or count == 0 else 1)
    scaled = all_ranks(name, 1, 9, in_place=in_place, scale=0.5)[0].ops
    assert [op.scale for op in scaled if isinstance(op, Reduce)] == [0.5]


def test_choice() -> None:
    """One step for a few bytes, otherwise two rounds; made of the arguments alone."""
    assert choose_allreduce(1 << 14, 2, FLOAT32, MinMax()) == "one_shot"
    assert choose_allreduce(1 << 20, 2, FLOAT32, MinMax()) == "two_round"
    assert choose_allreduce(1024, 4, FLOAT32, MinMax()) == "one_shot"
    assert choose_allreduce(1 << 20, 4, FLOAT32, MinMax()) == "two_round"
    assert choose_allreduce(1024, 64, FLOAT32, MinMax()) == "two_round"
    crossover = {
        codec: min(n for n in range(1024, 1 << 18, 1024) if choose_allreduce(n, 4, BFLOAT16, codec) == "two_round")
        for codec in (MinMax(2), MinMax(8), NoCodec())
    }
    assert crossover[MinMax(2)] > crossover[MinMax(8)] > crossover[NoCodec()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bad_arguments(name: str) -> None:
    for bad, reason in (
        ({"rank": 4}, "rank 4 of 4 ranks"),
        ({"rank": -1}, "rank -1 of 4 ranks"),
        ({"op": "avg"}, "op is 'avg'; a schedule knows sum, min and max"),
        ({"depth": 0}, "depth is 0"),
        ({"count": -1}, "count is -1"),
    ):
        arguments = {"rank": 0, "size": 4, "count": 8, "dtype": FLOAT32, "codec": CODEC} | bad
        with pytest.raises(ArgumentError, match=reason):
            one_rank(ALLREDUCE[name], **arguments)
