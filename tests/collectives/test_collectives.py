"""Every collective except all-reduce, bit for bit, against an oracle that knows parts and codes but no schedules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
from cases import NUMPY, any_codec, hard_data
from laws import assert_same_bits, oracle_codec, shards, starts, stored

import qccl
from qccl.codecs import get

KINDS = ["normal", "nonfinite", "zeros", "subnormal", "negative", "outliers"]


@dataclass(frozen=True)
class Case:
    """One call on ``ranks`` ranks; ``counts`` by rank or by array, or one count."""

    ranks: int
    counts: tuple[int, ...]
    dtype: str
    codec: str
    op: str
    chunk: int | None
    in_place: bool
    algorithm: str
    root: int
    data: str

    def __str__(self) -> str:
        parts = (self.ranks, list(self.counts), self.dtype, self.codec, self.op, self.chunk, self.in_place)
        return f"{'-'.join(map(str, parts))}-{self.algorithm}-{self.root}-{self.data}"

    def options(self) -> dict[str, Any]:
        return {"codec": self.codec, "chunk": self.chunk}

    def data_of(self, rank: int, count: int) -> np.ndarray:
        return hard_data(self.data, count, NUMPY[self.dtype], rank)

    @property
    def granule(self) -> int:
        return get(self.codec).granule


def random_cases(name: str, number: int, ranks: Sequence[int] = (1, 2, 3, 4, 8)) -> list[Case]:
    draw = random.Random(name)
    cases = []
    for i in range(number):
        size = ranks[i % len(ranks)]
        codec = any_codec(draw)
        arrays = draw.randint(1, 5) if name == "coalesced" else size
        algorithm = draw.choice({"broadcast": ["chain", "binomial"]}.get(name, ["one_shot", "two_round"]))
        counts = tuple(draw.choice([0, 1, 255, 256, 257, draw.randint(0, 3000)]) for _ in range(arrays))
        cases.append(
            Case(
                *(size, counts, draw.choice(["float32", "float16", "bfloat16"]), codec),
                op=draw.choice(["sum", "avg"] if get(codec).sparse else ["sum", "avg", "min", "max"]),
                chunk=draw.choice([None, 8, 500]),
                in_place=draw.random() < 0.5,
                algorithm=algorithm,
                root=draw.randrange(size),
                data=draw.choice(KINDS),
            )
        )
    return cases


# -- the oracle --------------------------------------------------------------------------------------------------------


def coded(case: Case, x: np.ndarray, rank: int, index: int, round_number: int = 0) -> np.ndarray:
    return oracle.encode(oracle_codec(case.codec), x, case.dtype, oracle.RngCounter(0, round_number, rank, index))


def through(case: Case, x: np.ndarray, rank: int, index: int, round_number: int = 0) -> np.ndarray:
    """The values that other ranks decode from the code of ``x``."""
    wire, counter = coded(case, x, rank, index, round_number), oracle.RngCounter(0, round_number, rank, index)
    return oracle.decode(oracle_codec(case.codec), wire, x.size, case.dtype, counter=counter)


def combined(
    case: Case, parts: list[np.ndarray], owner: int | None, index: int, *, encoded: bool = False
) -> np.ndarray:
    """The parts of all ranks combined by ``owner``, which has its own values unencoded (None: codes of all)."""
    op, scale = ("sum", 1 / case.ranks) if case.op == "avg" else (case.op, 1.0)
    makers = [oracle.RngCounter(0, 0, rank, index) for rank in range(case.ranks) if rank != owner]
    wires = [coded(case, parts[maker.rank], maker.rank, index) for maker in makers]
    own, place = (None, 0) if owner is None else (parts[owner], owner)
    where = oracle.RngCounter(0, 1, place, index)
    codec, count = oracle_codec(case.codec), parts[0].size
    if not count:
        return parts[0]
    options = {"op": op, "scale": scale, "encoded": encoded, "counter": where, "makers": makers}
    return oracle.reduce(codec, wires, own, place, count, case.dtype, **options)[1]


# -- the collectives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", random_cases("reduce_scatter", 30), ids=str)
def test_reduce_scatter(case: Case) -> None:
    total = sum(case.counts)
    inputs = [case.data_of(rank, total) for rank in range(case.ranks)]

    def run(comm: qccl.Communicator) -> np.ndarray:
        x, count = inputs[comm.rank].copy(), case.counts[comm.rank]
        first = sum(case.counts[: comm.rank])
        own = x[first : first + count]
        if case.in_place:
            given = {"out": own} if comm.rank % 2 else {}
            result = comm.quantized_reduce_scatter(x, counts=case.counts, op=case.op, **given, **case.options())
            assert result is given.get("out", x)
            others = np.delete(np.arange(total), np.arange(first, first + count))
            assert x[others].tobytes() == inputs[comm.rank][others].tobytes()
            return own
        out = np.empty(count, x.dtype)
        assert comm.quantized_reduce_scatter(x, out, counts=case.counts, op=case.op, **case.options()) is out
        assert x.tobytes() == inputs[comm.rank].tobytes()
        return out

    for rank, found in enumerate(qccl.run_ranks(case.ranks, run)):
        first, index = starts(case.counts, case.granule)[rank]
        parts = [stored(x[first : first + case.counts[rank]]) for x in inputs]
        assert_same_bits(stored(found), combined(case, parts, rank, index), f"rank {rank}")


@pytest.mark.parametrize("case", random_cases("all_gather", 30), ids=str)
def test_all_gather(case: Case) -> None:
    inputs = [case.data_of(rank, count) for rank, count in enumerate(case.counts)]

    def run(comm: qccl.Communicator) -> np.ndarray:
        x, out = inputs[comm.rank].copy(), np.empty(sum(case.counts), NUMPY[case.dtype])
        first = sum(case.counts[: comm.rank])
        if case.in_place:
            out[first : first + x.size] = x
            x = out[first : first + x.size]
        assert comm.quantized_all_gather(x, out, counts=case.counts, **case.options()) is out
        return out

    places = starts(case.counts, case.granule)
    decoded = [through(case, stored(x), rank, places[rank][1]) for rank, x in enumerate(inputs)]
    wanted = stored(inputs[0]) if case.ranks == 1 else np.concatenate(decoded)
    for rank, found in enumerate(qccl.run_ranks(case.ranks, run)):
        assert_same_bits(stored(found), wanted, f"rank {rank}")


@pytest.mark.parametrize("case", random_cases("all_to_all", 30), ids=str)
def test_all_to_all(case: Case) -> None:
    draw = random.Random(str(case))
    matrix = [[draw.choice([0, 3, 256, draw.randint(0, 900)]) for _ in range(case.ranks)] for _ in range(case.ranks)]
    if case.in_place:  # another word for: equal parts
        matrix = [[case.counts[0]] * case.ranks] * case.ranks
    inputs = [case.data_of(rank, sum(row)) for rank, row in enumerate(matrix)]

    def run(comm: qccl.Communicator) -> np.ndarray:
        back = [row[comm.rank] for row in matrix]
        out = np.empty(sum(back), NUMPY[case.dtype])
        counts = {} if case.in_place else {"send_counts": matrix[comm.rank], "recv_counts": back}
        assert comm.quantized_all_to_all(inputs[comm.rank].copy(), out, **counts, **case.options()) is out
        return out

    def part(source: int, target: int) -> np.ndarray:
        first = sum(matrix[source][:target])
        x = stored(inputs[source][first : first + matrix[source][target]])
        return x if source == target else through(case, x, source, 0, round_number=target)

    for rank, found in enumerate(qccl.run_ranks(case.ranks, run)):
        wanted = np.concatenate([part(source, rank) for source in range(case.ranks)])
        assert_same_bits(stored(found), wanted, f"rank {rank}")


@pytest.mark.parametrize("case", random_cases("broadcast", 30, ranks=(1, 2, 3, 5, 8)), ids=str)
def test_broadcast(case: Case) -> None:
    count = case.counts[0]
    given = case.data_of(case.root, count)

    def run(comm: qccl.Communicator) -> np.ndarray:
        options = {"root": case.root, "algorithm": case.algorithm, **case.options()}
        if case.in_place:
            x = given.copy() if comm.rank == case.root else np.full_like(given, 7)
            assert comm.quantized_broadcast(x, **options) is x
            return x
        out = np.full_like(given, 7)
        x = given.copy() if comm.rank == case.root else None
        assert comm.quantized_broadcast(x, out, **options) is out
        assert x is None or x.tobytes() == given.tobytes()
        return out

    wanted = stored(given) if case.ranks == 1 else through(case, stored(given), case.root, 0)
    for rank, found in enumerate(qccl.run_ranks(case.ranks, run)):
        assert_same_bits(stored(found), wanted, f"rank {rank}")


@pytest.mark.parametrize("case", random_cases("reduce", 40), ids=str)
def test_reduce(case: Case) -> None:
    count = case.counts[0]
    inputs = [case.data_of(rank, count) for rank in range(case.ranks)]

    def run(comm: qccl.Communicator) -> np.ndarray | None:
        x = inputs[comm.rank].copy()
        out = None if case.in_place else np.empty_like(x)
        options = {"root": case.root, "op": case.op, "algorithm": case.algorithm, **case.options()}
        result = comm.quantized_reduce(x, out, **options)
        if comm.rank == case.root:
            assert result is (x if out is None else out)
        else:
            assert result is None
        if comm.rank != case.root or out is not None:
            assert x.tobytes() == inputs[comm.rank].tobytes()
        return result

    found = qccl.run_ranks(case.ranks, run)[case.root]
    parts = [stored(x) for x in inputs]
    if case.algorithm == "one_shot":
        wanted = combined(case, parts, case.root, 0)
    else:
        parts_of = shards(count, case.ranks, case.granule)
        wanted = np.concatenate(
            [
                combined(case, [x[shard] for x in parts], owner, shard.start, encoded=owner != case.root)
                for owner, shard in enumerate(parts_of)
            ]
        )
    assert_same_bits(stored(found), wanted, "root")


@pytest.mark.parametrize("case", random_cases("coalesced", 40), ids=str)
def test_coalesced(case: Case) -> None:
    inputs = [[case.data_of(rank + 10 * i, n) for i, n in enumerate(case.counts)] for rank in range(case.ranks)]

    def run(comm: qccl.Communicator) -> list[np.ndarray]:
        xs = [x.copy() for x in inputs[comm.rank]]
        outs = None if case.in_place else [np.empty_like(x) for x in xs]
        options = {"op": case.op, "algorithm": case.algorithm, **case.options()}
        result = comm.quantized_allreduce_coalesced(xs, outs, **options)
        assert result is (xs if outs is None else outs)
        if outs is not None:
            assert all(x.tobytes() == y.tobytes() for x, y in zip(xs, inputs[comm.rank], strict=True))
        return result

    granules = [-(-n // case.granule) for n in case.counts]
    owners = shards(sum(granules), case.ranks if case.algorithm == "two_round" else 1, 1)
    wanted = [stored(x).copy() for x in inputs[0]]
    for i in range(len(case.counts)) if case.ranks > 1 else ():
        first = sum(granules[:i])
        for owner, shard in enumerate(owners):
            start, stop = (max(0, min(granules[i], edge - first)) * case.granule for edge in (shard.start, shard.stop))
            segment = slice(start, min(stop, case.counts[i]))
            if segment.start < segment.stop:
                parts, index = [stored(x[i][segment]) for x in inputs], first * case.granule + start
                is_two = case.algorithm == "two_round"
                wanted[i][segment] = combined(case, parts, owner if is_two else None, index, encoded=is_two)
    for rank, results in enumerate(qccl.run_ranks(case.ranks, run)):
        for i, found in enumerate(results):
            assert_same_bits(stored(found), wanted[i], f"rank {rank}, array {i}")
