"""``qccl-bench simulate``: its table, what it makes of machines and sizes, its profile, and its errors."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qccl import codecs
from qccl.base.dtypes import FLOAT16, FLOAT32
from qccl.base.errors import ArgumentError
from qccl.bench.cli import main
from qccl.bench.doctor import simulated as module
from qccl.bench.doctor.simulated import Constants, Machines, Processor, simulated
from qccl.bench.params import parse_rate
from qccl.bench.sweep.calls import Case
from qccl.bench.sweep.table import header

SPEEDS = {"minmax4": (0.2e-9, 0.15e-9), "minmax8": (0.2e-9, 0.2e-9)}
PROCESSOR = Processor(Constants(), SPEEDS)
GIGABIT = parse_rate("1gbit")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def figures(*arguments: str) -> dict[str, Any]:
    """The JSON of a run whose codecs are not measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        result = run(*arguments, "--encode", "20GBps", "--decode", "20GBps", "--json", str(path))
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def seconds(case: Case, codec: str, machines: Machines) -> float:
    return simulated(case, codecs.get(codec), "auto", None, machines, PROCESSOR).timeline.total


def test_the_table_is_that_of_allreduce() -> None:
    given = ("--ranks", "4", "-b", "64K", "-e", "1M", "-f", "4", "--codec", "minmax8,minmax4")
    lines = run("allreduce", *given).output.splitlines()
    head = header("none", lab=True)
    assert [line for line in lines if line in head] == head
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[-1] for row in rows] == ["none", "minmax8", "minmax4"] * 3
    assert [int(row[0]) for row in rows] == [64 << 10] * 3 + [256 << 10] * 3 + [1 << 20] * 3
    for group in (rows[:3], rows[3:6], rows[6:]):
        assert all(row[8:13] == ["N/A"] * 5 for row in group)  # nothing was checked, and nothing ran in place
        assert all(float(row[5]) >= float(row[-3]) for row in group)  # no call is faster than its bytes


@pytest.mark.slow
def test_many_ranks_take_representatives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 ranks: the schedules of 8 of them, or of a few times as many where not all have a bucket."""
    made: list[int] = []
    real = module.simulate
    monkeypatch.setattr(
        module, "simulate", lambda each, *args, **how: made.append(len(each)) or real(each, *args, **how)
    )
    machines = ("--ranks", "1024", "--nodes", "128", "--link", "25gbit", "--intra", "300GBps", "--delay", "5us")
    found = figures("allreduce", *machines, "--codec", "minmax4", "-b", "1M", "-e", "16M", "-f", "16")
    assert made == [32, 32, 8, 8]  # none and minmax4: 256 buckets of 1,024, then 4,096
    assert found["machines"]["inter"]["rate"] == 25e9 / 8 and found["machines"]["intra"] == 300e9
    assert {each["algorithm"] for each in found["results"]} == {"hierarchical"}


@pytest.mark.slow
def test_ten_thousand_ranks() -> None:
    found = figures("allreduce", "--ranks", "10000", "--nodes", "1250", "-b", "64M", "-e", "64M", "--codec", "minmax4")
    assert [each["codec"] for each in found["results"]] == ["none", "minmax4"]
    assert all(each["time"] > 10_000 * 2 * 11 for each in found["results"])  # the headers alone


@pytest.mark.parametrize("codec", ["minmax4", "none"])
@pytest.mark.parametrize(("ranks", "node_size"), [(4, 1), (8, 1), (8, 2), (6, 2)])
@pytest.mark.parametrize("buckets", [0.01, 0.2, 0.5, 1, 3, 10])
def test_representatives_take_as_long_as_all_ranks(
    monkeypatch: pytest.MonkeyPatch, buckets: float, ranks: int, node_size: int, codec: str
) -> None:
    """Where the elements are as many as are simulated: a number of buckets for each rank, or for every so many."""
    granule = codecs.get(codec).granule
    case = Case(max(1, round(buckets * ranks)) * granule, FLOAT32, "sum")
    machines = Machines(ranks, GIGABIT, 5e9, node_size=node_size)
    every = seconds(case, codec, machines)
    monkeypatch.setattr(module, "_ALL_RANKS", 1)
    periods: list[int] = []
    real = module._repeated
    monkeypatch.setattr(module, "_repeated", lambda *given: periods.append(real(*given)) or periods[-1])
    found = seconds(case, codec, machines)
    assert found == pytest.approx(every, rel=0.15 if periods[0][1] != case.count else 1e-9)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "all_to_all", "peer_exchange"])
@pytest.mark.parametrize("node_size", [1, 2])
def test_other_collectives_repeat_by_node(monkeypatch: pytest.MonkeyPatch, collective: str, node_size: int) -> None:
    case, machines = Case(6 * 5000, FLOAT32, "none", collective), Machines(6, GIGABIT, 5e9, node_size=node_size)
    if collective == "reduce_scatter":
        case = replace(case, op="sum")
    every = seconds(case, "minmax8", machines)
    monkeypatch.setattr(module, "_ALL_RANKS", 1)
    assert seconds(case, "minmax8", machines) == pytest.approx(every, rel=0.02)


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_ranks_that_differ_are_simulated_one_by_one(collective: str) -> None:
    found = figures(collective, "--ranks", "20", "--root", "3", "-b", "64K", "-e", "64K", "--codec", "minmax8")
    assert [each["codec"] for each in found["results"]] == ["none", "minmax8"]
    result = run(collective, "--ranks", "5000", "-b", "64K", "-e", "64K", "--encode", "1GBps", "--decode", "1GBps")
    assert result.exit_code == 2
    assert "5000 ranks" in result.output and "do different things" in result.output and "fewer --ranks" in result.output


@pytest.mark.slow
def test_so_short_a_vector_for_so_many_ranks_is_refused() -> None:
    """Of 10,007 ranks, a prime number, one has a bucket."""
    with pytest.raises(ArgumentError, match=r"in so short a vector most have nothing to reduce.*or more elements"):
        simulated(
            Case(3000, FLOAT32, "sum"),
            codecs.get("minmax4"),
            "two_round",
            None,
            Machines(10007, GIGABIT, 5e9, node_size=1),
            PROCESSOR,
        )


def test_delay_rate_and_processors_matter() -> None:
    case, machines = Case(1 << 20, FLOAT32, "sum"), Machines(4, GIGABIT, 5e9)
    usual = seconds(case, "minmax8", machines)
    assert seconds(case, "minmax8", replace(machines, delay=0.05)) >= 2 * 0.05 > 2 * usual
    assert seconds(case, "minmax8", replace(machines, inter=parse_rate("100mbit"))) > 5 * usual
    assert seconds(case, "minmax8", replace(machines, processors=0.01)) > 2 * usual


@pytest.mark.parametrize("codec", ["minmax8", "none"])
def test_an_element_of_16_bits_is_encoded_as_slowly_as_one_of_32(codec: str) -> None:
    """Where links are fast and processors slow, the number of the elements decides, not that of their bytes."""
    machines = Machines(4, parse_rate("1000000gbit"), 5e15, processors=1e-3)
    processor = Processor(Constants(byte=1e-15), SPEEDS)
    times = [
        simulated(Case(1 << 20, each, "sum"), codecs.get(codec), "auto", None, machines, processor).timeline.total
        for each in (FLOAT32, FLOAT16)
    ]
    assert times[1] == pytest.approx(times[0], rel=0.05)


def test_a_timeline_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = run("allreduce", "--ranks", "4", "-b", "1M", "-e", "1M", "--codec", "minmax8", "--trace", str(path))
    assert result.exit_code == 0 and f"# Wrote {path}" in result.output
    records = json.loads(path.read_text())["traceEvents"]
    assert {each["pid"] for each in records} == {0, 1, 2, 3}
    assert any(each["name"].startswith("encode") for each in records)


def test_rates_are_bits_or_bytes() -> None:
    assert [parse_rate(text).rate for text in ("100mbit", "25gbit", "300GBps", "1.5MBps")] == [
        12.5e6,
        3.125e9,
        3e11,
        1.5e6,
    ]


def test_codecs_are_compared_with_the_fastest_algorithm_without_a_codec() -> None:
    given = ("allreduce", "--ranks", "8", "-b", "1M", "-e", "1M", "--algorithm", "one_shot,two_round")
    times = {each["codec"]: each["time"] for each in figures(*given, "--codec", "minmax8,none")["results"]}
    assert times["none, two_round"] < times["none, one_shot"]
    for codecs_given in ("minmax8", "minmax8,none"):
        output = run(*given, "--codec", codecs_given, "--encode", "20GBps", "--decode", "20GBps").output
        speedup = [line for line in output.splitlines() if line.startswith("#   minmax8, two_round : ")][-1]
        assert speedup.endswith(f"{times['none, two_round'] / times['minmax8, two_round']:.2f}x")


@pytest.mark.parametrize(
    ("ranks", "nodes", "said"),
    [(8, 2, "2 nodes of 4 ranks"), (10, 3, "3 nodes of at most 4 ranks"), (8, 1, "1 node of 8 ranks"), (8, 8, None)],
)
def test_the_head_counts_nodes(ranks: int, nodes: int, said: str | None) -> None:
    given = ("--ranks", str(ranks), "--nodes", str(nodes), "--codec", "none", "-b", "4K", "-e", "4K")
    (line,) = (each for each in run("allreduce", *given).output.splitlines() if each.startswith("# ranks"))
    assert line.startswith(f"# ranks {ranks}: " + ("10gbit" if said is None else f"{said}, "))
